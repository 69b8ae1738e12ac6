"""The log drivers by name, and the three questions the engine asks: is this configuration allowed, where does output go, what is said beside it.

`json-file` is the default, `none` keeps nothing. The other drivers of the specification are accepted by a create, so that a container made for
them can be shown and moved, but not by a start: this engine version does not ship them. Only json-file can be read back.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote_plus

from engine.errors import InvalidParameter, ServerError
from engine.logs import jsonfile
from engine.wire.containers import Config, LogConfig

DEFAULT = jsonfile.NAME
NONE = "none"
NOT_SHIPPED = frozenset(("syslog", "journald", "gelf", "fluentd", "awslogs", "splunk", "etwlogs"))

_BLOCKING = "blocking"
_DELIVERY = frozenset(("mode", "max-buffer-size"))
"""Options that Docker takes for every driver: how it may lose output. This engine's log never holds a container up and loses nothing."""


class LogFile(NamedTuple):
    """Where a container's output is logged: what `monitor.messages.LogFile` says, field by field."""

    path: str
    max_size: int
    max_file: int
    attrs: bytes = b""


def validate(log: LogConfig) -> None:
    """Raises InvalidParameter for a driver that does not exist, or options that it does not have."""
    kind = log.type or DEFAULT
    if kind == NONE or kind in NOT_SHIPPED:
        return
    if kind != DEFAULT:
        raise InvalidParameter(f"logger: no log driver named '{kind}' is registered")
    mode = log.config.get("mode", _BLOCKING)
    if mode not in (_BLOCKING, "non-blocking"):
        raise InvalidParameter(f"logger: logging mode not supported: {mode}")
    if "max-buffer-size" in log.config:
        if mode == _BLOCKING:
            raise InvalidParameter("logger: max-buffer-size option is only supported with 'mode=non-blocking'")
        if not re.fullmatch(r"\d+(\.\d+)? ?[kKmMgGtTpP]?[iI]?[bB]?", log.config["max-buffer-size"], re.ASCII):
            raise InvalidParameter(f"logger: invalid max-buffer-size '{log.config['max-buffer-size']}'")
    jsonfile.rotation(_own_options(log))


def log_file(log: LogConfig, path: Path | None, config: Config | None = None) -> LogFile | None:
    """The file at `path` for a json-file log, None when nothing is kept. With `config`, entries carry the labels and variables that the options name.

    Raises ServerError when the driver is not shipped, InvalidParameter as `validate`.
    """
    kind = log.type or DEFAULT
    if kind == NONE:
        return None
    if kind != DEFAULT:
        raise ServerError(
            f"failed to initialize logging driver: this engine version does not ship the log driver '{kind}'"
        )
    if path is None:
        raise ServerError(f"failed to initialize logging driver: {kind} has no file to write to")
    attrs = jsonfile.encoded(_attributes(log, config)) if config is not None else b""
    return LogFile(str(path), *jsonfile.rotation(_own_options(log)), attrs)


def details(log: LogConfig, config: Config) -> str:
    """What `details=1` puts before each line: `name=value,…` and a space, sorted and percent-encoded as Docker does; the space alone for nothing."""
    extra = _attributes(log, config)
    return ",".join(f"{quote_plus(name)}={quote_plus(extra[name])}" for name in sorted(extra)) + " "


def _attributes(log: LogConfig, config: Config) -> dict[str, str]:
    return jsonfile.attributes(log.config, config.labels or {}, config.env or ())


def _own_options(log: LogConfig) -> dict[str, str]:
    return {name: value for name, value in log.config.items() if name not in _DELIVERY}
