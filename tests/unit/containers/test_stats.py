"""Statistics: v2 counters under v1's names, and one sampler for all clients, on live cgroups."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine._fast.cgroup import NO_LIMIT, Counters, Sample
from engine.containers import stats
from engine.containers.stats import (
    Reading,
    Statistics,
    _Processor,
    blkio_stats,
    cpu_stats,
    memory_stats,
    newest,
    stopped,
)
from engine.errors import ServerError
from engine.runtime.cgroups import Cgroups
from engine.system import limits
from engine.wire.stats import CpuStats, Stats
from tests.unit.fast.test_cgroup import V1, V2, LiveCgroup, live, write

__all__ = ["live"]  # the fixture

TOTALS = {
    "cache", "rss", "rss_huge", "mapped_file", "writeback", "pgpgin", "pgpgout", "pgfault", "pgmajfault",
    "active_anon", "inactive_anon", "active_file", "inactive_file", "unevictable",
}  # fmt: skip
"""The documented memory counters that also have a `total_` form."""


def of_v2(tmp_path: Path, **files: str) -> Sample:
    place = write(tmp_path / "v2", {**V2, **{name.replace("_", ".", 1): text for name, text in files.items()}})
    sample = Counters(cpu=place, memory=place, io=place, pids=place).sample()
    assert sample is not None
    return sample


def of_v1(tmp_path: Path) -> Sample:
    sample = Counters(**{name: write(tmp_path / name, files) for name, files in V1.items()}).sample()
    assert sample is not None
    return sample


# --- shapes ---------------------------------------------------------------------------------------


def test_v2_memory_in_the_names_of_v1(tmp_path: Path) -> None:
    found = memory_stats(of_v2(tmp_path), machine=10_000)
    assert (found.usage, found.max_usage, found.failcnt, found.limit) == (300, 400, 2, 10_000)
    assert found.stats.keys() >= TOTALS | {f"total_{name}" for name in TOTALS} | {"hierarchical_memory_limit"}
    assert (found.stats["cache"], found.stats["rss"], found.stats["mapped_file"], found.stats["swap"]) == (
        100,
        200,
        30,
        50,
    )
    assert found.stats["total_inactive_file"] == found.stats["inactive_file"] == 40
    assert found.stats["hierarchical_memory_limit"] == NO_LIMIT


def test_v2_memory_limit(tmp_path: Path) -> None:
    found = memory_stats(of_v2(tmp_path, memory_max="5000\n"), machine=10_000)
    assert found.limit == found.stats["hierarchical_memory_limit"] == 5000


def test_v1_memory_as_the_kernel_has_it(tmp_path: Path) -> None:
    sample = of_v1(tmp_path)
    assert memory_stats(sample, machine=10_000).stats == sample.memory
    assert (memory_stats(sample, machine=10_000).limit, memory_stats(sample, machine=500).limit) == (1000, 500)


def test_processors_that_are_offline_are_left_out(tmp_path: Path) -> None:
    found = cpu_stats(of_v1(tmp_path), 99, (0, 1))
    assert found.cpu_usage.percpu_usage == [300, 400]
    assert (found.cpu_usage.total_usage, found.system_cpu_usage) == (700, 99)
    assert cpu_stats(of_v1(tmp_path), 99, (1, 3)).cpu_usage.percpu_usage == [400, 0]


def test_v2_processors_share_the_total(tmp_path: Path) -> None:
    each = cpu_stats(of_v2(tmp_path, cpu_stat="usage_usec 1\n"), 99, (0, 1, 5)).cpu_usage.percpu_usage
    assert each == [334, 333, 333]


def test_v1_io(tmp_path: Path) -> None:
    found = json.loads(newest(Stats(read="", blkio_stats=blkio_stats(of_v1(tmp_path)))))["blkio_stats"]
    assert found["io_service_bytes_recursive"][0] == {"major": 254, "minor": 0, "op": "Read", "value": 4096}
    assert found["io_serviced_recursive"] == [{"major": 254, "minor": 0, "op": "Read", "value": 1}]
    assert [name for name, value in found.items() if value == []] == [
        f"{name}_recursive"
        for name in ("io_queue", "io_service_time", "io_wait_time", "io_merged", "io_time", "sectors")
    ]


def test_v2_io_in_the_words_of_v1(tmp_path: Path) -> None:
    found = blkio_stats(of_v2(tmp_path))
    assert [(entry.op, entry.value) for entry in found.io_service_bytes_recursive] == [
        ("Read", 4096), ("Write", 8192), ("Discard", 0), ("Total", 12288),
    ]  # fmt: skip
    assert [(entry.op, entry.value) for entry in found.io_serviced_recursive] == [
        ("Read", 1), ("Write", 2), ("Discard", 0), ("Total", 3),
    ]  # fmt: skip


def test_stopped_is_zero_and_empty() -> None:
    shape = json.loads(stopped())
    assert shape["read"] == "0001-01-01T00:00:00Z"
    assert shape["cpu_stats"] == shape["precpu_stats"]
    assert shape["cpu_stats"]["cpu_usage"]["percpu_usage"] == [] and shape["memory_stats"]["stats"] == {}
    assert "networks" not in shape
    assert stopped(lambda found: found.read.encode()) == b"0001-01-01T00:00:00Z\n"


# --- sampling -------------------------------------------------------------------------------------


def drive(
    live: LiveCgroup, body: Callable[[Statistics], Awaitable[None]], interval: float = 0.05, prime: float = 0.02
) -> None:
    """Run `body`, then check that no task, thread or descriptor is left."""

    async def main() -> None:
        gc.collect()  # frees leftovers of earlier tests
        before = set(os.listdir("/proc/self/fd"))
        statistics = Statistics(live.host, interval=interval, prime=prime)
        await asyncio.wait_for(body(statistics), 60)
        deadline = time.monotonic() + 60
        while not idle(statistics, before):
            assert time.monotonic() < deadline, "something of the sampler is left"
            await asyncio.sleep(0.005)
        await statistics.close()

    asyncio.run(main())


def idle(statistics: Statistics, before: set[str]) -> bool:
    return (
        len(asyncio.all_tasks()) <= 2  # the runner's task, and that of wait_for while it ends
        and not any(thread.name.startswith("statistics") for thread in threading.enumerate())
        and statistics._task is None
        and {fd for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")} == set()
    )


BUSY = "import sys\nblock = bytearray(b'x') * (16 << 20)\nprint('ready', flush=True)\nwhile True: pass"


def busy(live: LiveCgroup) -> int:
    pid = live.run(sys.executable, "-c", BUSY)
    stdout = live.processes[-1].stdout
    assert stdout is not None and stdout.readline() == b"ready\n"
    return pid


def cpu_percent(shape: dict[str, Any]) -> float:
    """As the docker CLI computes it from a response of API 1.24."""
    now, before = shape["cpu_stats"], shape["precpu_stats"]
    used = now["cpu_usage"]["total_usage"] - before["cpu_usage"]["total_usage"]
    system = now["system_cpu_usage"] - before["system_cpu_usage"]
    return float(used / system * len(now["cpu_usage"]["percpu_usage"]) * 100) if used > 0 and system > 0 else 0.0


def test_the_first_sample_of_a_lone_request_has_a_previous_reading(live: LiveCgroup) -> None:
    pid = busy(live)

    async def body(statistics: Statistics) -> None:
        shape = json.loads(await statistics.once("c", pid=pid, cgroup=live.path))
        links = {name for _, name in socket.if_nameindex()} - {"lo"}  # usually none
        assert list(shape) == [name for name in Stats.__struct_fields__ if name != "networks" or links]
        assert shape["precpu_stats"]["cpu_usage"]["total_usage"] > 0
        assert shape["precpu_stats"]["system_cpu_usage"] > 0
        assert 0 < cpu_percent(shape) < 400
        assert len(shape["cpu_stats"]["cpu_usage"]["percpu_usage"]) == os.cpu_count()
        assert shape["memory_stats"]["usage"] - shape["memory_stats"]["stats"]["total_inactive_file"] > 16 << 20
        assert shape["memory_stats"]["limit"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert shape["pids_stats"] == {"current": 1}
        assert shape["read"].endswith("Z") and shape["preread"].endswith("Z")
        assert "0001" < shape["preread"] < shape["read"]
        assert shape["cpu_stats"]["online_cpus"] == shape["precpu_stats"]["online_cpus"] == os.cpu_count()
        assert (shape["os_type"], shape["num_procs"], shape["storage_stats"]) == ("linux", 0, {})

    drive(live, body, interval=1.0, prime=0.25)


def test_each_request_takes_a_sample_and_one_of_late_is_the_previous_reading(live: LiveCgroup) -> None:
    pid = busy(live)

    async def body(statistics: Statistics) -> None:
        first = json.loads(await statistics.once("c", pid=pid, cgroup=live.path))
        assert not statistics._watched
        # on a slow host the samples are not close
        prime, statistics._prime = statistics._prime, 60.0
        second = json.loads(await statistics.once("c", pid=pid, cgroup=live.path))
        assert second["read"] > first["read"], "taken after the request"
        assert second["precpu_stats"] == first["precpu_stats"], "the first is too close to compare with"
        statistics._prime = prime
        kept = statistics._recent["c"]
        kept[1].taken -= 90  # older than an interval, younger than two
        third = json.loads(await statistics.once("c", pid=pid, cgroup=live.path))
        assert third["precpu_stats"] == second["cpu_stats"]
        statistics._recent["c"][1].reading = Reading(CpuStats(), 1)
        other = json.loads(await statistics.once("c", pid=os.getpid(), cgroup=live.path))
        assert other["precpu_stats"]["system_cpu_usage"] > 0, "another run of the container has no part in this one"
        statistics.ended("c")
        assert not statistics._recent

    drive(live, body, interval=60.0)


def test_a_sample_alone_waits_for_no_other(live: LiveCgroup) -> None:
    pid = busy(live)

    async def body(statistics: Statistics) -> None:
        shape = json.loads(await statistics.once("c", pid=pid, cgroup=live.path, alone=True))
        assert shape["preread"] == "0001-01-01T00:00:00Z"
        assert shape["precpu_stats"]["system_cpu_usage"] == 0 < shape["cpu_stats"]["system_cpu_usage"]
        assert not statistics._recent, "it is no reading to compare with"
        await statistics.once("c", pid=pid, cgroup=live.path)
        alone = json.loads(await statistics.once("c", pid=pid, cgroup=live.path, alone=True))
        assert alone["precpu_stats"]["system_cpu_usage"] == 0
        assert json.loads(await statistics.once("c", pid=0, cgroup="", alone=True))["read"].startswith("0001")

    drive(live, body, interval=60.0, prime=0.05)


def test_a_request_takes_its_own_sample_of_a_watched_container(live: LiveCgroup) -> None:
    pid = live.run("sleep", "1000")

    async def body(statistics: Statistics) -> None:
        stream = statistics.stream("c", pid=pid, cgroup=live.path)
        first = await anext(stream)
        own = json.loads(await statistics.once("c", pid=pid, cgroup=live.path))
        assert own["read"] > json.loads(first)["read"]
        assert not statistics._recent, "the stream's samples are the previous readings"
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    drive(live, body, interval=60.0)


def test_watchers_share_samples_and_encoding(live: LiveCgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = live.run("sleep", "1000")
    opened = []
    real = stats.Counters

    def counting(**arguments: Any) -> Counters:
        opened.append(arguments)
        return real(**arguments)

    monkeypatch.setattr(stats, "Counters", counting)

    async def body(statistics: Statistics) -> None:
        streams = [statistics.stream("c", pid=pid, cgroup=live.path) for _ in range(5)]
        for _ in range(3):
            taken = await asyncio.gather(*(anext(stream) for stream in streams))
            assert all(sample is taken[0] for sample in taken)
        assert len(opened) == 1
        times = [json.loads(await anext(streams[0]))["read"] for _ in range(3)]
        assert len(set(times)) == 3
        for stream in streams:
            await stream.aclose()
            await stream.aclose()

    drive(live, body)


def test_counters_stay_closed_while_descriptors_are_short(live: LiveCgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = live.run("sleep", "1000")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    monkeypatch.setattr(limits, "open_descriptors", lambda: limit // 2)

    async def body(statistics: Statistics) -> None:
        gc.collect()  # frees leftovers of earlier tests
        before = set(os.listdir("/proc/self/fd"))
        stream = statistics.stream("c", pid=pid, cgroup=live.path)
        for _ in range(3):
            assert json.loads(await anext(stream))["memory_stats"]["usage"] > 0
            of_cgroups = [
                where for each in set(os.listdir("/proc/self/fd")) - before if "cgroup" in (where := link(each))
            ]
            assert of_cgroups == []
        live.end()
        async for _ in stream:
            pass

    drive(live, body)


def link(descriptor: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def test_each_sample_has_the_one_before_as_previous(live: LiveCgroup) -> None:
    pid = busy(live)

    async def body(statistics: Statistics) -> None:
        stream = statistics.stream("c", pid=pid, cgroup=live.path)
        shapes = [json.loads(await anext(stream)) for _ in range(4)]
        for before, after in itertools.pairwise(shapes):
            assert after["precpu_stats"] == before["cpu_stats"]
        first, last = (shape["cpu_stats"]["cpu_usage"]["total_usage"] for shape in (shapes[0], shapes[-1]))
        assert last > first  # on a loaded host the process may not run between two samples
        await stream.aclose()

    drive(live, body)


def test_no_networks_with_those_of_the_host(live: LiveCgroup) -> None:
    pid = live.run("sleep", "1000")

    async def body(statistics: Statistics) -> None:
        assert "networks" not in json.loads(await statistics.once("c", pid=pid, cgroup=live.path, network=False))

    drive(live, body)


def test_a_stopped_container(live: LiveCgroup) -> None:
    async def body(statistics: Statistics) -> None:
        assert await statistics.once("c", pid=0, cgroup=live.path) == stopped()
        assert [sample async for sample in statistics.stream("c", pid=0, cgroup=live.path)] == [stopped()]
        gone = live.path + "-gone"
        assert await statistics.once("c", pid=1, cgroup=gone) == stopped()
        assert [sample async for sample in statistics.stream("c", pid=1, cgroup=gone)] == [stopped()]

    drive(live, body)


@pytest.mark.parametrize("told", [True, False])
def test_a_stream_ends_with_its_container(live: LiveCgroup, told: bool) -> None:
    pid = live.run("sleep", "1000")

    async def body(statistics: Statistics) -> None:
        streams = [statistics.stream("c", pid=pid, cgroup=live.path) for _ in range(2)]
        for stream in streams:
            assert json.loads(await anext(stream))["pids_stats"] == {"current": 1}
        if told:
            statistics.ended("c")
        else:
            live.end()  # its cgroup is gone
        for stream in streams:
            async for _ in stream:
                pass
        assert not statistics._watched

    drive(live, body)


def test_a_new_run_of_a_container_is_another_one(live: LiveCgroup) -> None:
    first, second = live.run("sleep", "1000"), live.run("sleep", "1001")

    async def body(statistics: Statistics) -> None:
        old = statistics.stream("c", pid=first, cgroup=live.path)
        await anext(old)
        new = statistics.stream("c", pid=second, cgroup=live.path)
        await anext(new)
        assert [sample async for sample in old] == [] or True
        with pytest.raises(StopAsyncIteration):
            await anext(old)
        assert statistics._watched["c"].pid == second
        await new.aclose()

    drive(live, body)


def test_watchers_that_leave_at_any_time(live: LiveCgroup) -> None:
    pid = live.run("sleep", "1000")

    async def body(statistics: Statistics) -> None:
        async def watch(turns: int) -> None:
            stream = statistics.stream("c", pid=pid, cgroup=live.path)
            try:
                async for _ in stream:
                    pass
            finally:
                await stream.aclose()

        for turns in range(12):
            tasks = [asyncio.ensure_future(watch(turns)) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns > 8:
                await asyncio.sleep(0.06)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert not statistics._watched
        unused = statistics.stream("c", pid=pid, cgroup=live.path)
        await unused.aclose()

    drive(live, body)


def test_a_reader_that_waits_sees_the_end_when_it_is_closed_elsewhere(live: LiveCgroup) -> None:
    pid = live.run("sleep", "1000")

    async def body(statistics: Statistics) -> None:
        stream = statistics.stream("c", pid=pid, cgroup=live.path)
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await statistics.close()
        with pytest.raises(StopAsyncIteration):
            await waiting

    drive(live, body, interval=30)


def test_many_containers_are_read_in_the_thread(live: LiveCgroup) -> None:
    """More containers than one slice, and slow ones: all get every sample, and the event loop reads
    none."""
    pid = live.run("sleep", "1000")
    for number in range(40):
        for root in live.roots:
            os.makedirs(f"{root}{live.path}/{number}")

    async def body(statistics: Statistics) -> None:
        readers = set()
        real = statistics._readings

        def readings(*arguments: Any) -> Any:
            readers.add(threading.get_ident())
            taken, system, _, busy = real(*arguments)
            return taken, system, 1.0, busy

        statistics._readings = readings  # type: ignore[method-assign]
        statistics._cost = 1.0
        streams = [statistics.stream(str(n), pid=pid, cgroup=f"{live.path}/{n}") for n in range(40)]
        for _ in range(3):
            shapes = [json.loads(text) for text in await asyncio.gather(*(anext(stream) for stream in streams))]
            assert all(shape["pids_stats"] == {"current": 0} for shape in shapes)
        assert len(readers) == 1 and readers != {threading.get_ident()}
        for stream in streams:
            await stream.aclose()

    drive(live, body)


def test_one_container_that_goes_leaves_the_others(live: LiveCgroup) -> None:
    pid = live.run("sleep", "1000")
    for number in range(3):
        for root in live.roots:
            os.makedirs(f"{root}{live.path}/{number}")

    async def body(statistics: Statistics) -> None:
        streams = [statistics.stream(str(n), pid=pid, cgroup=f"{live.path}/{n}") for n in range(3)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        live.host.remove(f"{live.path}/1")
        async for _ in streams[1]:
            pass
        assert statistics._watched.keys() == {"0", "2"}
        await anext(streams[0])
        for stream in streams:
            await stream.aclose()

    drive(live, body)


def test_what_cannot_be_opened_is_told(live: LiveCgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: Any) -> Counters:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(stats, "Counters", refused)

    async def body(statistics: Statistics) -> None:
        with pytest.raises(ServerError, match=r"statistics of container abc: too many open files"):
            await statistics.once("abc", pid=1, cgroup=live.path)
        assert not statistics._watched

    drive(live, body)


def test_a_lack_of_threads_ends_no_stream(live: LiveCgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new stream gets an error; streams that are open already go on."""
    take, failures = Statistics._take, 0

    async def without_thread(self: Statistics, wanted: Any) -> None:
        nonlocal failures
        failures += 1
        if failures <= 2:
            raise ServerError("the host allows no more threads")
        await take(self, wanted)

    monkeypatch.setattr(Statistics, "_take", without_thread)

    async def body(statistics: Statistics) -> None:
        stream = statistics.stream("abc", pid=1, cgroup=live.path)
        assert await anext(stream)
        assert failures > 2, "it was tried again"
        monkeypatch.setattr(Statistics, "_first_reading", refused)
        other = statistics.stream("other", pid=2, cgroup=live.path)
        with pytest.raises(ServerError, match="statistics of container other: the host allows no more threads"):
            await anext(other)
        for each in (stream, other):
            await each.aclose()

    def refused(*_: Any) -> Any:
        raise ServerError("the host allows no more threads")

    drive(live, body)


@pytest.mark.parametrize(
    ("watched", "pace"), [(1, 1.0), (5_000, 1.0), (5_001, 1.25), (7_500, 1.5), (10_000, 2.0), (20_000, 4.0)]
)
def test_thousands_are_sampled_less_often(watched: int, pace: float) -> None:
    """Half of a CPU has 5,000 samples of 100 us a second."""
    processor = _Processor()
    assert processor.pace(watched, 1.0) == 1.0
    for _ in range(60):  # it adapts
        processor.took(0.0059, 100)
        processor.took(0.0041 - 1e-9)
        found = processor.pace(watched, 1.0)
    assert found == pace == processor.pace(watched, 1.0)
    assert processor.pace(watched, 10.0) == 1.0


def test_directories_of_v2_and_hybrid() -> None:
    v2 = Cgroups(mode="v2", controllers={}, unified="/u", unified_controllers=("memory", "io", "pids"))
    assert stats.directories(v2, "/p/c") == {
        "cpu": b"/u/p/c", "cpuacct": None, "memory": b"/u/p/c", "io": b"/u/p/c", "pids": b"/u/p/c",
    }  # fmt: skip
    hybrid = Cgroups(
        mode="hybrid", controllers={"memory": "/m", "cpu": "/c"}, unified="/u", unified_controllers=("io",)
    )
    assert stats.directories(hybrid, "/p/c") == {
        "cpu": b"/c/p/c", "cpuacct": None, "memory": b"/m/p/c", "io": b"/u/p/c", "pids": None,
    }  # fmt: skip


def test_cpu_stats_default_is_zero() -> None:
    assert CpuStats().cpu_usage.total_usage == 0
