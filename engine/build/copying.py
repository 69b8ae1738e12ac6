"""COPY and ADD: which files of a tree are copied, where to, and the tar stream of the layer with
them.

Not here: the trees (trees.py, context.py), the extraction of the stream (images/layers.py), files
from the network (fetching.py).
Owns: nothing. A `Stream` has descriptors of the files being read, until `close`.
Threads: all of this may read the disk, so it runs in threads.
Raises: InvalidParameter with the words of Docker's builder, ServerError with the kernel's reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.build.trees import Entry, Tree


class Piece(NamedTuple):
    """Entries of one source, by their path below the destination. The only name of a single file is
    its base name; it counts if the destination is a directory.
    """

    tree: Tree
    entries: tuple[tuple[str, Entry], ...]
    unpack: bool = False
    """The only entry is an archive, whose members are copied in its place (ADD)."""


class Selection(NamedTuple):
    """What one instruction copies."""

    pieces: tuple[Piece, ...]
    kind: str
    """`file`, `dir` or `multi`, as in history: `#(nop) COPY file:<digest> in /a `."""
    digest: str
    """sha256 in hex of names, modes, types, links, attributes and contents; not of owners and
    times.
    """


def select(
    tree: Tree,
    sources: Sequence[str],
    *,
    instruction: str = "COPY",
    exclude: Sequence[str] = (),
    parents: bool = False,
    unpack: bool = False,
    destination_is_directory: bool,
) -> Selection:
    """Choose files by COPY's rules: wildcards, contents of directories, links followed.

    `unpack`: archives among the files are unpacked (ADD). `destination_is_directory`: it ends with
    `/`, which several sources need.
    """
    raise NotImplementedError


def join(selections: Sequence[Selection], *, instruction: str = "COPY", destination_is_directory: bool) -> Selection:
    """One selection of several: sources from different trees, and here-documents."""
    raise NotImplementedError


class Destination(NamedTuple):
    """A place in an image's root, with all links followed inside it."""

    path: str
    """Relative to the root, "" for the root."""
    is_directory: bool
    """It is one, or is to become one."""
    missing: tuple[str, ...]
    """Directories that do not exist, outermost first; `path` itself among them if it is to become a
    directory.
    """


def destination(root: int, path: str, *, directory: bool = False) -> Destination:
    """Look up an absolute `path` in the root with the descriptor `root`; -1 for an empty root.

    A `/` at the end makes it a directory, as `directory` does (the source is one).
    """
    raise NotImplementedError


class Stream:
    """The uncompressed tar stream of the layer in which a selection is at its destination, for
    `images.layers.extract_and_hash`.
    """

    def __init__(
        self,
        selection: Selection,
        place: Destination,
        root: int,
        *,
        owner: tuple[int, int] | None = None,
        chmod: str = "",
        now: int,
        epoch: int | None = None,
    ) -> None:
        """`root`: as for `destination`; members of archives follow its links.

        `owner`: of everything (`--chown`); None means 0:0, and an archive's own owners for its
        members. `chmod`: octal digits or symbolic modes. `now`: nanoseconds, the time of new
        directories. `epoch`: seconds of SOURCE_DATE_EPOCH, later times become this one.
        """
        raise NotImplementedError

    def readinto(self, buffer: memoryview) -> int:
        """Read up to the whole buffer; 0 at the end. Raises InvalidParameter, ServerError."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def check_mode(chmod: str) -> None:
    """Raises InvalidParameter if `chmod` is no mode."""
    raise NotImplementedError


__all__ = ["Destination", "Piece", "Selection", "Stream", "check_mode", "destination", "join", "select"]
