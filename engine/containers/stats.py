"""Statistics of containers: one sampler for all that are watched, and their counters in the shape
of the API.

A sample is taken once a second for each watched container, whatever the number of its watchers, and
encoded once for each shape that they request. Thousands of watched containers get theirs less often
(`SHARE`), and `preread` says when the one before was taken. Without watchers there is no task, no
thread and no open file. A reading that costs the loop more than a millisecond goes to a thread of
the sampler's own.

CPU percentage. Clients divide the growth from `precpu_stats` to `cpu_stats` by that of
`system_cpu_usage`, so the first sample of a watcher needs an earlier reading. If there is none from
the last two seconds, two readings `PRIME` apart are taken (Docker: one to two seconds apart, and a
stream's first object without any). /proc/stat counts in hundredths of a second, so `PRIME` cannot
be shorter.

Not here: reading and parsing (`_fast/cgroup`), which container has which cgroup
(`runtime/cgroups.py`), API versions (the caller gives `encode`).
Owns: the open counters. They keep a container's network namespace alive, so `Statistics.ended` must
      be called when a container ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from engine._fast.cgroup import NO_LIMIT, Counters, Processors, Sample, samples
from engine.common.times import ZERO, rfc3339
from engine.containers.container import Container
from engine.errors import ServerError, words
from engine.runtime.cgroups import Cgroups
from engine.system import limits
from engine.system.tasks import shield, spawn
from engine.system.threads import Threads
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

INTERVAL = 1.0
"""Seconds between two samples of a watched container."""

PAUSE = 1.0
"""Seconds between the empty statistics of a container that does not run."""
PRIME = 0.25
"""Seconds between the two readings behind the first sample of a container without watchers."""

SHARE = 0.5
"""Part of one CPU that samples may take, with their encoding. With more watched containers than fit
into it, all of them are sampled less often."""

_STEPS = 4
"""Steps of an interval in which it grows then: all containers keep one clock."""

_SLICE = 32
"""Containers read in one batch; the work that holds the GIL stays well below a millisecond."""

_LOOP_BUDGET = 0.001
"""Seconds that a reading may take in the loop."""

_TOGETHER = 0.01
"""Seconds by which a reading may come early to be taken with another."""

_log = logging.getLogger(__name__)

Encode = Callable[[Stats], bytes]
"""The JSON of a sample in the shape that a client's API version has."""

newest: Encode = msgspec.json.Encoder().encode
"""The newest shape."""


# --- counters in the names of API 1.24 ------------------------------------------------------------

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
    """`percpu_usage` gets as many elements as processors are online, since clients take its length
    for their number.

    v1 also lists processors that could be hot-plugged; they are left out. v2 has no values per
    processor, so the total is split evenly.
    """
    each = [sample.cpu_each[number] for number in online if number < len(sample.cpu_each)]
    if not each and online:
        part, rest = divmod(sample.cpu_total, len(online))
        each = [part + (index < rest) for index in range(len(online))]
    return CpuStats(
        CpuUsage(sample.cpu_total, each, sample.cpu_kernel, sample.cpu_user),
        system,
        len(online),
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
    """Maps v2's keys to v1's names, with the total that v1 has."""
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


def stopped(encode: Encode = newest) -> bytes:
    """The object of a container that does not run: everything is zero or empty."""
    return encode(Stats(read=ZERO)) + b"\n"


# --- sampling -------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """CPU times, and when they were read, in ns since the epoch."""

    cpu: CpuStats
    at: int


NO_READING = Reading(CpuStats(), 0)
"""In place of the previous reading of a sample that is taken alone (`one-shot`)."""


class _Processor:
    """The processor time of samples, and how often they may be taken for it."""

    __slots__ = ("_each", "_samples", "_seconds")

    def __init__(self) -> None:
        self._each = 0.0
        """Seconds for one sample, of late."""
        self._seconds = 0.0
        self._samples = 0

    def took(self, seconds: float, samples: int = 0) -> None:
        """So many seconds for so many samples, or for what is made of them."""
        self._seconds += seconds
        self._samples += samples

    def pace(self, watched: int, interval: float) -> float:
        """The number of intervals between two samples of one of so many containers; called before
        each round of samples.
        """
        if self._samples:
            self._each += (self._seconds / self._samples - self._each) / 2
            self._seconds, self._samples = 0.0, 0
        return max(1.0, math.ceil(watched * self._each / (SHARE * interval) * _STEPS) / _STEPS)


class _Moment:
    """One sample beside the reading before it, encoded when first asked for."""

    __slots__ = ("_encoded", "_machine", "_processor", "_sample", "previous", "reading", "taken")

    def __init__(
        self,
        sample: Sample,
        reading: Reading,
        previous: Reading,
        machine: int,
        processor: _Processor | None = None,
    ) -> None:
        self.taken = time.monotonic()
        self._processor = processor
        self.reading = reading
        self._sample = sample
        self.previous = previous
        self._machine = machine
        self._encoded: dict[Encode, bytes] = {}

    def encoded(self, encode: Encode) -> bytes:
        kept = self._encoded.get(encode)
        if kept is None:
            begun = time.thread_time()
            kept = self._encoded[encode] = encode(self.stats()) + b"\n"
            if self._processor is not None:
                self._processor.took(time.thread_time() - begun)
        return kept

    def stats(self) -> Stats:
        sample = self._sample
        networks = {name: NetworkStats(*values) for name, values in sample.networks.items()}
        return Stats(
            read=rfc3339(self.reading.at),
            preread=rfc3339(self.previous.at),
            precpu_stats=self.previous.cpu,
            cpu_stats=self.reading.cpu,
            memory_stats=memory_stats(sample, self._machine),
            blkio_stats=blkio_stats(sample),
            pids_stats=PidsStats(sample.pids),
            networks=networks or msgspec.UNSET,
        )


class _Watched:
    """One container with its watchers."""

    __slots__ = ("before", "counters", "due", "failure", "latest", "opening", "over", "pid", "reopen", "streams")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.streams: set[Stream] = set()
        self.counters: Counters | None = None
        self.reopen: Callable[[], Counters] | None = None
        """Opens the counters for one reading, where the engine has too few descriptors to keep
        them open."""
        self.before: Reading | None = None
        """The reading before the next sample."""
        self.latest: _Moment | None = None
        self.due = math.inf
        self.over = False
        self.failure: ServerError | None = None
        self.opening: asyncio.Future[None] | None = None

    def deliver(self, moment: _Moment) -> None:
        self.latest = moment
        self.before = moment.reading
        for stream in self.streams:
            stream.wake()

    def end(self) -> None:
        """Take no more samples, close the descriptors and wake the watchers."""
        self.over = True
        self.due = math.inf
        if self.counters is not None:
            self.counters.close()
        for stream in self.streams:
            stream.wake()


def _watched(container: Container) -> dict[str, Any]:
    own_network = container.record.host.network_mode != "host"
    return {"pid": container.record.status.pid, "cgroup": container.cgroup, "network": own_network}


def _named(container: Container, sample: bytes) -> bytes:
    return b'{"name":"/%s","id":"%s",' % (container.record.name.encode(), container.id.encode()) + sample[1:]


async def of_container(
    container: Container, statistics: Statistics, encode: Encode, *, named: bool
) -> AsyncGenerator[bytes, None]:
    """Encoded statistics, one a second, as `encode` encodes them. While the container does not run
    they are empty; they end when it is removed.

    `named`: they begin with its name and id, which `docker stats` shows.
    """
    while not container.removed:
        async with contextlib.aclosing(
            statistics.stream(container.id, **_watched(container), encode=encode)
        ) as samples:
            async for sample in samples:
                yield _named(container, sample) if named else sample
        await asyncio.sleep(PAUSE)


async def once_of_container(
    container: Container, statistics: Statistics, encode: Encode, *, named: bool, alone: bool = False
) -> bytes:
    """One reading, encoded. `alone`: without the one before it."""
    sample = await statistics.once(container.id, **_watched(container), encode=encode, alone=alone)
    return _named(container, sample) if named else sample


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
        self._thread = Threads(1)
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        # seconds for one container, as measured last; the first guess is a high one
        self._cost = 100e-6
        self._processor = _Processor()

    def stream(
        self, container_id: str, *, pid: int, cgroup: str, network: bool = True, encode: Encode = newest
    ) -> Stream:
        """A sample at once when there is one, then one each `interval` until the container ends; a
        slow reader misses some.

        `pid`: the container's first process. When it is 0 (not running), the stream is a single
        object of zeros. `cgroup`: its path from the root of the hierarchies. `network`: it has
        interfaces of its own (not those of the host). The iterator raises ServerError where the
        counters cannot be opened. Always call its `aclose()`.
        """
        return Stream(self, container_id, pid, cgroup, network, encode)

    async def once(
        self,
        container_id: str,
        *,
        pid: int,
        cgroup: str,
        network: bool = True,
        encode: Encode = newest,
        alone: bool = False,
    ) -> bytes:
        """One sample, taken after the call.

        Parameters as for `stream`. Returns at once when there is a previous reading to compare
        with, and when it is wanted `alone`, with zeros in place of the previous reading.
        """
        stream = self.stream(container_id, pid=pid, cgroup=cgroup, network=network, encode=encode)
        previous = self._previous(container_id, pid) if pid else None
        if pid and alone:
            previous = NO_READING
        if previous is not None:
            moment = await self._taken_now(stream, previous)
            return stopped(encode) if moment is None else moment.encoded(encode)
        try:
            return await anext(stream)
        except StopAsyncIteration:
            return stopped(encode)
        finally:
            await stream.aclose()

    def _previous(self, container_id: str, pid: int) -> Reading | None:
        """A CPU reading at least `prime` old and of the last two intervals. None without one."""
        watched = self._watched.get(container_id)
        if watched is not None and watched.pid == pid and watched.latest is not None:
            latest: _Moment | None = watched.latest
        else:
            latest = self._of_late(container_id, pid, 2 * self._interval)
        if latest is None:
            return None
        return latest.reading if time.monotonic() - latest.taken >= self._prime else latest.previous

    async def _taken_now(self, stream: Stream, previous: Reading) -> _Moment | None:
        """A sample with counters opened for it alone; None when the container is gone.

        Raises ServerError.
        """
        try:
            counters, sample, reading = await self._thread.run(self._first_reading, stream)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(stream, error) from error
        finally:
            if not self._watched and self._task is None:
                self._rest()
        counters.close()
        if sample is None:
            return None
        moment = _Moment(sample, reading, previous, self._machine)
        if previous is not NO_READING and stream.container_id not in self._watched:
            self._keep(stream.container_id, stream.pid, moment)
        return moment

    def ended(self, container_id: str) -> None:
        """The container has ended: end its streams and close its files."""
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

    # --- watchers come and go ---------------------------------------------------------------------

    def _of_late(self, container_id: str, pid: int, age: float) -> _Moment | None:
        kept = self._recent.get(container_id)
        if kept is None or kept[0] != pid or time.monotonic() - kept[1].taken > age:
            return None
        return kept[1]

    async def _watch(self, stream: Stream) -> _Watched:
        watched = self._watched.get(stream.container_id)
        if watched is not None and watched.pid != stream.pid:
            # it was started again before `ended` was called
            self.ended(stream.container_id)
            watched = None
        if watched is None:
            watched = self._watched[stream.container_id] = _Watched(stream.pid)
            # The streams that wait for it raise its failure. If none is left, `spawn` logs it.
            watched.opening = spawn(self._open(watched, stream), f"statistics of container {stream.container_id}")
        watched.streams.add(stream)
        try:
            if watched.opening is not None:
                await shield(watched.opening)
        except BaseException:
            self._leave(watched, stream)
            raise
        return watched

    async def _open(self, watched: _Watched, stream: Stream) -> None:
        try:
            counters, sample, reading = await self._thread.run(self._first_reading, stream)
        except FileNotFoundError:
            watched.end()
            return
        except (OSError, ServerError) as error:  # ServerError: no thread
            watched.failure = _unreadable(stream, error)
            watched.failure.__cause__ = error
            watched.end()
            return
        finally:
            watched.opening = None
        if limits.has_plenty():
            watched.counters = counters
        else:
            counters.close()
            watched.reopen = functools.partial(self._counters, stream)
        if sample is None or watched.over or not watched.streams:
            watched.end()
            return
        recent = self._of_late(stream.container_id, stream.pid, 2 * self._interval)
        now = asyncio.get_running_loop().time()
        if recent is not None:
            watched.deliver(_Moment(sample, reading, recent.reading, self._machine))
            watched.due = now + self._interval
        else:
            watched.before = reading
            watched.due = now + self._prime
        self._changed.set()
        if self._task is None:
            self._task = spawn(self._run(), "statistics")

    def _leave(self, watched: _Watched, stream: Stream) -> None:
        """Close the counters with the last watcher.

        The last sample is kept for two intervals as a previous reading.
        """
        watched.streams.discard(stream)
        if watched.streams:
            return
        container_id = stream.container_id
        if self._watched.get(container_id) is watched:
            del self._watched[container_id]
            if watched.latest is not None and not watched.over:
                self._keep(container_id, watched.pid, watched.latest)
        watched.end()
        self._changed.set()
        if not self._watched and self._task is None:
            self._rest()

    def _keep(self, container_id: str, pid: int, moment: _Moment) -> None:
        kept = self._recent[container_id] = pid, moment
        asyncio.get_running_loop().call_later(2 * self._interval, self._forget, container_id, kept)

    def _forget(self, container_id: str, kept: tuple[int, _Moment]) -> None:
        if self._recent.get(container_id) is kept:
            del self._recent[container_id]

    def _rest(self) -> None:
        """True when no container is watched."""
        # not closed: the thread may be using it, and holds the reference then
        self._processors = None

    # --- the sampler ------------------------------------------------------------------------------

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
                interval = self._interval * self._processor.pace(len(self._watched), self._interval)
                following = grid + math.ceil((now + self._prime - grid) / interval) * interval
                together = [watched for watched in self._watched.values() if watched.due <= now + _TOGETHER]
                for watched in together:
                    watched.due = following
                try:
                    await self._take(together)
                # /proc/stat itself failed, or memory or a thread: the next interval tries again
                except (OSError, ServerError, MemoryError) as error:
                    _log.error("statistics: %s", words(error))
        finally:
            self._task = None
            self._rest()

    async def _take(self, wanted: list[_Watched]) -> None:
        """Sample these, and deliver slice by slice."""
        system: tuple[int, tuple[int, ...]] | None = None
        for begin in range(0, len(wanted), _SLICE):
            part = [watched for watched in wanted[begin : begin + _SLICE] if not watched.over]
            if not part:
                continue
            counters = [source for watched in part if (source := watched.counters or watched.reopen) is not None]
            if self._cost * len(part) <= _LOOP_BUDGET:
                taken, now, spent, busy = self._readings(counters, system)
            else:
                taken, now, spent, busy = await self._thread.run(self._readings, counters, system)
            system = now
            self._cost += (spent / len(part) - self._cost) / 4
            self._processor.took(busy, len(part))
            begun = time.thread_time()
            for watched, sample in zip(part, taken, strict=True):
                if watched.over:
                    continue
                if sample is None:
                    self._gone(watched)
                else:
                    reading = Reading(cpu_stats(sample, *now), time.time_ns())
                    moment = _Moment(sample, reading, watched.before or reading, self._machine, self._processor)
                    watched.deliver(moment)
            self._processor.took(time.thread_time() - begun)

    def _gone(self, watched: _Watched) -> None:
        """Its cgroup no longer exists."""
        for container_id in [key for key, value in self._watched.items() if value is watched]:
            self.ended(container_id)

    # --- in the thread ----------------------------------------------------------------------------

    def _readings(
        self, counters: Sequence[Counters | Callable[[], Counters]], system: tuple[int, tuple[int, ...]] | None
    ) -> tuple[list[Sample | None], tuple[int, tuple[int, ...]], float, float]:
        """The samples, the processors' times, and the seconds for it: passed, and of a CPU."""
        begin, busy = time.perf_counter(), time.thread_time()
        if system is None:
            system = self._system()
        kept = iter(samples([each for each in counters if not callable(each)]))
        taken = [_once(each) if callable(each) else next(kept) for each in counters]
        return taken, system, time.perf_counter() - begin, time.thread_time() - busy

    def _system(self) -> tuple[int, tuple[int, ...]]:
        if self._processors is None:
            self._processors = Processors()
        return self._processors.read()

    def _counters(self, stream: Stream) -> Counters:
        return Counters(**directories(self._cgroups, stream.cgroup), network=stream.network)

    def _first_reading(self, stream: Stream) -> tuple[Counters, Sample | None, Reading]:
        counters = self._counters(stream)
        try:
            sample = counters.sample()
            cpu = CpuStats() if sample is None else cpu_stats(sample, *self._system())
            reading = Reading(cpu, time.time_ns())
        except BaseException:
            counters.close()
            raise
        return counters, sample, reading


def _once(reopen: Callable[[], Counters]) -> Sample | None:
    """A sample of counters that are open for it alone; None when the container is gone."""
    try:
        counters = reopen()
    except FileNotFoundError:
        return None
    try:
        return counters.sample()
    finally:
        counters.close()


def _unreadable(stream: Stream, error: Exception) -> ServerError:
    return ServerError(f"cannot read the statistics of container {stream.container_id}: {words(error)}")


def directories(cgroups: Cgroups, cgroup: str) -> dict[str, bytes | None]:
    """Where the controllers of a container are, as `Counters` wants them; v2 has them under
    other names, and cpu.stat even without `cpu`.
    """
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
    """The encoded samples of one container for one watcher. Starts with the first `anext`."""

    def __init__(
        self, statistics: Statistics, container_id: str, pid: int, cgroup: str, network: bool, encode: Encode
    ) -> None:
        self.container_id = container_id
        self.pid = pid
        self.cgroup = cgroup
        self.network = b"/proc/%d/net/dev" % pid if network and pid else None
        self._statistics = statistics
        self._encode = encode
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
            return stopped(self._encode)
        if self._watched is None:
            self._watched = await self._statistics._watch(self)
        watched = self._watched
        while True:
            moment = watched.latest
            if moment is not None and moment is not self._seen:
                self._seen = moment
                return moment.encoded(self._encode)
            if watched.failure is not None:
                raise watched.failure
            if watched.over or self._finished:
                await self.aclose()
                if self._seen is None:  # it ended before its first sample
                    return stopped(self._encode)
                raise StopAsyncIteration
            self._sleep = asyncio.get_running_loop().create_future()
            try:
                await self._sleep
            finally:
                self._sleep = None

    async def aclose(self) -> None:
        """Leave; repeated calls do nothing. A waiting reader gets the end."""
        self._finished = True
        watched, self._watched = self._watched, None
        if watched is not None:
            self._statistics._leave(watched, self)
        self.wake()
