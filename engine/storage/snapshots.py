"""What images and containers ask of a snapshotter: immutable layers by chain_id, writable snapshots by key on top of them.

A layer is *drafted* (a directory to extract into), then *committed* under its chain_id; it lives while an image retains it, a container's
snapshot stands on it, or another layer does. A snapshot is *prepared* for a container's id, *mounted* for its run, and *removed*.

The suite in tests/contract/test_snapshots.py runs on every implementation. Not here: where layers come from (images/layers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec


class Layer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one committed layer; its key is the chain_id (OCI image specification, "Layer ChainID")."""

    number: int
    diff_id: str
    parent: str = ""
    """chain_id of the layer below; empty for the lowest."""
    size: int = 0
    """Bytes of its regular files, as `docker images` counts them."""
    pending: str = ""
    """The boot in which its files were written, until they are known to be on the disk; empty then."""


class Draft(NamedTuple):
    """A layer on its way in. `path` is the directory that becomes its content."""

    number: int
    path: Path


class Usage(NamedTuple):
    """What a snapshot itself holds: bytes of regular files, and entries of every type."""

    size: int
    entries: int


class Snapshots(Protocol):
    """Every method may raise ServerError with the kernel's reason; those that take a key or chain_id raise NotFound for one that is unknown."""

    def layer(self, chain_id: str) -> Layer | None:
        """The committed layer; None when there is none."""

    def retain(self, chain_id: str) -> None:
        """Count one more user of a layer, which need not exist yet. No layer below it is collected either, once it is committed."""

    async def release(self, chain_id: str) -> list[str]:
        """Count one user less. The chain_ids collected thereby, topmost first."""

    async def draft(self) -> Draft:
        """A new empty directory for a layer's content."""

    async def commit_layer(self, draft: Draft, chain_id: str, layer: Layer, implied: Sequence[bytes] = ()) -> None:
        """Make the draft the layer `chain_id`; its parent must be committed. The draft is used up, whatever happens.

        `implied`: directories (b"" for the root) that the layer did not bring, but has because something lies in them; they get
        mode, owner, times and attributes of what the layers below have there.
        """

    async def abandon(self, draft: Draft) -> None:
        """Remove a draft that will not be committed."""

    async def prepare(self, key: str, parent: str | None) -> None:
        """Make a writable snapshot on a layer, or on nothing. Raises Conflict when the key is taken."""

    async def mount(self, key: str) -> None:
        """Mount the snapshot for a container to run on, until `unmount`, where nobody but this process sees it."""

    def mounted(self, key: str) -> str:
        """A path of a mounted snapshot's root, for any thread of this process until `unmount`. Raises NotFound when it is not mounted."""

    def shown(self, key: str, target: Path) -> AbstractAsyncContextManager[int]:
        """A descriptor of a copy of this process's mount namespace that has the mounted snapshot at `target`, a directory of `trees.make_private`."""

    async def open_content(self, chain_id: str) -> int:
        """A descriptor (O_PATH) of all that an image's layers show together, to be read only. The caller closes it; no mount point is left for it."""

    async def unmount(self, key: str) -> None:
        """The run is over; nothing happens when there was none."""

    async def remove(self, key: str) -> None:
        """Remove the snapshot, which must not be mounted, and the layers that nobody else uses; nothing happens when there is none."""

    def upper(self, key: str) -> Path:
        """The directory that holds what was changed in the snapshot."""

    async def usage(self, key: str) -> Usage:
        """What the snapshot holds by itself."""

    async def sweep(self, live_keys: set[str], live_chain_ids: set[str]) -> None:
        """At start: undo what a crash left half done, and drop what nobody names."""
