"""HTTP/1.1 connections to one plugin, over a Unix socket or TCP, kept between calls.

A small client on httptools, because a general one (aiohttp) costs more than the rest of a call to
an authorization plugin, which is made twice for every request.

Not here: the calls and their errors (`client.py`), where a plugin listens (`discovery.py`).
Owns:    the open connections, until `close`. Threads: the event loop's.
Raises:  Unreachable when no connection could be made, Broken when one ended before the answer was
         complete, TooLong for a large answer.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import stat
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools

from engine.errors import reason, words
from engine.plugins.discovery import Endpoint

KEPT = 8
"""Connections that are kept while they are idle."""

_OVERHEAD = 2
"""The bytes of an answer with its head and the frames of its chunks may be so many times the limit
of its body."""


class Unreachable(OSError):
    """No connection could be made: nothing was sent."""


class Broken(OSError):
    """The connection ended, or its bytes are not HTTP, before the answer was complete."""

    def __init__(self, words: str, *, silent: bool) -> None:
        super().__init__(words)
        self.silent = silent
        """No byte of an answer was received."""


class TooLong(Exception):
    """The answer is longer than the limit."""


class Connection(asyncio.Protocol):
    """One connection. It carries one call at a time."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of an answer's body."""
        self._limit = limit
        self._transport: Any = None
        self._answer: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._text = bytearray()
        self._received = 0
        self._in_body = self._framed = self._complete = False
        self.status = 0
        self.open = True
        """It can take another call, once it is idle."""

    async def exchange(self, pieces: Sequence[bytes]) -> tuple[int, bytearray]:
        """Send a request, and return the status and body of its answer."""
        if not self.open:
            raise Broken("the plugin has closed the connection", silent=True)
        self._parser = httptools.HttpResponseParser(self)
        self._text = bytearray()
        self._received = 0
        self._in_body = self._framed = self._complete = False
        answer = self._answer = asyncio.get_running_loop().create_future()
        try:
            self._transport.writelines(pieces)
            await answer
        except BaseException:
            self.abort()
            raise
        finally:
            self._answer = self._parser = None
            del answer  # an exception in it refers to this frame, and so to the request
        if self._transport.get_write_buffer_size():  # it answered before it had read the request
            self.abort()
        return self.status, self._text

    def abort(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._complete:
            self.abort()  # nothing was asked
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(Broken(f"the plugin's answer is not HTTP: {words(error)}", silent=False))
            return
        if len(self._text) > self._limit or self._received > _OVERHEAD * self._limit:
            self._fail(TooLong())
        elif self._complete:
            self._done()

    def eof_received(self) -> bool:
        self.open = False
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._answer is None or self._answer.done():
            return
        if self._in_body and not self._framed and error is None:
            self._done()  # RFC 9112, 6.3: such a body ends with the connection
        else:
            place = "in the middle of its answer" if self._received else "without an answer"
            words = f"the plugin closed the connection {place}"
            why = f": {reason(error)}" if isinstance(error, OSError) else ""
            self._fail(Broken(words + why, silent=not self._received))

    def _done(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self._transport.abort()

    # --- httptools --------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        if self._complete:
            self.open = False  # more than one answer
            return
        self.status = self._parser.get_status_code()
        self._in_body = self.status >= 200

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._text += data

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue: the answer follows
            self._framed = False
        elif not self._complete:
            self._complete = True
            self.open = self.open and self._parser.should_keep_alive()


class Connections:
    """The connections to one plugin."""

    def __init__(self, found: Endpoint, tls: ssl.SSLContext | None, limit: int) -> None:
        """`tls` for an https URL. `limit`: bytes of an answer's body."""
        self._socket, self._hostile = found.socket, found.hostile
        parts = urlsplit(found.url)
        self._host, self._port = parts.hostname or "", parts.port or (443 if tls else 80)
        self._tls = tls
        self._limit = limit
        self._path = parts.path
        self._fields = f"HTTP/1.1\r\nHost: {parts.netloc}\r\nUser-Agent: engined\r\n"
        self._idle: list[Connection] = []
        self._closed = False

    async def post(
        self, path: str, fields: str, pieces: Sequence[bytes], *, repeat: bool = False
    ) -> tuple[int, bytearray]:
        """POST the pieces as one body. `fields` are further header lines.

        With `repeat` the request is sent again on a new connection if a kept one turns out to be
        closed. It may then have been executed already.
        """
        size = sum(map(len, pieces))
        head = f"POST {self._path}{path} {self._fields}{fields}Content-Length: {size}\r\n\r\n".encode()
        connection = self._kept()
        if connection is not None:
            try:
                return await self._exchange(connection, (head, *pieces))
            except Broken as error:
                if not (repeat and error.silent):
                    raise
        return await self._exchange(await self._connect(), (head, *pieces))

    async def _exchange(self, connection: Connection, pieces: Sequence[bytes]) -> tuple[int, bytearray]:
        answer = await connection.exchange(pieces)
        if connection.open and not self._closed and len(self._idle) < KEPT:
            self._idle.append(connection)
        else:
            connection.abort()
        return answer

    def _kept(self) -> Connection | None:
        """The connection that was used last, because it is the least likely to be closed."""
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(self._limit)
        try:
            if self._hostile:
                await self._connect_without_links(connection)
            elif self._socket:
                await loop.create_unix_connection(lambda: connection, self._socket)
            else:
                await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            place = self._socket or f"{self._host}:{self._port}"
            raise Unreachable(f"cannot connect to {place}: {reason(error)}") from error
        return connection

    async def _connect_without_links(self, connection: Connection) -> None:
        """Connect to the socket itself; connect(2) would follow a link. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = os.open(self._socket, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not stat.S_ISSOCK(os.fstat(found).st_mode):
                raise OSError(errno.ENOTSOCK, "it is not a socket")
            client = socket.socket(socket.AF_UNIX)
            try:
                client.setblocking(False)
                await loop.sock_connect(client, f"/proc/self/fd/{found}")
                await loop.create_unix_connection(lambda: connection, sock=client)
            except BaseException:
                client.close()
                raise
        finally:
            os.close(found)

    def close(self) -> None:
        """Close the idle connections now, and others after their call."""
        self._closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
