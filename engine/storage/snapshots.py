"""The snapshotter protocol: immutable layers by chain_id, writable snapshots by key on top of them.

A layer begins as an *ingest*, a directory to extract into, and is then *committed* under its
chain_id. It exists while an image retains it, or a container's snapshot or another layer is on top.
A snapshot is *prepared* for a container's id, *mounted* while the container runs, and *removed*.

An image with two layers comes in, the lowest layer first::

    snapshots.retain(top)                          # the image uses `top`, which may come later
    for chain_id, diff_id, parent in ((base, diff_1, ""), (top, diff_2, base)):
        ingest = await snapshots.ingest()
        ...                                        # extract the archive into ingest.path
        await snapshots.commit_layer(ingest, chain_id, Layer(ingest.number, diff_id, parent))
    await snapshots.settle()                       # on the disk, whatever happens to the power now

An ingest that is not committed is abandoned: `commit_layer` does so when it fails. A process that
is killed leaves it, and `sweep` of the next one removes it.

A container is created, started, read and removed::

    await snapshots.prepare(key, top)              # an empty directory for its changes, on `top`
    await snapshots.mount(key)                     # in `mount_namespace`; the host does not see it
    async with snapshots.shown(key, target) as namespace:
        ...                                        # the runtime runs there, its root at target
    async with snapshots.opened(key) as path:      # the same mount; its own if nothing runs
        ...                                        # archive calls
    await snapshots.unmount(key)                   # the run has ended
    await snapshots.remove(key)                    # also the layers that nothing else uses

A build makes a layer of a step's changes without copying them: `take` turns the snapshot into an
ingest. At start a process calls `resume`, so that what runs keeps its mount, and then `sweep`.

Every implementation passes the suite in tests/contract/test_snapshots.py;
tests/support/fakes/snapshots.py is one for unit tests. Not here: how layers are obtained
(images/layers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from engine.system.detached_mounts import MountNamespace, NewFile, Tree


class Layer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one committed layer; its key is the chain_id (OCI image specification,
    "Layer ChainID").
    """

    number: int
    diff_id: str
    parent: str = ""
    """chain_id of the layer below; empty for the lowest."""
    size: int = 0
    """Bytes of its regular files, as `docker images` counts them."""
    pending: str = ""
    """Id of the boot in which its files were written.

    Empty once they are known to be on the disk.
    """


class Ingest(NamedTuple):
    """A layer that is not committed yet. `path` is the directory that becomes its content."""

    number: int
    path: Path
    stubs: tuple[str, ...] = ()
    """Empty files and directories that the engine made as mount points, relative to `path`, in the
    order in which they were made. They are removed before the directory becomes a layer."""


class Usage(NamedTuple):
    """The size of a snapshot's own changes: bytes of regular files, and entries of every type."""

    size: int
    entries: int


class Snapshots(Protocol):
    """Every method may raise ServerError with the kernel's reason.

    Methods that take a key or chain_id raise NotFound for an unknown one, unless they say
    otherwise. A cancelled coroutine leaves either the state before the call or the state after it.
    """

    @property
    def boot(self) -> str:
        """The id of this boot of the host."""

    @property
    def mount_namespace(self) -> MountNamespace:
        """The namespace in which snapshots are mounted and archive calls assemble their roots."""

    # --- layers -----------------------------------------------------------------------------------

    def layer(self, chain_id: str) -> Layer | None:
        """The committed layer; None when there is none."""

    def layer_path(self, chain_id: str) -> Path:
        """The directory of a committed layer's content, which must not be changed."""

    def layer_paths(self) -> list[Path]:
        """`layer_path` of every layer."""

    def layer_data(self, chain_id: str) -> dict[str, str]:
        """GraphDriver.Data of an image, by its topmost layer."""

    def chain(self, chain_id: str) -> list[Layer]:
        """A layer and those below it, topmost first; empty for "".

        Raises ServerError when one is missing.
        """

    def retain(self, chain_id: str) -> None:
        """Add a user of a layer, which need not exist yet.

        Once it is committed, the layers below it are kept too.
        """

    async def release(self, chain_id: str) -> list[str]:
        """Remove a user. Returns the chain_ids that were collected, topmost first."""

    async def ingest(self) -> Ingest:
        """A new empty directory for a layer's content."""

    async def commit_layer(self, ingest: Ingest, chain_id: str, layer: Layer, implied: Sequence[bytes] = ()) -> None:
        """Make the ingest the layer `chain_id`; its parent must be committed. Consumes the ingest,
        also on failure.

        `implied`: directories (b"" for the root) that have no entry in the layer but contain one.
        They get mode, owner, times and attributes of the same directory in the layers below.
        """

    async def abandon(self, ingest: Ingest) -> None:
        """Remove an ingest that will not be committed."""

    async def settle(self) -> None:
        """Wait until everything written so far is on the disk, and record the pending layers as
        complete.
        """

    # --- snapshots --------------------------------------------------------------------------------

    async def prepare(self, key: str, parent: str | None, *, transient: bool = False, marked: bool = True) -> None:
        """Make a writable snapshot on a layer, or an empty one if `parent` is None.

        A `transient` one has no record, so it does not outlive this process, and nothing is written
        back to the disk when it is unmounted. As long as it is transient, it may lack the files
        that mark the root of a container (`marked`). Raises Conflict if the key is in use.
        """

    def parent(self, key: str) -> str | None:
        """The chain_id that a snapshot is on, "" for an empty one; None for an unknown key."""

    async def take(self, key: str) -> Ingest:
        """Unmount a snapshot on which no container runs, and make an ingest of its changes where
        they lie. The snapshot is gone then, and the caller retains its parent.

        Waits for calls that access the snapshot. Raises Conflict when they do not end.
        """

    async def keep(self, key: str) -> None:
        """Make an ordinary snapshot of a transient one on which no container runs. Its changes are
        on the disk then. Does nothing for an ordinary one.

        Waits as `take`.
        """

    async def resume(self, namespace: int) -> set[str]:
        """At start: take over the mounts in the namespace of an earlier process (-1: there is
        none).

        Returns the keys of the snapshots that are mounted there; their containers are assumed to be
        running.
        """

    async def mount(self, key: str, *, mapped: bool = False) -> None:
        """Mount the snapshot for a container to run on, until `unmount`. `mapped`: with the ids
        that containers in a user namespace have on the host. On the disk they stay as they are.

        The host does not see the mount.
        """

    def mounted(self, key: str) -> str:
        """A path of a mounted snapshot's root, for any thread of this process until `unmount`.

        Raises NotFound when it is not mounted.
        """

    def shown(self, key: str, target: Path, beside: Sequence[Tree | NewFile] = ()) -> AbstractAsyncContextManager[int]:
        """A descriptor of a copy of this process's mount namespace with the mounted snapshot at
        `target`, a directory made by `detached_mounts.make_private`. `beside`: see
        `MountNamespace.namespace_with`."""

    def opened(self, key: str, *, writable: bool = False, mapped: bool = False) -> AbstractAsyncContextManager[str]:
        """The path of the snapshot's mount in `mount_namespace`, valid within the context. A
        running container uses the same mount, which has its ids then, whatever `mapped` says.

        On a full disk the mount may be read-only. With `writable` that raises ServerError.
        """

    async def open_content(self, chain_id: str, *, mapped: bool = False) -> int:
        """A descriptor (O_PATH) of the merged layers of an image, which must not be changed.
        `mapped`: as for `mount`.

        The caller closes it; no mount point remains.
        """

    def content(self, chain_id: str, *, mapped: bool = False) -> AbstractAsyncContextManager[int]:
        """As `open_content`, for a caller that mounts directories below the descriptor elsewhere:
        it is mounted in `mount_namespace` within the context."""

    async def unmount(self, key: str) -> None:
        """End the use by a container. Does nothing if the snapshot is not mounted."""

    async def remove(self, key: str) -> None:
        """Remove the snapshot, and layers without another user. Unknown keys are ignored."""

    def upper(self, key: str) -> Path:
        """The directory with the changes made in the snapshot."""

    def lower(self, key: str) -> list[Path]:
        """The directories below `upper`, topmost first."""

    def snapshot_data(self, key: str) -> dict[str, str]:
        """GraphDriver.Data of a container."""

    async def usage(self, key: str) -> Usage:
        """The size of the snapshot's own changes."""

    async def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """The bytes of `usage` of each, in one piece of work. Those that are gone are absent."""

    async def sweep(self, live_keys: set[str], live_chain_ids: set[str]) -> None:
        """At start: undo operations that a crash interrupted, and remove all snapshots and layers
        that are not named.
        """
