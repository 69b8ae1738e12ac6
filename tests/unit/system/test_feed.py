"""Bodies of requests on their way to a thread."""

from __future__ import annotations

import asyncio

import pytest

from engine.errors import Unavailable
from engine.system import feed
from engine.system.feed import Feed


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
        assert [Feed(), Feed()]

    asyncio.run(main())
