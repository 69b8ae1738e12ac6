"""Resources at rest: memory, and CPU when idle and with stats streams."""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

from bench import steps, wire
from bench.engines import Engine
from bench.job import Figure, Job, Size
from bench.report import Target


def settled(engine: Engine) -> int:
    """The lowest PSS in 12 seconds: engined returns memory to the kernel up to 11 seconds after
    its last work.
    """
    lowest = engine.proportional_set_size()
    for _ in range(12):
        time.sleep(1)
        lowest = min(lowest, engine.proportional_set_size())
    return lowest


def at_rest(engine: Engine, _: Any) -> float:
    """MiB."""
    return settled(engine) / (1 << 20)


def processor(engine: Engine, seconds: float) -> float:
    """Percent of one CPU."""
    before, begin = engine.processor_time(), time.monotonic()
    time.sleep(seconds)
    return (engine.processor_time() - before) / (time.monotonic() - begin) * 100


def watched(engine: Engine, seconds: float) -> tuple[float, float]:
    """Percent of one CPU for one sample a second of each idle container, and the samples a second
    that each stream got.

    Engines choose their own interval, so the cost is scaled from the samples sent to one a second.
    """
    streams: dict[int, socket.socket] = {}
    texts: dict[int, bytearray] = {}
    poll = select.epoll()
    try:
        for container in engine.idle:
            stream = wire.connect(engine.socket)
            stream.sendall(wire.request("GET", f"/containers/{container}/stats"))
            streams[stream.fileno()] = stream
            texts[stream.fileno()] = bytearray()
            poll.register(stream, select.EPOLLIN)

        def read(until: float) -> None:
            while (left := until - time.monotonic()) > 0:
                for descriptor, _ in poll.poll(left):
                    data = streams[descriptor].recv(1 << 18)
                    assert data, "a stats stream ended"
                    texts[descriptor] += data

        read(time.monotonic() + 3)  # discard the first samples, which ignore the interval
        for text in texts.values():
            text.clear()
        before, begin = engine.processor_time(), time.monotonic()
        read(begin + seconds)
        spent, elapsed = engine.processor_time() - before, time.monotonic() - begin
        samples = sum(text.count(b'"precpu_stats"') for text in texts.values())
        for text in texts.values():
            lines = [line for line in bytes(text).splitlines() if line.startswith(b"{") and line.endswith(b"}")]
            assert lines, f"a container without a sample in {seconds} s"
            shown = json.loads(lines[-1])
            assert shown["cpu_stats"]["cpu_usage"]["total_usage"] > 0 and shown["memory_stats"]["usage"] > 0, lines[-1]
    finally:
        poll.close()
        for stream in streams.values():
            stream.close()
    pace = samples / len(streams) / elapsed
    return spent / elapsed / pace * 100, pace


def rest_jobs(size: Size) -> list[Job]:
    """Jobs without containers; they come first in a run."""
    return [
        Job(
            "memory",
            [Figure("memory", "PSS of all engine processes at rest", "MiB", target=Target(at_most=60))],
            at_rest,
            idle=None,
        )
    ]


def dense(size: Size) -> list[Job]:
    """Jobs from none to `count` idle running containers, which stay."""
    few, many = size.of(20, 5), size.of(150, 20)

    def per_container(engine: Engine, _: Any) -> tuple[float, float]:
        steps.stock(engine, few)
        before = settled(engine)
        begin = time.perf_counter()
        steps.stock(engine, many)
        elapsed = time.perf_counter() - begin
        return (settled(engine) - before) / (many - few) / 1024, (many - few) / elapsed

    return [
        Job(
            "memory-per-container",
            [
                Figure(
                    "memory-per-container",
                    f"PSS per further idle container, from {few} to {many}",
                    "KiB",
                    target=Target({"dockerd": 100, "podman": 4}),
                ),
                Figure(
                    "start-many",
                    f"create + start of those, {steps.CLIENTS} clients at once",
                    "1/s",
                    False,
                    Target({"podman": 1}),
                ),
            ],
            per_container,
            idle=0,
        ),
        Job(
            "idle-cpu",
            [Figure("idle-cpu", f"processor of the engine with {many} idle containers", "% of one")],
            lambda engine, _: processor(engine, size.of(4, 2)),
            idle=many,
            rest=2,
        ),
        Job(
            "stats",
            [
                Figure(
                    "stats",
                    f"processor for stats streams of {many} containers, at one sample a second each",
                    "% of one",
                    target=Target({"dockerd": 12, "podman": 1}, 3),
                ),
                Figure("stats-pace", "samples that each stream got", "1/s", False),
            ],
            lambda engine, _: watched(engine, size.of(7, 6)),
            idle=many,
            rest=1,
        ),
    ]
