"""Statistics of containers: one sampler for all that are watched, and their counters in the shape of API 1.24.

A sample is taken once a second for each watched container, whatever the number of its watchers, and encoded once for each shape that they
want. While nobody watches there is no task, no thread and no open file. A reading that costs the loop more than a millisecond goes to a
thread of the sampler's own.

CPU percentage. Clients divide the growth from `precpu_stats` to `cpu_stats` by that of `system_cpu_usage`, so the first sample that anybody
gets needs a reading before it. When there is none of the last two seconds, two readings `PRIME` apart are taken (Docker: one to two
seconds apart, and a stream's first object without any). /proc/stat counts in hundredths of a second, which is what keeps it from being less.

Not here: reading and parsing (`_fast/cgroup`), which container has which cgroup (`runtime/cgroups.py`), API versions (`downs` come from
the caller).
Owns: the open counters. They hold a container's network namespace, so whoever sees a container end says so: `Statistics.ended`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from engine._fast.cgroup import NO_LIMIT, Counters, Processors, Sample, samples
from engine.errors import ServerError
from engine.runtime.cgroups import Cgroups
from engine.wire.stats import (
    BlkioEntry,
    BlkioStats,
    CpuStats,
    CpuUsage,
    MemoryStats,
    NetworkStats,
    PidsStats,
    Stats,
    ThrottlingData,
)
from engine.wire.times import ZERO, rfc3339

INTERVAL = 1.0
"""Seconds between two samples of a watched container."""

PRIME = 0.25
"""Seconds between the two readings behind the first sample of a container that nobody watched."""

_SLICE = 32
"""Containers read in one go; what is computed with the GIL held stays well below a millisecond."""

_LOOP_BUDGET = 0.001
"""Seconds that a reading may take in the loop."""

_TOGETHER = 0.01
"""Seconds by which a reading may come early to be taken with another."""

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode

Down = Callable[[dict[str, Any]], None]
"""Turns the JSON object of `Stats` into an older shape, in place."""


# --- counters in the names of API 1.24 ------------------------------------------------------------------------------------------------------

_V1_NAMES = (
    ("cache", "file"),
    ("rss", "anon"),
    ("rss_huge", "anon_thp"),
    ("shmem", "shmem"),
    ("mapped_file", "file_mapped"),
    ("dirty", "file_dirty"),
    ("writeback", "file_writeback"),
    ("pgpgin", ""),
    ("pgpgout", ""),
    ("pgfault", "pgfault"),
    ("pgmajfault", "pgmajfault"),
    ("inactive_anon", "inactive_anon"),
    ("active_anon", "active_anon"),
    ("inactive_file", "inactive_file"),
    ("active_file", "active_file"),
    ("unevictable", "unevictable"),
)
"""v1's counters and v2's of the same meaning. v2 counts no pages charged and uncharged."""

_V2_OPERATIONS = {"r": "Read", "w": "Write", "d": "Discard"}


def cpu_stats(sample: Sample, system: int, online: Sequence[int]) -> CpuStats:
    """`percpu_usage` gets as many elements as processors are online, since clients take its length for their number.

    v1 tells of processors that could be plugged in too: left out. v2 tells none: the total in equal parts.
    """
    each = [sample.cpu_each[number] for number in online if number < len(sample.cpu_each)]
    if not each and online:
        part, rest = divmod(sample.cpu_total, len(online))
        each = [part + (index < rest) for index in range(len(online))]
    return CpuStats(
        CpuUsage(sample.cpu_total, each, sample.cpu_kernel, sample.cpu_user),
        system,
        ThrottlingData(sample.periods, sample.throttled_periods, sample.throttled_time),
    )


def memory_stats(sample: Sample, machine: int) -> MemoryStats:
    """`machine` bytes are the limit of a container without one, as in Docker."""
    stats = sample.memory
    if sample.memory_unified:
        limit = min(sample.memory_limit, NO_LIMIT)
        stats = {name: sample.memory.get(v2, 0) for name, v2 in _V1_NAMES}
        stats["swap"] = sample.memory_swap
        stats |= {f"total_{name}": value for name, value in stats.items()}
        stats["hierarchical_memory_limit"] = limit
    return MemoryStats(
        sample.memory_usage,
        sample.memory_peak,
        stats,
        sample.memory_failures,
        min(sample.memory_limit, machine),
    )


def blkio_stats(sample: Sample) -> BlkioStats:
    """v2's keys become v1's words, with the total that v1 has."""
    if not sample.io_unified:
        return BlkioStats(
            [BlkioEntry(*entry) for entry in sample.io], [BlkioEntry(*entry) for entry in sample.io_operations]
        )
    size: dict[tuple[int, int], list[BlkioEntry]] = {}
    operations: dict[tuple[int, int], list[BlkioEntry]] = {}
    for major, minor, key, value in sample.io:
        word = _V2_OPERATIONS.get(key[:1])
        kind = {"bytes": size, "ios": operations}.get(key[1:])
        if word is not None and kind is not None:
            kind.setdefault((major, minor), []).append(BlkioEntry(major, minor, word, value))
    for kind in (size, operations):
        for (major, minor), entries in kind.items():
            entries.append(BlkioEntry(major, minor, "Total", sum(entry.value for entry in entries)))
    return BlkioStats(
        [entry for entries in size.values() for entry in entries],
        [entry for entries in operations.values() for entry in entries],
    )


def machine_memory() -> int:
    """Bytes of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def render(stats: Stats, downs: Sequence[Down] = ()) -> bytes:
    """One JSON object and a newline."""
    if not downs:
        return _encode(stats) + b"\n"
    shape = msgspec.to_builtins(stats)
    for down in downs:
        down(shape)
    return _encode(shape) + b"\n"


def stopped(downs: Sequence[Down] = ()) -> bytes:
    """The object of a container that does not run: everything zero or empty."""
    return render(Stats(read=ZERO), downs)


# --- sampling -----------------------------------------------------------------------------------------------------------------------------------


class _Moment:
    """One sample beside the reading before it, encoded when first asked for."""

    __slots__ = ("_encoded", "_machine", "_previous", "_sample", "at", "cpu", "taken")

    def __init__(self, sample: Sample, cpu: CpuStats, previous: CpuStats, machine: int) -> None:
        self.at = time.time_ns()
        self.taken = time.monotonic()
        self.cpu = cpu
        self._sample = sample
        self._previous = previous
        self._machine = machine
        self._encoded: dict[tuple[Down, ...], bytes] = {}

    def encoded(self, downs: tuple[Down, ...]) -> bytes:
        kept = self._encoded.get(downs)
        if kept is None:
            kept = self._encoded[downs] = render(self.stats(), downs)
        return kept

    def stats(self) -> Stats:
        sample = self._sample
        networks = {name: NetworkStats(*values) for name, values in sample.networks.items()}
        return Stats(
            read=rfc3339(self.at),
            precpu_stats=self._previous,
            cpu_stats=self.cpu,
            memory_stats=memory_stats(sample, self._machine),
            blkio_stats=blkio_stats(sample),
            pids_stats=PidsStats(sample.pids),
            networks=networks or msgspec.UNSET,
        )


class _Watched:
    """One container with its watchers."""

    __slots__ = ("counters", "cpu", "due", "failure", "latest", "opening", "over", "pid", "streams")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.streams: set[Stream] = set()
        self.counters: Counters | None = None
        self.cpu: CpuStats | None = None
        self.latest: _Moment | None = None
        self.due = math.inf
        self.over = False
        self.failure: ServerError | None = None
        self.opening: asyncio.Future[None] | None = None

    def deliver(self, moment: _Moment) -> None:
        self.latest = moment
        self.cpu = moment.cpu
        for stream in self.streams:
            stream.wake()

    def end(self) -> None:
        """No more samples; the descriptors are given back, the watchers told."""
        self.over = True
        self.due = math.inf
        if self.counters is not None:
            self.counters.close()
        for stream in self.streams:
            stream.wake()


class Statistics:
    """The samples of all containers of one engine. Everything is called in the loop."""

    def __init__(self, cgroups: Cgroups, *, interval: float = INTERVAL, prime: float = PRIME) -> None:
        self._cgroups = cgroups
        self._interval = interval
        self._prime = prime
        self._machine = machine_memory()
        self._watched: dict[str, _Watched] = {}
        self._recent: dict[str, tuple[int, _Moment]] = {}
        self._processors: Processors | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._cost = 100e-6  # seconds for one container, as measured last; the first guess is a high one

    def stream(
        self, container_id: str, *, pid: int, cgroup: str, network: bool = True, downs: Iterable[Down] = ()
    ) -> Stream:
        """A sample at once when there is one, then one each `interval` until the container ends; a slow reader misses some.

        `pid`: the container's first process, 0 when it does not run: then one object of zeros is all. `cgroup`: its path from the root of
        the hierarchies. `network`: it has interfaces of its own (not those of the host). The iterator raises ServerError where the counters
        cannot be opened. `aclose()` it in any case.
        """
        return Stream(self, container_id, pid, cgroup, network, tuple(downs))

    async def once(
        self, container_id: str, *, pid: int, cgroup: str, network: bool = True, downs: Iterable[Down] = ()
    ) -> bytes:
        """One sample, parameters as for `stream`. At once when there is one not older than `interval`."""
        shape = tuple(downs)
        if container_id not in self._watched and pid:
            recent = self._of_late(container_id, pid, self._interval)
            if recent is not None:
                return recent.encoded(shape)
        stream = self.stream(container_id, pid=pid, cgroup=cgroup, network=network, downs=shape)
        try:
            return await anext(stream)
        except StopAsyncIteration:
            return stopped(shape)
        finally:
            await stream.aclose()

    def ended(self, container_id: str) -> None:
        """The container has ended: its streams end, and nothing of it stays open."""
        self._recent.pop(container_id, None)
        watched = self._watched.pop(container_id, None)
        if watched is not None:
            watched.end()
            self._changed.set()

    async def close(self) -> None:
        """End every stream and the sampler."""
        for container_id in list(self._watched):
            self.ended(container_id)
        self._recent.clear()
        if self._task is not None:
            await self._task

    # --- watchers come and go -----------------------------------------------------------------------------------------------------------------

    def _of_late(self, container_id: str, pid: int, age: float) -> _Moment | None:
        kept = self._recent.get(container_id)
        if kept is None or kept[0] != pid or time.monotonic() - kept[1].taken > age:
            return None
        return kept[1]

    async def _watch(self, stream: Stream) -> _Watched:
        watched = self._watched.get(stream.container_id)
        if watched is not None and watched.pid != stream.pid:
            # it was started anew before anyone said that it had ended
            self.ended(stream.container_id)
            watched = None
        if watched is None:
            watched = self._watched[stream.container_id] = _Watched(stream.pid)
            watched.opening = asyncio.ensure_future(self._open(watched, stream))
        watched.streams.add(stream)
        try:
            if watched.opening is not None:
                await asyncio.shield(watched.opening)
        except BaseException:
            self._leave(watched, stream)
            raise
        return watched

    async def _open(self, watched: _Watched, stream: Stream) -> None:
        loop = asyncio.get_running_loop()
        try:
            counters, sample, cpu = await loop.run_in_executor(self._own_thread(), self._first_reading, stream)
        except FileNotFoundError:
            watched.end()
            return
        except OSError as error:
            watched.failure = ServerError(f"cannot read the statistics of container {stream.container_id}: {error}")
            watched.failure.__cause__ = error
            watched.end()
            return
        finally:
            watched.opening = None
        watched.counters = counters
        if sample is None or watched.over or not watched.streams:
            watched.end()
            return
        recent = self._of_late(stream.container_id, stream.pid, 2 * self._interval)
        if recent is not None:
            watched.deliver(_Moment(sample, cpu, recent.cpu, self._machine))
            watched.due = loop.time() + self._interval
        else:
            watched.cpu = cpu
            watched.due = loop.time() + self._prime
        self._changed.set()
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def _own_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "statistics")
        return self._thread

    def _leave(self, watched: _Watched, stream: Stream) -> None:
        """The last watcher closes the door; what was read last is kept for two seconds as somebody's previous reading."""
        watched.streams.discard(stream)
        if watched.streams:
            return
        container_id = stream.container_id
        if self._watched.get(container_id) is watched:
            del self._watched[container_id]
            if watched.latest is not None and not watched.over:
                kept = self._recent[container_id] = watched.pid, watched.latest
                asyncio.get_running_loop().call_later(2 * self._interval, self._forget, container_id, kept)
        watched.end()
        self._changed.set()
        if not self._watched and self._task is None:
            self._rest()

    def _forget(self, container_id: str, kept: tuple[int, _Moment]) -> None:
        if self._recent.get(container_id) is kept:
            del self._recent[container_id]

    def _rest(self) -> None:
        """Nobody watches."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None
        self._processors = None  # not closed: the thread may be in it, and holds it then

    # --- the sampler ----------------------------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        grid = loop.time()
        try:
            while self._watched:
                self._changed.clear()
                due = min(watched.due for watched in self._watched.values())
                try:
                    async with asyncio.timeout_at(due if due < math.inf else None):
                        await self._changed.wait()
                    continue
                except TimeoutError:
                    pass
                now = loop.time()
                following = grid + math.ceil((now + self._prime - grid) / self._interval) * self._interval
                wanted = [watched for watched in self._watched.values() if watched.due <= now + _TOGETHER]
                for watched in wanted:
                    watched.due = following
                try:
                    await self._take(wanted)
                except OSError as error:  # /proc/stat itself: nothing that a container could be blamed for
                    _log.error("statistics: %s", error)
        finally:
            self._task = None
            self._rest()

    async def _take(self, wanted: list[_Watched]) -> None:
        """Sample these, and deliver slice by slice."""
        loop = asyncio.get_running_loop()
        system: tuple[int, tuple[int, ...]] | None = None
        for begin in range(0, len(wanted), _SLICE):
            part = [watched for watched in wanted[begin : begin + _SLICE] if not watched.over]
            counters = [watched.counters for watched in part if watched.counters is not None]
            if not part:
                continue
            if self._cost * len(part) <= _LOOP_BUDGET:
                taken, now, spent = self._readings(counters, system)
            else:
                taken, now, spent = await loop.run_in_executor(self._own_thread(), self._readings, counters, system)
            system = now
            self._cost += (spent / len(part) - self._cost) / 4
            for watched, sample in zip(part, taken, strict=True):
                if watched.over:
                    continue
                if sample is None:
                    self._gone(watched)
                else:
                    cpu = cpu_stats(sample, *now)
                    watched.deliver(_Moment(sample, cpu, watched.cpu or cpu, self._machine))

    def _gone(self, watched: _Watched) -> None:
        """Its cgroup is no more."""
        for container_id in [key for key, value in self._watched.items() if value is watched]:
            self.ended(container_id)

    # --- in the thread --------------------------------------------------------------------------------------------------------------------------

    def _readings(
        self, counters: list[Counters], system: tuple[int, tuple[int, ...]] | None
    ) -> tuple[list[Sample | None], tuple[int, tuple[int, ...]], float]:
        begin = time.perf_counter()
        if system is None:
            system = self._system()
        taken = samples(counters)
        return taken, system, time.perf_counter() - begin

    def _system(self) -> tuple[int, tuple[int, ...]]:
        if self._processors is None:
            self._processors = Processors()
        return self._processors.read()

    def _first_reading(self, stream: Stream) -> tuple[Counters, Sample | None, CpuStats]:
        counters = Counters(**directories(self._cgroups, stream.cgroup), network=stream.network)
        try:
            sample = counters.sample()
            cpu = CpuStats() if sample is None else cpu_stats(sample, *self._system())
        except BaseException:
            counters.close()
            raise
        return counters, sample, cpu


def directories(cgroups: Cgroups, cgroup: str) -> dict[str, bytes | None]:
    """Where the controllers of a container are, as `Counters` wants them; v2 has them under other names, and cpu.stat even without `cpu`."""
    unified = cgroups.unified + cgroup if cgroups.unified else None
    found = {
        "cpu": cgroups.directory("cpu", cgroup) or unified,
        "cpuacct": cgroups.directory("cpuacct", cgroup),
        "memory": cgroups.directory("memory", cgroup),
        "io": cgroups.directory("blkio", cgroup) or cgroups.directory("io", cgroup),
        "pids": cgroups.directory("pids", cgroup),
    }
    return {name: None if place is None else os.fsencode(place) for name, place in found.items()}


class Stream(AsyncIterator[bytes]):
    """The encoded samples of one container for one watcher. Nothing is begun before the first is asked for."""

    def __init__(
        self, statistics: Statistics, container_id: str, pid: int, cgroup: str, network: bool, downs: tuple[Down, ...]
    ) -> None:
        self.container_id = container_id
        self.pid = pid
        self.cgroup = cgroup
        self.network = b"/proc/%d/net/dev" % pid if network and pid else None
        self._statistics = statistics
        self._downs = downs
        self._watched: _Watched | None = None
        self._seen: _Moment | None = None
        self._sleep: asyncio.Future[None] | None = None
        self._finished = False

    def wake(self) -> None:
        if self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    async def __anext__(self) -> bytes:
        if self._finished:
            raise StopAsyncIteration
        if not self.pid:
            self._finished = True
            return stopped(self._downs)
        if self._watched is None:
            self._watched = await self._statistics._watch(self)
        watched = self._watched
        while True:
            moment = watched.latest
            if moment is not None and moment is not self._seen:
                self._seen = moment
                return moment.encoded(self._downs)
            if watched.failure is not None:
                raise watched.failure
            if watched.over or self._finished:
                await self.aclose()
                if self._seen is None:  # it ended before its first sample
                    return stopped(self._downs)
                raise StopAsyncIteration
            self._sleep = asyncio.get_running_loop().create_future()
            try:
                await self._sleep
            finally:
                self._sleep = None

    async def aclose(self) -> None:
        """Leave; again is nothing. A reader that waits meanwhile gets the end."""
        self._finished = True
        watched, self._watched = self._watched, None
        if watched is not None:
            self._statistics._leave(watched, self)
        self.wake()
