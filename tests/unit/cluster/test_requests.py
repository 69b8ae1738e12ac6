"""Requests to a manager's process that ends meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from engine.cluster import requests
from engine.errors import ServerError
from engine.swarm_session.messages import LogLine, LogLines


class Lost:
    """A connection that ends after one answer."""

    async def ask_for_many(self, message: Any) -> AsyncGenerator[Any, None]:
        yield LogLines(lines=(LogLine(task="t1", stream=1, time=1, data=b"a line"),))
        raise ConnectionError("the connection has ended")


def test_logs_of_a_manager_that_ends() -> None:
    connection: Any = Lost()
    found = []

    async def test() -> None:
        async for lines in requests.follow(connection, "service", "web", {}):
            found.extend(lines)

    with pytest.raises(ServerError, match="manager's process has ended"):
        asyncio.run(test())
    assert [line.data for line in found] == [b"a line"]
