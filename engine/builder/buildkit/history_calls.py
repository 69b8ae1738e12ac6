"""The calls of BuildKit's API for its build history: Control/ListenBuildHistory and
UpdateBuildHistory, the log of a build that has ended, and containerd's content service for the
blobs that records name.

Owns:    nothing. Threads: the event loop's.
Raises:  the kinds of `engine/errors.py`, which become the status of the call.
Not here: what is kept, and how long (`history.py`); filters (`history_filters.py`).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping

from engine.builder.buildkit import history_filters
from engine.builder.buildkit.control_messages import Empty, Time
from engine.builder.buildkit.history import History
from engine.builder.buildkit.history_messages import (
    COMPLETE,
    STARTED,
    BuildHistoryEvent,
    BuildHistoryRecord,
    BuildHistoryRequest,
    ContentInfo,
    InfoRequest,
    InfoResponse,
    ReadRequest,
    UpdateBuildHistoryRequest,
)
from engine.builder.buildkit.messages import ReadContentResponse
from engine.errors import InvalidParameter
from engine.rpc import grpc, protobuf
from engine.rpc.grpc import Handler, Stream

_CONTROL = "/moby.buildkit.v1.Control/"
_CONTENT = "/containerd.services.content.v1.Content/"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class HistoryCalls:
    """The calls of all connections."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.handlers: Mapping[str, Handler] = {
            f"{_CONTROL}ListenBuildHistory": self._listen,
            f"{_CONTROL}UpdateBuildHistory": self._update,
            f"{_CONTENT}Info": self._info,
            f"{_CONTENT}Read": self._read,
            # Clients send their traces where no other collector is set up. Nothing reads them.
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export": _ignore,
        }

    async def _listen(self, stream: Stream) -> None:
        request = await grpc.request(stream, BuildHistoryRequest)
        matches = history_filters.parse(request.filters, time.time_ns())
        if request.limit < 0:
            raise InvalidParameter(f"invalid limit {request.limit}")
        stream.begin()

        def chosen(record: BuildHistoryRecord | None) -> bool:
            return record is not None and request.ref in ("", record.ref) and matches(record)

        if not request.active_only:
            await self._history.recent()
            if not request.ref:
                await self._history.settle()
        with self._history.listen() as listener:
            events = [BuildHistoryEvent(STARTED, record) for record in self._history.active() if chosen(record)]
            if not request.active_only:
                events += [BuildHistoryEvent(COMPLETE, each) for each in self._history.ended() if chosen(each)]
            events.sort(key=_age)
            for event in events[: request.limit or None]:
                await stream.send(protobuf.encode(event))
            while not request.early_exit:
                event = await listener.next()
                if chosen(event.record):
                    await stream.send(protobuf.encode(event))

    async def _update(self, stream: Stream) -> bytes:
        request = await grpc.request(stream, UpdateBuildHistoryRequest)
        await self._history.recent()
        if request.delete:
            await self._history.delete(request.ref)
        elif not request.finalize:  # a record is final when it is written
            await self._history.pin(request.ref, request.pinned)
        return b""

    async def log(self, stream: Stream, ref: str) -> bool:
        """Send the log of a build that has ended. Returns False if there is none."""
        await self._history.recent()
        if self._history.find(ref) is None:
            return False
        async with contextlib.aclosing(self._history.log(ref)) as messages:
            async for message in messages:
                await stream.send(message)
        return True

    async def _info(self, stream: Stream) -> bytes:
        digest = _checked((await grpc.request(stream, InfoRequest)).digest)
        await self._history.recent()
        ref, part = self._history.blob(digest)
        completed = Time(*divmod(self._history.completed(ref), 1_000_000_000))
        return protobuf.encode(InfoResponse(ContentInfo(digest, part.size, completed, completed)))

    async def _read(self, stream: Stream) -> None:
        request = await grpc.request(stream, ReadRequest)
        await self._history.recent()
        ref, part = self._history.blob(_checked(request.digest))
        if not 0 <= request.offset <= part.size or request.size < 0:
            raise InvalidParameter(f"content digest {request.digest}: it has {part.size} bytes, not more")
        place = request.offset
        async with contextlib.aclosing(self._history.read(ref, part, place, request.size)) as pieces:
            async for piece in pieces:
                await stream.send(protobuf.encode(ReadContentResponse(offset=place, data=piece)))
                place += len(piece)


async def _ignore(stream: Stream) -> bytes:
    await grpc.request(stream, Empty)
    return b""


def _age(event: BuildHistoryEvent) -> tuple[int, int]:
    """Sorts the newest build first."""
    created = event.record.created if event.record is not None else None
    return (-created.seconds, -created.nanoseconds) if created is not None else (0, 0)


def _checked(digest: str) -> str:
    if _DIGEST.fullmatch(digest) is None:
        raise InvalidParameter(f"{digest[:100]!r}: invalid digest")
    return digest


__all__ = ["HistoryCalls"]
