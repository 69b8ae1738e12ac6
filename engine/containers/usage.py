"""The sizes of containers, for GET /system/df and lists with sizes. A container that does not run
keeps its size until something changes it, so that a thousand of them are not walked for each
request.

Owns:    the sizes that are kept. Threads: the event loop's; files are counted in threads.
Not here: the size of one container, and how it is counted (`listing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.containers.container import Container
from engine.containers.lifecycle import State
from engine.errors import NotFound

AT_ONCE = 64
"""Containers whose files are counted in one piece of work. Between two of them the threads that
count can do others.
"""

_RESTING = frozenset((State.CREATED, State.EXITED))


class Sizes:
    """See the module."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, tuple[int, int]]] = {}
        """The generation of a container that did not run, and its sizes then, by its id."""

    async def of(self, containers: Sequence[Container]) -> list[tuple[int, int]]:
        """As `listing.sizes`: the bytes of its own layer, and of its whole root."""
        found = {container.id: kept[1] for container in containers if (kept := self._find(container))}
        bases: dict[str, int] = {}
        walked = [container for container in containers if container.id not in found]
        for begin in range(0, len(walked), AT_ONCE):
            batch = walked[begin : begin + AT_ONCE]
            # Read before the walk: a change during it makes the size outdated.
            generations = [container.generation for container in batch]
            resting = [_rests(container) for container in batch]
            own = await batch[0].parts.snapshots.sizes([container.id for container in batch])
            for container, generation, rests in zip(batch, generations, resting, strict=True):
                bytes_ = own.get(container.id)
                size = (0, 0) if bytes_ is None else (bytes_, bytes_ + _below(container, bases))
                found[container.id] = size
                if rests and not container.removed:
                    self._kept[container.id] = generation, size
        return [found[container.id] for container in containers]

    def forget(self, container_id: str) -> None:
        """The container was removed."""
        self._kept.pop(container_id, None)

    def _find(self, container: Container) -> tuple[int, tuple[int, int]] | None:
        kept = self._kept.get(container.id)
        return kept if kept is not None and kept[0] == container.generation else None


def _below(container: Container, bases: dict[str, int]) -> int:
    """Bytes of the layers below its own; `bases` has those of the layers seen so far."""
    parent = container.record.parent
    if parent not in bases:
        bases[parent] = sum(layer.size for layer in container.parts.snapshots.chain(parent))
    return bases[parent]


def _rests(container: Container) -> bool:
    """No process can write to its layer now. A client that writes, or starts it, makes a new
    generation.
    """
    if container.record.status.state not in _RESTING:
        return False
    try:
        container.parts.snapshots.mounted(container.id)
    except NotFound:
        return True
    return False
