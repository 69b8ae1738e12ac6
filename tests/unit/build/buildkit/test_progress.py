"""The output of a build as vertices, status lines and logs."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.build.buildkit import progress as module
from engine.build.buildkit.control_messages import StatusResponse
from engine.build.buildkit.progress import Progress, Steps
from engine.wire.build import BuildMessage, BuiltImage
from engine.wire.images import ProgressDetail


def collected(*messages: BuildMessage, error: str | None = None) -> tuple[list[dict[str, Any]], Steps]:
    """The vertices that the messages make, as their client sees them at the end."""

    async def work() -> tuple[StatusResponse, Steps]:
        progress = Progress("ref")
        steps = Steps(progress)
        for message in messages:
            steps.take(message)
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


def says(*texts: str) -> list[BuildMessage]:
    return [BuildMessage(stream=text) for text in texts]


def test_a_build() -> None:
    vertices, steps = collected(
        *says(
            *("Step 1/3 : FROM busybox\n", " ---> 0123456789ab\n"),
            *("Step 2/3 : RUN echo a && \\\n    echo b\n", " ---> Running in 0123456789ab\n", "out\n"),
            *("\x1b[91merr\n\x1b[0m", "Removing intermediate container 0123456789ab\n", " ---> 0123456789ab\n"),
            *("Step 3/3 : CMD x\n", " ---> Using cache\n", " ---> 0123456789ab\n"),
        ),
        BuildMessage(aux=BuiltImage(id="sha256:1")),
        BuildMessage(aux=BuiltImage(id="sha256:2")),
        *says("Successfully built 0123456789ab\n", "Successfully tagged x:latest\n"),
    )
    names = ["[1/3] FROM busybox", "[2/3] RUN echo a && \\\n    echo b", "[3/3] CMD x"]
    assert [vertex["name"] for vertex in vertices] == names
    assert [vertex["cached"] for vertex in vertices] == [False, False, True]
    assert all(vertex["ended"] and not vertex["error"] for vertex in vertices)
    assert [vertex["logs"] for vertex in vertices] == [[], [(1, b"out\n"), (2, b"err\n")], []]
    assert steps.image_id == "sha256:2"


def test_downloads_are_status_lines() -> None:
    def status(text: str, name: str, current: int = 0, total: int = 0) -> BuildMessage:
        detail = ProgressDetail(current=current, total=total) if total else None
        return BuildMessage(status=text, id=name, progress_detail=detail)

    (vertex,), _ = collected(
        *says("Step 1/1 : FROM x\n"),
        status("Downloading", "layer", 1, 10),
        status("Downloading", "layer", 10, 10),
        status("Pull complete", "layer"),
        BuildMessage(status="Status: Downloaded newer image for x"),
    )
    assert vertex["statuses"] == [
        ("layer: Downloading", 1, 10, False),
        ("layer: Downloading", 10, 10, True),
        ("layer: Pull complete", 0, 0, True),
        ("Status: Downloaded newer image for x", 0, 0, True),
    ]


def test_a_failure_is_at_its_step() -> None:
    vertices, _ = collected(*says("Step 1/3 : FROM x\n", "Step 2/3 : RUN false\n"), error="it failed")
    assert [(vertex["error"], vertex["ended"]) for vertex in vertices] == [("", True), ("it failed", True)]


def test_output_that_looks_like_a_step_is_output() -> None:
    vertices, _ = collected(
        *says("Step 1/3 : FROM x\n", "Step 2/3 : RUN nested\n", "Step 1/3 : FROM y\n", "Step 3/7 : RUN z\n", "Step x\n")
    )
    assert [vertex["name"] for vertex in vertices] == ["[1/3] FROM x", "[2/3] RUN nested"]
    assert b"".join(text for _, text in vertices[1]["logs"]) == b"Step 1/3 : FROM y\nStep 3/7 : RUN z\nStep x\n"


def test_output_before_the_first_step_has_a_vertex() -> None:
    (vertex,), _ = collected(*says("hello\n"))
    assert vertex["logs"] == [(1, b"hello\n")] and vertex["ended"]


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
        await asyncio.wait_for(waiting, 30)
        waiting = asyncio.ensure_future(progress.room())
        for _ in range(module.AHEAD + 1):
            vertex.log("x")
        await reader.aclose()  # one that leaves is not waited for
        await asyncio.wait_for(waiting, 30)

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
        assert [report async for report in progress.read()] == []

    asyncio.run(work())
