"""The output of a build as vertices, status lines and logs."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.buildkit import progress as module
from engine.builder.buildkit.control_messages import StatusResponse
from engine.builder.buildkit.progress import Clip, Limits, Progress, Steps
from engine.builder.reports import (
    STDERR,
    STDOUT,
    CacheHit,
    ImageMade,
    Notice,
    OfStage,
    Output,
    Report,
    StepBegun,
    StepEnded,
    Transfer,
)
from engine.rpc import protobuf
from engine.wire.images import ProgressDetail
from tests.support import PATIENCE


def collected(*reports: Report, error: str | None = None) -> tuple[list[dict[str, Any]], Steps]:
    """The vertices that the reports make, as their client sees them at the end."""

    async def work() -> tuple[StatusResponse, Steps]:
        progress = Progress("ref")
        steps = Steps(progress)
        for report in reports:
            steps.take(report)
        steps.end(error or "")
        progress.close()
        found = StatusResponse(vertexes=[], statuses=[], logs=[])
        async for report in progress.read():
            found.vertexes += report.vertexes
            found.statuses += report.statuses
            found.logs += report.logs
        return found, steps

    found, steps = asyncio.run(work())
    vertices: dict[str, dict[str, Any]] = {}
    for vertex in found.vertexes:
        shown = vertices.setdefault(vertex.digest, {"logs": [], "statuses": []})
        assert vertex.started is not None and vertex.digest.startswith("sha256:") and len(vertex.digest) == 71
        shown |= {
            "name": vertex.name,
            "cached": vertex.cached,
            "ended": vertex.completed is not None,
            "error": vertex.error,
        }
    for log in found.logs:
        vertices[log.vertex]["logs"].append((log.stream, log.message))
    for status in found.statuses:
        entry = (status.name, status.current, status.total, status.completed is not None)
        vertices[status.vertex]["statuses"].append(entry)
    return list(vertices.values()), steps


def began(number: int, total: int, text: str, vertex: str = "") -> StepBegun:
    return StepBegun(number, total, text, vertex)


def test_a_build() -> None:
    vertices, steps = collected(
        *(began(1, 3, "FROM busybox", "[1/2] FROM busybox"), Notice(" ---> 0123456789ab\n", classic=True)),
        *(began(2, 3, "RUN a", "[2/2] RUN a"), Notice(" ---> Running in 0123456789ab\n", classic=True), CacheHit()),
        *(Output(1, "out\n"), Output(2, "err\n"), Notice("words\n")),
        *(began(3, 3, "CMD x"), CacheHit(), Notice(" ---> 0123456789ab\n", classic=True)),
        *(ImageMade("sha256:1"), ImageMade("sha256:2")),
    )
    assert [vertex["name"] for vertex in vertices] == ["[1/2] FROM busybox", "[2/2] RUN a"]
    assert [vertex["cached"] for vertex in vertices] == [False, True]
    assert all(vertex["ended"] and not vertex["error"] for vertex in vertices)
    assert [vertex["logs"] for vertex in vertices] == [[], [(1, b"out\n"), (2, b"err\n"), (1, b"words\n")]]
    assert steps.image_id == "sha256:2"


def test_stages_side_by_side() -> None:
    vertices, steps = collected(
        OfStage(0, began(1, 4, "RUN a", "[a 1/1] RUN a")),
        OfStage(1, began(2, 4, "RUN b", "[b 1/2] RUN b")),
        OfStage(0, Output(1, "of a\n")),
        OfStage(1, Output(1, "of b\n")),
        OfStage(1, CacheHit()),
        OfStage(1, StepEnded()),
        OfStage(1, StepBegun(3, 4, "RUN c", "[b 2/2] RUN c", (5, 6))),
        OfStage(0, Output(2, "more\n")),
        OfStage(1, StepEnded(failed=True)),
        error="it failed",
    )
    assert [(each["name"], each["cached"], each["error"]) for each in vertices] == [
        ("[a 1/1] RUN a", False, "context canceled"),
        ("[b 1/2] RUN b", True, ""),
        ("[b 2/2] RUN c", False, "it failed"),
    ]
    assert [each["logs"] for each in vertices] == [[(1, b"of a\n"), (2, b"more\n")], [(1, b"of b\n")], []]
    assert steps.lines == (5, 6)


def test_downloads_are_status_lines() -> None:
    def status(text: str, name: str, current: int = 0, total: int = 0) -> Transfer:
        detail = ProgressDetail(current=current, total=total) if total else None
        return Transfer(status=text, id=name, progress_detail=detail)

    (vertex,), _ = collected(
        began(1, 1, "FROM x", "[1/1] FROM x"),
        status("Downloading", "layer", 1, 10),
        status("Downloading", "layer", 10, 10),
        status("Pull complete", "layer"),
        Transfer(status="Status: Downloaded newer image for x"),
    )
    assert vertex["statuses"] == [
        ("layer: Downloading", 1, 10, False),
        ("layer: Downloading", 10, 10, True),
        ("layer: Pull complete", 0, 0, True),
        ("Status: Downloaded newer image for x", 0, 0, True),
    ]


def test_a_failure_is_at_its_step() -> None:
    vertices, _ = collected(began(1, 3, "FROM x", "1"), began(2, 3, "RUN false", "2"), error="it failed")
    assert [(vertex["error"], vertex["ended"]) for vertex in vertices] == [("", True), ("it failed", True)]


def test_output_that_looks_like_the_builder_s_is_output() -> None:
    texts = ("Step 2/2 : RUN evil\n", " ---> Using cache\n", "Successfully built 0123456789ab\n", "\x1b[91mred\x1b[0m")
    (vertex,), _ = collected(began(1, 2, "RUN x", "[1/2] RUN x"), *(Output(1, text) for text in texts))
    assert not vertex["cached"] and vertex["name"] == "[1/2] RUN x"
    assert vertex["logs"] == [(1, text.encode()) for text in texts]


def test_output_without_a_vertex_gets_one() -> None:
    first, second = collected(Notice("hello\n"), began(1, 1, "FROM one"), Output(1, "triggered\n"))[0]
    assert first["logs"] == [(1, b"hello\n")] and first["ended"]
    assert (second["name"], second["logs"]) == ("FROM one", [(1, b"triggered\n")])


def test_a_slow_reader_is_waited_for() -> None:
    async def work() -> None:
        progress = Progress("ref")
        vertex = progress.vertex("v")
        reader = progress.read()
        await anext(reader)
        for _ in range(module.AHEAD + 1):
            vertex.log("x")
        waiting = asyncio.ensure_future(progress.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        await anext(reader)
        await asyncio.wait_for(waiting, 30 * PATIENCE)
        waiting = asyncio.ensure_future(progress.room())
        for _ in range(module.AHEAD + 1):
            vertex.log("x")
        await reader.aclose()  # one that leaves is not waited for
        await asyncio.wait_for(waiting, 30 * PATIENCE)

    asyncio.run(work())


@pytest.mark.parametrize("ending", ["pace", "many", "closed"])
def test_what_is_reported_meanwhile_goes_together(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # seconds: no other reason to read
    monkeypatch.setattr(module, "PACE", 0.01 if ending == "pace" else 3600.0)

    async def work() -> None:
        progress = Progress("ref")
        vertex = progress.vertex("v")
        reader = progress.read()
        await anext(reader)
        vertex.log("1")
        reading = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        assert not reading.done()
        for number in range(module.TOGETHER if ending == "many" else 2):
            vertex.log(str(number))
        if ending == "closed":
            progress.close()
        report = await asyncio.wait_for(reading, 30 * PATIENCE)
        assert len(report.logs) == (module.TOGETHER if ending == "many" else 3)
        reader.close()

    asyncio.run(work())


def test_readers_that_come_late() -> None:
    async def work() -> None:
        progress = Progress("ref")
        vertex = progress.vertex("v")
        for number in range(module.BACKLOG + 5):
            vertex.log(str(number))
        vertex.end()
        vertex.end("later")
        progress.close()
        reports = [report async for report in progress.read()]
        logs = [log.message for report in reports for log in report.logs]
        assert len(logs) == module.BACKLOG - 1 and logs[-1] == str(module.BACKLOG + 4).encode()
        last = reports[-1].vertexes[-1]
        assert last.completed is not None and not last.error
        assert [report async for report in progress.read()] == [StatusResponse(vertexes=[last])]

    asyncio.run(work())


def test_the_end_waits_for_readers_that_are_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gives up the status of a build soon after its answer."""

    async def work() -> None:
        progress = Progress("ref")
        vertex = progress.vertex("v")
        reader = progress.read()
        await anext(reader)
        for _ in range(3 * module.TOGETHER):
            vertex.log("x")
        progress.close()
        ending = asyncio.ensure_future(progress.taken())
        for _ in range(3):
            await anext(reader)
            await asyncio.sleep(0)
            assert not ending.done(), "the last message is not sent yet"
        assert [report async for report in reader] == []
        await asyncio.wait_for(ending, 30 * PATIENCE)
        await progress.taken()

    asyncio.run(work())

    async def stalled() -> None:
        progress = Progress("ref")
        reader = progress.read()
        progress.vertex("v")
        await anext(reader)
        progress.close()
        await asyncio.wait_for(progress.taken(), 30 * PATIENCE)
        await reader.aclose()

    monkeypatch.setattr(module, "STALLED", 0.01)
    asyncio.run(stalled())


# --- bounds ---------------------------------------------------------------------------------------


def test_output_is_clipped_by_its_speed() -> None:
    clip = Clip(Limits(1 << 20, 100), 10.0)
    assert clip.take(b"a" * 60, 10.0) == b"a" * 60
    assert clip.take(b"b" * 60, 10.5) == b"b" * 40 + b"\n[output clipped, log limit 100B/s reached]\n"
    assert clip.take(b"c" * 60, 10.9) == b"", "it says so once"
    assert clip.take(b"d" * 10, 11.1) == b"d" * 10, "another second has begun"
    assert clip.take(b"e" * 50, 11.2) == b"e" * 10 + b"\n[output clipped, log limit 100B/s reached]\n"


def test_output_is_clipped_by_its_size() -> None:
    clip = Clip(Limits(), 0.0)
    shown = clip.take(b"x" * (3 << 20), 60.0)
    assert shown == b"x" * (2 << 20) + b"\n[output clipped, log limit 2MiB reached]\n"
    assert clip.take(b"y", 1e9) == b""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Limits(2 << 20, 200 << 10)),
        ({"BUILDKIT_STEP_LOG_MAX_SIZE": "10485760", "BUILDKIT_STEP_LOG_MAX_SPEED": "-1"}, Limits(10 << 20, -1)),
        ({"BUILDKIT_STEP_LOG_MAX_SIZE": "10m", "BUILDKIT_STEP_LOG_MAX_SPEED": "-2"}, Limits()),
    ],
)
def test_limits_of_the_environment(environment: dict[str, str], expected: Limits) -> None:
    assert module.limits(environment) == expected


_LIMIT = st.one_of(st.just(-1), st.integers(0, 300))


@given(_LIMIT, _LIMIT, st.lists(st.tuples(st.floats(0, 3), st.binary(max_size=200)), max_size=20))
def test_what_is_shown_is_a_part_of_the_output(size: int, speed: int, writes: list[tuple[float, bytes]]) -> None:
    clip, now, shown = Clip(Limits(size, speed), 0.0), 0.0, 0
    for pause, data in writes:
        now += pause
        found = clip.take(data, now)
        text = found.partition(b"\n[output clipped, log limit ")[0] if found != data else found
        assert data.startswith(text)
        shown += len(text)
        if size >= 0:
            assert shown <= size
        if speed >= 0:
            assert shown <= max(1, math.ceil(now)) * speed
        if size < 0 and speed < 0:
            assert found == data


def test_messages_are_bounded() -> None:
    """Whatever is written, and however late a client asks."""

    async def work() -> list[bytes]:
        progress = Progress("ref")
        for number in range(300):
            vertex = progress.vertex(f"[{number}/300] RUN " + "n" * (1 << 20))
            for stream in (STDOUT, STDERR):
                for _ in range(20):
                    vertex.log("x" * 250_000, stream)
            vertex.end("e" * (1 << 20) + ": exit code: 7")
        progress.close()
        return [protobuf.encode(report) async for report in progress.read()]

    messages = asyncio.run(work())
    assert max(map(len, messages)) < module.TOGETHER_BYTES + (256 << 10)
    assert sum(map(len, messages)) < module.BACKLOG_BYTES * 1.1
    last = protobuf.decode(messages[-1], StatusResponse).vertexes[-1]
    assert last.error.startswith("eee") and last.error.endswith(": exit code: 7")
    assert last.name.startswith("[299/300] RUN nnn") and last.completed is not None


def test_a_reader_aside() -> None:
    """It gets everything, in few messages, and takes nothing from the client that comes late."""

    async def work() -> None:
        progress = Progress("ref")
        recorded: list[StatusResponse] = []

        reports = progress.read_aside()

        async def record() -> None:
            async for report in reports:
                recorded.append(report)

        recording = asyncio.create_task(record())
        await asyncio.sleep(0)
        vertex = progress.vertex("a")
        vertex.log("one")
        await asyncio.sleep(0)
        assert not recorded, "it waits for more"
        for _ in range(module.TOGETHER):
            vertex.log("more")
        await asyncio.sleep(0)
        assert len(recorded) == 1
        vertex.end("it failed")
        progress.close()
        await progress.taken()
        await recording
        late = [report async for report in progress.read()]
        for reports in (recorded, late):
            assert sum(len(report.logs) for report in reports) == module.TOGETHER + 1
            assert reports[-1].vertexes[-1].error == "it failed"
        assert progress.failed == recorded[0].vertexes[0].digest

    asyncio.run(work())


def test_a_reader_that_never_reads_is_closed() -> None:
    async def work() -> None:
        progress = Progress("ref")
        vertex = progress.vertex("v")
        for read in (progress.read, progress.read_aside):
            reader = read()
            for _ in range(module.AHEAD + 1):
                vertex.log("x")
            waiting = asyncio.ensure_future(progress.room())
            await asyncio.sleep(0)
            assert not waiting.done()
            reader.close()
            await waiting
            assert [report async for report in reader] == []
        progress.close()
        await progress.taken()

    asyncio.run(work())


def test_a_reader_that_comes_late() -> None:
    """It learns the names of the steps, but not what they have written so far."""

    async def work() -> list[StatusResponse]:
        progress = Progress("ref")
        first = progress.read()
        progress.vertex("a").end()
        running = progress.vertex("b")
        running.log("early")
        await anext(first)
        second = progress.read()
        found = [await anext(second)]
        running.log("late")
        found.append(await anext(second))
        running.end()
        progress.close()
        found += [report async for report in second]
        await first.aclose()
        return found

    found = asyncio.run(work())
    assert [(vertex.name, vertex.completed is not None) for vertex in found[0].vertexes] == [("a", True), ("b", False)]
    assert [[log.message for log in report.logs] for report in found] == [[], [b"late"], []]
    assert [vertex.name for vertex in found[2].vertexes] == ["b"]
