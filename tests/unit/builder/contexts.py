"""Contexts and layers for the tests of `engine.builder`, without a daemon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from engine.builder import copying
from engine.builder.context import Context, receive
from engine.builder.copying import Destination, Selection, Stream
from engine.images.layers import Extraction
from engine.storage.snapshots import Ingest

T = TypeVar("T")

NOW = 1_750_000_000 * 10**9


class Making:
    """What `receive` needs of `images.layers.Layers`."""

    def __init__(self) -> None:
        self.processors = threading.Semaphore(2)


async def body(data: bytes, step: int = 65536) -> AsyncIterator[bytes]:
    for at in range(0, len(data), step):
        yield data[at : at + step]


async def received(data: bytes, directory: Path, *, step: int = 65536, links_out: bool = False) -> Context:
    making: Any = Making()
    return await receive(body(data, step), directory, making, links_out=links_out)


def with_context(data: bytes, directory: Path, work: Callable[[Context], T], **how: Any) -> T:
    """The result of `work` on the context in an archive."""

    async def run() -> T:
        context = await received(data, directory, **how)
        try:
            return work(context)
        finally:
            await context.close()

    return asyncio.run(run())


def stream_of(selection: Selection, place: Destination, root: int = -1, *, step: int = 65536, **how: Any) -> bytes:
    """A whole layer's stream."""
    stream = Stream(selection, place, root, **{"now": NOW, **how})
    found = bytearray()
    buffer = bytearray(step)
    try:
        while got := stream.readinto(memoryview(buffer)):
            found += buffer[:got]
    finally:
        stream.close()
    return bytes(found)


def laid_out(directory: Path, selection: Selection, path: str, root: int = -1, **how: Any) -> tuple[Path, Extraction]:
    """The directory of a layer, extracted as the engine does it."""
    place = copying.destination(root, path, directory=selection.needs_directory)
    diff = directory / "diff"
    diff.mkdir(parents=True)
    stream = Stream(selection.at(place), place, root, **{"now": NOW, **how})
    return diff, copying.lay_out(Ingest(1, diff), stream)
