"""Limits of containers as properties of their scopes, with the systemd driver of cgroups.

systemd writes the properties of its units to their cgroups again whenever it reloads, and a
property that it was not told of as no limit. So each limit is a property, too: crun 1.8 and runc
1.1 tell systemd only some of them. The numbers are in the configuration of a container; the lists,
and all changes, are set by D-Bus while it runs.

Rules: systemd.resource-control(5), org.freedesktop.systemd1(5).
Owns nothing. Not here: names of scopes (`scopes.py`), the connection (`system/system_bus.py`).
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio

from engine.errors import NotFound, ServerError
from engine.runtime import scopes
from engine.runtime.cgroups import numbers
from engine.system.system_bus import BusError, Peer, SystemBus, Variant
from engine.wire import oci

SYSTEMD = Peer("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
LIMIT = 25.0
"""Seconds that systemd may take for a change; it is D-Bus' own limit of a call."""
AGAIN = 0.1
"""Seconds until a call is repeated, when systemd or the bus is being started again."""

_GONE = "org.freedesktop.systemd1.NoSuchUnit"
_NONE = (1 << 64) - 1
"""systemd's number for no limit, and for a weight that is not set."""
_WITHOUT = {
    **{"MemoryMax": _NONE, "MemorySwapMax": _NONE, "TasksMax": _NONE, "MemoryLow": 0, "CPUWeight": _NONE},
    **{"CPUQuotaPerSecUSec": _NONE, "CPUQuotaPeriodUSec": _NONE, "IOWeight": _NONE},
}
"""The properties that are numbers, and what each is without a limit."""
_ANNOTATIONS = {
    # crun makes a cgroup `container` in the scope otherwise, and runc does not.
    "run.oci.systemd.subgroup": "",
    # A scope that has failed does not stay in systemd's list of units.
    "org.systemd.property.CollectMode": "'inactive-or-failed'",
}


def unit_annotations(resources: oci.Resources) -> dict[str, str]:
    """For the configuration of a container in a scope: its limits as far as they are numbers, which
    crun can pass on. The others are set by `change`, when it runs. Without a TasksMax systemd sets
    one of its own.
    """
    limits = {"TasksMax": _NONE} | _limits(resources)
    return _ANNOTATIONS | {f"org.systemd.property.{name}": f"uint64 {number}" for name, number in limits.items()}


def properties(resources: oci.Resources) -> list[tuple[str, Variant]]:
    """All limits, also those that are not set. An empty list is no limit; it comes before the
    entries of a list, because systemd adds them to those that it has.
    """
    limits = _WITHOUT | _limits(resources)
    found = [(name, Variant("t", number)) for name, number in limits.items()]
    cpu, block = resources.cpu or oci.Cpu(), resources.block_io or oci.BlockIO()
    found.append(("AllowedCPUs", Variant("ay", _bits(cpu.cpus))))
    found.append(("AllowedMemoryNodes", Variant("ay", _bits(cpu.mems))))
    for name, devices in (
        ("IOReadBandwidthMax", block.throttle_read_bps_device),
        ("IOWriteBandwidthMax", block.throttle_write_bps_device),
        ("IOReadIOPSMax", block.throttle_read_iops_device),
        ("IOWriteIOPSMax", block.throttle_write_iops_device),
    ):
        found.append((name, Variant("a(st)", [])))
        if devices:
            rates = [[f"/dev/block/{each.major}:{each.minor}", each.rate] for each in devices]
            found.append((name, Variant("a(st)", rates)))
    return found


def _limits(resources: oci.Resources) -> dict[str, int]:
    """The limits that are set and are numbers, by property."""
    memory, cpu, pids = resources.memory or oci.Memory(), resources.cpu or oci.Cpu(), resources.pids
    found = {}
    if pids is not None and pids.limit > 0:
        found["TasksMax"] = pids.limit
    if memory.limit is not None and memory.limit > 0:
        found["MemoryMax"] = memory.limit
        if memory.swap is not None and memory.swap >= memory.limit:
            found["MemorySwapMax"] = memory.swap - memory.limit
    if memory.reservation:
        found["MemoryLow"] = memory.reservation
    if cpu.shares:
        found["CPUWeight"] = 1 + (max(2, min(cpu.shares, 262_144)) - 2) * 9_999 // 262_142
    if cpu.quota is not None and cpu.quota > 0:
        period = cpu.period or 100_000
        # systemd keeps whole percents, and would round down
        found["CPUQuotaPerSecUSec"] = -(-cpu.quota * 100 // period) * 10_000
        found["CPUQuotaPeriodUSec"] = period
    if resources.block_io is not None and resources.block_io.weight:
        # BlkioWeight is 10 to 1000, IOWeight 1 to 10000
        found["IOWeight"] = 1 + (resources.block_io.weight - 10) * 9_999 // 990
    return found


def _bits(members: str) -> bytes:
    """The bit mask of a list such as `0-3,5`, the lowest number first."""
    mask = sum(1 << number for number in numbers(members))
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


class ScopeLimits:
    """Changes the limits of containers that run."""

    def __init__(self, bus: SystemBus) -> None:
        self._bus = bus

    async def change(self, container_id: str, resources: oci.Resources) -> None:
        """Tell systemd all limits of a container that runs, also those that it has no more.

        While systemd or dbus is being restarted, the call is repeated. Raises NotFound if the scope
        is gone, and ServerError with the unit and the reason. systemd changes nothing if it refuses
        one property; without its answer, the change may happen later.
        """
        unit, changes = scopes.scope(container_id), properties(resources)
        loop = asyncio.get_running_loop()
        end = loop.time() + LIMIT
        while True:
            try:
                change = SYSTEMD, "SetUnitProperties", "sba(sv)", unit, True, changes
                await self._bus.call(*change, limit=end - loop.time())
                return
            except BusError as error:
                if error.name == _GONE:
                    raise NotFound(f"unit {unit}: {error}") from error
                if not error.away or loop.time() + AGAIN >= end:
                    named = any(name in str(error) for name, _ in changes)
                    of = "" if named else f" (properties {', '.join(dict(changes))})"
                    raise ServerError(f"unit {unit}: {error}{of}") from error
            await asyncio.sleep(AGAIN)
