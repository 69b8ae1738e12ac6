"""Observers: functions that are called when something has happened, so that the caller need not
know the interested parts.

Not here: events for clients (`engine/events.py`), queues. Observers run at once, in the order of
their subscription.

Threads: the event loop's alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Generic, ParamSpec

_log = logging.getLogger(__name__)

P = ParamSpec("P")


class Observers(Generic[P]):
    """The observers of one kind of event; calling it calls each of them.

    Observers must return at once and not raise.
    """

    __slots__ = ("_observers", "what")

    def __init__(self, what: str) -> None:
        """`what`: the event's name in the log."""
        self.what = what
        self._observers: list[Callable[P, None]] = []

    def subscribe(self, observer: Callable[P, None]) -> None:
        """Call `observer` for every later event too."""
        self._observers.append(observer)

    def unsubscribe(self, observer: Callable[P, None]) -> None:
        """Do not call it any more. One that does not observe is ignored."""
        with contextlib.suppress(ValueError):
            self._observers.remove(observer)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for observer in tuple(self._observers):
            try:
                observer(*args, **kwargs)
            except Exception:
                # A failing observer affects neither the caller nor the other observers.
                _log.exception("%s: an observer failed", self.what)
