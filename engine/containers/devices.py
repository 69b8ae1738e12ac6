"""Devices of a container: the nodes in its /dev, cgroup rules, and limits of block devices.

Rules: Docker Engine API, HostConfig (Devices, DeviceCgroupRules, Blkio…); runtime-spec
       config-linux.md, "Devices" and "Block IO".
Reads /dev of the host. Not here: whether the fields are well formed (`body.py`, `limits.py`),
devices by name (`runtime/cdi.py`). Raises InvalidParameter or NotFound with the field's name.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Container, Iterator

import msgspec

from engine.containers.body import parse_device_rule
from engine.errors import InvalidParameter, NotFound
from engine.runtime import cdi
from engine.wire import oci
from engine.wire.containers import HostConfig, ThrottleDevice, WeightDevice

_CHARACTER, _BLOCK, _FIFO = "c", "b", "p"
_TYPES = {stat.S_IFCHR: _CHARACTER, stat.S_IFBLK: _BLOCK, stat.S_IFIFO: _FIFO}

DEFAULT_RULES = (
    oci.DeviceRule(allow=False, access="rwm"),
    oci.DeviceRule(allow=True, type=_CHARACTER, access="m"),
    oci.DeviceRule(allow=True, type=_BLOCK, access="m"),
    *(
        oci.DeviceRule(allow=True, type=_CHARACTER, major=major, minor=minor, access="rwm")
        for major, minor in ((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2), (136, None))
    ),
)
"""null, zero, full, random, urandom, tty, console, ptmx and every pty; mknod of any."""

PRIVILEGED_RULES = (oci.DeviceRule(allow=True, access="rwm"),)


# --- nodes ----------------------------------------------------------------------------------------


def nodes(host: HostConfig) -> Iterator[tuple[oci.Device, oci.DeviceRule]]:
    """The device nodes of a container, each with its cgroup rule. Raises NotFound for a missing
    one.
    """
    mapped = list(_mapped(host))
    if host.privileged:
        replaced = {device.path for device, _ in mapped}
        for path in _device_files("/dev"):
            if path not in replaced:
                yield from _device(path, path, "rwm")
    yield from mapped


def _mapped(host: HostConfig) -> Iterator[tuple[oci.Device, oci.DeviceRule]]:
    """Those of Devices. A privileged container has those of the host's /dev in any case."""
    for mapping in host.devices or ():
        source, target = mapping.path_on_host, mapping.path_in_container or mapping.path_on_host
        if host.privileged and source == target and source.startswith("/dev/"):
            continue
        access = mapping.cgroup_permissions or "rwm"
        if not set(access) <= set("rwm"):
            raise InvalidParameter(f"Devices: {source}: invalid CgroupPermissions {access!r}")
        found = list(_device_files(source)) if os.path.isdir(source) else [source]
        made = [pair for path in found for pair in _device(path, target + path.removeprefix(source), access)]
        if not made:
            raise NotFound(
                f'error gathering device information while adding custom device "{source}": not a device node'
            )
        yield from made


def requested(edits: cdi.Edits, user: oci.User) -> Iterator[tuple[oci.Device, oci.DeviceRule | None]]:
    """The device nodes of CDI's edits, with a cgroup rule for those that have one. Values that an
    edit leaves out are those of the node on the host; the owner is the container's user.

    Raises NotFound for a missing one, InvalidParameter for a file that is not of the edit's type.
    """
    for edit in edits.device_nodes:
        kind, major, minor = edit.type.replace("u", _CHARACTER), edit.major, edit.minor
        if not kind or (kind != _FIFO and not (major or minor)):
            source = edit.host_path or edit.path
            try:
                found = os.stat(source)
            except OSError as error:
                reason = (error.strerror or "").lower()
                raise NotFound(f"CDI device injection failed: {source}: {reason}") from error
            own = _TYPES.get(stat.S_IFMT(found.st_mode), "")
            if not own:
                raise InvalidParameter(f"CDI device injection failed: {source} is not a device node")
            if kind not in ("", own):
                raise InvalidParameter(f"CDI device injection failed: {source} is of type {own}, not {kind}")
            kind, major, minor = own, os.major(found.st_rdev), os.minor(found.st_rdev)
        yield (
            oci.Device(
                type=kind,
                path=edit.path,
                major=major,
                minor=minor,
                file_mode=edit.file_mode,
                uid=user.uid if edit.uid is None and user.uid > 0 else edit.uid,
                gid=user.gid if edit.gid is None and user.gid > 0 else edit.gid,
            ),
            oci.DeviceRule(allow=True, type=kind, major=major, minor=minor, access=edit.permissions or "rwm")
            if kind in (_CHARACTER, _BLOCK)
            else None,
        )


def rules(host: HostConfig) -> Iterator[oci.DeviceRule]:
    """The entries of DeviceCgroupRules."""
    for text in host.device_cgroup_rules or ():
        rule = parse_device_rule(text)
        yield oci.DeviceRule(allow=True, type=rule.type, major=rule.major, minor=rule.minor, access=rule.access)


_SKIPPED_DEVICES = {"/dev/pts", "/dev/shm", "/dev/fd", "/dev/mqueue", "/dev/console", "/dev/.udev", "/dev/.lxc"}
"""Files of /dev that a privileged container has of its own."""


def _device_files(directory: str) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise NotFound(f"Devices: {directory}: {(error.strerror or '').lower()}") from error
    for entry in found:
        if entry.path in _SKIPPED_DEVICES:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _device_files(entry.path)
        elif not entry.is_symlink() and not entry.is_file(follow_symlinks=False):
            yield entry.path


def _device(path: str, target: str, access: str) -> Iterator[tuple[oci.Device, oci.DeviceRule]]:
    try:
        found = os.stat(path)
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise NotFound(f'error gathering device information while adding custom device "{path}": {reason}') from error
    kind = _TYPES.get(stat.S_IFMT(found.st_mode), "")
    if kind not in (_CHARACTER, _BLOCK):
        return
    major, minor = os.major(found.st_rdev), os.minor(found.st_rdev)
    yield (
        oci.Device(
            type=kind,
            path=target,
            major=major,
            minor=minor,
            file_mode=stat.S_IMODE(found.st_mode),
            uid=found.st_uid,
            gid=found.st_gid,
        ),
        oci.DeviceRule(allow=True, type=kind, major=major, minor=minor, access=access),
    )


# --- limits of block devices ----------------------------------------------------------------------

THROTTLES = {
    "blkio_device_read_bps": "throttle_read_bps_device",
    "blkio_device_write_bps": "throttle_write_bps_device",
    "blkio_device_read_iops": "throttle_read_iops_device",
    "blkio_device_write_iops": "throttle_write_iops_device",
}
"""Fields of HostConfig, and of `oci.BlockIO`."""
WEIGHTS = "blkio_weight_device"
LIMITS = (WEIGHTS, *THROTTLES)
_NAMES = {field.name: field.encode_name for field in msgspec.structs.fields(HostConfig) if field.name in LIMITS}


def block_limits(host: HostConfig, *, weight: int | None, only: Container[str] = LIMITS) -> oci.BlockIO:
    """The limits of block devices, those of the fields in `only`."""
    weights = (host.blkio_weight_device or ()) if WEIGHTS in only else ()
    throttled: dict[str, list[oci.ThrottleDevice]] = {
        theirs: [
            oci.ThrottleDevice(major=major, minor=minor, rate=each.rate)
            for each in getattr(host, ours) or ()
            if each.rate
            for major, minor in (_block_device(each.path, ours),)
        ]
        for ours, theirs in THROTTLES.items()
        if ours in only
    }
    return oci.BlockIO(
        weight=weight,
        weight_device=[
            oci.WeightDevice(major=major, minor=minor, weight=each.weight)
            for each in weights
            for major, minor in (_block_device(each.path, WEIGHTS),)
        ],
        **throttled,
    )


def lifted(before: HostConfig, after: HostConfig) -> Iterator[tuple[str, int, int]]:
    """The limits that only `before` has: the field, and the device's numbers. A device that is gone
    from the host has no limit either.
    """
    for field in LIMITS:
        kept = {each.path for each in getattr(after, field) or () if _limits(each)}
        for each in getattr(before, field) or ():
            if each.path not in kept and _limits(each):
                with contextlib.suppress(NotFound, InvalidParameter):
                    yield field, *_block_device(each.path, field)


def present(host: HostConfig) -> HostConfig:
    """Without the limits of devices that are gone from the host."""

    def there(path: str, field: str) -> bool:
        try:
            _block_device(path, field)
        except (NotFound, InvalidParameter):
            return False
        return True

    return msgspec.structs.replace(
        host, **{field: [each for each in getattr(host, field) or () if there(each.path, field)] for field in LIMITS}
    )


def _limits(each: ThrottleDevice | WeightDevice) -> int:
    """0 if the entry sets no limit."""
    return each.weight if isinstance(each, WeightDevice) else each.rate


def _block_device(path: str, field: str) -> tuple[int, int]:
    name = _NAMES[field]
    try:
        found = os.stat(path)
    except OSError as error:
        raise NotFound(f"{name}: {path}: {(error.strerror or '').lower()}") from error
    if not stat.S_ISBLK(found.st_mode):
        raise InvalidParameter(f"{name}: {path} is not a block device")
    return os.major(found.st_rdev), os.minor(found.st_rdev)
