"""Exits that no daemon has confirmed yet, kept on disk for the case that the monitor dies before one does.

Owns:    the file, which one monitor at a time has open. Not durable against power loss: RUN does not outlive the kernel.
"""

from __future__ import annotations

import os
import traceback

import msgspec

from engine.monitor import messages

LIMIT = 1 << 20
"""Bytes beyond which a journal that is mostly taken back is rewritten."""


class Journal:
    """Exits on disk until the daemon has them: a 4-byte length and a MessagePack array (key, status, at) each, appended with one write(2).

    A status of -1 takes the key's entry back. Truncated when nothing is left, rewritten when most of it is taken back.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.exits: dict[str, tuple[int, int]] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = self._load()

    def _load(self) -> int:
        with open(self._path, "rb") as file:
            data = file.read()
        decode = msgspec.msgpack.Decoder(tuple[str, int, int]).decode
        at = 0
        while at + 4 <= len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            try:
                key, status, when = decode(data[at + 4 : end])
            except msgspec.DecodeError:  # torn: the machine or the monitor died in the middle of a write
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

    def remove(self, key: str) -> None:
        if self.exits.pop(key, None) is None:
            return
        if not self.exits:
            os.ftruncate(self._file, 0)
            self._size = 0
            return
        self._append(self._entry(key, -1, 0))
        if self._size > LIMIT:
            self._rewrite()

    def _append(self, entry: bytes) -> None:
        try:
            self._size += os.write(self._file, entry)
        except OSError:  # a full disk: the exit is still in memory, and told to every daemon that asks
            traceback.print_exc()

    def _rewrite(self) -> None:
        data = b"".join(self._entry(key, status, at) for key, (status, at) in self.exits.items())
        if len(data) > LIMIT // 2:
            return
        fresh = os.open(self._path + ".new", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fresh, data)
            os.rename(self._path + ".new", self._path)
        except OSError:
            os.close(fresh)
            raise
        os.close(self._file)
        self._file, self._size = fresh, len(data)
