"""The body of a wait's reply."""

from __future__ import annotations

import asyncio

import pytest

from engine.api.containers import _Waited
from engine.api.versions import VERSIONS
from engine.containers.waiting import Ended
from engine.http.messages import Headers, Query, Request


async def _body(ended: Ended, version: str) -> bytes:
    request = Request("POST", "/containers/c/wait", Query(), Headers([]))
    request.version = VERSIONS[version]
    end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
    end.set_result(ended)
    return b"".join([chunk async for chunk in _Waited(end, request)])


@pytest.mark.parametrize("version", ["1.24", "1.33", "1.34", "1.55"])
def test_an_exit(version: str) -> None:
    assert asyncio.run(_body(Ended(137), version)) == b'{"StatusCode":137}\n'


@pytest.mark.parametrize(
    ("version", "body"),
    [
        ("1.33", b""),
        ("1.34", b'{"StatusCode":3,"Error":{"Message":"the disk is full"}}\n'),
        ("1.55", b'{"StatusCode":3,"Error":{"Message":"the disk is full"}}\n'),
    ],
)
def test_a_removal_that_failed(version: str, body: bytes) -> None:
    """Clients below 1.34 take an empty body for an error."""
    assert asyncio.run(_body(Ended(3, "the disk is full"), version)) == body


def test_a_client_that_leaves() -> None:
    async def leave() -> bool:
        request = Request("POST", "/containers/c/wait", Query(), Headers([]))
        end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        await _Waited(end, request).aclose()
        return end.cancelled()

    assert asyncio.run(leave())
