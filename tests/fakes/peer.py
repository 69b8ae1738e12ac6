"""The monitor's end of the daemon's connection. It listens at RUN/monitor/socket, takes orders and
sends the reports of a test.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from engine.monitor import messages


class Peer:
    """One listening socket; the newest connection is `connection`.

    Orders queue up in `orders`, descriptors beside them are closed.
    """

    def __init__(self, run: Path, codec: messages.Codec = messages.CURRENT) -> None:
        self.codec = codec
        self.path = run / "monitor" / "socket"
        self.orders: asyncio.Queue[messages.Order] = asyncio.Queue()
        self.connection: socket.socket | None = None
        self.descriptors: dict[int, int] = {}
        """Number of descriptors that came with an order, by its `seq`."""
        self._listener: socket.socket | None = None

    def listen(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(self.path))
        self._listener.listen(8)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        self.connection, _ = listener.accept()
        self.connection.setblocking(False)
        asyncio.get_running_loop().add_reader(self.connection, self._read, self.connection)

    def _read(self, connection: socket.socket) -> None:
        data, descriptors, _, _ = socket.recv_fds(connection, messages.PACKET, 8)
        for descriptor in descriptors:
            os.close(descriptor)
        if data:
            order = self.codec.decode_order(data)
            self.descriptors[order.seq] = len(descriptors)
            self.orders.put_nowait(order)
        else:
            asyncio.get_running_loop().remove_reader(connection)

    async def next(self) -> messages.Order:
        return await asyncio.wait_for(self.orders.get(), 10)

    async def greet(self) -> messages.Hello:
        """Take the Hello and answer it as a monitor without processes. A Hello of another protocol
        is refused first.
        """
        hello = await self.next()
        while isinstance(hello, messages.Hello) and hello.protocol != self.codec.protocol:
            self.send(messages.Failed(hello.seq, f"the monitor speaks protocol {self.codec.protocol}"))
            hello = await self.next()
        assert isinstance(hello, messages.Hello)
        self.send(messages.Done(hello.seq))
        return hello

    def send(self, report: messages.Report, descriptors: Sequence[int] = ()) -> None:
        """Send a report, then close the descriptors here."""
        self.send_bytes(self.codec.encode(report), descriptors)

    def send_bytes(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        assert self.connection is not None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
        self.connection.sendmsg([data], rights if descriptors else [])
        for descriptor in descriptors:
            os.close(descriptor)

    def die(self) -> None:
        """End the connection and the listening socket, as a killed monitor's are."""
        for end in (self.connection, self._listener):
            if end is not None:
                asyncio.get_running_loop().remove_reader(end)
                end.close()
        self.connection = self._listener = None
