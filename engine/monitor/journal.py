"""Exits that no daemon has confirmed yet, kept on disk in case the monitor dies first.

Owns:    the file, which one monitor at a time has open. Not durable against power loss, because RUN
         does not outlive the kernel.
"""

from __future__ import annotations

import errno
import os
import traceback

import msgspec

from engine.monitor import messages

LIMIT = 1 << 20
"""Size in bytes beyond which a journal of mostly cancelled entries is rewritten."""


class Journal:
    """Exits on disk until the daemon confirms them: a 4-byte length and a MessagePack array (key,
    status, at) each, appended with one write(2).

    A status of -1 cancels the key's entry. The file is truncated when no entry is left. It is
    rewritten when most entries are cancelled, or after an entry could not be written
    (`_incomplete`), since there may be room for fewer.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.exits: dict[str, tuple[int, int]] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._incomplete = False
        self._size = self._load()

    def _load(self) -> int:
        with open(self._path, "rb") as file:
            data = file.read()
        decode = msgspec.msgpack.Decoder(tuple[str, int, int]).decode
        at = 0
        while at + 4 <= len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            if end > len(data):
                break
            try:
                key, status, when = decode(data[at + 4 : end])
            # torn: the machine or the monitor died in the middle of a write
            except messages.NOT_A_MESSAGE:
                break
            if status < 0:
                self.exits.pop(key, None)
            else:
                self.exits[key] = (status, when)
            at = end
        if at < len(data):
            os.ftruncate(self._file, at)
        return at

    @staticmethod
    def _entry(key: str, status: int, at: int) -> bytes:
        body = messages.encode((key, status, at))
        return len(body).to_bytes(4, "little") + body

    def add(self, key: str, status: int, at: int) -> None:
        self.exits[key] = (status, at)
        self._append(self._entry(key, status, at))
        if self._incomplete:
            self._rewrite()

    def remove(self, key: str) -> None:
        if self.exits.pop(key, None) is None:
            return
        if not self.exits:
            os.ftruncate(self._file, 0)
            self._size, self._incomplete = 0, False
            return
        self._append(self._entry(key, -1, 0))
        if self._size > LIMIT or self._incomplete:
            self._rewrite()

    def _append(self, entry: bytes) -> None:
        """Append one whole entry, or leave the file unchanged: entries after a torn one could not
        be read."""
        try:
            written = os.write(self._file, entry)
            if written < len(entry):
                os.ftruncate(self._file, self._size)
                raise OSError(errno.ENOSPC, f"{written} of {len(entry)} bytes written")
            self._size += written
        # disk full: the exit is still in memory, and reported to every daemon at Hello
        except OSError:
            traceback.print_exc()
            self._incomplete = True

    def _rewrite(self) -> None:
        """Replace the file by one with only the current entries. On failure the old file stays in
        use."""
        data = b"".join(self._entry(key, status, at) for key, (status, at) in self.exits.items())
        if len(data) > LIMIT // 2:
            return
        fresh = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            fresh = os.open(self._path + ".new", flags, 0o600)
            written = os.write(fresh, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes written")
            os.rename(self._path + ".new", self._path)
        except OSError:
            if fresh >= 0:
                os.close(fresh)
                os.unlink(self._path + ".new")
            traceback.print_exc()
            return
        os.close(self._file)
        self._file, self._size, self._incomplete = fresh, len(data), False
