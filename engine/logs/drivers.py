"""The log drivers by name. A driver checks its options, chooses the target of the output, and knows
whether the log can be read.

A driver is a row of `DRIVERS`. `json-file` is the default; `none` discards the output. Other names
are refused at create.

Not here: writing, which the monitor does (`monitor/launch.py`, `open_sink`); reading
(`containers/logs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote_plus

from engine.errors import InvalidParameter, ServerError
from engine.logs import jsonfile
from engine.logs.targets import JsonFile, Target
from engine.wire.containers import Config, LogConfig

DEFAULT = jsonfile.NAME
NONE = "none"

_BLOCKING = "blocking"
_DELIVERY = frozenset(("mode", "max-buffer-size"))
"""Options that every driver accepts. They control whether output may be dropped. The json-file log
drops nothing."""


class Driver(NamedTuple):
    """One driver. `options` checks the driver's own options and raises InvalidParameter. `target`
    makes the target of a container's output from the options, the path of the log file and the
    attributes; None discards the output. `readable`: `docker logs` works.
    """

    options: Callable[[Mapping[str, str]], object]
    target: Callable[[Mapping[str, str], Path | None, Mapping[str, str]], Target | None]
    readable: bool


def _json_file(options: Mapping[str, str], path: Path | None, attributes: Mapping[str, str]) -> Target:
    if path is None:
        raise ServerError(f"failed to initialize logging driver: {jsonfile.NAME} has no file to write to")
    return JsonFile(str(path), *jsonfile.rotation(options), jsonfile.encoded(attributes))


DRIVERS: dict[str, Driver] = {
    jsonfile.NAME: Driver(jsonfile.rotation, _json_file, True),
    NONE: Driver(lambda options: None, lambda options, path, attributes: None, False),
}

SHIPPED = tuple(DRIVERS)
"""Their names, for /info."""


def driver(log: LogConfig) -> Driver:
    """The driver of a configuration.

    Raises InvalidParameter, in Docker's words, if it is unknown.
    """
    found = DRIVERS.get(log.type or DEFAULT)
    if found is None:
        raise InvalidParameter(f"logger: no log driver named '{log.type}' is registered")
    return found


def validate(log: LogConfig) -> None:
    """Raises InvalidParameter for an unknown driver, or options that it does not have."""
    chosen = driver(log)
    if (log.type or DEFAULT) == NONE:
        return
    mode = log.config.get("mode", _BLOCKING)
    if mode not in (_BLOCKING, "non-blocking"):
        raise InvalidParameter(f"logger: logging mode not supported: {mode}")
    if "max-buffer-size" in log.config:
        if mode == _BLOCKING:
            raise InvalidParameter("logger: max-buffer-size option is only supported with 'mode=non-blocking'")
        if not re.fullmatch(r"\d+(\.\d+)? ?[kKmMgGtTpP]?[iI]?[bB]?", log.config["max-buffer-size"], re.ASCII):
            raise InvalidParameter(f"logger: invalid max-buffer-size '{log.config['max-buffer-size']}'")
    chosen.options(_own_options(log))


def target(log: LogConfig, path: Path | None, config: Config | None = None) -> Target | None:
    """The target of a container's output; None if it is discarded. `path`: the container's log
    file.

    With `config`, entries carry the labels and variables that the options name. Raises ServerError
    for a driver that this version of the engine does not have, InvalidParameter as `validate`.
    """
    try:
        chosen = driver(log)
    except InvalidParameter as error:
        raise ServerError(f"failed to initialize logging driver: {error.message}") from error
    attributes = _attributes(log, config) if config is not None else {}
    return chosen.target(_own_options(log), path, attributes)


def details(log: LogConfig, config: Config) -> str:
    """The prefix of each line with `details=1`: `name=value,…` and a space, sorted and
    percent-encoded as Docker does; only the space when there are no attributes."""
    extra = _attributes(log, config)
    return ",".join(f"{quote_plus(name)}={quote_plus(extra[name])}" for name in sorted(extra)) + " "


def _attributes(log: LogConfig, config: Config) -> dict[str, str]:
    return jsonfile.attributes(log.config, config.labels or {}, config.env or ())


def _own_options(log: LogConfig) -> dict[str, str]:
    return {name: value for name, value in log.config.items() if name not in _DELIVERY}
