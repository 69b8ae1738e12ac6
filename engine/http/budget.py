"""Bounds the memory of all request bodies that are read whole.

A body of up to `FREE` bytes costs nothing. A larger one waits, unread, until its size fits into the
budget. The kernel's socket buffers push back on its client meanwhile.

While bodies wait, those that hold room must make progress: one that delivers less than `Pace.least`
bytes in `Pace.seconds` is ended with 408, and its room goes to the next. While none waits, there is
no lower limit. Owners (one process, one host) take turns, so that the many connections of one owner
cannot keep the others out.

Owns: the reservations, and a timer while bodies wait. Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple, Protocol

from engine.errors import Unavailable

FREE = 64 * 1024
"""Bytes of a body that need no reservation."""


class Pace(NamedTuple):
    """The least rate at which a body must arrive while others wait for its room."""

    least: int = 32 * 1024
    """Bytes, or the end of the body."""
    seconds: float = 2.0


PACE = Pace()


class Upload(Protocol):
    """The interface of a body that a budget uses."""

    @property
    def owner(self) -> str:
        """The owner whose turn it takes."""

    @property
    def received(self) -> int:
        """Number of bytes received."""

    def too_slow(self, failure: str) -> None:
        """End the body with 408. Its reader releases the room."""


class Room:
    """A reservation."""

    __slots__ = ("mark", "size", "upload")

    def __init__(self, size: int, upload: Upload) -> None:
        self.size = size
        self.upload = upload
        self.mark: int | None = None
        """Number of bytes received at the last check; None before the first."""


class Budget:
    """Bytes, reserved first come, first served for each owner, and in rotation between owners."""

    def __init__(self, size: int, patience: float, pace: Pace = PACE) -> None:
        """`patience`: seconds that a body waits for its turn."""
        self._free = self._size = size
        self._patience = patience
        self._pace = pace
        self._rooms: set[Room] = set()
        self._waiting: dict[str, deque[tuple[Room, asyncio.Future[None]]]] = {}
        """Queues by owner, in the order of their turns; none is empty."""
        self._timer: asyncio.TimerHandle | None = None

    async def reserve(self, size: int, upload: Upload) -> Room:
        """Wait until that many bytes are free, and reserve them until `release`.

        Raises Unavailable when that takes too long. A body larger than the whole budget takes all
        of it.
        """
        room = Room(min(size, self._size), upload)
        if not self._waiting and room.size <= self._free:
            self._take(room)
            return room
        owner = upload.owner
        turn = asyncio.get_running_loop().create_future()
        entry = (room, turn)
        self._waiting.setdefault(owner, deque()).append(entry)
        self._watch()
        try:
            async with asyncio.timeout(self._patience):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release(room)  # its turn came together with the cancellation
            else:
                self._leave(owner, entry)
            if isinstance(error, TimeoutError):
                raise Unavailable("too many large requests at once; try again later") from None
            raise
        return room

    def release(self, room: Room) -> None:
        """Release a reservation."""
        self._rooms.remove(room)
        self._free += room.size
        self._admit()

    @property
    def reserved(self) -> int:
        """Bytes in use."""
        return self._size - self._free

    def _take(self, room: Room) -> None:
        self._free -= room.size
        self._rooms.add(room)

    def _leave(self, owner: str, entry: tuple[Room, asyncio.Future[None]]) -> None:
        queue = self._waiting.get(owner, deque())
        if entry in queue:  # otherwise `_admit` has found it cancelled and removed it
            queue.remove(entry)
            if not queue:
                del self._waiting[owner]
            self._admit()

    def _admit(self) -> None:
        """Give room to the bodies that are next. Small bodies do not overtake a large one."""
        while self._waiting:
            owner = next(iter(self._waiting))
            queue = self._waiting[owner]
            room, turn = queue[0]
            if room.size > self._free and not turn.cancelled():
                return
            queue.popleft()
            del self._waiting[owner]
            if queue:
                self._waiting[owner] = queue  # behind the other owners
            if not turn.cancelled():
                self._take(room)
                turn.set_result(None)

    # --- slow bodies ------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._timer is None:
            for room in self._rooms:
                room.mark = room.upload.received
            self._look_later()

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._pace.seconds, self._look, loop.time() + self._pace.seconds)

    def _look(self, due: float) -> None:
        """End bodies that are too slow. Runs while others wait."""
        self._timer = None
        if not self._waiting:
            return
        least, seconds = self._pace
        # After a pause of the loop itself, bytes that clients sent meanwhile are still unread.
        late = asyncio.get_running_loop().time() - due > seconds / 2
        for room in list(self._rooms):
            received = room.upload.received
            if room.mark is not None and received - room.mark < least and not late:
                room.upload.too_slow(
                    f"the request's body came too slowly: {received - room.mark} bytes in {seconds:g} s "
                    "while other large requests waited"
                )
            room.mark = received
        self._look_later()
