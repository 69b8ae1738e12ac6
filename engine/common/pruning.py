"""The common part of prunes of containers, images, networks and volumes: which objects they remove,
and that two of one kind do not run at once.

Rules: Docker Engine API, ContainerPrune, ImagePrune, NetworkPrune, VolumePrune.
Threads: the event loop's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import msgspec

from engine.common import labels
from engine.errors import Conflict


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The filters of a prune."""

    until_ns: int = 0
    """Only objects made before this time, in nanoseconds since the epoch. 0: any."""
    labels: tuple[str, ...] = ()
    """Objects must have all of them."""
    not_labels: tuple[str, ...] = ()
    """Objects that have all of them stay."""
    others: Mapping[str, list[str]] = msgspec.field(default_factory=dict)
    """The other filters that were allowed."""

    def matches(self, created_ns: int, found: Mapping[str, str]) -> bool:
        """True if an object made at this time, with these labels, may go."""
        return (
            (not self.until_ns or created_ns < self.until_ns)
            and labels.have_all(found, self.labels)
            and not (self.not_labels and labels.have_all(found, self.not_labels))
        )


class OnlyOne:
    """`with only_one:` around a prune. Raises Conflict while another is within."""

    def __init__(self) -> None:
        self._running = False

    def __enter__(self) -> None:
        if self._running:
            raise Conflict("a prune operation is already running")
        self._running = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running = False
