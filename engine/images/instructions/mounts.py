"""`RUN --mount`: its fields, their defaults and rules.

Pure. Not here: the mount itself (engine/builder/steps).
Raises: InvalidParameter in the words of BuildKit.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.common import booleans
from engine.errors import InvalidParameter, words
from engine.images.instructions.nearest import hint
from engine.images.instructions.words import Expand, Unnumbered


class RunMount(msgspec.Struct, frozen=True, kw_only=True):
    """`RUN --mount`, with the defaults of its type.

    `source`, `target`: paths as written, `target` is relative to the working directory, which it is
    when it is empty. `id`: for a
    cache, empty means its absolute target; a secret always has one. A secret's `target` is empty
    when only `env` is wanted. For ssh, an empty `target` means the default path, and an empty `id`
    the default agent. `sharing`: of a cache only.
    """

    type: str = "bind"
    id: str = ""
    source: str = ""
    target: str = ""
    from_: str = ""
    sharing: str = ""
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    required: bool = False
    read_only: bool = True
    size: int = 0
    env: str = ""


_MOUNT_TYPES = ("bind", "cache", "tmpfs", "secret", "ssh")
_SHARING = ("shared", "private", "locked")
_MOUNT_KEYS = {
    "type": "type",
    "from": "from_",
    "source": "source",
    "src": "source",
    "target": "target",
    "dst": "target",
    "destination": "target",
    "readonly": "read_only",
    "ro": "read_only",
    "readwrite": "read_only",
    "rw": "read_only",
    "required": "required",
    "size": "size",
    "id": "id",
    "sharing": "sharing",
    "mode": "mode",
    "uid": "uid",
    "gid": "gid",
    "env": "env",
}


def read(text: str, word: Expand, *, strict: bool) -> RunMount:
    """A mount's fields, comma-separated as in CSV. Without `strict`, the fields that have variables
    are left out, and what they would decide is not checked.
    """
    try:
        rows = list(csv.reader([text], strict=True))
    except csv.Error as error:
        raise Unnumbered(f"failed to parse csv mounts: {words(error)}: {text}"[:300]) from None
    fields = rows[0] if rows else []
    options: dict[str, Any] = {}
    unknown = False
    for field in fields:
        key, equals, value = field.partition("=")
        key = key.lower()
        if key not in _MOUNT_KEYS:
            raise Unnumbered(
                f"unexpected key '{key}' in '{field}'"[:300] + hint(key, _MOUNT_KEYS)
                if equals
                else f"invalid field '{field}' must be a key=value pair"[:300]
            )
        if not equals and key not in ("readonly", "ro", "readwrite", "rw", "required"):
            raise Unnumbered(f"invalid field '{field}' must be a key=value pair"[:300])
        if key == "from" and re.search(r"\$.", value):
            raise InvalidParameter(f"'{key}' doesn't support variable expansion, define alias stage instead")
        value = word(value) if equals else "true"
        if not strict and "$" in value:
            unknown = True
            continue
        options[_MOUNT_KEYS[key]] = _mount_value(key, value)
    mount = RunMount(**options)
    if not unknown:
        _check_mount(mount, options)
    if "read_only" not in options and mount.type in ("cache", "tmpfs"):
        mount = msgspec.structs.replace(mount, read_only=False)
    if mount.type == "cache":
        mount = msgspec.structs.replace(mount, sharing=mount.sharing or "shared")
    if mount.type == "secret":
        mount = _secret(mount)
    return mount


def _mount_value(key: str, value: str) -> Any:
    match _MOUNT_KEYS[key]:
        case "type":
            if value.lower() not in _MOUNT_TYPES:
                raise Unnumbered(f'unsupported mount type "{value}"')
            return value.lower()
        case "sharing":
            if value.lower() not in _SHARING:
                raise Unnumbered(f'unsupported sharing value "{value}"')
            return value.lower()
        case "read_only" | "required":
            if value not in booleans.WORDS:
                raise Unnumbered(f"invalid value for {key}: {value}"[:300])
            return booleans.WORDS[value] != (key in ("rw", "readwrite"))
        case "mode":
            if not re.fullmatch(r"[0-7]{1,11}", value) or int(value, 8) > 0o7777:
                raise Unnumbered(f"invalid value {value} for mode"[:300])
            return int(value, 8)
        case "uid" | "gid":
            if not re.fullmatch(r"[0-9]{1,10}", value) or int(value) >= (1 << 32) - 1:
                raise Unnumbered(f"invalid value {value} for {key}"[:300])
            return int(value)
        case "size":
            return _size(value)
        case _:
            return value


_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([kmgtp]?)(?:i?b)?", re.IGNORECASE)


def _size(value: str) -> int:
    """Bytes, with a binary unit: `64m`, `1.5GiB`."""
    match = _SIZE.fullmatch(value)
    size = 0
    if match is not None:
        whole, _, fraction = match[1].partition(".")
        unit = 1 << 10 * " kmgtp".index(match[2].lower() or " ")
        size = int(whole) * unit + int(fraction or 0) * unit // 10 ** len(fraction)
    if match is None or size >= 1 << 63:
        raise Unnumbered(f"invalid value for size: {value}"[:300])
    return size


_ONLY = {"required": ("secret", "ssh"), "size": ("tmpfs",), "env": ("secret",)}


def _check_mount(mount: RunMount, given: Mapping[str, Any]) -> None:
    """Which fields a type has."""
    kind = mount.type
    for key in ("mode", "uid", "gid"):
        if key in given and kind not in ("secret", "ssh", "cache"):
            raise Unnumbered(f'{key} not allowed for "{kind}" type mounts')
    for key, kinds in _ONLY.items():
        if key in given and kind not in kinds:
            raise Unnumbered(f"unexpected key '{key}' for mount type '{kind}'")
    if kind == "secret":
        if mount.from_:
            raise Unnumbered("secret mount should not have a from")
        if mount.sharing:
            raise Unnumbered("secret mount should not define sharing")
        if not (mount.source or mount.target or mount.id or mount.env):
            raise Unnumbered("invalid secret mount. one of source, target required")
        if mount.source and mount.id:
            raise Unnumbered("both source and id can't be set")
    if mount.sharing and kind != "cache":
        raise Unnumbered(f"invalid cache sharing set for {kind} mount")


def _secret(mount: RunMount) -> RunMount:
    """A secret's id and target default to each other's base name: `/run/secrets/ID`."""
    name = mount.id or mount.source or mount.target.rstrip("/").rpartition("/")[2] or mount.env
    target = mount.target
    if not target and not mount.env:
        target = f"/run/secrets/{name.rstrip('/').rpartition('/')[2]}"
    return msgspec.structs.replace(mount, id=name, target=target)
