"""GET /events: remembered events and live ones, as lines of JSON.

Not here: the log and its filters (`engine/events.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from engine.api.engine import Engine
from engine.api.parameters import accepted, filters, timestamp
from engine.api.replies import encode
from engine.api.versions import Flag
from engine.errors import InvalidParameter
from engine.events import EVENT_FILTERS, Subscription
from engine.http.messages import Request, StreamReply
from engine.wire.events import Message

JSON_LINES, JSON_SEQUENCE = "application/jsonl", "application/json-seq"
_STREAM_TYPES = (JSON_LINES, "application/x-ndjson", JSON_SEQUENCE)


def list_all(engine: Engine, request: Request) -> StreamReply:
    """GET /events. With `since` or `until`, remembered past events come first; without both, the
    starts of containers that have just started. Then live events follow, up to `until`.
    """
    wanted = filters(request.query, EVENT_FILTERS)
    content_type = _stream_type(request)
    since = timestamp(request.query, "since") if request.query.get("since") else None
    until = timestamp(request.query, "until") if request.query.get("until") else None
    if since is not None and until is not None and until < since:
        raise InvalidParameter(f"`since` time ({since}) cannot be after `until` time ({until})")
    # Nothing is awaited between subscribing and reading the past, so no event is missed or sent
    # twice. The response head is flushed after both.
    subscription = engine.events.subscribe(wanted)
    if since is not None or until is not None:
        past = engine.events.history(since or 0, until, wanted)
    else:
        past = engine.events.just_started(engine.containers.runs, wanted)
    return StreamReply(
        request.status, EventFeed(request, subscription, past, until, content_type == JSON_SEQUENCE), content_type
    )


def _stream_type(request: Request) -> str:
    """The media type of events that the client accepts by name, at any version; otherwise the
    version's own.
    """
    usual = JSON_LINES if request.version.has(Flag.EVENTS_LINES) else "application/json"
    return accepted(request.headers, _STREAM_TYPES) or usual


class EventFeed:
    """Events as lines of JSON; all waiting events are sent in one chunk. An object, not a
    generator: see `StreamReply`.

    `sequence`: each begins with a record separator (RFC 7464).
    """

    def __init__(
        self,
        request: Request,
        subscription: Subscription,
        past: list[Message],
        until: int | None,
        sequence: bool = False,
    ) -> None:
        self._request = request
        self._begin = b"\x1e" if sequence else b""
        self._created_images = request.version.has(Flag.IMAGE_CREATE_EVENTS)
        self._swarm = request.version.has(Flag.SWARM_EVENTS)
        self._subscription = subscription
        self._past = deque(past)
        self._until = until

    def __aiter__(self) -> EventFeed:
        return self

    async def __anext__(self) -> bytes:
        while True:
            if self._past:
                messages = list(self._past)
                self._past.clear()
            else:
                messages = await self._live()
            if not messages:
                raise StopAsyncIteration
            if chunk := b"".join([self._begin + encode(each, self._request) + b"\n" for each in self._shown(messages)]):
                return chunk

    def _shown(self, messages: list[Message]) -> list[Message]:
        if not self._created_images:
            messages = [message for message in messages if (message.type, message.action) != ("image", "create")]
        if not self._swarm:
            messages = [message for message in messages if message.scope != "swarm"]
        return messages

    async def _live(self) -> list[Message]:
        if self._until is None:
            return await self._subscription.take()
        remaining = (self._until - time.time_ns()) / 1e9
        if remaining <= 0:
            return []
        try:
            async with asyncio.timeout(remaining):
                messages = await self._subscription.take()
        except TimeoutError:
            return []
        return [message for message in messages if message.time_nano <= self._until]

    async def aclose(self) -> None:
        self._subscription.close()
