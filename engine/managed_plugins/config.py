"""The config of a plugin: read from the document that its author wrote, and checked.

Docker's clients and engines read it with Go's decoder (`wire/folded.py`): authors write `workdir`
as well as `WorkDir`.

Pure. Raises: InvalidParameter that names what is wrong.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine.errors import InvalidParameter, decoding_reason
from engine.images.archive import MAX_LAYERS, is_digest
from engine.wire import folded
from engine.wire.plugins import PluginConfig, PluginRootfs

LONGEST = 1 << 20
"""Bytes of a config."""

PROTOCOLS = ("", "moby.plugins.http/v1")

_TYPE = re.compile(r"[A-Za-z0-9_.-]*\.[A-Za-z0-9_-]+/[A-Za-z0-9_./-]+")
_SOCKET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""A name in the plugin's directory of sockets, which does not lead out of it."""


def parse(raw: bytes, first: bool = False) -> PluginConfig:
    """The config. `first`: in the format of Docker 1.12 (v0)."""
    if len(raw) > LONGEST:
        raise InvalidParameter(f"invalid plugin config: it has {len(raw)} bytes, more than {LONGEST}")
    if b"\\u0000" in raw:  # as JSON spells it; the kernel would see the text's beginning
        raise InvalidParameter("invalid plugin config: a text has a zero byte")
    try:
        given = msgspec.json.decode(raw)
        if not isinstance(given, dict):
            raise InvalidParameter("invalid plugin config: it is not a JSON object")
        if first:
            given = _upgraded(given)
        config = folded.convert(given, PluginConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidParameter(f"invalid plugin config: {decoding_reason(error)}") from error
    _check(config)
    return config


def is_plugin(config: PluginConfig) -> bool:
    """False for a document that is probably of something else: all fields of a config may be
    absent, but a plugin without these cannot be enabled."""
    return bool(config.interface.types and config.entrypoint)


def with_rootfs(config: PluginConfig, diff_ids: list[str]) -> PluginConfig:
    return msgspec.structs.replace(config, rootfs=PluginRootfs(diff_ids=diff_ids))


def encoded(config: PluginConfig) -> bytes:
    """The document of a plugin that is made here."""
    return msgspec.json.encode(config)


def _upgraded(given: dict[str, Any]) -> dict[str, Any]:
    """A config of Docker 1.12 in the later format: capabilities and devices have moved, and mounts
    were always shared with the host."""
    names = {name.lower(): name for name in given}
    linux = {name: given[names[name]] for name in ("capabilities", "devices") if name in names}
    mounts = given.get(names.get("mounts", ""))
    shared = [_shared(each) if isinstance(each, dict) else each for each in mounts] if isinstance(mounts, list) else []
    kept = {name: value for name, value in given.items() if name.lower() not in ("linux", "mounts")}
    return {**kept, "linux": linux, "mounts": shared}


def _shared(mount: dict[str, Any]) -> dict[str, Any]:
    if not any(name.lower() == "type" and value == "bind" for name, value in mount.items()):
        return mount
    kept = {name: value for name, value in mount.items() if name.lower() != "options"}
    return {**kept, "options": ["rbind", "rshared"]}


def _check(config: PluginConfig) -> None:
    interface = config.interface
    for each in interface.types:
        if not _TYPE.fullmatch(each):
            raise InvalidParameter(f"invalid plugin config: {each[:100]!r} is not a plugin type (PREFIX.KIND/VERSION)")
    if interface.socket and not _SOCKET.fullmatch(interface.socket):
        raise InvalidParameter(f"invalid plugin config: socket {interface.socket[:100]!r} is not the name of a file")
    if interface.protocol_scheme not in PROTOCOLS:
        raise InvalidParameter(
            f"invalid plugin config: protocol {interface.protocol_scheme[:100]!r} is not {PROTOCOLS[1]}"
        )
    for what, path in (
        ("propagatedMount", config.propagated_mount),
        ("workdir", config.work_dir),
        *(("destination of a mount", mount.destination) for mount in config.mounts),
    ):
        if path and not path.startswith("/"):
            raise InvalidParameter(f"invalid plugin config: {what} {path[:200]!r} is not an absolute path")
    for variable in config.env:
        if not variable.name or "=" in variable.name:
            raise InvalidParameter(f"invalid plugin config: {variable.name[:100]!r} is not the name of a variable")
    if config.rootfs.type != "layers":
        raise InvalidParameter(
            f"invalid plugin config: rootfs has type {config.rootfs.type[:100]!r}, expected 'layers'"
        )
    if len(config.rootfs.diff_ids) > MAX_LAYERS:
        raise InvalidParameter(f"invalid plugin config: more than {MAX_LAYERS} layers")
    for diff_id in config.rootfs.diff_ids:
        if not is_digest(diff_id):
            raise InvalidParameter(f"invalid plugin config: invalid diff_id {diff_id[:100]!r}")
