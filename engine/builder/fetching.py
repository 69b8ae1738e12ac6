"""Files that ADD fetches by URL.

Owns:    the file, which has no name on disk, until the end of `download`.
Threads: the loop's; bytes are written and hashed in a thread. The tree may be read in any thread.
Raises:  InvalidParameter for a URL without a file name and for a checksum that does not match,
         ServerError when it cannot be fetched.
Not here: repositories (git.py), contexts (remote.py), unpacking: what was fetched is a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.message
import email.utils
import hashlib
import os
import posixpath
import re
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.builder.git import without_password
from engine.builder.remote import Meter, OnTransfer, is_url
from engine.builder.trees import DIRECTORY, Entry, File, Tree
from engine.errors import InvalidParameter, NotFound, ServerError, reason
from engine.images.remote import Remote
from engine.system import files
from engine.system.feed import Feed, process
from engine.system.threads import opened, uninterrupted

UNNAMED = "__unnamed__"
"""The name of a file for which no name was found and none is needed, as in Docker."""

_CHUNK = 1 << 20
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}\Z")
_DIGEST = re.compile(r"[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[a-zA-Z0-9=_-]+\Z")
"""Of any algorithm (OCI image specification, Descriptors)."""
_LATEST = 1 << 33
"""Seconds since the epoch. Times beyond the range of tar(5)'s octal field are not believed."""


class Download(NamedTuple):
    """A file with mode 0600, the server's modification time (or 0), and a name."""

    name: str
    tree: Tree
    """One file, of this name."""
    digest: str
    """`sha256:…` of the content."""


@contextlib.asynccontextmanager
async def download(
    url: str,
    remote: Remote,
    directory: Path,
    report: OnTransfer,
    *,
    checksum: str = "",
    named: bool = True,
    limit: int | None = None,
) -> AsyncIterator[Download]:
    """The file at `url`, for the time of the context manager.

    The name comes from the URL's path, or else from Content-Disposition. If neither has one, that
    is an error when `named` is set: the destination is a directory. Otherwise any name will do.
    `checksum`: `sha256:…` that the content must have. `directory`: for temporary files. `limit`:
    most bytes of the file.
    """
    shown = without_password(url)
    if not is_url(url):
        raise InvalidParameter(f"invalid URL: {shown}"[:300])
    if checksum:
        check_checksum(checksum)
    try:
        spool = await opened(asyncio.to_thread(files.temporary_file, directory))
    except OSError as error:
        raise ServerError(f"downloading {shown} into {directory}: {reason(error)}") from error
    try:
        headers, size, digest, name = await _received(url, remote, spool, report, named=named, limit=limit)
        if checksum not in ("", digest):
            raise InvalidParameter(f"digest mismatch {digest}: {checksum}")
        entry = Entry(path=name, mode=0o600, size=size, mtime=modified(headers) * 1_000_000_000)
        yield Download(name, _OneFile(spool, entry, bytes.fromhex(digest.partition(":")[2])), digest)
    finally:
        # An unlinked file: closing it frees its blocks, which may take a while.
        await uninterrupted(asyncio.to_thread(os.close, spool))


def check_checksum(checksum: str) -> None:
    """Raises InvalidParameter unless `checksum` is a sha256, as `--checksum` of ADD with a URL. The
    words are those of BuildKit, which takes longer hashes but never finds them equal.
    """
    algorithm, _, digits = checksum.partition(":")
    if not _DIGEST.match(checksum):
        raise InvalidParameter("invalid checksum digest format")
    if algorithm != "sha256":
        raise InvalidParameter("unsupported digest algorithm")
    if len(digits) != 64:
        raise InvalidParameter("invalid checksum digest length")
    if not _SHA256.match(checksum):
        raise InvalidParameter("invalid checksum digest format")


async def _received(
    url: str, remote: Remote, spool: int, report: OnTransfer, *, named: bool, limit: int | None
) -> tuple[Mapping[str, str], int, str, str]:
    """Download into the file: the answer's headers, the file's size, digest and name."""
    shown = without_password(url)
    with remote.store.idle.work():
        client = await remote.client()
        try:
            async with client.document(url) as document:
                if document.status >= 400:
                    raise ServerError(f"Got HTTP status code >= 400: {document.status} {document.reason}".rstrip())
                name = file_name(url, document.headers)
                if not name and named:
                    raise InvalidParameter(f"cannot determine filename from url: {shown}")
                meter = Meter(report, "", "Downloading", document.length or 0)
                body = document.body if limit is None else _bounded(document.body, limit)
                size, digest = await _written(body, spool, meter)
                return document.headers, size, digest, name or UNNAMED
        except ServerError as error:
            raise ServerError(f"{shown}: {without_password(error.message)}") from error


async def _bounded(body: AsyncIterator[bytes], limit: int) -> AsyncGenerator[bytes, None]:
    size = 0
    async for chunk in body:
        size += len(chunk)
        if size > limit:
            raise ServerError(f"larger than {limit} bytes")
        yield chunk


async def _written(body: AsyncIterator[bytes], spool: int, meter: Meter) -> tuple[int, str]:
    """Write the body into the file; its size and digest."""

    async def metered() -> AsyncGenerator[bytes, None]:
        async for chunk in body:
            meter.take(len(chunk))
            yield chunk
        meter.end()

    def write(received: Feed) -> tuple[int, str]:
        digest = hashlib.sha256()
        size = 0
        buffer = memoryview(bytearray(_CHUNK))
        while got := received.readinto(buffer):
            digest.update(buffer[:got])
            files.write_sparse(spool, buffer[:got], size)
            size += got
        os.ftruncate(spool, size)
        return size, f"sha256:{digest.hexdigest()}"

    async with contextlib.aclosing(metered()) as chunks:
        try:
            return await process(Feed(), chunks, write)
        except OSError as error:
            raise ServerError(f"writing the file: {reason(error)}") from error


def file_name(url: str, headers: Mapping[str, str]) -> str:
    """The name of the file at `url`, "" if there is none: the last part of the URL's path, or else
    of the name in Content-Disposition (RFC 6266).
    """
    path = urllib.parse.unquote(urllib.parse.urlsplit(url).path, errors="surrogateescape")
    name = _base(path)
    if not name and (disposition := headers.get("Content-Disposition", "")):
        message = email.message.Message()
        message["Content-Disposition"] = disposition
        name = _base(message.get_filename("") or "")
    return name


def _base(path: str) -> str:
    """The last part of a path if a file can have it as its name, else ""."""
    name = posixpath.basename(path)
    try:
        size = len(os.fsencode(name))
    except UnicodeEncodeError:
        return ""
    usable = name not in ("", ".", "..") and not name.startswith(".wh.") and "\0" not in name and size <= 255
    return name if usable else ""


def modified(headers: Mapping[str, str]) -> int:
    """The time of Last-Modified in seconds; 0 if there is none that can be read (RFC 9110,
    5.6.7).
    """
    try:
        seconds = int(email.utils.parsedate_to_datetime(headers.get("Last-Modified", "")).timestamp())
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0
    return seconds if 0 <= seconds < _LATEST else 0


class _OneFile:
    """A tree of one file, whose content is that of a descriptor."""

    where = ""

    def __init__(self, descriptor: int, entry: Entry, digest: bytes) -> None:
        self._descriptor = descriptor
        self._entry = entry
        self._digest = digest

    def find(self, path: str) -> Entry | None:
        if path == self._entry.path:
            return self._entry
        return None if path else Entry(path="", kind=DIRECTORY, mode=0o755)

    def resolve(self, path: str) -> Entry | None:
        return self.find(path)

    def children(self, path: str) -> list[str]:
        return [] if path else [self._entry.path]

    def walk(self, path: str) -> Iterator[tuple[str, Entry]]:
        if not path:
            yield self._entry.path, self._entry

    def read(self, path: str, limit: int) -> bytes:
        if path != self._entry.path:
            raise NotFound(f"{path}: no such file or directory")
        if self._entry.size > limit:
            raise InvalidParameter(f"{path}: larger than {limit} bytes")
        return os.pread(self._descriptor, limit, 0)

    def reader(self, entry: Entry) -> File:
        return _Reader(self._descriptor)

    def digest(self, entry: Entry) -> bytes:
        return self._digest


class _Reader:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._at = 0

    def readinto(self, buffer: memoryview) -> int:
        got = os.preadv(self._descriptor, [buffer], self._at)
        self._at += got
        return got

    def close(self) -> None:
        """Nothing: the descriptor is the download's."""


__all__ = ["UNNAMED", "Download", "check_checksum", "download", "file_name", "modified"]
