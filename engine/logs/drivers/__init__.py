"""The log drivers by name, and what the daemon asks of them: whether a configuration is valid,
which driver a container gets, where its output goes and how it is delivered.

A driver is a row of `DRIVERS` and a module for its options. `json-file`, `local` and `none` end in
the monitor; the others are delivered by the shipper. `etwlogs` is Windows only. `gcplogs` is not
here: it would need Google's client library for one driver. Both names are refused. Any other name
is that of a plugin (`plugin.py`); whether there is one is not known here.

Pure. Not here: writing, which the monitor does (`monitor/launch.py`, `open_sink`); reading
(`containers/logs.py`); delivering.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote_plus

import msgspec

from engine.common import booleans
from engine.config import Config
from engine.errors import InvalidParameter, ServerError
from engine.logs import attributes, tags
from engine.logs.deliveries import Awslogs, Delivery, LogPlugin, Remote
from engine.logs.drivers import awslogs, fluentd, gelf, journald, json_file, local, plugin, splunk, syslog
from engine.logs.drivers.json_file import Files
from engine.logs.facts import Facts
from engine.logs.options import Missing, Options
from engine.logs.targets import JsonFile, Spool, Target
from engine.wire.containers import LogConfig

NONE = "none"

CACHE = frozenset(("cache-disabled", "cache-max-size", "cache-max-file", "cache-compress"))
"""Options of the copy that `docker logs` reads when the lines go elsewhere. Every driver accepts
them, as in dockerd; they matter to drivers whose logs have such a copy."""

_BLOCKING = "blocking"
_COMMON = frozenset(("mode", "max-buffer-size", *CACHE))
_UNREAD_SIZE = 1 << 20
"""Bytes of a file of a spool that is not kept for `docker logs`: it can be removed soon."""


class Driver(NamedTuple):
    """One driver. `parse` checks its own options, the names of which are `options`; None: they are
    not checked, also not those that all other drivers have, as tags. With `empty_is_unset`, an
    empty value counts as not given.

    `attributes`: entries carry labels and variables. `tag`: the default template. `cached`: dockerd
    does not read this driver's logs from the target, but from a copy, which can be disabled.
    """

    parse: Callable[[Options], Files | Remote]
    options: frozenset[str] | None
    attributes: bool = True
    tag: str = tags.ID
    cached: bool = True
    empty_is_unset: bool = False


DRIVERS: dict[str, Driver] = {
    awslogs.NAME: Driver(awslogs.parse, awslogs.OPTIONS, attributes=False, tag=tags.FULL_ID, empty_is_unset=True),
    fluentd.NAME: Driver(fluentd.parse, fluentd.OPTIONS, empty_is_unset=True),
    gelf.NAME: Driver(gelf.parse, gelf.OPTIONS),
    journald.NAME: Driver(journald.parse, journald.OPTIONS, cached=False),
    json_file.NAME: Driver(json_file.parse, json_file.OPTIONS, tag="", cached=False),
    local.NAME: Driver(local.parse, local.OPTIONS, tag="", cached=False),
    splunk.NAME: Driver(splunk.parse, splunk.OPTIONS),
    syslog.NAME: Driver(syslog.parse, syslog.OPTIONS),
}
"""All but `none`, which discards the output and accepts any options."""

_PLUGIN = Driver(plugin.parse, None, attributes=False, tag="")
"""Any driver that is a plugin."""

FILES = frozenset((json_file.NAME, local.NAME))
"""Drivers whose log is a file of the container that the monitor keeps."""


class Plan(NamedTuple):
    """Where a container's output goes. `target`: what the monitor writes, None to discard it.
    `delivery`: what the shipper does with a spool, None for other targets."""

    target: Target | None
    delivery: Delivery | None = None


class Buffering(NamedTuple):
    """The spool of a remote driver: its files, the bytes of undelivered lines that it holds at
    most, what happens then (`targets.Spool`), and whether delivered lines are kept."""

    files: Files
    quota: int
    blocking: bool
    keep: bool


# --- which driver ---------------------------------------------------------------------------------


def of_daemon(config: Config) -> LogConfig:
    """The configuration of containers that name no driver."""
    pairs = (entry.partition("=") for entry in config.log_opts)
    return LogConfig(type=config.log_driver, config={name: value for name, _, value in pairs})


def check_daemon(config: Config) -> None:
    """Check the daemon's defaults. They may lack what the driver requires, because a container can
    give it. Raises InvalidParameter, in Docker's words."""
    try:
        validate(of_daemon(config))
    except Missing:
        return
    except InvalidParameter as error:
        raise InvalidParameter(f"Failed to set log opts: {error.message}") from error


def resolve(log: LogConfig, default: LogConfig) -> LogConfig:
    """A container's configuration, completed by the daemon's defaults.

    They are for containers with the daemon's driver, and the container's own options have
    precedence. A container with another driver inherits only the options of the copy for `docker
    logs`.
    """
    kind = log.type or default.type
    if kind == default.type:
        inherited = default.config
    elif (chosen := _driver(kind)) is not None and chosen.cached:
        inherited = {name: value for name, value in default.config.items() if name in CACHE}
    else:
        inherited = {}
    return LogConfig(type=kind, config={**inherited, **log.config})


def names(*, journal: bool) -> tuple[str, ...]:
    """Drivers that work on this host, sorted. `journal`: it has systemd's journal."""
    return tuple(sorted(name for name in (*DRIVERS, NONE) if journal or name != journald.NAME))


# --- what a configuration means -------------------------------------------------------------------


def validate(log: LogConfig) -> None:
    """Raises InvalidParameter, in Docker's words, for an unknown driver, or for options or values
    that it does not have; Missing for a valid configuration that lacks a required option."""
    if _kind(log) == NONE:
        return
    _parsed(log)


def remote(log: LogConfig) -> bool:
    """True if the lines are delivered by the shipper."""
    return _driver(_kind(log)) is not None and _kind(log) not in FILES


def by_plugin(log: LogConfig) -> bool:
    """True if the driver is a plugin, which may not exist."""
    return _driver(_kind(log)) is _PLUGIN


def readable(log: LogConfig) -> bool:
    """True if `docker logs` can read it."""
    chosen = _driver(_kind(log))
    return chosen is not None and not (chosen.cached and _cache_disabled(log.config))


def plan(log: LogConfig, facts: Facts) -> Plan:
    """Where the output of a container goes. `log` is resolved.

    Raises ServerError for a configuration that this host or this version of the engine does not
    have, in Docker's words.
    """
    if _kind(log) == NONE:
        return Plan(None)
    try:
        parsed, buffering = _parsed(log)
        extra = _attributes(log, facts)
        encoded = attributes.encoded(extra)  # checks their size
        if isinstance(parsed, Files):
            if not facts.log_path:
                raise InvalidParameter(f"{_kind(log)} has no file to write to")
            exact = _kind(log) == local.NAME
            return Plan(JsonFile(facts.log_path, *parsed[:2], encoded, parsed.compress, exact))
        tag = _tag(log, facts)
    except InvalidParameter as error:
        raise _failed(error.message) from error
    if isinstance(parsed, Awslogs):
        parsed = _completed(parsed, tag, facts)
    if isinstance(parsed, LogPlugin):
        parsed = plugin.completed(parsed, log.config, facts)
    if _kind(log) == journald.NAME and not facts.journal:
        raise _failed("journald is not enabled on this host")
    delivery = Delivery(
        id=facts.id,
        name=facts.name,
        tag=tag,
        target=parsed,
        attributes=_attributes(log, facts, tag=False),
        host=facts.hostname,
        image_id=facts.image_id,
        image_name=facts.image_name,
        command=facts.command,
        created=facts.created,
        pid=facts.pid,
        blocking=buffering.blocking,
        quota=buffering.quota,
        keep=buffering.keep,
    )
    files, quota, blocking, _ = buffering
    return Plan(Spool(facts.spool, files.max_size, files.max_file, quota, blocking, files.compress), delivery)


def details(log: LogConfig, facts: Facts) -> str:
    """The prefix of each line with `details=1`: `name=value,…` and a space, sorted and
    percent-encoded as Docker does; only the space when there are no attributes."""
    try:
        extra = _attributes(log, facts)
    except InvalidParameter:  # a tag that does not fit to the container: it has not started with it
        extra = _attributes(log, facts, tag=False)
    return ",".join(f"{quote_plus(name)}={quote_plus(extra[name])}" for name in sorted(extra)) + " "


def _kind(log: LogConfig) -> str:
    """Records of earlier versions may lack the type."""
    return log.type or json_file.NAME


def _driver(kind: str) -> Driver | None:
    """None for `none`, and for a name that no driver can have."""
    if kind != NONE and kind not in DRIVERS and plugin.is_name(kind):
        return _PLUGIN
    return DRIVERS.get(kind)


def unregistered(kind: str) -> InvalidParameter:
    """The error for a driver that does not exist, in Docker's words."""
    return InvalidParameter(f"logger: no log driver named '{kind}' is registered")


def _failed(why: str) -> ServerError:
    return ServerError(f"failed to initialize logging driver: {why}")


def _parsed(log: LogConfig) -> tuple[Files | Remote, Buffering]:
    """Raises InvalidParameter as `validate`."""
    kind, given = _kind(log), log.config
    chosen = _driver(kind)
    if chosen is None:
        raise unregistered(kind)
    mode = given.get("mode", "")
    if mode not in ("", _BLOCKING, "non-blocking"):
        raise InvalidParameter(f"logger: logging mode not supported: {mode} (log opt 'mode' for {kind} log driver)")
    blocking = mode != "non-blocking"
    own = Options(
        kind, {name: value for name, value in given.items() if name not in _COMMON}, empty=chosen.empty_is_unset
    )
    if chosen.options is not None:
        own.only(chosen.options | {"tag"} | (attributes.OPTIONS if chosen.attributes else frozenset()))
        for name in ("labels-regex", "env-regex"):
            own.expression(name)
        try:
            tags.validate(own.text("tag"))
        except InvalidParameter as error:
            raise own.invalid("tag", error.message) from error
    buffering = _buffering(kind, chosen, given, blocking)
    return chosen.parse(own), buffering  # parsed last: it may find an option missing


def _buffering(kind: str, chosen: Driver, given: Mapping[str, str], blocking: bool) -> Buffering:
    disabled = _cache_disabled(given)
    if disabled is None:
        raise InvalidParameter(f"invalid value for option cache-disabled: {given['cache-disabled']}")
    options = Options(kind, given, empty=False)
    # What dockerd does not read, it does not check.
    files = local.parse(options, "cache-") if chosen.cached else local.parse(Options(kind, {}, empty=False))
    quota = files.max_size * files.max_file
    if "max-buffer-size" in given:
        if blocking:
            raise InvalidParameter(
                "logger: max-buffer-size option is only supported with 'mode=non-blocking' "
                f"(log opt 'max-buffer-size' for {kind} log driver)"
            )
        quota = options.size("max-buffer-size", quota, binary=True)
        if quota < 1:
            raise options.invalid("max-buffer-size", "must be a positive number")
    keep = not (chosen.cached and disabled)
    if not keep:
        files = Files(min(files.max_size, _UNREAD_SIZE), 1, False)
    return Buffering(files, quota, blocking, keep)


def _cache_disabled(given: Mapping[str, str]) -> bool | None:
    """None for a value that is no boolean."""
    return booleans.WORDS.get(given.get("cache-disabled") or "false")


def _attributes(log: LogConfig, facts: Facts, *, tag: bool = True) -> dict[str, str]:
    """The labels and variables that the options name; with `tag`, also the tag if one was asked
    for: entries of files carry it."""
    if by_plugin(log):
        return {}
    found = attributes.chosen(log.config, facts.labels, facts.environment)
    if tag and log.config.get("tag"):
        found["tag"] = _tag(log, facts)
    return found


def _tag(log: LogConfig, facts: Facts) -> str:
    """An empty template means the default one, but splunk then has no tag. A plugin makes its own
    tags."""
    if by_plugin(log):
        return ""
    template = log.config.get("tag")
    if not template:
        template = "" if template == "" and log.type == splunk.NAME else DRIVERS[_kind(log)].tag
    try:
        return tags.render(template, facts, log.config)
    except InvalidParameter as error:
        raise InvalidParameter(f"log opt 'tag' for {_kind(log)} log driver: {error.message}") from error


def _completed(target: Awslogs, tag: str, facts: Facts) -> Awslogs:
    """With the name of the stream, and the region of the daemon."""
    stream = target.stream or tag
    if not re.fullmatch(r"[^:*]{1,512}", stream):
        raise _failed(
            f"log opts 'awslogs-stream' and 'tag' for awslogs log driver: '{stream[:100]}' is not the name of a "
            "stream: 1 to 512 characters without : and *"
        )
    if not awslogs.REGION.fullmatch(facts.region):
        raise _failed(f"AWS_REGION is not a region: '{facts.region[:100]}'")
    return msgspec.structs.replace(target, stream=stream, region=target.region or facts.region)
