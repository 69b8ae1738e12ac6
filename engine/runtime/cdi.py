"""Devices by name: CDI specifications, which vendors write for their devices, and the requests of
clients for them (`--gpus`, `--device vendor.com/class=name`).

Rules: Container Device Interface, SPEC.md 0.3 to 1.0
       (github.com/cncf-tags/container-device-interface); Docker Engine API,
       HostConfig.DeviceRequests.
A specification is a .json or .yaml file in one of the configured directories. A device of a later
directory replaces one of the same name; two in one directory are a conflict, and neither exists.
Files are read for each request, because vendors rewrite them when drivers change. They belong to
root and are trusted, as those who write them choose hooks that run as root.

Blocks on files: called in threads. Not here: how the edits get into config.json
(`containers/spec.py`). Raises InvalidParameter in Docker's words.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.errors import InvalidParameter, words
from engine.wire.containers import DeviceRequest

_log = logging.getLogger(__name__)

FILE_LIMIT = 4 << 20
"""Bytes of a specification; a larger file is skipped."""

HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")

_VENDOR = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_CLASS = re.compile(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


class _Part(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Base of the parts of a specification."""


class DeviceNode(_Part, frozen=True, kw_only=True):
    """What is not given is that of the node on the host."""

    path: str
    host_path: str = ""
    type: str = ""
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None


class Mount(_Part, frozen=True, kw_only=True):
    host_path: str
    container_path: str
    type: str = ""
    options: tuple[str, ...] = ()


class Hook(_Part, frozen=True, kw_only=True):
    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


class Edits(_Part, frozen=True, kw_only=True):
    """Changes of a container for a device."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()
    intel_rdt: dict[str, Any] | None = None
    net_devices: tuple[dict[str, Any], ...] = ()

    def __add__(self, other: Edits) -> Edits:
        return Edits(
            **{field: getattr(self, field) + getattr(other, field) for field in _JOINED},
            intel_rdt=self.intel_rdt or other.intel_rdt,
        )


_JOINED = tuple(name for name in Edits.__struct_fields__ if name != "intel_rdt")
NONE = Edits()


class Device(_Part, frozen=True, kw_only=True):
    name: str
    container_edits: Edits


class Specification(_Part, frozen=True, kw_only=True):
    """One file. `kind` is `vendor.com/class`."""

    cdi_version: str
    kind: str
    devices: tuple[Device, ...] = ()
    container_edits: Edits = NONE


def parse(text: bytes, *, json: bool) -> Specification:
    """Raises ValueError for a text that is no specification of a version that is known."""
    import yaml  # most hosts have no devices with names

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = msgspec.json.decode(text) if json else yaml.load(text, Loader=loader)
        found = msgspec.convert(document, Specification)
    except (msgspec.MsgspecError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not re.fullmatch(r"v?[01]\.\d{1,3}\.\d{1,3}", found.cdi_version, re.ASCII):
        raise ValueError(f"cdiVersion {found.cdi_version[:40]!r} is not known")
    vendor, _, kind = found.kind.partition("/")
    if not (_VENDOR.fullmatch(vendor) and _CLASS.fullmatch(kind)):
        raise ValueError(f"kind {found.kind[:100]!r} is not VENDOR/CLASS")
    names = [device.name for device in found.devices]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:100]!r} is not the name of a device")
    if len(set(names)) < len(names):
        raise ValueError("two devices have the same name")
    if b"\\u0000" in msgspec.json.encode(found):  # no environment, path or argument may have one
        raise ValueError("a NUL character")
    for edits in (found.container_edits, *(device.container_edits for device in found.devices)):
        _check(edits)
    return found


def _check(edits: Edits) -> None:
    for variable in edits.env:
        if variable.find("=") < 1:
            raise ValueError(f"env {variable[:100]!r} is not NAME=VALUE")
    for node in edits.device_nodes:
        if not node.path.startswith("/") or node.type not in ("", "b", "c", "u", "p"):
            raise ValueError(f"device node {node.path[:100]!r} {node.type[:10]!r}: wrong path or type")
        if not set(node.permissions) <= set("rwm"):
            raise ValueError(f"device node {node.path[:100]!r}: permissions {node.permissions[:10]!r}")
    for mount in edits.mounts:
        target = mount.container_path
        if not target.startswith("/") or not target.strip("/") or not mount.host_path:
            raise ValueError(f"mount {mount.host_path[:100]!r} at {mount.container_path[:100]!r}: wrong path")
    for hook in edits.hooks:
        if hook.hook_name not in HOOKS or not hook.path.startswith("/"):
            raise ValueError(f"hook {hook.hook_name[:40]!r} {hook.path[:100]!r}: wrong name or path")


# --- the specifications of this host --------------------------------------------------------------


class _Found(NamedTuple):
    specification: Specification
    device: Device


class Registry:
    """The devices in the given directories. Holds nothing but the directories' names."""

    def __init__(self, directories: Sequence[Path] = ()) -> None:
        self.directories = tuple(directories)

    def devices(self) -> list[str]:
        """The names of all devices, sorted."""
        return sorted(self._read())

    def edits(self, requests: Iterable[DeviceRequest]) -> Edits:
        """The changes for all requests, in their order. Edits of a specification itself come once,
        before those of its first device.

        Raises InvalidParameter for a request that no driver serves, and for an unknown device.
        """
        requests = list(requests)
        if not requests:
            return NONE
        devices = self._read()
        wanted = list(dict.fromkeys(name for each in requests for name in _names(each, devices)))
        if unknown := [name for name in wanted if name not in devices]:
            raise InvalidParameter(f"CDI device injection failed: unresolvable CDI devices {', '.join(unknown)}")
        edits = NONE
        seen: set[int] = set()
        for name in wanted:
            found = devices[name]
            if id(found.specification) not in seen:
                seen.add(id(found.specification))
                edits += found.specification.container_edits
            edits += found.device.container_edits
        for what, given in (("intelRdt", edits.intel_rdt), ("netDevices", edits.net_devices)):
            if given:
                raise InvalidParameter(f"CDI device injection failed: {what} is not supported by this engine")
        return edits

    def _read(self) -> dict[str, _Found]:
        devices: dict[str, _Found] = {}
        for directory in self.directories:
            own: dict[str, _Found | None] = {}
            for specification in _specifications(directory):
                for device in specification.devices:
                    name = f"{specification.kind}={device.name}"
                    own[name] = None if name in own else _Found(specification, device)
            for name, found in own.items():
                if found is None:
                    _log.warning("CDI: two specifications in %s have the device %s", directory, name)
                    devices.pop(name, None)
                else:
                    devices[name] = found
        return devices


def _specifications(directory: Path) -> Iterator[Specification]:
    try:
        paths = sorted(each for each in directory.iterdir() if each.suffix in (".json", ".yaml"))
    except OSError:  # most hosts have none
        return
    for path in paths:
        try:
            yield parse(_content(path), json=path.suffix == ".json")
        except (OSError, ValueError) as error:
            _log.warning("CDI: %s is skipped: %s", path, words(error))


def _content(path: Path) -> bytes:
    # Without O_NONBLOCK the opening of a FIFO waits for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is no regular file")
        text = file.read(FILE_LIMIT + 1)
    if len(text) > FILE_LIMIT:
        raise ValueError(f"has more than {FILE_LIMIT} bytes")
    return text


# --- drivers of requests --------------------------------------------------------------------------

_NVIDIA = frozenset(("gpu", "nvidia", "compute", "compat32", "graphics", "utility", "video", "display"))
_AMD = frozenset(("gpu", "amd"))
_VENDORS = (("nvidia", "nvidia.com/gpu", _NVIDIA), ("amd", "amd.com/gpu", _AMD))
"""Drivers that Docker has for requests by capability: the CDI kind of their devices, and the
capabilities that they serve. The first one that fits and has a specification is chosen."""


def _names(request: DeviceRequest, devices: Iterable[str]) -> Sequence[str]:
    """The CDI names of the devices that a request means. Raises InvalidParameter if no driver
    serves it.
    """
    if request.driver == "cdi":
        for what, given in (("count", request.count), ("options", request.options)):
            if given:
                raise InvalidParameter(f"unexpected {what} in CDI device request")
        return request.device_ids or ()
    for driver, kind, capabilities in _VENDORS:
        if request.driver not in ("", driver) or not any(
            set(each) <= capabilities for each in request.capabilities or ()
        ):
            continue
        own = [name.partition("=")[2] for name in devices if name.startswith(f"{kind}=")]
        if own:
            return [f"{kind}={name}" for name in _chosen(request, own)]
    words = " ".join(f"[{' '.join(each)}]" for each in request.capabilities or ())
    raise InvalidParameter(f'could not select device driver "{request.driver}" with capabilities: [{words}]')


def _chosen(request: DeviceRequest, own: list[str]) -> Sequence[str]:
    if request.device_ids:
        return request.device_ids
    if request.count < 0:
        return ["all"] if "all" in own else sorted(own)
    return [str(number) for number in range(request.count)]
