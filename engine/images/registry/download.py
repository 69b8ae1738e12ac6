"""Download of a blob into a file: written and hashed in a thread, and resumed after a broken
connection.

Owns: nothing; the descriptor is the caller's. Not here: requests and their authorization
(session.py), sharing of downloads (pull.py).
Raises: ServerError. Of these, Failure is an answer of the registry.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Callable

from engine.errors import ServerError, reason
from engine.images.registry.session import Failure, Retrying, Site, failure_of
from engine.system.threads import uninterrupted

_ATTEMPTS = 50
"""Total tries of one blob, whatever their progress."""
_PROGRESS = 64 << 10
"""Bytes after which a try counts as a success, so that its failure is the first again."""
_CHUNK = 1 << 20

_CONTENT_RANGE = re.compile(r"bytes\s+(\d+)-")


class BlobFile:
    """A file that a blob is received into: one piece is written and hashed in a thread while the
    next arrives.
    """

    def __init__(self, target: int, wanted: int, report: Callable[[int], None]) -> None:
        self._target = target
        self.wanted = wanted
        self.size = 0
        """Bytes in the file, or in the thread that writes them."""
        self._report = report
        self._hashed = hashlib.sha256()
        self._waiting: list[bytes] = []
        self._waiting_size = 0
        self._writing: asyncio.Future[None] | None = None

    async def take(self, chunk: bytes) -> None:
        """Append `chunk`. Raises Failure beyond the expected size, ServerError when it cannot be
        written.
        """
        self._waiting.append(chunk)
        self._waiting_size += len(chunk)
        if self.size + self._waiting_size > self.wanted:
            raise Failure(f"a blob is larger than the {self.wanted} bytes that its manifest states", 500)
        if self._waiting_size >= _CHUNK:
            await self._settle()
            self._begin()

    def _begin(self) -> None:
        pieces, size = self._waiting, self._waiting_size
        self._waiting, self._waiting_size = [], 0
        self.size += size
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, pieces, self.size))

    def _write(self, pieces: list[bytes], size: int) -> None:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[os.write(self._target, view) :]
        self._report(size)
        for piece in pieces:
            self._hashed.update(piece)

    async def _settle(self) -> None:
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            # the thread cannot be stopped, and the descriptor is the caller's
            await uninterrupted(writing)
        except OSError as error:
            raise ServerError(f"writing a blob: {reason(error)}") from error

    async def flush(self) -> None:
        """Wait until all bytes of `take` are in the file."""
        await self._settle()
        if self._waiting and self.size + self._waiting_size <= self.wanted:
            self._begin()
            await self._settle()

    async def restart(self) -> None:
        """Drop all received bytes."""
        await self._settle()
        if not self.size:
            return
        self._report(0)
        await uninterrupted(asyncio.to_thread(os.ftruncate, self._target, 0))
        os.lseek(self._target, 0, os.SEEK_SET)
        self.size = 0
        self._hashed = hashlib.sha256()

    async def digest(self) -> str:
        await self.flush()
        return f"sha256:{self._hashed.hexdigest()}"


async def download(site: Site, path: str, digest: str, file: BlobFile, retrying: Retrying, *, patient: bool) -> None:
    """Receive the rest of a blob of the repository `path`, and resume after a broken connection.
    Raises Failure, ServerError.
    """
    patience = site.download_patience(patient=patient)
    for attempt in range(1, _ATTEMPTS + 1):
        begun = file.size
        try:
            await _receive_rest(site, path, digest, file)
            return
        except Failure as error:
            if attempt == _ATTEMPTS:
                raise
            if file.size - begun >= _PROGRESS:
                patience = site.download_patience(patient=patient)
            await patience.wait(error, retrying)


async def _receive_rest(site: Site, path: str, digest: str, file: BlobFile) -> None:
    url = await site.url(path, "blobs", digest)
    headers = {"Range": f"bytes={file.size}-"} if file.size else {}
    async with site.exchange("GET", url, headers) as answer:
        if answer.status == 206 and file.size:
            begin = _CONTENT_RANGE.match(answer.headers.get("Content-Range", ""))
            if begin is None or int(begin[1]) != file.size:
                raise Failure(f"{url.host} sent another range of blob {digest} than requested", 500)
        elif answer.status == 200 or (answer.status == 416 and file.size):
            await file.restart()
            if answer.status == 416:
                raise Failure(f"{url.host} cannot resume blob {digest}", transient=True)
        else:
            raise await failure_of(answer)
        try:
            # `iter_any` returns data that arrived before the connection broke, even if the error is
            # known by then. Bytes that aiohttp still holds while a piece is written are requested
            # again.
            async for chunk in answer.content.iter_any():
                await file.take(chunk)
        finally:
            await file.flush()
    if file.size < file.wanted:
        raise Failure(f"{url.host} closed the connection before the end of blob {digest}", transient=True)


__all__ = ["BlobFile", "download"]
