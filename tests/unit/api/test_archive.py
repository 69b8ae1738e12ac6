"""Requests of `docker cp`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.api import archive
from engine.errors import NotFound


def test_a_missing_directory_is_reported_after_the_body() -> None:
    """A docker CLI that cannot send all of its archive prints an error of its own."""
    read = []

    async def body() -> AsyncIterator[bytes]:
        for piece in (b"a", b"b", b"c"):
            read.append(piece)
            yield piece

    def get(name: str) -> None:
        raise NotFound(f"No such container: {name}")

    engine: Any = SimpleNamespace(containers=SimpleNamespace(get=get))
    request: Any = SimpleNamespace(parameters={"id": "x"}, query={}, body=body())
    with pytest.raises(NotFound, match="No such container: x"):
        asyncio.run(archive.put(engine, request))
    assert read == [b"a", b"b", b"c"]
