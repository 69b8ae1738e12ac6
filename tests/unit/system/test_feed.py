"""Bodies of requests on their way to a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from engine.errors import ServerError, Unavailable
from engine.system import feed
from engine.system.feed import Feed, one_body, process, skip
from tests.support import PATIENCE


def test_bodies_at_a_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "BODIES", 2)

    async def main() -> None:
        first, _second = Feed(), Feed()
        with pytest.raises(Unavailable, match="2 bodies of requests are being received"):
            Feed()
        first.close()
        third = Feed()
        third.close()
        third.close()
        del _second  # dropped before it was used
        with one_body():
            assert Feed()
            _fourth = Feed()
            with pytest.raises(Unavailable), one_body():
                pass
        assert Feed()

    asyncio.run(main())


async def endless(pause: float = 0) -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(pause)
        yield bytes(1000)


@pytest.mark.parametrize(("size", "seconds", "pause"), [(5000, 1000.0, 0), (1 << 40, 0.05, 0), (1 << 40, 0.05, 1000)])
def test_what_is_skipped_is_bounded(size: int, seconds: float, pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "SKIPPED", size)
    monkeypatch.setattr(feed, "SKIP_SECONDS", seconds)

    async def main() -> None:
        await skip(endless(pause))
        if not pause:
            received = Feed()
            feeding = asyncio.ensure_future(received.feed(endless()))
            await asyncio.to_thread(received.skip)
            feeding.cancel()
            await asyncio.wait([feeding])
            received.close()

    asyncio.run(asyncio.wait_for(main(), 60 * PATIENCE))


def test_a_body_with_an_end_is_skipped_to_it() -> None:
    async def main() -> None:
        ended = False

        async def body() -> AsyncIterator[bytes]:
            nonlocal ended
            yield b"x"
            ended = True

        await skip(body())
        assert ended

    asyncio.run(main())


def test_a_cancelled_caller_waits_for_the_end_of_its_thread() -> None:
    begun, ended = threading.Event(), []

    def work(received: Feed) -> None:
        begun.set()
        try:
            while received.read():
                pass
        except ServerError as error:
            ended.append(error.message)

    async def main() -> None:
        processing = asyncio.create_task(process(Feed(), endless(0.01), work))
        await asyncio.to_thread(begun.wait)
        processing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await processing
        assert ended == ["the engine is stopping"]

    asyncio.run(main())


def test_the_result_and_the_failure_of_a_thread_reach_its_caller() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"c"

    def work(received: Feed) -> bytes:
        return received.read() + received.read() + received.read()

    def fail(received: Feed) -> int:
        raise OSError(28, "full")

    async def main() -> None:
        assert await process(Feed(), body(), work) == b"abc"
        with pytest.raises(OSError, match="full"):
            await process(Feed(), body(), fail)

    asyncio.run(main())
