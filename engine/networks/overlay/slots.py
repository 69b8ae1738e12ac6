"""How many slots the backends of a service have in an nftables map, and which slot each one gets.

A rule picks a slot by a random number below a constant, and a map leads from the slot to a backend.
Up to `EXACT` backends there are as many slots as backends, so that each gets the same share.
Beyond, there are at least eight slots for each backend, so that the shares differ by an eighth at
most. From 2,049 backends on the shares are coarser.

Pure. Not here: the rules and the maps (`balance.py` for virtual addresses, `ingress.py` for ports).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Sequence
from typing import TypeVar

EXACT = 32
SIZES: tuple[int, ...] = (*range(1, EXACT + 1), 512, 1024, 2048, 4096, 8192, 16384, 65536)
"""Numbers of slots for which there are rules."""

_PER_BACKEND = 8
_COARSE = 16384

Backend = TypeVar("Backend", bound=Hashable)


def size(backends: int) -> int:
    """The number of slots for that many backends; 0 for none."""
    if backends <= EXACT:
        return backends
    if backends > _COARSE:
        return SIZES[-1]
    return SIZES[bisect_left(SIZES, min(backends * _PER_BACKEND, _COARSE))]


def fill(before: Sequence[Backend], backends: Collection[Backend]) -> list[Backend]:
    """The slots of these backends. As many slots as possible lead where they led before.

    Each backend gets an equal share, with one slot more for some. Without backends there are no
    slots. Backends beyond the largest size get none.
    """
    ready = list(dict.fromkeys(backends))[: SIZES[-1]]
    slots = size(len(ready))
    if not slots:
        return []
    share, more = divmod(slots, len(ready))
    room = dict.fromkeys(ready, share)
    filled: list[Backend | None] = [None] * slots
    for at, backend in enumerate(before[:slots]):
        left = room.get(backend)
        if left is None or (left == 0 and not more):
            continue
        if left:
            room[backend] = left - 1
        else:
            more -= 1
            del room[backend]
        filled[at] = backend
    # Backends that may still have one slot more come last, so that none gets two more.
    waiting = [backend for backend, left in room.items() for _ in range(left)]
    waiting += list(room)[:more]
    rest = iter(waiting)
    return [next(rest) if each is None else each for each in filled]
