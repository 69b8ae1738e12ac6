"""The output of one build step: written once, read by every build that waits for the step.

Steps of independent stages run at the same time, and equal steps of several builds run once. Each
step writes to a log of its own; a build reads the logs of its steps in the order of its file. What
was written stays until the log is released, for builds that join later. Beyond `MEMORY` bytes it is
kept in an unnamed file, so output is never cut off and never fills the memory.

Owns:    the file. Threads: the event loop's alone: a write or read of the file is at most `_PIECE`
         bytes, from and to the page cache.
Raises:  ServerError when the disk is full.
Not here: the order of logs, and the objects on the wire (`builder.py`, wire/build.py).
"""

from __future__ import annotations

import asyncio
import codecs
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from engine.errors import ServerError, reason
from engine.system import files
from engine.wire.build import BuildMessage

MEMORY = 1 << 20
"""Bytes of one step's output that are kept in memory."""

_PIECE = 256 * 1024
_LENGTH = struct.Struct("<I")
_RED, _PLAIN = "\x1b[91m", "\x1b[0m"
"""How classic builds mark the standard error of RUN (ECMA-48, SGR)."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BuildMessage).decode


class _Spooled:
    """Messages in the file, up to this place in it."""

    __slots__ = ("end",)
    end: int


class Log:
    """See the module. `read` may be called by any number of readers."""

    def __init__(self, directory: Path) -> None:
        """`directory`: for the file, if one is needed."""
        self._directory = directory
        self._messages: list[BuildMessage | Log | _Spooled] = []
        self._size = 0
        self._file = -1
        self._file_size = 0
        self._closed = False
        self._changed = asyncio.Event()

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    # --- the writer -------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Write text of the stream, with its line ends."""
        self.write(BuildMessage(stream=text))

    def write(self, message: BuildMessage) -> None:
        """Write one object."""
        if self._size < MEMORY:
            self._messages.append(message)
            self._size += len(message.stream) + len(message.status) + len(message.progress) + 128
        else:
            self._spool(_encode(message))
        self._wake()

    def _spool(self, data: bytes) -> None:
        try:
            if self._file < 0:
                self._file = files.temporary_file(self._directory)
            view, end = memoryview(_LENGTH.pack(len(data)) + data), self._file_size
            while view:
                written = os.pwrite(self._file, view[:_PIECE], end)
                view = view[written:]
                end += written
        except OSError as error:
            raise ServerError(f"keeping the output of a build step in {self._directory}: {reason(error)}") from error
        self._file_size = end  # only now: what is read never ends within an object
        last = self._messages[-1] if self._messages else None
        if not isinstance(last, _Spooled):
            last = _Spooled()
            self._messages.append(last)
        last.end = self._file_size

    def follow(self, other: Log) -> None:
        """Let the content of `other`, which another step writes, stand at this place."""
        self._messages.append(other)
        self._wake()

    def close(self) -> None:
        """Nothing more is written. Idempotent."""
        self._closed = True
        self._wake()

    def release(self) -> None:
        """Drop what was written: the only reader has read it."""
        self._messages.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file, self._file_size = -1, 0

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- readers ----------------------------------------------------------------------------------

    async def read(self) -> AsyncIterator[BuildMessage]:
        """Everything, from the first object to the last, as soon as it is written."""
        at = offset = 0
        while True:
            changed = self._changed
            while at < len(self._messages):
                message = self._messages[at]
                if isinstance(message, _Spooled):
                    while offset < message.end:
                        (length,) = _LENGTH.unpack(os.pread(self._file, _LENGTH.size, offset))
                        data = os.pread(self._file, length, offset + _LENGTH.size)
                        offset += _LENGTH.size + length
                        yield _decode(data)
                    if message is self._messages[-1]:  # it may grow
                        break
                elif isinstance(message, Log):
                    async for each in message.read():
                        yield each
                else:
                    yield message
                at += 1
            if changed is self._changed:
                if self._closed:
                    return
                await changed.wait()


class Terminal:
    """The output of a RUN step's process as text for a log: UTF-8, standard error in red."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._decoders = {number: codecs.getincrementaldecoder("utf-8")(errors="replace") for number in (1, 2)}

    def write(self, stream: int, data: bytes, *, final: bool = False) -> None:
        """`stream`: 1 for standard output, 2 for standard error."""
        text = self._decoders[stream].decode(data, final)
        if text:
            self._log.say(f"{_RED}{text}{_PLAIN}" if stream == 2 else text)

    def end(self) -> None:
        """Write what is left of incomplete characters."""
        for number in self._decoders:
            self.write(number, b"", final=True)


__all__ = ["MEMORY", "Log", "Terminal"]
