"""A client's stream and a container: detach keys, and attach with history and live output without a
gap or a repeat.

The bytes themselves go from the monitor to the client's socket; the daemon only writes history, and
hands the socket over.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, closing, suppress
from pathlib import Path

import msgspec

from engine.containers import logs
from engine.containers.container import Container
from engine.errors import InvalidParameter
from engine.monitor.handles import Attached, Client, LogReading

DEFAULT_DETACH_KEYS = b"\x10\x11"  # ctrl-p,ctrl-q

_CONTROL = {**{chr(code): code - 96 for code in range(97, 123)}, "@": 0, "[": 27, "\\": 28, "]": 29, "^": 30, "_": 31}


def parse_detach_keys(text: str | None) -> bytes:
    """Parses `a`, `ctrl-p,ctrl-q` to the bytes to wait for (Docker Engine API, ContainerAttach).

    None selects the default, an empty string disables the keys.
    """
    if text is None:
        return DEFAULT_DETACH_KEYS
    if not text:
        return b""
    keys = bytearray()
    # A comma may be the value of a ctrl- key, or stand alone between commas. The remains of a split
    # on "," show which.
    for part in _parts(text):
        name = part[5:] if part.startswith("ctrl-") else ""
        if len(part) == 1 and part.isascii():
            keys.append(ord(part))
        elif name in _CONTROL and len(name) == 1:
            keys.append(_CONTROL[name])
        elif name == ",":
            keys.append(ord(","))
        else:
            raise InvalidParameter(
                f"Invalid escape keys ({text}) provided: {part!r} is neither a character nor ctrl-<value>"
            )
    return bytes(keys)


def _parts(text: str) -> list[str]:
    parts: list[str] = []
    rest = text
    while rest:
        width = 6 if rest.startswith("ctrl-") and len(rest) >= 6 else 1
        end = rest.find(",", width)
        end = len(rest) if end < 0 else end
        parts.append(rest[:end])
        if end + 1 == len(rest):
            raise InvalidParameter(f"Invalid escape keys ({text}) provided: they end in a comma")
        rest = rest[end + 1 :]
    return parts


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The query of an attach."""

    logs: bool = False
    stream: bool = False
    stdin: bool = False
    stdout: bool = False
    stderr: bool = False
    detach_keys: bytes = DEFAULT_DETACH_KEYS


async def attach(
    container: Container,
    descriptor: int,
    wanted: Wanted,
    *,
    head: bytes,
    early: bytes,
    framed: bool | None = None,
) -> None:
    """Attach the client behind `descriptor` (which stays the caller's) as its query asks.

    If the container has ended since the request, the client gets the log's content and the end of
    the stream. If the container does not run, the client waits for its next run. Raises the
    lifecycle table's Conflict when the container is paused; nothing has been written then. `framed`
    overrides the default, which the tty decides.
    """
    record = container.record
    container.check_attach()
    ran = container.running
    raw = record.config.tty if framed is None else not framed
    log = container.log_path if wanted.logs else None
    if log is None and wanted.stream:
        attached = await _join(container, descriptor, wanted, raw=raw, head=head, early=early, hold=False)
        container.publish("attach")
        if ran and not attached.running:
            _shut_down(descriptor)
        return
    reading = container.log_reading()
    try:
        position = None
        client = 0
        ended = not wanted.stream
        if wanted.stream:
            # Until the log is open, rotation must not remove the history that this client is to
            # get.
            if reading is not None:
                await reading.begin()
            before = await asyncio.to_thread(logs.end, log) if log is not None else (0, 0)
            attached = await _join(container, descriptor, wanted, raw=raw, head=b"", early=early, hold=True)
            client = attached.client
            ended = ran and not attached.running
            if not ended:
                position = (attached.log_inode, attached.log_offset) if attached.log_inode else before
        container.publish("attach")
        with closing(socket.socket(fileno=_duplicate(descriptor))) as client_socket:
            client_socket.setblocking(False)
            with suppress(ConnectionError):  # the client left: the monitor notices it too
                await asyncio.get_running_loop().sock_sendall(client_socket, head)
                if log is not None:
                    await _write_history(client_socket, log, wanted, raw, position, reading)
            if ended:
                _shut_down(descriptor)
    finally:
        if reading is not None:
            reading.end()
    if wanted.stream:
        await container.parts.monitor.release(container.id, client)


def _shut_down(descriptor: int) -> None:
    """End the stream for the client, and for the monitor if it has the socket too."""
    with closing(socket.socket(fileno=_duplicate(descriptor))) as client_socket, suppress(OSError):
        client_socket.shutdown(socket.SHUT_RDWR)


async def _join(
    container: Container,
    descriptor: int,
    wanted: Wanted,
    *,
    raw: bool,
    head: bytes,
    early: bytes,
    hold: bool,
) -> Attached:
    config = container.record.config
    client = Client(
        descriptor=descriptor,
        stdin=wanted.stdin and config.open_stdin,
        stdout=wanted.stdout,
        stderr=wanted.stderr,
        raw=raw,
        head=head,
        early=early,
        detach_keys=wanted.detach_keys if config.tty else b"",
    )
    return await container.parts.monitor.attach(container.id, client, hold=hold)


async def _write_history(
    client_socket: socket.socket,
    log: Path,
    wanted: Wanted,
    raw: bool,
    position: tuple[int, int] | None,
    reading: LogReading | None,
) -> None:
    loop = asyncio.get_running_loop()
    lines = logs.Lines(stdout=wanted.stdout, stderr=wanted.stderr, framed=not raw, until_position=position)
    chunks = logs.read(log, lines, reading=reading)
    async with aclosing(chunks):
        async for chunk in chunks:
            await loop.sock_sendall(client_socket, chunk)


async def send(descriptor: int, head: bytes, chunks: AsyncIterator[bytes]) -> None:
    """Write an upgraded reply to the client behind `descriptor` (the caller's), then end the
    stream. A client that closes ends it sooner.
    """
    loop = asyncio.get_running_loop()
    with closing(socket.socket(fileno=_duplicate(descriptor))) as client_socket:
        client_socket.setblocking(False)

        async def write() -> None:
            await loop.sock_sendall(client_socket, head)
            async for chunk in chunks:
                await loop.sock_sendall(client_socket, chunk)

        async def until_closed() -> None:
            while await loop.sock_recv(client_socket, 4096):
                pass

        # not `spawn`: both are awaited below
        tasks = {asyncio.ensure_future(write()), asyncio.ensure_future(until_closed())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            with suppress(ConnectionError):
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(OSError):
                client_socket.shutdown(socket.SHUT_RDWR)


def _duplicate(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
