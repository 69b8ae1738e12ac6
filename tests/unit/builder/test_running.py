"""Cancellation of a build by the client's id, and the messages of a quiet build."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from engine.builder import output, quiet
from engine.builder.reports import ImageMade, Notice, Report
from engine.builder.running import RunningBuilds
from engine.errors import ServerError
from tests.support.engine.descriptors import none_left_open


class Build:
    """Yields `texts`, then waits, fails or ends."""

    def __init__(self, *texts: str, error: Exception | None = None, endless: bool = False) -> None:
        self._texts = texts
        self._error = error
        self._endless = endless
        self.closed = False

    async def run(self) -> AsyncGenerator[Report, None]:
        try:
            for text in self._texts:
                yield Notice(text)
            if self._endless:
                await asyncio.Event().wait()
            if self._error is not None:
                raise self._error
            yield ImageMade("sha256:1")
        finally:
            await asyncio.sleep(0)
            self.closed = True


def test_a_cancelled_build_ends_with_an_error() -> None:
    async def run() -> None:
        builds, build = RunningBuilds(), Build("a", "b", endless=True)
        messages = builds.run("x", build.run())
        assert await anext(messages) == Notice("a")
        assert await anext(messages) == Notice("b")
        builds.cancel("another")
        asyncio.get_running_loop().call_soon(builds.cancel, "x")
        with pytest.raises(ServerError, match="Build cancelled"):
            await anext(messages)
        assert build.closed
        builds.cancel("x")  # it is gone: not an error
        assert builds._by_id == {}

    asyncio.run(run())


def test_builds_of_one_id_are_cancelled_together() -> None:
    async def run() -> None:
        builds, two = RunningBuilds(), [Build("a", endless=True), Build("a", endless=True)]
        messages = [builds.run("x", build.run()) for build in two]
        for each in messages:
            await anext(each)
        builds.cancel("x")
        for each in messages:
            with pytest.raises(ServerError):
                await anext(each)
        assert all(build.closed for build in two) and builds._by_id == {}

    asyncio.run(run())


@pytest.mark.parametrize("error", [None, ServerError("broken")])
def test_a_build_that_is_not_cancelled(error: Exception | None) -> None:
    async def run() -> None:
        builds, build = RunningBuilds(), Build("a", error=error)
        seen = []
        try:
            async for message in builds.run("x", build.run()):
                seen.append(message)
        except ServerError as raised:
            assert raised is error
        assert seen == [Notice("a"), *(() if error else [ImageMade("sha256:1")])]
        assert build.closed and builds._by_id == {}

    asyncio.run(run())


@pytest.mark.parametrize("waiting", [False, True])
def test_a_client_that_leaves_closes_the_build(waiting: bool) -> None:
    async def run() -> None:
        builds, build = RunningBuilds(), Build("a", endless=True)
        messages = builds.run("x", build.run())
        await anext(messages)
        if waiting:
            step = asyncio.ensure_future(anext(messages))
            await asyncio.sleep(0)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
        else:
            await messages.aclose()
        assert build.closed and builds._by_id == {}

    asyncio.run(run())


def test_a_quiet_build_says_only_the_image(tmp_path: Path) -> None:
    async def run() -> None:
        build = Build("a", "b")
        seen = [message async for message in quiet.quiet(build.run(), tmp_path)]
        assert seen == [Notice("sha256:1\n")] and build.closed

    asyncio.run(run())


@pytest.mark.parametrize("count", [0, 3, 5000])
def test_a_quiet_build_that_fails_says_what_it_kept(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MEMORY", 1000)
    texts = [f"line {number}\r\n\N{SNOWMAN}" for number in range(count)]

    async def run() -> None:
        build = Build(*texts, error=ServerError("broken"))
        seen = []
        with pytest.raises(ServerError, match="broken"):
            async for message in quiet.quiet(build.run(), tmp_path):
                seen.append(message)
        assert seen == [Notice(text) for text in texts] and build.closed

    with none_left_open():
        asyncio.run(run())
    assert list(tmp_path.iterdir()) == []
