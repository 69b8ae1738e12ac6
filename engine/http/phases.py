"""The phases of a connection: their possible successors, and the states of the request's body that
are possible in each.

    HEAD ──► HANDLING ──► STREAMING ──► HEAD, or the end
      │        ▲  │  └──────────┴─► DRAINING ──► HEAD, or the end
      └► HELD ─┘  └─► HIJACKED (back to HANDLING when its handler fails)

The end is GONE, after LINGER if the client is to get the last answer. GONE may follow every phase,
when the client disconnects. `FOLLOWS` is the complete table; `tests/unit/http/test_phases.py`
checks that each of its moves occurs.

Two facts about the transport are independent of the phase, in every combination: reading is paused
or not, and the client has sent its EOF or not.

Pure. Not here: what happens in a phase (`protocol.py`).
"""

from __future__ import annotations

from enum import Enum, auto


class Incoming(Enum):
    """The current request's body."""

    COMPLETE = auto()
    """All of it was received, or there is none."""
    ARRIVING = auto()
    """The loop receives it."""
    LENT = auto()
    """A thread receives it (`borrowed.py`)."""


class Phase:
    """One phase. Compared by identity."""

    __slots__ = ("active", "incoming", "name")

    def __init__(self, name: str, *incoming: Incoming, active: bool = True) -> None:
        self.name = name
        self.incoming = frozenset(incoming)
        """The possible states of the body in this phase."""
        self.active = active
        """True if there is a request whose answer is not complete."""

    def __repr__(self) -> str:
        return self.name


COMPLETE, ARRIVING, LENT = Incoming.COMPLETE, Incoming.ARRIVING, Incoming.LENT

HEAD = Phase("HEAD", COMPLETE, active=False)
"""The next byte is part of a head; between requests, its first byte."""
HELD = Phase("HELD", COMPLETE, ARRIVING)
"""A request to hijack waits for the end of its body, and until earlier answers are written."""
HANDLING = Phase("HANDLING", COMPLETE, ARRIVING, LENT)
"""The handler runs, and no byte of its answer was written."""
STREAMING = Phase("STREAMING", COMPLETE, ARRIVING, LENT)
"""The head of an answer is written, and its chunks follow."""
DRAINING = Phase("DRAINING", ARRIVING)
"""The answer is written. The rest of the body is received and dropped, so that the connection can
be kept.
"""
HIJACKED = Phase("HIJACKED", COMPLETE)
"""Nothing is read: the next byte belongs to a stream that is about to be handed over."""
LINGER = Phase("LINGER", COMPLETE, active=False)
"""The last answer is written.

Input is dropped until the client has received the answer and closes.
"""
GONE = Phase("GONE", COMPLETE, active=False)
"""The connection is lost, or handed over."""

FOLLOWS: dict[Phase, frozenset[Phase]] = {
    HEAD: frozenset((HELD, HANDLING, LINGER, GONE)),
    HELD: frozenset((HANDLING, LINGER, GONE)),
    HANDLING: frozenset((HEAD, STREAMING, DRAINING, HIJACKED, LINGER, GONE)),
    STREAMING: frozenset((HEAD, DRAINING, LINGER, GONE)),
    DRAINING: frozenset((HEAD, LINGER, GONE)),
    HIJACKED: frozenset((HANDLING, GONE)),
    LINGER: frozenset((GONE,)),
    GONE: frozenset(),
}
