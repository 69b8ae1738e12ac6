"""Contexts that a build names by URL (`remote=`): a repository, an archive, or a Dockerfile alone.

Owns:    the connection or checkout, until the end of `fetch`.
Threads: the loop's.
Raises:  InvalidParameter for a URL of none of these; ServerError, in Docker's words, when it cannot
         be fetched or has another content.
Not here: repositories (git.py), files for ADD (fetching.py), what an archive contains (context.py).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from engine.builder import git
from engine.builder.buildkit.session import Sessions
from engine.builder.git import Checkout, without_password
from engine.builder.reports import Transfer
from engine.errors import InvalidParameter, ServerError
from engine.images.progress import amount
from engine.images.remote import Remote
from engine.storage.compression import compression_of
from engine.wire.images import ProgressDetail

MAX_TEXT = 4 << 20
"""Bytes of a Dockerfile."""

OnTransfer = Callable[[Transfer], None]

_URL = re.compile(r"https?://[^/?#\s]+\S*\Z")
_HEAD = 512
"""Bytes at the beginning that decide what a body is: a tar header."""
_ACCEPTED = re.compile(r"application/(?:(?:x-)?(?:tar|gzip|bzip2?|xz|zstd)|octet-stream)|text/plain")
"""The beginning of an accepted Content-Type, as in Docker; and zstd."""
_UNKNOWN = ("", "application/octet-stream", "binary/octet-stream")
"""Types that servers state when they do not know better."""


class Text(NamedTuple):
    """A Dockerfile alone: the build has an empty context."""

    content: bytes


class Archive(NamedTuple):
    """A tar archive, compressed or not. Errors of the connection are raised while it is read."""

    body: AsyncIterator[bytes]


Fetched = Text | Archive | Checkout


@contextlib.asynccontextmanager
async def fetch(
    url: str,
    remote: Remote,
    directory: Path,
    report: OnTransfer,
    *,
    keep_git_dir: bool = False,
    sessions: Sessions | None = None,
    session_id: str = "",
) -> AsyncIterator[Fetched]:
    """The context at `url`, for the time of the context manager.

    `directory`: for temporary files. `report` gets the progress of downloads. `keep_git_dir`: a
    checkout keeps its `.git`. `session_id`: of the client, which may forward an SSH agent.
    """
    source = git.source_of_context(url)
    if source is not None:
        source = source._replace(keep_git_dir=keep_git_dir or source.keep_git_dir)
        async with contextlib.AsyncExitStack() as stack:
            agent = None
            if sessions is not None:
                agent = await git.agent_of(source, sessions, session_id, directory, stack)
            yield await stack.enter_async_context(git.checkout(source, directory, agent=agent))
        return
    if not is_url(url):
        raise InvalidParameter(f"remoteURL ({without_password(url)}) could not be recognized as URL"[:300])
    async with _opened(url, remote, report) as fetched:
        yield fetched


@contextlib.asynccontextmanager
async def _opened(url: str, remote: Remote, report: OnTransfer) -> AsyncIterator[Text | Archive]:
    shown = without_password(url)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(remote.store.idle.work())
        client = await remote.client()
        try:
            document = await stack.enter_async_context(client.document(url))
            if document.status >= 400:
                raise ServerError(f"Got HTTP status code >= 400: {document.status} {document.reason}".rstrip())
        except ServerError as error:
            message = f"Error downloading remote context {shown}: {without_password(error.message)}"
            raise ServerError(message) from error
        meter = Meter(report, "Downloading context", shown, document.length or 0)
        body = await stack.enter_async_context(contextlib.aclosing(_metered(document.body, shown, meter)))
        head = b""
        async for chunk in body:
            head += chunk
            if len(head) >= _HEAD:
                break
        stated = document.headers.get("Content-Type", "")
        kind = content_type(stated, head)
        if not head or not kind:
            why = f'unsupported Content-Type "{stated}"' if head else "Empty response"
            raise ServerError(f"Error detecting content type for remote {shown}: {why}")
        joined = await stack.enter_async_context(contextlib.aclosing(_joined(head, body)))
        if kind == "text/plain":
            yield Text(await _collected(joined, shown))
        else:
            yield Archive(joined)


async def _metered(body: AsyncIterator[bytes], shown: str, meter: Meter) -> AsyncGenerator[bytes, None]:
    """The body, whose progress is reported."""
    try:
        async for chunk in body:
            meter.take(len(chunk))
            yield chunk
    except ServerError as error:
        message = f"Error downloading remote context {shown}: {without_password(error.message)}"
        raise ServerError(message) from error
    meter.end()


async def _joined(head: bytes, rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    yield head
    async for chunk in rest:
        yield chunk


async def _collected(body: AsyncIterator[bytes], shown: str) -> bytes:
    """The Dockerfile. Raises ServerError when it is too large for one."""
    parts: list[bytes] = []
    size = 0
    async for part in body:
        parts.append(part)
        size += len(part)
        if size > MAX_TEXT:
            raise ServerError(f"Error downloading remote context {shown}: a Dockerfile of more than {MAX_TEXT} bytes")
    return b"".join(parts)


def is_url(text: str) -> bool:
    """True for an http URL with a host."""
    try:
        return _URL.match(text) is not None and urlsplit(text).port != 0 and bool(urlsplit(text).hostname)
    except ValueError:  # the port, or the brackets of an IPv6 address
        return False


class Meter:
    """The progress of a download in the form that Docker's clients draw, and as often as Docker
    reports it: after half a megabyte or a hundredth, but not within a tenth of a second.
    """

    _STEP, _PAUSE = 512 << 10, 0.1

    def __init__(self, report: OnTransfer, name: str, action: str, total: int) -> None:
        """`total`: 0 if it is not known."""
        self._report = report
        self._name = name
        self._action = action
        self._total = total
        self._step = min(self._STEP, total // 100) if total else self._STEP
        self._current = self._shown = 0
        self._next = 0.0

    def take(self, size: int) -> None:
        """So many bytes more."""
        self._current += size
        if self._current - self._shown > self._step:
            now = time.monotonic()
            if now >= self._next and self._current != self._total:
                self._next = now + self._PAUSE
                self._say()

    def end(self) -> None:
        """The download is complete."""
        self._say()

    def _say(self) -> None:
        self._shown = self._current
        detail = ProgressDetail(self._current, self._total)
        drawn = amount(self._current, self._total)
        self._report(Transfer(status=self._action, progress_detail=detail, progress=drawn, id=self._name))


# --- content --------------------------------------------------------------------------------------

_SIGNATURES = (
    (
        re.compile(rb"(?i)\s*<(?:!--|(?:!doctype html|html|head|script|iframe|body|title|div|table|h1|style|p|br)\b)"),
        "text/html",
    ),
    (re.compile(rb"\s*<\?xml"), "text/xml"),
    (re.compile(rb"%PDF-"), "application/pdf"),
    (re.compile(rb"PK\x03\x04"), "application/zip"),
    (re.compile(rb"Rar!\x1a\x07"), "application/x-rar-compressed"),
    (re.compile(rb"7z\xbc\xaf\x27\x1c"), "application/x-7z-compressed"),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"\x7fELF"), "application/x-executable"),
)
"""Content that is neither a Dockerfile nor an archive (WHATWG, "MIME Sniffing")."""
_BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
"""Bytes that text does not contain, by the same document."""
_CHECKSUM = slice(148, 156)


def content_type(stated: str, head: bytes) -> str:
    """The type of a body by its Content-Type, or by its first bytes if the server does not know it.

    `text/plain`, or the type of an archive, which may be compressed. Empty if it is neither.
    """
    found = stated.partition(";")[0].strip().lower()
    accepted = _ACCEPTED.match(sniffed(head) if found in _UNKNOWN else found)
    return accepted[0] if accepted is not None else ""


def sniffed(head: bytes) -> str:
    """The type of a body by its first bytes."""
    packed = compression_of(head)
    if packed:
        return f"application/x-{packed}"
    if _is_tar(head):
        return "application/x-tar"
    for signature, kind in _SIGNATURES:
        if signature.match(head):
            return kind
    return "application/octet-stream" if _BINARY.search(head) else "text/plain"


def _is_tar(head: bytes) -> bool:
    """True for a header with a right checksum, also of formats before ustar."""
    block = head[:_HEAD]
    try:
        stated = int(block[_CHECKSUM].strip(b" \0") or b"-1", 8)
    except ValueError:
        return False
    return len(block) == _HEAD and stated == sum(block) - sum(block[_CHECKSUM]) + 8 * ord(" ")


__all__ = [
    "MAX_TEXT",
    "Archive",
    "Fetched",
    "Meter",
    "OnTransfer",
    "Text",
    "content_type",
    "fetch",
    "is_url",
    "sniffed",
]
