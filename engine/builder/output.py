"""The output of one build step: written once, read by every build that waits for the step.

Steps of independent stages run at the same time, and equal steps of several builds run once. Each
step writes to a log of its own; a build reads the logs of its steps in the order of its file. What
was written stays until the log is released, for builds that join later. Beyond `MEMORY` bytes it is
kept in an unnamed file, so output is never cut off and never fills the memory.

Owns:    the file. Threads: the event loop's alone: a write or read of the file is at most `_PIECE`
         bytes, from and to the page cache.
Raises:  ServerError when the disk is full.
Not here: the order of logs (`build.py`), what a report is (`reports.py`).
"""

from __future__ import annotations

import asyncio
import codecs
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from engine.builder import reports
from engine.builder.reports import Notice, Output, Report
from engine.errors import ServerError, reason
from engine.system import files

MEMORY = 1 << 20
"""Bytes of one step's output that are kept in memory."""

_PIECE = 256 * 1024
_LENGTH = struct.Struct("<I")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Report).decode


class _Spooled:
    """Reports in the file, up to this place in it."""

    __slots__ = ("end",)
    end: int


class Log:
    """See the module. `read` may be called by any number of readers."""

    def __init__(self, directory: Path) -> None:
        """`directory`: for the file, if one is needed."""
        self._directory = directory
        self._reports: list[Report | Log | _Spooled] = []
        self._size = 0
        self._file = -1
        self._file_size = 0
        self._closed = False
        self._changed = asyncio.Event()

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    # --- the writer -------------------------------------------------------------------------------

    def say(self, text: str, *, classic: bool = False) -> None:
        """Report words of the builder, with their line end. `classic`: see `Notice`."""
        self.write(Notice(text, classic))

    def write(self, report: Report) -> None:
        if self._size < MEMORY:
            self._reports.append(report)
            self._size += reports.size(report) + 128
        else:
            self._spool(_encode(report))
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
        last = self._reports[-1] if self._reports else None
        if not isinstance(last, _Spooled):
            last = _Spooled()
            self._reports.append(last)
        last.end = self._file_size

    def follow(self, other: Log) -> None:
        """Let the content of `other`, which another step writes, stand at this place."""
        self._reports.append(other)
        self._wake()

    def close(self) -> None:
        """Nothing more is written. Idempotent."""
        self._closed = True
        self._wake()

    def release(self) -> None:
        """Drop what was written: the only reader has read it."""
        self._reports.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file, self._file_size = -1, 0

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- readers ----------------------------------------------------------------------------------

    async def read(self) -> AsyncIterator[Report]:
        """Everything, from the first report to the last, as soon as it is written."""
        at = offset = 0
        while True:
            changed = self._changed
            while at < len(self._reports):
                report = self._reports[at]
                if isinstance(report, _Spooled):
                    while offset < report.end:
                        (length,) = _LENGTH.unpack(os.pread(self._file, _LENGTH.size, offset))
                        data = os.pread(self._file, length, offset + _LENGTH.size)
                        offset += _LENGTH.size + length
                        yield _decode(data)
                    if report is self._reports[-1]:  # it may grow
                        break
                elif isinstance(report, Log):
                    async for each in report.read():
                        yield each
                else:
                    yield report
                at += 1
            if changed is self._changed:
                if self._closed:
                    return
                await changed.wait()


class Terminal:
    """The output of a RUN step's process as text for a log: UTF-8."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._decoders = {number: codecs.getincrementaldecoder("utf-8")(errors="replace") for number in (1, 2)}

    def write(self, stream: int, data: bytes, *, final: bool = False) -> None:
        """`stream`: 1 for standard output, 2 for standard error."""
        text = self._decoders[stream].decode(data, final)
        if text:
            self._log.write(Output(stream, text))

    def end(self) -> None:
        """Write what is left of incomplete characters."""
        for number in self._decoders:
            self.write(number, b"", final=True)


__all__ = ["MEMORY", "Log", "Terminal"]
