"""Bodies of requests on their way to a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.errors import Unavailable
from engine.system import feed
from engine.system.feed import Feed, one_body, skip
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
