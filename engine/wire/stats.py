"""Statistics and process lists on the wire, as the newest API version documents them
(ContainerStats, ContainerTop).

Structs name the fields and their defaults and have no behaviour. Rows of `api/versions/` describe
how older versions differ.
"""

from __future__ import annotations

import msgspec


class CpuUsage(msgspec.Struct, frozen=True):
    """CPU times in nanoseconds. `percpu_usage` has one element per online processor, because
    clients multiply by its length.
    """

    total_usage: int = 0
    percpu_usage: list[int] = msgspec.field(default_factory=list)
    usage_in_kernelmode: int = 0
    usage_in_usermode: int = 0


class ThrottlingData(msgspec.Struct, frozen=True):
    """Periods of the CPU quota; time in nanoseconds."""

    periods: int = 0
    throttled_periods: int = 0
    throttled_time: int = 0


class CpuStats(msgspec.Struct, frozen=True):
    """`system_cpu_usage`: the sum of the time of all processors of the host since boot, busy and
    idle, in nanoseconds.
    """

    cpu_usage: CpuUsage = CpuUsage()
    system_cpu_usage: int = 0
    online_cpus: int = 0
    throttling_data: ThrottlingData = ThrottlingData()


class MemoryStats(msgspec.Struct, frozen=True):
    """Bytes. The keys of `stats` are those of v1's memory.stat."""

    usage: int = 0
    max_usage: int = 0
    stats: dict[str, int] = msgspec.field(default_factory=dict)
    failcnt: int = 0
    limit: int = 0


class BlkioEntry(msgspec.Struct, frozen=True):
    major: int
    minor: int
    op: str
    value: int


class BlkioStats(msgspec.Struct, frozen=True):
    """Bytes and operations by device. The other lists are empty: only the CFQ scheduler filled
    them, and current kernels do not have it.
    """

    io_service_bytes_recursive: list[BlkioEntry] = msgspec.field(default_factory=list)
    io_serviced_recursive: list[BlkioEntry] = msgspec.field(default_factory=list)
    io_queue_recursive: list[BlkioEntry] = msgspec.field(default_factory=list)
    io_service_time_recursive: list[BlkioEntry] = msgspec.field(default_factory=list)
    io_wait_time_recursive: list[BlkioEntry] = msgspec.field(default_factory=list)
    io_merged_recursive: list[BlkioEntry] = msgspec.field(default_factory=list)
    io_time_recursive: list[BlkioEntry] = msgspec.field(default_factory=list)
    sectors_recursive: list[BlkioEntry] = msgspec.field(default_factory=list)


class PidsStats(msgspec.Struct, frozen=True):
    current: int = 0


class NetworkStats(msgspec.Struct, frozen=True):
    """One interface, seen from inside the container."""

    rx_bytes: int = 0
    rx_packets: int = 0
    rx_errors: int = 0
    rx_dropped: int = 0
    tx_bytes: int = 0
    tx_packets: int = 0
    tx_errors: int = 0
    tx_dropped: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """One object of GET /containers/{id}/stats. `precpu_stats` is the reading before this one,
    of the time `preread`.
    """

    os_type: str = "linux"
    read: str
    preread: str = "0001-01-01T00:00:00Z"
    num_procs: int = 0
    """On Windows only."""
    storage_stats: dict[str, int] = msgspec.field(default_factory=dict)
    """On Windows only."""
    precpu_stats: CpuStats = CpuStats()
    cpu_stats: CpuStats = CpuStats()
    memory_stats: MemoryStats = msgspec.field(default_factory=MemoryStats)
    blkio_stats: BlkioStats = msgspec.field(default_factory=BlkioStats)
    pids_stats: PidsStats = PidsStats()
    networks: dict[str, NetworkStats] | msgspec.UnsetType = msgspec.UNSET


class ProcessList(msgspec.Struct, frozen=True, rename="pascal"):
    """GET /containers/{id}/top."""

    titles: list[str]
    processes: list[list[str]]
