"""Receives the body of one request, from the head to the last byte. The loop receives it, or lends
it to a thread that reads the client's socket (`borrowed.py`). A client that has asked for `100
Continue` gets it when the body is first read.

Owns:    the framing state of the body, and a loan while it lasts. It has no reference to the
         `Body`, which refers to this object, so that their memory is freed without the garbage
         collector.
Threads: the event loop's.
Not here: bytes that wait for the handler (`messages.Body`), the consequence of an incomplete body
for the connection (`protocol.py`), framing (`framing.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from engine.http.borrowed import BorrowedBody
from engine.http.budget import Budget
from engine.http.framing import BodyReader, Sink
from engine.http.phases import ARRIVING, COMPLETE, LENT, Incoming


class Carrier(Protocol):
    """The interface of a connection that an upload uses."""

    @property
    def budget(self) -> Budget: ...

    @property
    def owner(self) -> str: ...

    @property
    def body_seconds(self) -> float:
        """Seconds that a loan may wait for a byte."""

    def send_continue(self) -> None:
        """Write `100 Continue`."""

    def watch_body(self) -> None:
        """The handler waits for bytes: the idle limit begins now."""

    def regulate(self) -> None:
        """Pause or resume reading, depending on the free room."""

    def lend(self) -> int | None:
        """Stop reading, and return a duplicate of the socket.

        Returns None when only the loop can read.
        """

    def take_back(self, loan: BorrowedBody) -> None:
        """A loan has ended: continue to read."""


class Upload:
    """One body. The source of a `messages.Body`."""

    __slots__ = ("_carrier", "_continue_due", "_loan", "_reader", "done")

    def __init__(self, carrier: Carrier, reader: BodyReader, expects: bool) -> None:
        """`expects`: the client waits for `100 Continue`."""
        self._carrier = carrier
        self._reader = reader
        self._continue_due = expects
        self._loan: BorrowedBody | None = None
        self.done = False
        """The last byte was received."""

    @property
    def incoming(self) -> Incoming:
        if self._loan is not None:
            return LENT
        return COMPLETE if self.done else ARRIVING

    @property
    def lent(self) -> bool:
        return self._loan is not None

    @property
    def continue_due(self) -> bool:
        """True if the client waits for `100 Continue`, without which it may never send the body."""
        return self._continue_due

    def at_most(self, size: int) -> bool:
        """True if at most that many bytes are known to be outstanding."""
        return self._reader.left is None or self._reader.left <= size

    def read(self, data: bytes, start: int, sink: Sink | None) -> int:
        """Take the body's bytes from `start` on. Returns the position after them. Raises
        InvalidParameter when they break the rules of the coding. Without a sink they are dropped.
        """
        end = self._reader.read(data, start, sink)
        if sink is not None and end > start:
            self._continue_due = False  # the client did not wait
        self.done = self._reader.done
        return end

    def send_continue(self) -> None:
        """Send `100 Continue` if the client waits for it, once, before any byte of the final answer
        (RFC 9110, 10.1.1).
        """
        if self._continue_due:
            self._continue_due = False
            self._carrier.send_continue()

    def cut(self) -> None:
        """The connection is lost: a thread that waits for bytes gets an error."""
        if self._loan is not None:
            self._loan.cut()

    # --- messages.Source --------------------------------------------------------------------------

    @property
    def budget(self) -> Budget:
        return self._carrier.budget

    @property
    def owner(self) -> str:
        return self._carrier.owner

    def body_wanted(self) -> None:
        if not self.done:
            self._carrier.watch_body()

    def body_taken(self) -> None:
        self._carrier.regulate()

    def body_borrowed(self, early: Iterable[bytes]) -> BorrowedBody | None:
        descriptor = self._carrier.lend() if not self.done else None
        if descriptor is None:
            return None
        self.send_continue()
        self._loan = BorrowedBody(descriptor, self._reader, early, self._carrier.body_seconds, self._returned)
        return self._loan

    def _returned(self, loan: BorrowedBody) -> None:
        """See `BorrowedBody.give_back`."""
        self._loan = None
        self.done = self._reader.done
        self._carrier.take_back(loan)
