"""A sample of a container's counters, and 150 containers with an open statistics stream each.

Budgets: 60 us a sample, 3 % of a core for the streams at one sample a second, without the cost of
         HTTP. Measured on real cgroups with limits and interfaces, because most of the time is
         spent in the kernel.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine._fast.cgroup import Counters, Processors, samples
from engine.containers.stats import Statistics, directories
from engine.runtime.cgroups import Cgroups

CONTAINERS = 150


@pytest.fixture(scope="module")
def cgroups() -> Iterator[tuple[Cgroups, list[str]]]:
    host = Cgroups.detect()
    controllers = [name for name in ("cpu", "cpuacct", "memory", "blkio", "pids") if name in host.controllers]
    if os.geteuid() != 0 or host.missing:
        pytest.skip("needs root and every controller")
    roots = {host.controllers[name] for name in controllers} or {host.unified}
    parent = f"/engined-bench-{os.getpid()}"
    paths = [f"{parent}/{number}" for number in range(CONTAINERS)]
    try:
        for root in roots:
            os.mkdir(root + parent)
            if host.mode == "v2":
                Path(root + parent, "cgroup.subtree_control").write_text("+cpu +io +memory +pids")
            for path in paths:
                os.mkdir(root + path)
        yield host, paths
    finally:
        host.remove(parent)


def opened(host: Cgroups, path: str) -> Counters:
    return Counters(**directories(host, path), network=b"/proc/self/net/dev")


def test_sample(benchmark: Any, cgroups: tuple[Cgroups, list[str]]) -> None:
    counters = opened(cgroups[0], cgroups[1][0])
    sample = counters.sample()
    assert sample is not None and "inactive_file" in sample.memory
    assert sample.memory_unified or len(sample.cpu_each) >= (os.cpu_count() or 1)
    benchmark.extra_info["budget_us"] = 60
    benchmark(counters.sample)


def test_samples_of_a_slice(benchmark: Any, cgroups: tuple[Cgroups, list[str]]) -> None:
    many = [opened(cgroups[0], path) for path in cgroups[1][:32]]
    assert all(sample is not None for sample in samples(many))
    benchmark.extra_info["containers"] = len(many)
    benchmark(samples, many)


@pytest.mark.timed("the text depends on the host")
def test_processors(benchmark: Any) -> None:
    processors = Processors()
    assert processors.read()[0] > 0
    benchmark(processors.read)


def test_open(benchmark: Any, cgroups: tuple[Cgroups, list[str]]) -> None:
    benchmark(lambda: opened(cgroups[0], cgroups[1][0]).close())


@pytest.mark.timed("a share of five seconds")
def test_streams(benchmark: Any, cgroups: tuple[Cgroups, list[str]]) -> None:
    """Processor time of this process over five seconds of 150 streams."""
    host, paths = cgroups

    async def main() -> tuple[float, float]:
        statistics = Statistics(host)
        counts = [0] * CONTAINERS

        async def read(number: int) -> None:
            stream = statistics.stream(str(number), pid=os.getpid(), cgroup=paths[number])
            try:
                async for text in stream:
                    counts[number] += 1
                    if counts[number] == 1:
                        assert json.loads(text)["precpu_stats"]["system_cpu_usage"] > 0
            finally:
                await stream.aclose()

        tasks = [asyncio.ensure_future(read(number)) for number in range(CONTAINERS)]
        await asyncio.sleep(2)
        begun, cpu, wall = sum(counts), time.process_time(), time.perf_counter()
        await asyncio.sleep(5)
        cpu, wall, taken = time.process_time() - cpu, time.perf_counter() - wall, sum(counts) - begun
        while min(counts) < 2:
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return cpu / wall * 100, taken / wall

    percent, rate = benchmark.pedantic(lambda: asyncio.run(main()), rounds=1)
    benchmark.extra_info |= {"core_percent": round(percent, 2), "samples_per_second": round(rate), "budget_percent": 3}
