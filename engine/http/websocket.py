"""Websocket clients (RFC 6455) of a byte stream: the upgrade, and a relay between the client's
messages and a plain socket.

The payload of the client's messages, of any kind and length, is written to the socket as it
arrives. Bytes from the socket become binary messages, or, for older clients, text if they are UTF-8
and binary otherwise, so that nothing is lost and no text is invalid. Neither side is read faster
than the other accepts, and no message is held whole.

The relay runs in the daemon: unlike an attach over a plain socket, it ends with the daemon, and the
client gets a Close (1001).

Not here: frames and the handshake's rules (wsproto), the relays of a server (`relays.py`), the
          stream's content.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from engine.errors import EngineError, InvalidParameter, words
from engine.http import origins
from engine.http.messages import Request

_log = logging.getLogger(__name__)

READ_SIZE = 64 * 1024
CLOSE_SECONDS = 5.0
"""Seconds that the client may take to answer a Close."""
REASON_LIMIT = 123
"""Bytes of a Close's reason (RFC 6455, 5.5)."""

_NOT_COPIED = (b"connection", b"upgrade", b"content-type")

Join = Callable[[socket.socket], Awaitable[None]]
"""Connects one end of a socket pair to the stream. The relay closes that end.
"""


class Upgrade:
    """A request for a websocket. Raises InvalidParameter when it is not a valid one, and Forbidden
    when a page of another web site makes it.
    """

    def __init__(self, request: Request) -> None:
        origins.check_site(request.headers)
        self.protocol = WSConnection(ConnectionType.SERVER)
        if request.headers.get("upgrade").lower() != "websocket":
            raise InvalidParameter("not a websocket handshake: the header Upgrade: websocket is missing")
        try:
            self.protocol.initiate_upgrade_connection([*request.headers], request.path)
        except RemoteProtocolError as error:
            raise InvalidParameter(f"not a websocket handshake: {words(error)}") from None

    def accept(self, head: bytes) -> bytes:
        """The 101 answer. Other header fields are copied from `head`, the head of an answer."""
        fields = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
        extra = [(name, value.strip()) for name, _, value in fields if name and name.lower() not in _NOT_COPIED]
        return self.protocol.send(AcceptConnection(extra_headers=extra))

    def relay(self, descriptor: int, takes: bool, binary: bool) -> Relay:
        """As `Relays.start` says."""
        return Relay(self.protocol, socket.socket(fileno=descriptor), takes, binary)


class Relay:
    """One client."""

    def __init__(self, protocol: WSConnection, client: socket.socket, takes: bool, binary: bool) -> None:
        self._protocol = protocol
        self._client = client
        self._takes = takes
        self._binary = binary
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()

    async def run(self, accept: bytes, early: bytes, join: Join) -> None:
        near, far = socket.socketpair()
        tasks: list[asyncio.Task[None]] = []
        with self._client, near, far:
            self._client.setblocking(False)
            near.setblocking(False)
            try:
                await self._loop.sock_sendall(self._client, accept)
                # before `join`, because the stream may begin with many bytes
                tasks.append(self._loop.create_task(self._output(near)))
                await join(far)
                far.close()
                received = self._loop.create_task(self._input(near, early))
                tasks.append(received)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                # the stream has ended, and all of it is sent with the Close
                if not received.done():
                    near.shutdown(socket.SHUT_RDWR)
                    await asyncio.wait((received,), timeout=CLOSE_SECONDS)
            except EngineError as error:
                with suppress(OSError):
                    await self.send(CloseConnection(CloseReason.INTERNAL_ERROR, _shortened(error.message)))
            except OSError as error:
                _log.debug("a websocket client disconnected: %s", error)
            finally:
                for task in tasks:
                    task.cancel()
                for result in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(result, Exception) and not isinstance(result, OSError):
                        _log.error("a websocket relay failed", exc_info=result)

    async def end(self) -> None:
        """The server ends: send the client a Close."""
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(self.send(CloseConnection(CloseReason.GOING_AWAY)), 1)

    async def send(self, event: Event) -> None:
        """Send one event. Does nothing when the connection is closing: a Close was sent or
        received.
        """
        async with self._sending:
            try:
                data = self._protocol.send(event)
            except LocalProtocolError:
                return
            await self._loop.sock_sendall(self._client, data)

    async def _output(self, near: socket.socket) -> None:
        while chunk := await self._loop.sock_recv(near, READ_SIZE):
            await self.send(BytesMessage(data=chunk) if self._binary else _message(chunk))
        await self.send(CloseConnection(CloseReason.NORMAL_CLOSURE))

    async def _input(self, near: socket.socket, data: bytes) -> None:
        if not data:
            data = await self._loop.sock_recv(self._client, READ_SIZE)
        while data:
            self._protocol.receive_data(data)
            for event in self._protocol.events():
                if isinstance(event, (TextMessage, BytesMessage)):
                    await self._take(near, event.data)
                elif isinstance(event, Ping):
                    await self.send(event.response())
                elif isinstance(event, CloseConnection):
                    if self._protocol.state is not ConnectionState.CLOSED:
                        await self.send(event.response())
                    return
            data = await self._loop.sock_recv(self._client, READ_SIZE)

    async def _take(self, near: socket.socket, data: str | bytes | bytearray) -> None:
        payload = data.encode() if isinstance(data, str) else bytes(data)
        if payload and self._takes:
            # the stream has ended, which `_output` reports
            with suppress(BrokenPipeError, ConnectionResetError):
                await self._loop.sock_sendall(near, payload)


def _message(chunk: bytes) -> Event:
    try:
        return TextMessage(data=chunk.decode())
    except UnicodeDecodeError:
        return BytesMessage(data=chunk)


def _shortened(text: str) -> str:
    return text.encode()[:REASON_LIMIT].decode(errors="ignore")
