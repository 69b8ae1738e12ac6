"""API versions: which are spoken, and every difference between them, one row each.

The domain and `wire/` know the newest version alone. `CHANGES` is indexed per version at import: an answer that no
newer change touches is encoded straight from its struct.

Not here: handlers, and comparisons of version numbers anywhere else (`Version.has` asks for a flag, route windows for a
release).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

from engine.errors import InvalidParameter
from engine.wire.containers import ContainerInspect, ContainerSummary, CreateBody, UpdateBody
from engine.wire.events import Message
from engine.wire.images import HistoryItem, ImageSummary
from engine.wire.networks import Network, NetworkConnect, NetworkCreate, NetworkDisconnect
from engine.wire.stats import Stats, empty_throttling_data, networks_to_network, without_pids, without_previous_cpu
from engine.wire.system import Info

MINIMUM = "1.18"
NEWEST = "1.24"

Shape = dict[str, Any]
"""A JSON object under conversion; converters change it in place."""


class Flag(enum.Enum):
    """Behaviour that a version has or has not: what a handler asks `request.version.has` about.

    Value: the change in the changelog's words.
    """

    LOGS_SINCE = "logs take since"
    INSPECT_SIZE = "inspect takes size"
    DETACH_KEYS = "start and attach take detachKeys"
    STATS_NAMED = "stats tell name and id"


class Change:
    """One difference, present from release `since` on.

    `down` turns the newer answer `of` a struct into the older shape, `up` an older request into the newer; both get the
    JSON object with field names as the struct spells them and change it in place. A change with a `flag` alone is
    behaviour.
    """

    __slots__ = ("down", "flag", "of", "since", "up", "words")

    def __init__(
        self,
        since: str,
        words: str,
        *,
        flag: Flag | None = None,
        of: type | None = None,
        down: Callable[[Shape], None] | None = None,
        up: Callable[[Shape], None] | None = None,
    ) -> None:
        if (of is None) != (down is None and up is None):
            raise ValueError(f"change {words!r}: `of` goes with `down` or `up`")
        self.since = release(since)
        self.words = words
        self.flag = flag
        self.of = of
        self.down = down
        self.up = up


def release(text: str) -> tuple[int, int]:
    """`1.24` as a pair that orders. ValueError for anything else."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal() and major.isascii() and minor.isascii() and len(text) < 12):
        raise ValueError(f"not a version: {text!r}")
    return int(major), int(minor)


def without(*fields: str) -> Callable[[Shape], None]:
    """A `down` for fields that an older version does not have; a dot goes into an object (`State.Status`)."""
    paths = [field.split(".") for field in fields]

    def drop(shape: Shape) -> None:
        for *parents, name in paths:
            place: Any = shape
            for parent in parents:
                place = place.get(parent) if isinstance(place, dict) else None
            if isinstance(place, dict):
                place.pop(name, None)

    return drop


class Version:
    """One spoken version, seen as what it lacks."""

    __slots__ = ("_downs", "_lacks", "_ups", "name", "release")

    def __init__(self, name: str, changes: Iterable[Change]) -> None:
        self.name = name
        self.release = release(name)
        newer = [change for change in changes if change.since > self.release]
        newer.sort(key=lambda change: change.since, reverse=True)
        self._lacks = {change.flag for change in newer if change.flag is not None}
        self._downs: dict[type, list[Callable[[Shape], None]]] = {}
        self._ups: dict[type, list[Callable[[Shape], None]]] = {}
        for change in newer:
            if change.of is not None and change.down is not None:
                self._downs.setdefault(change.of, []).append(change.down)
        for change in reversed(newer):
            if change.of is not None and change.up is not None:
                self._ups.setdefault(change.of, []).append(change.up)

    def has(self, flag: Flag) -> bool:
        return flag not in self._lacks

    def downs(self, of: type) -> list[Callable[[Shape], None]]:
        """Conversions of an answer, newest change first; empty: the struct is right as it is."""
        return self._downs.get(of, _NONE)

    def ups(self, of: type) -> list[Callable[[Shape], None]]:
        """Conversions of a request, oldest change first."""
        return self._ups.get(of, _NONE)

    def __repr__(self) -> str:
        return f"Version({self.name})"


_NONE: list[Callable[[Shape], None]] = []


def _execution_driver(info: Shape) -> None:
    info["ExecutionDriver"] = info["DefaultRuntime"]


def _volumes_of_mounts(container: Shape) -> None:
    container["Volumes"] = {each["Destination"]: each["Source"] for each in container["Mounts"]}
    container["VolumesRW"] = {each["Destination"]: each["RW"] for each in container["Mounts"]}


def _booleans_to_ints(info: Shape) -> None:
    for name in ("Debug", "IPv4Forwarding", "MemoryLimit", "SwapLimit"):
        info[name] = int(info[name])


def _created_with(since: str, words: str, *fields: str) -> tuple[Change, Change]:
    """Fields of a container's Config (`Healthcheck`) or HostConfig (`HostConfig.Tmpfs`).

    An older create does not read them, an older inspect does not show them.
    """
    shown = [field if field.startswith("HostConfig.") else f"Config.{field}" for field in fields]
    return (
        Change(since, words, of=CreateBody, up=without(*fields)),
        Change(since, words, of=ContainerInspect, down=without(*shown)),
    )


CHANGES: tuple[Change, ...] = (
    Change("1.24", "info tells SecurityOptions and Swarm", of=Info, down=without("SecurityOptions", "Swarm")),
    Change("1.24", "info has no ExecutionDriver", of=Info, down=_execution_driver),
    *_created_with(
        "1.24",
        "create takes Healthcheck, CpuPercent, IOMaximumBandwidth, IOMaximumIOps, PidsLimit, UsernsMode, Sysctls, StorageOpt",
        "Healthcheck",
        "HostConfig.CpuPercent",
        "HostConfig.IOMaximumBandwidth",
        "HostConfig.IOMaximumIOps",
        "HostConfig.PidsLimit",
        "HostConfig.UsernsMode",
        "HostConfig.Sysctls",
        "HostConfig.StorageOpt",
    ),
    Change("1.24", "inspect shows State.Health", of=ContainerInspect, down=without("State.Health")),
    Change("1.24", "update takes RestartPolicy", of=UpdateBody, up=without("RestartPolicy")),
    Change("1.24", "stats tell pids_stats", of=Stats, down=without_pids),
    Change("1.24", "the list shows State and Mounts", of=ContainerSummary, down=without("State", "Mounts")),
    Change("1.23", "networks have EnableIPv6 and Labels", of=NetworkCreate, up=without("EnableIPv6", "Labels")),
    Change(
        "1.23",
        "a network shows Internal, EnableIPv6 and Labels",
        of=Network,
        down=without("Internal", "EnableIPv6", "Labels"),
    ),
    *_created_with(
        "1.22",
        "create takes Tmpfs, BlkioWeightDevice and per device rate limits, OomScoreAdj, ShmSize",
        "HostConfig.Tmpfs",
        "HostConfig.BlkioWeightDevice",
        "HostConfig.BlkioDeviceReadBps",
        "HostConfig.BlkioDeviceWriteBps",
        "HostConfig.BlkioDeviceReadIOps",
        "HostConfig.BlkioDeviceWriteIOps",
        "HostConfig.OomScoreAdj",
        "HostConfig.ShmSize",
    ),
    Change("1.22", "start and attach take detachKeys", flag=Flag.DETACH_KEYS),
    Change("1.22", "networks can be internal", of=NetworkCreate, up=without("Internal")),
    Change("1.22", "connect takes EndpointConfig", of=NetworkConnect, up=without("EndpointConfig")),
    Change("1.22", "disconnect takes Force", of=NetworkDisconnect, up=without("Force")),
    Change("1.22", "create takes NetworkingConfig", of=CreateBody, up=without("NetworkingConfig")),
    Change(
        "1.22",
        "the list shows HostConfig and NetworkSettings",
        of=ContainerSummary,
        down=without("HostConfig", "NetworkSettings"),
    ),
    Change("1.22", "events have Type, Action and Actor", of=Message, down=without("Type", "Action", "Actor")),
    Change("1.22", "info tells Architecture and OSType", of=Info, down=without("Architecture", "OSType")),
    *_created_with(
        "1.21",
        "create takes StopSignal, MemoryReservation, KernelMemory, DnsOptions, VolumeDriver",
        "StopSignal",
        "HostConfig.MemoryReservation",
        "HostConfig.KernelMemory",
        "HostConfig.DnsOptions",
        "HostConfig.VolumeDriver",
    ),
    # Engines do since 1.13, whatever the version from here on, and a docker CLI of that age shows no NAME without.
    Change("1.21", "stats tell name and id", flag=Flag.STATS_NAMED),
    Change("1.21", "stats tell every network", of=Stats, down=networks_to_network),
    Change("1.21", "the list shows ImageID", of=ContainerSummary, down=without("ImageID")),
    Change("1.21", "inspect takes size", flag=Flag.INSPECT_SIZE),
    Change("1.21", "inspect shows State.Status", of=ContainerInspect, down=without("State.Status")),
    Change("1.21", "inspect shows every network", of=ContainerInspect, down=without("NetworkSettings.Networks")),
    Change("1.20", "Mounts tell what Volumes and VolumesRW told", of=ContainerInspect, down=_volumes_of_mounts),
    *_created_with(
        "1.20", "create takes GroupAdd, MemorySwappiness", "HostConfig.GroupAdd", "HostConfig.MemorySwappiness"
    ),
    *_created_with(
        "1.19",
        "create takes CpuPeriod, CpuQuota, CpusetMems, BlkioWeight, OomKillDisable",
        "HostConfig.CpuPeriod",
        "HostConfig.CpuQuota",
        "HostConfig.CpusetMems",
        "HostConfig.BlkioWeight",
        "HostConfig.OomKillDisable",
    ),
    Change("1.19", "the image list shows Labels", of=ImageSummary, down=without("Labels")),
    Change("1.19", "history tells Tags, Size, Comment", of=HistoryItem, down=without("Tags", "Size", "Comment")),
    Change("1.19", "stats tell precpu_stats", of=Stats, down=without_previous_cpu),
    Change("1.19", "stats tell throttling_data", of=Stats, down=empty_throttling_data),
    Change("1.19", "logs take since", flag=Flag.LOGS_SINCE),
    Change("1.19", "Debug, MemoryLimit become booleans", of=Info, down=_booleans_to_ints),
    Change(
        "1.19",
        "info tells CpuCfsPeriod, CpuCfsQuota, OomKillDisable",
        of=Info,
        down=without("CpuCfsPeriod", "CpuCfsQuota", "OomKillDisable"),
    ),
)
"""Newest first."""

_major, _minor = release(NEWEST)
VERSIONS = {f"{_major}.{n}": Version(f"{_major}.{n}", CHANGES) for n in range(release(MINIMUM)[1], _minor + 1)}
LATEST = VERSIONS[NEWEST]


def spoken(text: str) -> Version:
    """The version that a path prefix or a client names, or the reason why it is refused."""
    version = VERSIONS.get(text)
    if version is not None:
        return version
    try:
        asked = release(text)
    except ValueError:
        raise InvalidParameter(f"invalid API version: {text}") from None
    if asked < release(MINIMUM):
        raise InvalidParameter(
            f"client version {text} is too old. Minimum supported API version is {MINIMUM}, "
            "please upgrade your client to a newer version"
        )
    if asked > release(NEWEST):
        raise InvalidParameter(
            f"client is newer than server (client API version: {text}, server API version: {NEWEST})"
        )
    return VERSIONS[f"{asked[0]}.{asked[1]}"]
