"""The mounts of a container: Binds, Mounts, Tmpfs, VolumesFrom and Volumes of a create's body,
checked and merged.

Pure, except that volumes without a name are given a random one, and that `check_sources` looks at
the host.
Rules: Docker Engine API, ContainerCreate (HostConfig.Binds, Mounts, Tmpfs); error texts are
       dockerd's.
Not here: volumes themselves (`volumes/store.py`), the runtime's mounts (`spec.py`).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from engine.containers.store import ContainerRecord, ImageMount, MountOptions
from engine.errors import InvalidParameter
from engine.images.record import ImageRecord
from engine.wire.containers import (
    BindOptions,
    Config,
    HostConfig,
    ImageOptions,
    Mount,
    MountPoint,
    TmpfsOptions,
    VolumeDriver,
    VolumeOptions,
)
from engine.wire.volumes import VolumeCreate

_CONSISTENCIES = {"consistent", "cached", "delegated"}
"""Words for Docker Desktop's shared directories. They have no effect on Linux."""
_PROPAGATIONS = {"shared", "rshared", "slave", "rslave", "private", "rprivate"}
_PRIVATE = ("", "private", "rprivate")
_MODES = {"ro", "rw", "z", "Z", "nocopy", *_CONSISTENCIES, *_PROPAGATIONS}


class Bind(msgspec.Struct, frozen=True):
    """One entry of Binds.

    `source` is a host path, or a volume's name when `named`: empty for one of the container's own.
    """

    source: str
    destination: str
    named: bool
    read_only: bool
    mode: str
    propagation: str


def parse_bind(text: str) -> Bind:
    """`host-src:container-dest[:options]`, `volume-name:container-dest[:options]` or a
    `container-dest` alone.

    Raises InvalidParameter with the entry in it.
    """
    if "\0" in text:
        raise InvalidParameter(f"Invalid bind mount spec {text[:100]!r}: must not contain a NUL character")
    source, colon, rest = text.partition(":")
    destination, _, mode = rest.partition(":")
    if not colon and text.startswith("/"):
        return Bind("", normal_path(text, text), named=True, read_only=False, mode="", propagation="")
    if not source or not destination:
        raise InvalidParameter(f"Invalid bind mount spec {text!r}: it must be host-src:container-dest[:options]")
    named = not source.startswith("/")
    destination = normal_path(destination, text)
    options = mode.split(",") if mode else []
    propagations = [option for option in options if option in _PROPAGATIONS]
    if (
        any(option not in _MODES for option in options)
        or len(options) != len(set(options))
        or {"ro", "rw"} <= set(options)
        or {"z", "Z"} <= set(options)
        or len(propagations) > 1
        or len(_CONSISTENCIES.intersection(options)) > 1
        or (named and propagations)
        or (not named and "nocopy" in options)
    ):
        raise InvalidParameter(f"Invalid bind mount spec {text!r}: invalid mode: {mode}")
    propagation = propagations[0] if propagations else "" if named else "rprivate"
    return Bind(source, destination, named, "ro" in options, mode, propagation)


def normal_path(path: str, of: str) -> str:
    """`path` without doubled or trailing slashes, `.` and `..`; raises InvalidParameter when it
    is relative or the root itself.
    """
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    if not path.startswith("/"):
        raise InvalidParameter(f"Invalid bind mount spec {of!r}: mount path must be absolute: {path}")
    if not parts:
        raise InvalidParameter(f"Invalid bind mount spec {of!r}: destination can't be '/'")
    return "/" + "/".join(parts)


_PROC_FILES = frozenset(
    f"/proc/{name}"
    for name in (
        *("cpuinfo", "diskstats", "loadavg", "meminfo", "net/dev", "slabinfo", "stat", "swaps", "uptime"),
        *("sys/kernel/ns_last_pid", "sys/crypto/fips_enabled"),
    )
)
"""Files below /proc that may be mounted over, with numbers such as lxcfs provides. runc has the
same list.
"""


_NAME_MAX, _PATH_MAX = 255, 4095
"""Bytes of a file name and of a path (limits.h), without the NUL character."""


def check_length(path: str, what: str) -> None:
    """Raises InvalidParameter, with `what` first, for a path that no file system takes."""
    if "\0" in path:
        raise InvalidParameter(f"{what}: must not contain a NUL character")
    encoded = path.encode()
    longest = max(map(len, encoded.split(b"/")))
    if longest > _NAME_MAX or len(encoded) > _PATH_MAX:
        raise InvalidParameter(
            f"{what}: it has {len(encoded)} bytes of at most {_PATH_MAX}, and a name of {longest} of at most "
            f"{_NAME_MAX}"
        )


def _clean(source: str) -> str:
    """A bind's host path without doubled and trailing slashes, `.` and `..`, so that no directory
    is made that only the spelling names.
    """
    return "/" + os.path.normpath(source).lstrip("/")


def check_destination(destination: str, source: str = "") -> None:
    """Refuse a mount over /proc and /sys, which could hide masked paths and /proc/self/attr
    (CVE-2019-16884), and one whose path no file system takes.

    crun 1.8 does not refuse it. `source` is the host path of a bind: the host's own /proc at /proc
    and /sys at /sys hide nothing. Raises InvalidParameter.
    """
    check_length(destination, f"invalid mount destination {destination[:100]!r}")
    if destination in ("/proc", "/sys"):
        refused = normal_path(source, source) != destination if source.startswith("/") and source.strip("/") else True
    else:
        refused = destination.startswith("/proc/") and destination not in _PROC_FILES
    if refused:
        raise InvalidParameter(f"invalid mount destination {destination!r}: it is inside or over /proc or /sys")


def parse_volumes_from(text: str) -> tuple[str, bool]:
    """`container[:ro|rw]` as the container and whether it may write.

    Raises InvalidParameter with the entry in it.
    """
    name, _, mode = text.partition(":")
    if not name:
        raise InvalidParameter(f"VolumesFrom: malformed volumes-from specification: {text!r}")
    options = mode.split(",") if mode else []
    if not set(options) <= {"ro", "rw", "z", "Z"} or len(set(options)) != len(options) or {"ro", "rw"} <= set(options):
        raise InvalidParameter(f"VolumesFrom: {text!r}: invalid mode: {mode}")
    return name, "ro" not in options


_TMPFS_DEFAULTS = ("noexec", "nosuid", "nodev")
_TMPFS_OPPOSITES = {
    first: {second}
    for pair in (
        ("exec", "noexec"),
        ("suid", "nosuid"),
        ("dev", "nodev"),
        ("rw", "ro"),
        ("sync", "async"),
        ("mand", "nomand"),
        ("atime", "noatime"),
        ("diratime", "nodiratime"),
        ("relatime", "norelatime"),
        ("strictatime", "nostrictatime"),
    )
    for first, second in (pair, pair[::-1])
}
_TMPFS_VALUES = {
    "size": re.compile(r"\d{1,19}[kKmMgGtTpPeE%]?"),
    "nr_blocks": re.compile(r"\d{1,19}[kKmMgGtTpPeE]?"),
    "nr_inodes": re.compile(r"\d{1,19}[kKmMgGtTpPeE]?"),
    "mode": re.compile(r"[0-7]{1,4}"),
    "uid": re.compile(r"\d{1,10}"),
    "gid": re.compile(r"\d{1,10}"),
    "mpol": re.compile(r"[a-z]+([=:][a-z0-9:-]+)*"),
}


def tmpfs_options(text: str) -> tuple[str, ...]:
    """The mount options of a Tmpfs entry: Docker's own, each replaced by its opposite when that
    is given. Raises InvalidParameter.
    """
    chosen = dict.fromkeys(_TMPFS_DEFAULTS)
    values: dict[str, str] = {}
    propagation: list[str] = []
    for option in text.split(",") if text else ():
        name, equals, value = option.partition("=")
        if equals and name in _TMPFS_VALUES and _TMPFS_VALUES[name].fullmatch(value):
            values[name] = option
        elif not equals and option in _TMPFS_OPPOSITES:
            for other in _TMPFS_OPPOSITES[option]:
                chosen.pop(other, None)
            chosen[option] = None
        elif option in _PROPAGATIONS:
            propagation = [option]
        elif option != "defaults":
            raise InvalidParameter(f'Tmpfs: Invalid tmpfs option "{option[:100]}"')
    return (*chosen, *values.values(), *propagation)


# --- HostConfig.Mounts ----------------------------------------------------------------------------


def check(mount: Mount) -> None:
    """The rules of one entry of Mounts, in Docker's words. Raises InvalidParameter."""
    try:
        _check(mount)
    except InvalidParameter as error:
        raise InvalidParameter(f'invalid mount config for type "{mount.type}": {error.message}') from error


def _check(mount: Mount) -> None:
    if mount.type == "cluster":
        raise InvalidParameter("cluster volumes (CSI) are not supported by this version")
    if mount.type not in ("bind", "volume", "tmpfs", "image"):
        raise InvalidParameter("mount type unknown")
    if not mount.target:
        raise InvalidParameter("field Target must not be empty")
    _check_absolute(mount.target)
    if not mount.target.strip("/.") and ".." not in mount.target:
        raise InvalidParameter("invalid specification: destination can't be '/'")
    normal_path(mount.target, mount.target)
    for options, field, kind in (
        (mount.bind_options, "BindOptions", "bind"),
        (mount.volume_options, "VolumeOptions", "volume"),
        (mount.tmpfs_options, "TmpfsOptions", "tmpfs"),
        (mount.image_options, "ImageOptions", "image"),
    ):
        if options is not None and mount.type != kind:
            raise InvalidParameter(f"field {field} must not be specified")
    if mount.consistency not in ("", "default", *_CONSISTENCIES):
        raise InvalidParameter(f"invalid consistency: {mount.consistency}")
    if mount.type == "bind":
        _check_bind(mount)
    elif mount.type == "volume":
        _check_volume(mount)
    elif mount.type == "image":
        if not mount.source:
            raise InvalidParameter("field Source must not be empty")
        _check_subpath((mount.image_options or ImageOptions()).subpath, "image")
    else:
        if mount.source:
            raise InvalidParameter("field Source must not be specified")
        _check_tmpfs(mount.tmpfs_options or TmpfsOptions())
        tmpfs_options(_options_text(mount))


def _check_bind(mount: Mount) -> None:
    options = mount.bind_options or BindOptions()
    if not mount.source:
        raise InvalidParameter("field Source must not be empty")
    _check_absolute(mount.source)
    if options.propagation and options.propagation not in _PROPAGATIONS:
        raise InvalidParameter(f"invalid propagation mode: {options.propagation}")
    if options.read_only_non_recursive and options.read_only_force_recursive:
        raise InvalidParameter("mount options conflict: ReadOnlyNonRecursive && ReadOnlyForceRecursive")
    for given, field in (
        (options.read_only_non_recursive, "ReadOnlyNonRecursive"),
        (options.read_only_force_recursive, "ReadOnlyForceRecursive"),
    ):
        if given and not mount.read_only:
            raise InvalidParameter(f"BindOptions.{field} needs ReadOnly")
    if options.read_only_force_recursive and options.non_recursive:
        raise InvalidParameter("mount options conflict: NonRecursive && ReadOnlyForceRecursive")
    if options.read_only_force_recursive and options.propagation not in _PRIVATE:
        raise InvalidParameter(
            f"BindOptions.ReadOnlyForceRecursive needs the propagation mode rprivate: {options.propagation}"
        )


def _check_volume(mount: Mount) -> None:
    subpath = (mount.volume_options or VolumeOptions()).subpath
    if subpath and not mount.source:
        raise InvalidParameter("must not set Subpath when using anonymous volumes")
    _check_subpath(subpath, "volume")
    if not mount.source and mount.read_only:
        raise InvalidParameter("must not set ReadOnly mode when using anonymous volumes")
    if "\0" in mount.source:
        raise InvalidParameter("Source must not hold a NUL character")


def _check_subpath(subpath: str, of: str) -> None:
    """As Go's filepath.IsLocal: relative, and no `..` leads above its beginning."""
    depth = 0
    for part in subpath.split("/"):
        depth += {"": 0, ".": 0, "..": -1}.get(part, 1)
        if depth < 0:
            break
    if depth < 0 or subpath.startswith("/") or "\0" in subpath:
        raise InvalidParameter(f"subpath must be a relative path within the {of}")


def _check_tmpfs(options: TmpfsOptions) -> None:
    if options.size_bytes < 0:
        raise InvalidParameter(f"TmpfsOptions.SizeBytes must not be negative: {options.size_bytes}")
    if not 0 <= options.mode <= 0o7777:
        raise InvalidParameter(f"TmpfsOptions.Mode must be a file mode: {options.mode}")
    for pair in options.options or ():
        if not 1 <= len(pair) <= 2:
            raise InvalidParameter("invalid option array length")
        word = "=".join(pair)
        try:
            if not word or "," in word:
                raise InvalidParameter(word)
            tmpfs_options(word)
        except InvalidParameter as error:
            raise InvalidParameter(f"invalid option: {word[:100]}") from error


def _check_absolute(path: str) -> None:
    if "\0" in path:
        raise InvalidParameter(f"invalid mount path: {path[:100]!r}: must not contain a NUL character")
    if not path.startswith("/"):
        raise InvalidParameter(f"invalid mount path: '{path}' mount path must be absolute")


def _options_text(mount: Mount) -> str:
    """A tmpfs entry of Mounts as the text of a Tmpfs entry."""
    options = mount.tmpfs_options or TmpfsOptions()
    words = ["ro"] if mount.read_only else []
    if options.size_bytes:
        words.append(f"size={options.size_bytes}")
    if options.mode:
        words.append(f"mode={options.mode:o}")
    return ",".join((*words, *("=".join(pair) for pair in options.options or ())))


def temporary(host: HostConfig) -> dict[str, str]:
    """Destination and option text of every tmpfs, of Tmpfs and of Mounts."""
    found = {normal_path(path, path): options for path, options in (host.tmpfs or {}).items()}
    return found | {
        normal_path(mount.target, mount.target): _options_text(mount)
        for mount in host.mounts or ()
        if mount.type == "tmpfs"
    }


def temporary_ids(host: HostConfig, kind: str) -> list[int]:
    """The owners that options of tmpfs name. `kind`: `uid` or `gid`."""
    options = (option for text in temporary(host).values() for option in tmpfs_options(text))
    return [int(option.removeprefix(f"{kind}=")) for option in options if option.startswith(f"{kind}=")]


def options_of(record: ContainerRecord) -> dict[str, MountOptions]:
    """How its volumes and binds are mounted, by destination. A record of an earlier version of the
    engine has only what its HostConfig says.
    """
    return _options(record.host, recursive=False) | record.mount_options


def subpaths(record: ContainerRecord) -> dict[str, str]:
    """The parts of volumes that are mounted, by destination, where it is not the whole volume."""
    return {place: options.subpath for place, options in options_of(record).items() if options.subpath}


def _options(host: HostConfig, *, recursive: bool) -> dict[str, MountOptions]:
    """Of Binds and Mounts. `recursive`: what is read-only is so with the mounts below it."""
    found: dict[str, MountOptions] = {}
    default: Literal["", "recursive"] = "recursive" if recursive else ""
    for bind in map(parse_bind, host.binds or ()):
        if bind.read_only:
            found[bind.destination] = MountOptions(read_only=default)
    for mount in host.mounts or ():
        options = mount.bind_options or BindOptions()
        read_only: Literal["", "recursive", "forced"] = default if mount.read_only else ""
        if options.read_only_force_recursive:
            read_only = "forced"
        elif options.read_only_non_recursive:
            read_only = ""
        found[normal_path(mount.target, mount.target)] = MountOptions(
            shallow=options.non_recursive,
            read_only=read_only,
            subpath=(mount.volume_options or VolumeOptions()).subpath,
        )
    return {destination: options for destination, options in found.items() if options != MountOptions()}


def ignores_volume_driver(host: HostConfig) -> bool:
    """True if it has a VolumeDriver, which does not apply to a volume of Mounts that has none."""
    return bool(host.volume_driver) and any(
        mount.type == "volume" and (mount.volume_options or VolumeOptions()).driver_config is None
        for mount in host.mounts or ()
    )


def check_sources(host: HostConfig) -> None:
    """Checks that sources of binds in Mounts exist, which Binds do not require.

    Blocks on files. Raises InvalidParameter.
    """
    for mount in host.mounts or ():
        make = mount.bind_options is not None and mount.bind_options.create_mountpoint
        if mount.type == "bind" and not make and not os.path.exists(mount.source):
            raise InvalidParameter(
                f'invalid mount config for type "bind": bind source path does not exist: {mount.source}'
            )


def _image_mount(mount: Mount, destination: str, image: ImageRecord) -> ImageMount:
    return ImageMount(
        destination=destination,
        name=mount.source,
        image_id=image.id,
        chain_id=image.chain_ids[-1] if image.chain_ids else "",
        subpath=(mount.image_options or ImageOptions()).subpath,
    )


def _point(mount: Mount, destination: str) -> MountPoint:
    if mount.type == "bind":
        propagation = (mount.bind_options or BindOptions()).propagation or "rprivate"
        return MountPoint(
            type="bind",
            source=_clean(mount.source),
            destination=destination,
            rw=not mount.read_only,
            propagation=propagation,
        )
    driver = (mount.volume_options or VolumeOptions()).driver_config
    return MountPoint(
        type="volume",
        name=mount.source or secrets.token_hex(32),
        destination=destination,
        driver=driver.name if driver is not None else "",
        rw=not mount.read_only,
    )


# --- merging --------------------------------------------------------------------------------------


class Mounts(NamedTuple):
    """The mounts of a container to be. The volume store fills in the sources of volumes."""

    points: tuple[MountPoint, ...]
    populated: frozenset[str]
    """Destinations of the volumes into which the image's content is copied."""
    volumes: dict[str, VolumeCreate]
    """Options and labels for volumes that do not exist yet, by name."""
    options: dict[str, MountOptions]
    """By destination, of `points`."""
    images: tuple[ImageMount, ...]


class Inherited(NamedTuple):
    """The mounts of another container, for VolumesFrom."""

    points: Sequence[MountPoint] = ()
    options: Mapping[str, MountOptions] = MappingProxyType({})
    images: Sequence[ImageMount] = ()


def inherited(record: ContainerRecord, *, writable: bool = True, recursive: bool = False) -> Inherited:
    """Its mounts, read-only if `writable` is False or the mount itself is.

    `recursive`: one that becomes read-only is so with the mounts below it.
    """
    points = [msgspec.structs.replace(each, rw=each.rw and writable) for each in record.mounts]
    options = options_of(record)
    if recursive and not writable:
        for each in record.mounts:
            if each.rw:
                before = options.get(each.destination, MountOptions())
                options[each.destination] = msgspec.structs.replace(before, read_only="recursive")
    return Inherited(points, options, record.image_mounts)


Find = Callable[[str], ImageRecord]
"""The image of a name. Raises NotFound."""


def mount_points(
    config: Config,
    host: HostConfig,
    others: Iterable[Inherited] = (),
    *,
    image: Find | None = None,
    recursive: bool = False,
) -> Mounts:
    """Binds and Mounts, then those of VolumesFrom, then an anonymous volume for each of Volumes,
    each where the place is free.

    A tmpfs has its place before all but Binds and Mounts. `image` finds those of Mounts.
    `recursive`: what is read-only is so with the mounts below it.

    Raises InvalidParameter when two that the body names share a destination, NotFound (image).
    """
    tmpfs = temporary(host)
    found: dict[str, MountPoint] = {}
    options: dict[str, MountOptions] = {}
    images: dict[str, ImageMount] = {}
    for other in others:
        for point in other.points:
            images.pop(point.destination, None)
            options.pop(point.destination, None)
            found[point.destination] = point
        for each in other.images:
            found.pop(each.destination, None)
            images[each.destination] = each
        options |= other.options
    for destination in tmpfs:
        found.pop(destination, None)
        images.pop(destination, None)
    own = _options(host, recursive=recursive)
    taken = {normal_path(path, path) for path in host.tmpfs or {}}
    populated: set[str] = set()
    volumes: dict[str, VolumeCreate] = {}

    def take(destination: str) -> None:
        if destination in taken:
            raise InvalidParameter(f"Duplicate mount point: {destination}")
        taken.add(destination)

    for text in host.binds or ():
        bind = parse_bind(text)
        take(bind.destination)
        images.pop(bind.destination, None)
        if bind.named and "nocopy" not in bind.mode.split(","):
            populated.add(bind.destination)
        found[bind.destination] = MountPoint(
            type="volume" if bind.named else "bind",
            name=(bind.source or secrets.token_hex(32)) if bind.named else msgspec.UNSET,
            source="" if bind.named else _clean(bind.source),
            destination=bind.destination,
            driver=host.volume_driver if bind.named else msgspec.UNSET,
            mode=bind.mode,
            rw=not bind.read_only,
            propagation=bind.propagation,
        )
    for mount in host.mounts or ():
        destination = normal_path(mount.target, mount.target)
        take(destination)
        if mount.type == "tmpfs":
            continue
        if mount.type == "image":
            found.pop(destination, None)
            assert image is not None
            images[destination] = _image_mount(mount, destination, image(mount.source))
            continue
        images.pop(destination, None)
        point = found[destination] = _point(mount, destination)
        if isinstance(point.name, str):
            given = mount.volume_options or VolumeOptions()
            driver = given.driver_config or VolumeDriver()
            volumes[point.name] = VolumeCreate(labels=given.labels or {}, driver_opts=driver.options or {})
            if not given.no_copy and not given.subpath:
                populated.add(destination)
    for path in config.volumes or ():
        destination = normal_path(path if path.startswith("/") else f"/{path}", path)
        if destination not in found and destination not in images and destination not in taken:
            populated.add(destination)
            found[destination] = MountPoint(
                type="volume", name=secrets.token_hex(32), destination=destination, driver=host.volume_driver
            )
    for destination in (*tmpfs, *images):
        check_destination(destination)
    for point in found.values():
        check_destination(point.destination, "" if isinstance(point.name, str) else point.source)
    # one that the body names has only its own options
    options = {place: each for place, each in options.items() if place not in taken} | own
    options = {place: each for place, each in options.items() if place in found}
    return Mounts(tuple(found.values()), frozenset(populated), volumes, options, tuple(images.values()))


def named_volumes(host: HostConfig) -> set[str]:
    """Volumes that Binds and Mounts name: removing the container never removes them."""
    found = {bind.source for bind in map(parse_bind, host.binds or ()) if bind.named and bind.source}
    return found | {mount.source for mount in host.mounts or () if mount.type == "volume" and mount.source}
