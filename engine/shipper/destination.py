"""A remote end and the feeds that share it: whose turn it is, what is on the way, and when to try
again.

A sender is a subclass. It implements `form` (how entries become messages), `open`, `pass_on` and
`close`. `pass_on` runs until the connection fails. It takes messages of its feeds in turn, records
a mark for what it sends (`sent`), and settles marks as the target acknowledges them. After a
failure everything without an acknowledgement is read again from the spool.

Not here: protocols (`senders/`), reading (`feed.py`).

Owns:    its task.
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.logs.deliveries import Delivery
from engine.system.reconcile import either, jittered, pause

if TYPE_CHECKING:
    from engine._fast.wireform import Form
    from engine.shipper.feed import Feed, Position, State

_log = logging.getLogger(__name__)

TURN = 64 << 10
"""Bytes of messages of one feed before the next one's turn."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before the first new attempt, and at most."""
QUIET = 60.0
"""Seconds between two messages about refused lines of one feed."""


class Refused(Exception):
    """The target has answered that it does not accept the messages, or not in its protocol."""


FAILURES = (OSError, EOFError, TimeoutError, ssl.SSLError, Refused)
"""Failures of a target, after which it is tried again."""


class Owner(Protocol):
    """The process, as its destinations and feeds see it."""

    def acknowledged(self, feed: Feed) -> None:
        """The target has more of that feed."""

    def lost(self, feed: Feed, lines: int) -> None:
        """Lines of that feed were skipped."""

    def changed(self, destination: Destination) -> None:
        """The target has gone or returned."""


class Mark(NamedTuple):
    """Everything of the feed before `position` is with the target once `at` bytes of the stream
    have arrived there."""

    at: int
    feed: Feed
    position: Position
    state: State


class Destination(ABC):
    """One remote end. `run` is its task."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        """`document`: of any of its feeds; their targets have the same key."""
        self.owner = owner
        self.target = document.target
        self.driver = document.target.destination[0]
        self.address = document.target.address
        self.feeds: set[Feed] = set()
        self.error = ""
        """Why the target cannot be reached; empty while it can."""
        self.since = time.time()
        """When `error` has changed."""
        self.attempts = 0
        self._marks: deque[Mark] = deque()
        self._marked: dict[Feed, int] = {}
        self._ready: deque[Feed] = deque()
        self._wake = asyncio.Event()
        self._first_pause = FIRST_PAUSE
        self.ending = False
        """Nothing more is sent; `finish` settles what was."""
        self._refused: dict[Feed, tuple[float, int]] = {}
        """When refused lines were last logged, and how many there were since."""
        self._task: asyncio.Task[None] | None = None

    # --- a sender's part --------------------------------------------------------------------------

    @abstractmethod
    def form(self, document: Delivery) -> Form:
        """How entries of that container become messages."""

    @abstractmethod
    async def open(self) -> None:
        """Connect. Raises one of `FAILURES`."""

    @abstractmethod
    async def pass_on(self) -> None:
        """Send what the feeds have, until the connection fails with one of `FAILURES`."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection at once. Called after `open` has succeeded or failed."""

    async def finish(self) -> None:  # noqa: B027 (not all senders have something to settle)
        """The destination is no longer needed: close in order, and settle what the target has
        then."""

    # --- feeds ------------------------------------------------------------------------------------

    def add(self, feed: Feed) -> None:
        self.feeds.add(feed)
        if self._task is None:
            name = f"{self.driver} {self.address}"
            self._task = asyncio.get_running_loop().create_task(self._run(), name=name)

    def remove(self, feed: Feed) -> None:
        """Its messages on the way are no longer settled."""
        self.feeds.discard(feed)
        if self._marked.pop(feed, None):
            # the feed may return, with marks of its own
            self._marks = deque(mark for mark in self._marks if mark.feed is not feed)
        self._refused.pop(feed, None)
        if feed.queued:
            self._ready.remove(feed)
            feed.queued = False

    def notify(self, feed: Feed) -> None:
        """The feed may have something to send."""
        feed.drained = False
        if not feed.queued:
            feed.queued = True
            self._ready.append(feed)
            self._wake.set()

    def has_marks(self, feed: Feed) -> bool:
        """Messages of the feed are on the way."""
        return feed in self._marked

    def trouble(self, feed: Feed) -> str:
        """Why lines of that feed are not delivered; empty if they are."""
        return self.error

    # --- for senders ------------------------------------------------------------------------------

    def next_feed(self) -> Feed | None:
        """The feed whose turn it is. If there is more in it afterwards, `notify` queues it
        again."""
        if not self._ready or self.ending:
            return None
        feed = self._ready.popleft()
        feed.queued = False
        return feed

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until a feed may have something to send, or `interrupt` is called. Returns False
        when no feed has within the time."""
        if not self._ready or self.ending:
            await self.wait_for_change(seconds)
        return bool(self._ready)

    async def wait_for_change(self, seconds: float | None) -> None:
        """Wait until another feed may have something to send, or `interrupt` is called, whether or
        not feeds wait already."""
        self._wake.clear()
        await either(self._wake, seconds)

    def interrupt(self) -> None:
        """End a `wait`: something else has happened."""
        self._wake.set()

    def sent(self, at: int, feed: Feed) -> None:
        """What was read from the feed so far is with the target once `settle` is called with `at`
        or more."""
        self._marks.append(Mark(at, feed, *feed.mark()))
        self._marked[feed] = self._marked.get(feed, 0) + 1

    def settle(self, at: int) -> None:
        """The target has that much of what was sent."""
        marks = self._marks
        while marks and marks[0].at <= at:
            self.settled(marks.popleft())

    def settled(self, mark: Mark) -> None:
        """The target has what this mark covers."""
        left = self._marked.get(mark.feed)
        if left is None:  # removed meanwhile
            return
        if left == 1:
            del self._marked[mark.feed]
        else:
            self._marked[mark.feed] = left - 1
        mark.feed.acknowledge(mark.position, mark.state)
        self.attempts = 0
        if self.error:
            self.reached()

    def drop(self, feed: Feed, lines: int, why: str) -> None:
        """The target takes other messages, but not these, whenever they are sent. They count as
        lost."""
        if feed not in self.feeds:
            return
        feed.dropped_lines += lines
        self.owner.lost(feed, lines)
        logged, before = self._refused.get(feed, (-math.inf, 0))
        now, lines = time.monotonic(), lines + before
        if now - logged >= QUIET:
            text = "%s %s: container %s: %d lines refused, and dropped: %s"
            _log.warning(text, self.driver, self.address, feed.name, lines, why)
            logged, lines = now, 0
        self._refused[feed] = logged, lines

    def reached(self) -> None:
        """The target answers. Pauses become shorter only when it has taken something."""
        if self.error:
            self.error, self.since = "", time.time()
            self.owner.changed(self)

    # --- the task ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self.wait()
            if not self._has_something():
                continue
            try:
                await self.open()
                await self.pass_on()
            except FAILURES as error:
                self.failed(error)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # a fault of this program delays this target, not the others
                _log.exception("%s %s", self.driver, self.address)
                self.failed(error)
            finally:
                await self.abandon()
            await asyncio.sleep(self._pause())

    def _has_something(self) -> bool:
        """A feed that waits has something to send. The others no longer wait."""
        while self._ready:
            if self._ready[0].peek():
                return True
            self._ready.popleft().queued = False
        return False

    def failed(self, error: BaseException) -> None:
        """The target cannot be reached, or has failed."""
        self.attempts += 1
        text = describe(error)
        if self.error != text:
            gone = not self.error
            self.error = text
            if gone:
                self.since = time.time()
                self.owner.changed(self)

    async def abandon(self) -> None:
        """Close the connection; what is on the way will be read again."""
        await self.close()
        self._marks.clear()
        self._marked.clear()
        for feed in self.feeds:
            if feed.in_flight:
                feed.rollback()
                self.notify(feed)

    def _pause(self) -> float:
        return back_off(self.attempts, self._first_pause)

    async def end(self, *, orderly: bool) -> None:
        """End the task. `orderly`: settle first what the target has by then."""
        if self._task is not None:
            task, self._task = self._task, None
            self.ending = True
            if orderly and not self.error and not task.done():
                with suppress(*FAILURES):
                    await self.finish()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def back_off(attempts: int, first: float = FIRST_PAUSE) -> float:
    """Seconds until the next attempt, after so many. `first`: after one, at most."""
    return jittered(pause(attempts, first, LONGEST_PAUSE))


def describe(error: BaseException) -> str:
    """An error in one line, at most 200 characters."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"certificate verify failed: {error.verify_message}"
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif isinstance(error, TimeoutError):
        text = str(error) or "timed out"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())[:200]
