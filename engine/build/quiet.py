"""A build with suppressed output (`q`): its messages are kept until it is known whether it fails.

Owns: a file without a name, while the build runs. Threads: writes and reads it in threads.
Raises: what the build raises.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from engine.errors import EngineError
from engine.system import files
from engine.system.threads import uninterrupted
from engine.wire.build import BuildMessage


async def quiet(messages: AsyncGenerator[BuildMessage, None], directory: Path) -> AsyncGenerator[BuildMessage, None]:
    """Only the image's id, as one line. The other messages are sent when the build fails, before
    its error.
    """
    image = ""
    swallowed = _Swallowed(directory)
    try:
        try:
            async for message in messages:
                if message.aux is not None:
                    image = message.aux.id
                else:
                    await swallowed.add(message)
        except EngineError:
            async for message in swallowed.replay():
                yield message
            raise
        yield BuildMessage(stream=f"{image}\n")
    finally:
        await swallowed.close()
        await messages.aclose()


class _Swallowed:
    """Messages in their order: the latest in memory, older ones in a file without a name."""

    IN_MEMORY = 1 << 20
    """Bytes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = -1
        self._waiting: list[bytes] = []
        self._size = 0

    async def add(self, message: BuildMessage) -> None:
        line = msgspec.json.encode(message) + b"\n"
        self._waiting.append(line)
        self._size += len(line)
        if self._size > self.IN_MEMORY:
            lines, self._waiting, self._size = b"".join(self._waiting), [], 0
            await uninterrupted(asyncio.to_thread(self._write, lines))

    def _write(self, lines: bytes) -> None:
        if self._file < 0:
            self._file = files.temporary_file(self._directory)
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    async def replay(self) -> AsyncGenerator[BuildMessage, None]:
        if self._file >= 0:
            at, part = 0, b""
            while data := await uninterrupted(asyncio.to_thread(os.pread, self._file, self.IN_MEMORY, at)):
                at += len(data)
                *lines, part = (part + data).split(b"\n")
                for line in lines:
                    yield msgspec.json.decode(line, type=BuildMessage)
        for line in self._waiting:
            yield msgspec.json.decode(line, type=BuildMessage)

    async def close(self) -> None:
        if self._file >= 0:
            descriptor, self._file = self._file, -1
            await uninterrupted(asyncio.to_thread(os.close, descriptor))
