"""The graphs of operations (LLB) that this engine reads: a result of another build, and one file of
a web server, which buildx fetches for `--file URL` before it begins the build itself.

A definition lists operations, each a message, after those that they take as input. The last one is
no operation but names the one that is wanted.

Threads: the event loop's; a file is read in a thread.
Raises:  Unimplemented for any other graph, InvalidParameter for a value that is none, and what
         `fetching.py` raises.
Not here: the calls that carry graphs (`control.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
from pathlib import Path
from typing import NamedTuple

from engine.builder import fetching
from engine.builder.buildkit.control_messages import Definition, Input, Operation, OperationMetadata, Source
from engine.builder.buildkit.messages import Stat
from engine.builder.reports import Transfer
from engine.errors import InvalidParameter, NotFound, Unimplemented
from engine.images.remote import Remote
from engine.rpc import protobuf

LARGEST = 4 << 20
"""Bytes of a file that a client reads. buildx takes 2 MB."""

_RESULT = "docker-image://engined.invalid/result:"
_NAME = "llb.customname"
"""The key of a description that has the operation's name."""
_FILENAME, _CHECKSUM, _MODE = "http.filename", "http.checksum", "http.perm"
_MODES = 0o7777


class WebFile(NamedTuple):
    """A file of a web server, as a graph names it."""

    url: str
    name: str
    """Of its line in the progress."""
    filename: str
    """Empty for the server's name."""
    checksum: str
    """`sha256:…` or empty."""
    mode: int


class Fetched(NamedTuple):
    """A file that a client may read. The directory in which it lies has nothing else."""

    stat: Stat
    content: bytes

    def find(self, path: str) -> Stat:
        """The file at `path`. Raises NotFound for all others."""
        if posixpath.normpath(f"/{path}").lstrip("/") != self.stat.path:
            raise NotFound(f"open {path[:200]}: no such file or directory")
        return self.stat

    def read(self, path: str, offset: int, length: int) -> bytes:
        """A part of the file at `path`. `length`: 0 for all that follows `offset`."""
        self.find(path)
        return self.content[offset : offset + length if length else None]


def definition(result_id: str) -> Definition:
    """A graph that stands for a result: a client gives it back as an input of another build.
    Clients demand metadata.
    """
    source = protobuf.encode(Operation(source=Source(identifier=_RESULT + result_id)))
    digest = _digest(source)
    end = protobuf.encode(Operation(inputs=[Input(digest=digest)]))
    return Definition(operations=[source, end], metadata={digest: OperationMetadata()})


def result_of(graph: Definition) -> str:
    """The result for which a graph stands."""
    source, _ = _source(graph)
    if not source.identifier.startswith(_RESULT):
        raise refusal()
    return source.identifier.removeprefix(_RESULT)


def web_file(graph: Definition) -> WebFile:
    """The file of a web server that a graph consists of."""
    source, metadata = _source(graph)
    url = source.identifier
    if not url.lower().startswith(("http://", "https://")):
        raise refusal()
    attributes = dict(source.attributes)
    found = WebFile(
        url=url,
        name=metadata.description.get(_NAME, "") or url,
        filename=attributes.pop(_FILENAME, ""),
        checksum=attributes.pop(_CHECKSUM, ""),
        mode=_mode(attributes.pop(_MODE, "0600")),
    )
    for name in attributes:
        raise Unimplemented(f"{url[:200]}: the attribute {name[:100]!r} of a file to fetch is not supported")
    if found.filename in (".", "..") or "/" in found.filename:
        raise InvalidParameter(f"{url[:200]}: {found.filename[:200]!r} is not the name of a file")
    return found


def _mode(text: str) -> int:
    """Octal, as BuildKit's clients write it."""
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= _MODES:
        raise InvalidParameter(f"invalid value for {_MODE}: {text[:100]!r} is not a mode")
    return mode


def _source(graph: Definition) -> tuple[Source, OperationMetadata]:
    """The one source of a graph, and what is known of it. Raises Unimplemented if it has another
    operation.
    """
    if len(graph.operations) != 2:
        raise refusal()
    first, last = (protobuf.decode(each, Operation) for each in graph.operations)
    digest = _digest(graph.operations[0])
    if first.source is None or first.inputs or last != Operation(inputs=[Input(digest=digest)]):
        raise refusal()
    return first.source, graph.metadata.get(digest) or OperationMetadata()


def _digest(operation: bytes) -> str:
    return f"sha256:{hashlib.sha256(operation).hexdigest()}"


def refusal() -> Unimplemented:
    """The error for all graphs but these."""
    return Unimplemented("builds of LLB are not supported: only the frontend dockerfile.v0, and a file of a URL")


async def fetch(wanted: WebFile, remote: Remote, directory: Path) -> Fetched:
    """The file, which may have LARGEST bytes. `directory`: for temporary files."""

    def report(_: Transfer) -> None:
        """Clients do not see the progress of a small file."""

    async with fetching.download(
        wanted.url, remote, directory, report, checksum=wanted.checksum, named=False, limit=LARGEST
    ) as download:
        entry = download.tree.find(download.name)
        assert entry is not None, download.name
        content = await asyncio.to_thread(download.tree.read, download.name, LARGEST)
    stat = Stat(path=wanted.filename or download.name, mode=wanted.mode, size=entry.size, modified=entry.mtime)
    return Fetched(stat, content)


__all__ = ["LARGEST", "Fetched", "WebFile", "definition", "fetch", "refusal", "result_of", "web_file"]
