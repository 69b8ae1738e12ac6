"""What is known of a client whose connection has ended already."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest
import uvloop

from engine.http import peers


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_connection_that_has_ended(family: socket.AddressFamily, factory: Any) -> None:
    async def work() -> None:
        client, accepted = _pair(family)
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, accepted)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        transport.abort()
        await asyncio.sleep(0.01)
        assert peers.certificate(transport) is None
        assert peers.owner(transport) in ("", "127.0.0.1")
        assert peers.hung_up(transport) is not False

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work())


def _pair(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    if family is socket.AF_UNIX:
        pair = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            pair = socket.create_connection(server.getsockname()), server.accept()[0]
    for each in pair:
        each.setblocking(False)
    return pair
