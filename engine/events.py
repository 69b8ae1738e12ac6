"""The event log: the last events of this engine, and its subscribers.

Nothing waits for a subscriber. A subscription that falls too far behind is ended, and its client
sees the end of the stream.

Threads: the event loop's. Not here: the struct (`wire/events.py`), the stream (`api/system.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from engine import metrics
from engine.common import labels
from engine.wire.events import Actor, Message

HISTORY = 1024
"""Events that are remembered for `since`."""

HISTORY_SIZE = 16 << 20
"""Characters of their attributes together. A label may have megabytes."""

BACKLOG = 4096
"""Events that may wait for a slow subscriber before it is ended."""

CLOCK_SET_BACK = 1_000_000_000
"""Nanoseconds by which an event's time may precede the last event's. A larger difference means that
the clock was set back.
"""

JUST_STARTED = 500_000_000
"""Nanoseconds. A new subscriber gets the `start` of each container that started no longer ago and
still runs.
"""

EVENT_FILTERS = (
    "config",
    "container",
    "daemon",
    "event",
    "image",
    "label",
    "network",
    "node",
    "plugin",
    "scope",
    "secret",
    "service",
    "type",
    "volume",
)

Filters = Mapping[str, Sequence[str]]


class EventLog:
    """One per engine."""

    def __init__(self) -> None:
        self._history: deque[Message] = deque()
        self._size = 0
        """Characters of the attributes in `_history`."""
        self._subscriptions: dict[Subscription, None] = {}
        self._latest = 0

    def publish(
        self,
        type: str,
        action: str,
        id: str,
        attributes: Mapping[str, str] | None = None,
        at_ns: int | None = None,
        scope: str = "local",
    ) -> Message:
        """Remember an event and offer it to the subscribers. Its time is later than the last
        event's, unless the clock was set back. `scope`: "swarm" for objects of the swarm.
        """
        at = time.time_ns() if at_ns is None else at_ns
        if self._latest - CLOCK_SET_BACK < at <= self._latest:
            at = self._latest + 1
        self._latest = at
        actor = Actor(id, dict(attributes or {}))
        message = Message(type=type, action=action, actor=actor, scope=scope, time=at // 1_000_000_000, time_nano=at)
        self._remember(message)
        metrics.EVENTS.add()
        for subscription in list(self._subscriptions):
            subscription.offer(message)
        return message

    def _remember(self, message: Message) -> None:
        self._history.append(message)
        self._size += _size(message)
        while len(self._history) > HISTORY or self._size > HISTORY_SIZE:
            self._size -= _size(self._history.popleft())

    def subscribe(self, filters: Filters | None = None) -> Subscription:
        """A subscription to all matching events from now on."""
        subscription = Subscription(filters or {}, self._forget)
        self._subscriptions[subscription] = None
        return subscription

    def history(self, since_ns: int, until_ns: int | None = None, filters: Filters | None = None) -> list[Message]:
        """The remembered events from `since_ns` to `until_ns`, both included, oldest first."""
        return [
            message
            for message in self._history
            if message.time_nano >= since_ns
            and (until_ns is None or message.time_nano <= until_ns)
            and matches(message, filters or {})
        ]

    def just_started(self, runs: Callable[[str], bool], filters: Filters | None = None) -> list[Message]:
        """The last `start` of each container that started within `JUST_STARTED` and still runs.

        A client that subscribes and then starts a container, in two processes, would miss the event
        when the start is faster than its subscription.
        """
        starts: dict[str, Message] = {}
        earliest = time.time_ns() - JUST_STARTED
        for message in reversed(self._history):
            if message.time_nano < earliest:
                break
            if message.type == "container" and message.action == "start" and matches(message, filters or {}):
                starts.setdefault(message.actor.id, message)
        return [message for container, message in reversed(starts.items()) if runs(container)]

    @property
    def listeners(self) -> int:
        return len(self._subscriptions)

    def _forget(self, subscription: Subscription) -> None:
        self._subscriptions.pop(subscription, None)


class Subscription:
    """An async iterator of messages, for one reader. Ends when closed, or when more than `BACKLOG`
    messages waited.
    """

    def __init__(self, filters: Filters, forget: Callable[[Subscription], None]) -> None:
        self._filters = filters
        self._forget = forget
        self._waiting: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False
        self.overrun = False
        """True if it was ended because its reader was too slow."""

    def offer(self, message: Message) -> None:
        """Add a message. Called by the log."""
        if not matches(message, self._filters):
            return
        if len(self._waiting) >= BACKLOG:
            self.overrun = True
            self.close()
            return
        self._waiting.append(message)
        self._wake()

    async def take(self) -> list[Message]:
        """All waiting messages, at least one. An empty list at the end."""
        await self._something()
        messages = list(self._waiting)
        self._waiting.clear()
        return messages

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Message:
        await self._something()
        if not self._waiting:
            raise StopAsyncIteration
        return self._waiting.popleft()

    def close(self) -> None:
        """End the subscription. Waiting messages can still be taken. Idempotent."""
        if not self.ended:
            self.ended = True
            self._forget(self)
            self._wake()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _something(self) -> None:
        """Wait until there is a message or the end."""
        while not self._waiting and not self.ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def matches(message: Message, filters: Filters) -> bool:
    """True if the message matches one value of every filter name; for labels, all values.

    Objects match by a prefix of their id or name, as in Docker.
    """
    for name, values in filters.items():
        if not values:
            continue
        if name == "type":
            found = message.type in values
        elif name == "scope":
            found = message.scope in values
        elif name == "event":
            # filters name "exec_create: sh" and "health_status: healthy" by their first word
            found = any(message.action == value or message.action.startswith(value + ":") for value in values)
        elif name == "label":
            found = labels.have_all(message.actor.attributes, values)
        elif name == "image":
            found = _image_matches(message, values)
        else:
            found = message.type == name and _object_matches(message, values)
        if not found:
            return False
    return True


def _object_matches(message: Message, values: Sequence[str]) -> bool:
    name = message.actor.attributes.get("name", "")
    return any(
        message.actor.id.startswith(value) or (name != "" and name.startswith(value.removeprefix("/")))
        for value in values
    )


def _image_matches(message: Message, values: Sequence[str]) -> bool:
    """True if the event's image, or its container's image, has one of these references, with or
    without a tag.
    """
    if message.type not in ("image", "container"):
        return False
    name = message.actor.attributes.get("name" if message.type == "image" else "image", "")
    known = {name, _without_tag(name)}
    if message.type == "image":
        known.add(message.actor.id)
    return any(value in known for value in values)


def _without_tag(reference: str) -> str:
    repository, _, tag = reference.rpartition(":")
    return repository if repository and "/" not in tag else reference


def _size(message: Message) -> int:
    return sum(len(name) + len(value) for name, value in message.actor.attributes.items())
