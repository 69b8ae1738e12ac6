"""The monitor's end of the daemon's connection. It listens at RUN/monitor/socket or is started with
a connection, takes orders and sends the reports of a test.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from engine.monitor import messages
from tests.support import PATIENCE


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
        self.starts = 0
        self._listener: socket.socket | None = None
        self._lock = -1

    def listen(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(self.path))
        self._listener.listen(8)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def spawn(self, connection: int, lock: int) -> tuple[int, int]:
        """In place of `Monitor._spawn`."""
        self.starts += 1
        self._lock = os.dup(lock)
        self._serve(socket.socket(fileno=os.dup(connection)))
        return os.getpid(), os.open(os.devnull, os.O_RDONLY)

    def hold_lock(self) -> None:
        """As a monitor that runs, or has just been started by another daemon."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path.parent / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _accept(self, listener: socket.socket) -> None:
        self._serve(listener.accept()[0])

    def _serve(self, connection: socket.socket) -> None:
        self.connection = connection
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
        return await asyncio.wait_for(self.orders.get(), 10 * PATIENCE)

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
        """End connection, listening socket and lock, as a killed monitor's are."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self.disconnect()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def disconnect(self) -> None:
        if self.connection is not None:
            asyncio.get_running_loop().remove_reader(self.connection)
            self.connection.close()
            self.connection = None
