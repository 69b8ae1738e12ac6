"""COPY and ADD: which files of a tree are copied, where to, and the tar stream of the layer with
them.

Not here: the trees (trees.py, context.py), the extraction of the stream (images/layers.py), files
from the network (fetching.py).
Owns: nothing. A `Stream` has descriptors of the files being read, until `close`.
Threads: all of this may read the disk, so it runs in threads.
Raises: InvalidParameter with the words of Docker's builder, ServerError with the kernel's reason.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine._fast import members as _members
from engine._fast.assemble import Assembly
from engine._fast.tar import ArchiveError, Reader
from engine.builder.context import Context
from engine.builder.ignore import Patterns, glob, has_wildcards
from engine.builder.trees import (
    BLOCK,
    CHARACTER,
    DIRECTORY,
    FILE,
    LARGE,
    LINK,
    DirectoryTree,
    Entry,
    File,
    Tree,
    check_device,
    clean,
    source_path,
)
from engine.errors import InvalidParameter, NotFound, ServerError, reason, reason_with_file
from engine.images.layers import Extraction, Hashing, extract, extract_and_hash
from engine.storage.compression import MAGIC, Inflated, compression_of
from engine.storage.snapshots import Ingest
from engine.system import files
from engine.system.threads import checkpoint

_BATCH = 256
"""Entries whose headers are made, or which are digested, at a time."""
_BLOCK = 512
_LARGE = 4 << 20
"""Bytes of files, or of an archive to unpack."""
_HARD_LINK = "1"
_WHITEOUT = ".wh."


class Piece(NamedTuple):
    """What one source, or one match of its wildcards, selects."""

    tree: Tree
    entries: tuple[tuple[str, Entry], ...]
    """Each by its path below the destination."""
    single: bool = False
    """One file. Its path counts only if the destination is a directory."""
    unpack: bool = False
    """The single file is an archive, whose members are copied in its place (ADD)."""
    owners: bool = False
    """The entries keep their owners (COPY --from)."""
    top: Entry | None = None
    """The directory whose content it is, if it has a time."""

    @property
    def needs_directory(self) -> bool:
        """It is no plain file."""
        return self.unpack or not self.single


class Selection(NamedTuple):
    """What one instruction copies."""

    pieces: tuple[Piece, ...]
    kind: str
    """`file`, `dir` or `multi`, as in history: `#(nop) COPY file:<digest> in /a `."""
    digest: str
    """sha256 in hex of names, modes, types, links, attributes and contents; not of times, and
    of owners only where they are kept.
    """

    @property
    def needs_directory(self) -> bool:
        """True if the first piece makes the destination a directory, however it is written."""
        return bool(self.pieces) and self.pieces[0].needs_directory

    def at(self, place: Destination) -> Selection:
        """What is to be copied there. Of several files that get one name, the last one stays.

        Raises InvalidParameter for a piece that needs a directory where an earlier one is a file.
        """
        if place.is_directory or len(self.pieces) < 2:
            return self
        if any(piece.needs_directory for piece in self.pieces):
            raise InvalidParameter(f"cannot copy to non-directory: /{place.path}")
        return self._replace(pieces=self.pieces[-1:])


def select(  # noqa: PLR0913 - the options of COPY and what builders differ in, by keyword
    tree: Tree,
    sources: Sequence[str],
    *,
    instruction: str = "COPY",
    exclude: Sequence[str] = (),
    parents: bool = False,
    unpack: bool = False,
    owners: bool = False,
    patterns: bool = True,
    may_be_empty: bool = False,
    merges: bool = False,
    rooted: bool = False,
    destination_is_directory: bool,
) -> Selection:
    """Choose files by COPY's rules: wildcards, contents of directories, links followed.

    `unpack`: archives among the files are unpacked (ADD). `owners`: the files keep their owners
    (COPY --from), which belong to the digest then. `destination_is_directory`: it ends with `/`,
    which several sources need unless `merges`. `patterns`: sources may have wildcards.
    `may_be_empty`: these may match nothing, in a directory that exists. `rooted`: as in
    `trees.source_path`. Raises NotFound for a name that does not exist.
    """
    choice = _Choice(tree, Patterns(exclude), unpack=unpack, owners=owners, patterns=patterns, rooted=rooted)
    choice.empty = may_be_empty and any(has_wildcards(source) for source in sources)
    for source in sources:
        if parents:
            choice.with_parents(source)
        else:
            choice.add(source)
    if not choice.pieces and not choice.excluded and not choice.empty:
        raise InvalidParameter("No source files were specified")
    # Directories that one pattern matches are merged in any case.
    merged = merges or parents or (len(sources) == 1 and all(not piece.single for piece in choice.pieces))
    return _selection(choice.pieces, instruction, destination_is_directory=destination_is_directory or merged)


def join(selections: Sequence[Selection], *, instruction: str = "COPY", destination_is_directory: bool) -> Selection:
    """One selection of several: sources from different trees, and here-documents."""
    if len(selections) == 1:
        return selections[0]
    pieces = [piece for selection in selections for piece in selection.pieces]
    return _selection(pieces, instruction, destination_is_directory=destination_is_directory)


def _selection(pieces: list[Piece], instruction: str, *, destination_is_directory: bool) -> Selection:
    if len(pieces) > 1 and not destination_is_directory:
        raise InvalidParameter(
            f"When using {instruction} with more than one source file, the destination must be a directory and "
            "end with a /"
        )
    digests = [_digest(piece) for piece in pieces]
    if len(pieces) == 1:
        return Selection(tuple(pieces), "file" if pieces[0].single else "dir", digests[0])
    return Selection(tuple(pieces), "multi", hashlib.sha256("".join(digests).encode()).hexdigest())


def _digest(piece: Piece) -> str:
    """The digest of a piece, without times."""
    parts = [b"archive" if piece.unpack else b"file" if piece.single else b"dir"]
    for number, (path, entry) in enumerate(piece.entries):
        if not number % _BATCH or entry.size > LARGE:
            checkpoint()
        parts.append(
            f"{path}\0{entry.kind}{entry.mode:o}\0{entry.target}\0{entry.major}:{entry.minor}\0".encode(
                "utf-8", "surrogateescape"
            )
        )
        if piece.owners:
            parts.append(b"%d:%d" % (entry.uid, entry.gid))
        for name, value in entry.xattrs:
            parts.append(b"%s=%d:%s" % (name, len(value), value))
        if entry.kind == FILE:
            parts.append(piece.tree.digest(entry))
    return hashlib.sha256(b"\n".join(parts)).hexdigest()


class _Choice:
    """The pieces of one instruction that are found so far."""

    def __init__(
        self, tree: Tree, exclude: Patterns, *, unpack: bool, owners: bool, patterns: bool, rooted: bool
    ) -> None:
        self._tree = tree
        self._exclude = exclude
        self._unpack = unpack
        self._owners = owners
        self._patterns = patterns
        self._rooted = rooted
        self.pieces: list[Piece] = []
        self.excluded = False
        """True if a source exists but was excluded."""
        self.empty = False
        """Wildcards that match nothing are no error, but those that are malformed."""

    def add(self, source: str) -> None:
        path = source_path(source, rooted=self._rooted)
        if self._patterns and has_wildcards(path):
            for match in self._matches(path):
                self._add(match, self._existing(match, match))
        else:
            self._add(path, self._existing(path, path or source))

    def _existing(self, path: str, source: str) -> Entry:
        entry = self._tree.resolve(path)
        if entry is None:
            raise NotFound(f"{self._tree.where}{source}: no such file or directory")
        return entry

    def _add(self, path: str, entry: Entry) -> None:
        name = posixpath.basename(path)
        if entry.kind != DIRECTORY and self._exclude.excluded(name):
            self.excluded = True
        elif entry.kind == DIRECTORY:
            top = entry if entry.path else None
            self.pieces.append(Piece(self._tree, tuple(self._below(entry.path)), owners=self._owners, top=top))
        else:
            archive = self._unpack and entry.kind == FILE and is_archive(self._tree, entry)
            self.pieces.append(Piece(self._tree, ((name, entry),), True, archive, self._owners))

    def _below(self, directory: str) -> Iterator[tuple[str, Entry]]:
        """What is below a directory and not excluded, by its path there."""
        if not self._exclude:
            yield from self._tree.walk(directory)
            return
        held: list[tuple[str, Entry]] = []
        for path, entry in self._tree.walk(directory):
            while held and not path.startswith(held[-1][0] + "/"):
                held.pop()
            if self._exclude.excluded(path):
                # Something below it may be included again.
                if entry.kind == DIRECTORY and self._exclude.again:
                    held.append((path, entry))
                continue
            yield from held
            held.clear()
            yield path, entry

    def _matches(self, pattern: str) -> list[str]:
        """Paths that match, sorted. Links before the first wildcard are followed, no others."""
        parts = pattern.split("/")
        first = next(at for at, part in enumerate(parts) if has_wildcards(part))
        base = self._tree.resolve("/".join(parts[:first]))
        found = [] if base is None or base.kind != DIRECTORY else [base.path]
        if not found and self.empty:
            raise NotFound(f"{self._tree.where}{pattern}: no such file or directory")
        try:
            tests = [glob(part) for part in parts[first:]]
        except InvalidParameter:
            if self.empty:
                raise
            return []  # the classic builder ignores it
        for at, matches in enumerate(tests, first):
            below: list[str] = []
            for directory in found:
                if at > first:
                    entry = self._tree.find(directory)
                    if entry is None or entry.kind != DIRECTORY:
                        continue
                prefix = f"{directory}/" if directory else ""
                below += [prefix + name for name in self._tree.children(directory) if matches(name)]
            found = below
        return found

    def with_parents(self, source: str) -> None:
        """`--parents`: everything keeps its path, from `/./` on if the source has that. Without a
        match of its wildcards, the source is an empty directory.
        """
        before, pivot, pattern = source.partition("/./")
        if not pivot:
            before, pattern = "", source
        before, path = (source_path(part, rooted=self._rooted) for part in (before, pattern))
        if has_wildcards(before):
            tops = [top for match in self._matches(before) if (top := self._tree.find(match)) is not None]
            tops = [top for top in tops if top.kind == DIRECTORY]
        else:
            tops = [self._existing(before, source)]
            if tops[0].kind != DIRECTORY:
                raise InvalidParameter(f"{before}: not a directory")
        found = [self._below_with_parents(top, path, source, missing=has_wildcards(before)) for top in tops]
        for entries in [each for each in found if each] or [()]:
            self.pieces.append(Piece(self._tree, entries, owners=self._owners))

    def _below_with_parents(
        self, top: Entry, path: str, source: str, *, missing: bool
    ) -> tuple[tuple[str, Entry], ...]:
        """What matches below a directory, with the directories above it. `missing`: it may be
        nothing.
        """
        prefix = f"{top.path}/" if top.path else ""
        chosen: dict[str, Entry] = {}
        if not path:
            return tuple(self._below(top.path))
        if has_wildcards(path):
            try:
                matches = glob(path, deep=True)
            except InvalidParameter:  # as in `_matches`
                if self.empty:
                    raise
                return ()
            taken = "\0"
            for name, entry in self._tree.walk(top.path):
                if name.startswith(taken) or matches(name):
                    if entry.kind == DIRECTORY and not name.startswith(taken):
                        taken = name + "/"
                    self._choose(chosen, prefix, name, entry)
            return tuple(chosen.items())
        named = self._tree.find(prefix + path)
        if named is None:
            if missing:
                return ()
            raise NotFound(f"{self._tree.where}{source}: no such file or directory")
        self._choose(chosen, prefix, path, named)
        if named.kind == DIRECTORY:
            for name, entry in self._tree.walk(named.path):
                self._choose(chosen, prefix, f"{path}/{name}", entry)
        return tuple(chosen.items())

    def _choose(self, chosen: dict[str, Entry], prefix: str, name: str, entry: Entry) -> None:
        """Add an entry after the directories above it, unless it is excluded."""
        if self._exclude.excluded(name):
            self.excluded = True
            return
        for at in (at for at, character in enumerate(name) if character == "/"):
            if name[:at] not in chosen:
                above = self._tree.find(prefix + name[:at])
                if above is not None:
                    chosen[name[:at]] = above
        chosen[name] = entry


def is_archive(tree: Tree, entry: Entry) -> bool:
    """True if ADD unpacks this file: a tar archive by its first header, compressed or not."""
    if not entry.size:
        return False
    archive = _Archive(tree, entry)
    try:
        return Reader(archive).following() is not None
    except (ArchiveError, InvalidParameter):
        return False
    finally:
        archive.close()


class _Archive:
    """The uncompressed content of an archive."""

    def __init__(self, tree: Tree, entry: Entry) -> None:
        self._file: File = tree.reader(entry)
        try:
            head = bytearray(MAGIC)
            with memoryview(head) as view:
                filled = 0
                while filled < MAGIC and (got := self._file.readinto(view[filled:])):
                    filled += got
            self._head = bytes(head[:filled])
            kind = compression_of(self._head)
            self._inflated = Inflated(self, kind) if kind else None
        except BaseException:
            self._file.close()
            raise

    def read(self, size: int = 1 << 18) -> bytes:
        """Of the compressed file."""
        checkpoint()
        if self._head:
            head, self._head = self._head, b""
            return head
        buffer = bytearray(size)
        with memoryview(buffer) as view:
            got = self._file.readinto(view)
        return bytes(buffer[:got])

    def readinto(self, buffer: memoryview) -> int:
        checkpoint()  # a header may say that terabytes are to be left out
        if self._inflated is not None:
            return self._inflated.readinto(buffer)
        if self._head:
            head, self._head = self._head, b""
            buffer[: len(head)] = head
            return len(head)
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()


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


class NotDirectory(InvalidParameter):
    """A file is where a directory is needed."""

    def __init__(self, message: str, path: str, below: str = "") -> None:
        """`path`: of the file. `below`: of what was asked for in it; empty for the file itself."""
        super().__init__(message)
        self.path = path
        self.below = below


def destination(root: int, path: str, *, directory: bool = False) -> Destination:
    """Look up an absolute `path` in the root with the descriptor `root`; -1 for an empty root.

    A `/` at the end makes it a directory, as `directory` does (`Selection.needs_directory`).
    """
    directory = directory or path.endswith(("/", "/.", "/..")) or path in ("", ".", "..")
    _check_name(path)
    path = "/" + path
    try:
        real = posixpath.normpath(path).strip("/") if root < 0 else os.fsdecode(files.resolve_in_root(root, path))
    except OSError as error:
        raise InvalidParameter(f"{path}: {reason(error)}") from error
    _check_name(real)
    missing: list[str] = []
    names = real.split("/") if real else []
    for end in range(1, len(names) + 1):
        at = "/".join(names[:end])
        mode = None if root < 0 or missing else _mode(root, at)
        if mode is not None and not stat.S_ISDIR(mode):
            if end < len(names):
                raise NotDirectory(f"mkdir /{at}: not a directory", f"/{at}", f"/{at}/{names[end]}")
            if directory:
                raise NotDirectory(f"cannot copy to non-directory: /{at}", f"/{at}")
        elif mode is not None and end == len(names):
            directory = True
        elif mode is None and (end < len(names) or directory):
            missing.append(at)
    return Destination(real, directory or not real, tuple(missing))


def _mode(root: int, path: str) -> int | None:
    try:
        descriptor = files.open_without_links(root, path, os.O_PATH | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidParameter(f"/{path}: {reason(error)}") from error
    try:
        return os.fstat(descriptor).st_mode
    finally:
        os.close(descriptor)


def _check_name(path: str) -> None:
    """Refuse names that would hide files of the image."""
    if path.startswith(_WHITEOUT) or f"/{_WHITEOUT}" in path:
        raise InvalidParameter(f"{path}: names that begin with {_WHITEOUT} are reserved for layers")


def _merged(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, str, Entry]]:
    """The entries of all pieces: a later one replaces an earlier one of its name, and with it what
    was below it, unless both are directories.
    """
    if len(pieces) == 1:
        return ((pieces[0], path, entry) for path, entry in pieces[0].entries)
    merged: dict[str, tuple[Piece, str, Entry]] = {}
    below: dict[str, list[str]] = {}
    """Paths in each directory, so that a replaced one is not searched for among all."""
    for piece in pieces:
        for path, entry in piece.entries:
            before = merged.get(path)
            if before is not None and not before[2].kind == entry.kind == DIRECTORY:
                gone = [path]
                while gone:
                    each = gone.pop()
                    merged.pop(each, None)
                    gone += below.pop(each, ())
            if path not in merged:
                below.setdefault(posixpath.dirname(path), []).append(path)
            merged[path] = piece, path, entry
    return iter(merged.values())


class _Kinds:
    """Which names of a root are directories. Each directory is listed once, and nothing is looked
    up below one that the root does not have.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._listed: dict[str, dict[str, bool]] = {}

    def check(self, path: str, directory: bool) -> None:
        """Raises InvalidParameter if the path, relative to the root, is of the other kind there."""
        found = self._list(posixpath.dirname(path)).get(posixpath.basename(path))
        if found is False and directory:
            raise InvalidParameter(f"cannot copy to non-directory: /{path}")
        if found and not directory:
            raise InvalidParameter(f"cannot replace to directory /{path} with file")

    def _list(self, directory: str) -> dict[str, bool]:
        found = self._listed.get(directory)
        if found is None:
            above, name = posixpath.split(directory)
            found = self._listed[directory] = {}
            if not directory or self._list(above).get(name):
                opened = files.open_without_links(self._root, directory or ".", os.O_RDONLY | os.O_DIRECTORY)
                try:
                    with os.scandir(opened) as entries:
                        found.update((each.name, each.is_dir(follow_symlinks=False)) for each in entries)
                finally:
                    os.close(opened)
        return found


class Stream:
    """The uncompressed tar stream of the layer in which a selection is at its destination, for
    `lay_out`.
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
        keeps_kinds: bool = False,
        keeps_times: bool = False,
        owns_members: bool = False,
    ) -> None:
        """`root`: as for `destination`; members of archives follow its links. `keeps_kinds`: refuse
        to replace a directory of the root by something else, and something else by a directory.
        `keeps_times`: the destination gets the time of the directory whose content is copied.

        `owner`: of everything but members of archives, which have their own unless `owns_members`
        (`--chown`); None means 0:0, or each entry's own where the selection keeps them. `chmod`:
        octal digits or symbolic modes, not for members of archives. `now`: nanoseconds, the time of
        new directories. `epoch`: seconds of SOURCE_DATE_EPOCH, later times become this one.
        """
        assert place.is_directory or not selection.needs_directory
        self.large = sum(entry.size for piece in selection.pieces for _, entry in piece.entries) >= _LARGE
        """True if the files of the selection are worth a second thread."""
        self._root = root
        self._place = place
        self._owner = owner
        self._members_owner = owner if owns_members else None
        self._mode = _mode_change(chmod) if chmod else None
        archive = bool(selection.pieces) and selection.pieces[0].unpack
        self._parents_owner = (self._members_owner if archive else owner) or (0, 0)
        # As of a BuildKit that makes them with the umask 022.
        self._parents_mode = int(chmod, 8) & 0o755 if _OCTAL.fullmatch(chmod) and not archive else 0o755
        top = selection.pieces[-1].top if selection.pieces else None
        self._top_time = top.mtime if top is not None and keeps_times else None
        self._latest = None if epoch is None else epoch * 10**9
        self._prefix = place.path + "/" if place.path else ""
        self._kinds = _Kinds(root) if keeps_kinds and root >= 0 else None
        self._assembly = Assembly()
        self._names: dict[tuple[int, int], bytes] = {}
        """Of files with several names in one piece: the first one, by piece and inode. What is
        copied by two names, or through a link, becomes two files, as in Docker.
        """
        self._archive: _Archive | None = None
        self._content: Callable[[memoryview], int] | None = None
        """Reads the content that is due, if the assembly does not have it."""
        self._left = 0
        """Bytes of that content."""
        self._padding = 0
        """Bytes after it."""
        self._file: File | None = None
        self._steps = self._all(selection, now)

    def readinto(self, buffer: memoryview) -> int:
        """Read up to the whole buffer; 0 at the end. Raises InvalidParameter, ServerError, and
        Abandoned at a checkpoint.
        """
        checkpoint()
        filled = 0
        buffer = memoryview(buffer)
        try:
            while filled < len(buffer):
                got = self._assembly.readinto(buffer[filled:])
                if not got and self._left:
                    got = self._read(buffer[filled:])
                filled += got
                if not got and next(self._steps, None) is None:
                    break
        except ArchiveError as error:
            # Docker's words for a truncated one, which come from Go's archive/tar
            words = "unexpected EOF: " if "truncated" in str(error) else ""
            raise InvalidParameter(f"archive to unpack: {words}{error}") from error
        except OSError as error:
            raise ServerError(f"copying {reason_with_file(error)}") from error
        return filled

    def _read(self, buffer: memoryview) -> int:
        """Some of the content that is due."""
        assert self._content is not None
        buffer = buffer[: self._left]
        got = self._content(buffer)
        if not got:  # the file became shorter, and its header is sent already
            got = len(buffer)
            buffer[:] = bytes(got)
        self._left -= got
        if not self._left:
            self._finish()
        return got

    def _finish(self) -> None:
        self._assembly.zeros(self._padding)
        self._content = None
        self._left = self._padding = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _expect(self, content: Callable[[memoryview], int], size: int) -> None:
        """Content that follows the headers of the last entry."""
        self._content, self._left, self._padding = content, size, -size & (_BLOCK - 1)

    def close(self) -> None:
        self._steps = iter(())
        self._finish()
        self._assembly.close()
        if self._archive is not None:
            self._archive.close()
            self._archive = None

    def _all(self, selection: Selection, now: int) -> Iterator[bool]:
        """Put entries into the assembly; each item says that some were put."""
        for path in self._place.missing:
            mtime = now
            if path == self._place.path and self._top_time is not None:
                mtime = self._top_time
            raw = os.fsencode(path) + b"/"
            self._assembly.entry(raw, DIRECTORY, self._parents_mode, *self._parents_owner, self._time(mtime))
        if self._top_time is not None and self._place.path and not self._place.missing and self._root >= 0:
            self._put_existing(self._top_time)
        yield True
        for unpack, pieces in itertools.groupby(selection.pieces, lambda piece: piece.unpack):
            if unpack:
                for piece in pieces:
                    yield from self._unpacked(piece.tree, piece.entries[0][1])
                self._names.clear()  # members may have replaced those files
                continue
            entries = _merged(list(pieces))
            while batch := tuple(itertools.islice(entries, _BATCH)):
                for piece, path, entry in batch:
                    self._put(piece, path if self._place.is_directory else None, entry)
                    if self._left:
                        yield True
                yield True
        self._assembly.zeros(2 * _BLOCK)
        yield True

    def _put_existing(self, mtime: int) -> None:
        """The destination as it is in the root, with another time."""
        place = DirectoryTree(self._root).find(self._place.path)
        if place is not None and place.kind == DIRECTORY:
            name = os.fsencode(place.path) + b"/"
            owner = place.uid, place.gid
            self._assembly.entry(name, DIRECTORY, place.mode, *owner, self._time(mtime), 0, b"", place.xattrs)

    def _time(self, mtime: int) -> int:
        return mtime if self._latest is None else min(mtime, self._latest)

    def _put(self, piece: Piece, path: str | None, entry: Entry) -> None:
        """An entry at a path below the destination; None: at the destination itself."""
        tree = piece.tree
        name = self._place.path if path is None else self._prefix + path
        if _WHITEOUT in name:
            _check_name(name)
        if entry.kind in (CHARACTER, BLOCK):
            check_device(entry.path, entry.kind, entry.major, entry.minor)
        if self._kinds is not None:
            self._kinds.check(name, entry.kind == DIRECTORY)
        raw = os.fsencode(name)
        uid, gid = (entry.uid, entry.gid) if piece.owners and self._owner is None else self._owner or (0, 0)
        mode = entry.mode
        if self._mode is not None and entry.kind != LINK:
            mode = self._mode(mode, entry.kind == DIRECTORY)
        mtime = self._time(entry.mtime)
        if entry.kind != FILE:
            if entry.kind == DIRECTORY:
                raw += b"/"
            target = os.fsencode(entry.target)
            self._assembly.entry(
                raw, entry.kind, mode, uid, gid, mtime, 0, target, entry.xattrs, entry.major, entry.minor
            )
            return
        if entry.inode and entry.size:
            first = self._names.setdefault((id(piece), entry.inode), raw)
            if first is not raw:
                self._assembly.entry(raw, _HARD_LINK, mode, uid, gid, mtime, 0, first)
                return
        if isinstance(tree, Context) and entry.size:
            descriptor, offset, stored, extents = tree.stored(entry)
            self._assembly.entry(raw, FILE, mode, uid, gid, mtime, entry.size, b"", entry.xattrs, 0, 0, extents, stored)
            self._assembly.range(descriptor, offset, stored)
            return
        self._assembly.entry(raw, FILE, mode, uid, gid, mtime, entry.size, b"", entry.xattrs)
        if isinstance(tree, DirectoryTree):
            self._assembly.named(tree.root, os.fsencode(entry.path), entry.size)
        elif entry.size:
            self._file = tree.reader(entry)
            self._expect(self._file.readinto, entry.size)

    # --- archives ---------------------------------------------------------------------------------

    def _unpacked(self, tree: Tree, entry: Entry) -> Iterator[bool]:
        """The members of an archive, below the destination."""
        self._archive = _Archive(tree, entry)
        members = _members.Members(self._archive)
        parents = {"": self._place.path}
        while (member := members.following()) is not None:
            if self._member(member, parents):
                self._expect(members.content, member[14])
            yield True
        self._archive.close()
        self._archive = None

    def _member(self, member: _members.Member, parents: dict[str, str]) -> bool:
        """Put the headers of a member; True if its content follows."""
        path, parent, whiteout, kind, mode, uid, gid, size, mtime, link = member[:10]
        xattrs, major, minor, _, stored, extents, _ = member[10:]
        if whiteout:
            raise InvalidParameter(f"{path}: names that begin with {_WHITEOUT} are reserved for layers")
        if kind in (CHARACTER, BLOCK):
            check_device(path, kind, major, minor)
        if not path:
            if kind != DIRECTORY:
                raise InvalidParameter("archive to unpack: its root is not a directory")
            return False  # the destination stays as it is
        above = self._parent(parent, parents)
        name = f"{above}/{posixpath.basename(path)}" if above else posixpath.basename(path)
        raw = os.fsencode(name)
        uid, gid = self._members_owner or (uid, gid)
        if kind == DIRECTORY:
            parents[path] = name
            raw += b"/"
        target = b""
        if kind == LINK:
            target = os.fsencode(link)
        elif kind == _HARD_LINK:
            linked = clean(link)
            if linked is None:
                raise InvalidParameter(f'invalid hardlink "{path}" -> "{link}": it leads out of the archive')
            above = self._parent(posixpath.dirname(linked), parents)
            target = os.fsencode(posixpath.join(above, posixpath.basename(linked)))
        self._assembly.entry(
            raw, kind, mode, uid, gid, self._time(mtime), size, target, xattrs, major, minor, extents, stored
        )
        return stored > 0

    def _parent(self, path: str, parents: dict[str, str]) -> str:
        """The place of a directory of the archive. If the archive has no entry for it so far, links
        of the image are followed.
        """
        done = ""
        for end in (*(at for at, character in enumerate(path) if character == "/"), len(path)):
            at = path[:end]
            if at not in parents:
                name = posixpath.basename(at)
                parents[at] = self._followed(f"{parents[done]}/{name}" if parents[done] else name)
            done = at
        return parents[done]

    def _followed(self, path: str) -> str:
        if self._root < 0:
            return path
        try:
            return os.fsdecode(files.resolve_in_root(self._root, path))
        except OSError as error:
            raise InvalidParameter(f"/{path}: {reason(error)}") from error


class _Hashed:
    """A stream that is hashed while it is read."""

    def __init__(self, stream: Stream, digest: Hashing) -> None:
        self._stream = stream
        self._digest = digest

    def readinto(self, buffer: memoryview) -> int:
        got = self._stream.readinto(buffer)
        self._digest.update(bytes(buffer[:got]))
        return got


def lay_out(ingest: Ingest, stream: Stream) -> Extraction:
    """Extract a stream and close it. As `layers.extract_and_hash`, but a large stream is
    hashed in another thread meanwhile. Blocking.
    """
    try:
        if not stream.large:
            return extract_and_hash(ingest, stream)
        digest = Hashing()
        try:
            extraction = extract(ingest, _Hashed(stream, digest))
        finally:
            diff_id = digest.finish()
        return extraction._replace(diff_id=diff_id)
    finally:
        stream.close()


_OCTAL = re.compile(r"0*[0-7]{1,4}")
_SYMBOLIC = re.compile(r"([ugoa]*)((?:[-+=](?:[ugo]|[rwxXst]*))+)")
_ACTION = re.compile(r"([-+=])([ugo]|[rwxXst]*)")
_BITS = {"r": 0o444, "w": 0o222, "x": 0o111}
_WHO = {"u": 0o4700, "g": 0o2070, "o": 0o1007}
_SHIFT = {"u": 6, "g": 3, "o": 0}


def _mode_change(chmod: str) -> Callable[[int, bool], int]:
    """What `--chmod` makes of a mode; the second argument: it is a directory's."""
    if _OCTAL.fullmatch(chmod):
        value = int(chmod, 8)
        return lambda mode, directory: value
    steps: list[tuple[int, str, str]] = []
    for clause in chmod.split(","):
        parts = _SYMBOLIC.fullmatch(clause)
        if parts is None:
            raise InvalidParameter(
                f"invalid chmod parameter: '{chmod}'. it should be octal string and between 0 and 07777"
            )
        who = parts[1] or "a"
        mask = 0o7777 if "a" in who else sum({_WHO[one] for one in who})
        steps += [(mask, operator, what) for operator, what in _ACTION.findall(parts[2])]

    def change(mode: int, directory: bool) -> int:
        for mask, operator, what in steps:
            bits = 0
            if what in _SHIFT:
                bits = (mode >> _SHIFT[what] & 7) * 0o111
            for one in what if what not in _SHIFT else "":
                if one == "X":
                    bits |= 0o111 if directory or mode & 0o111 else 0
                elif one == "s":
                    bits |= 0o6000
                elif one == "t":
                    bits |= 0o1000
                else:
                    bits |= _BITS[one]
            bits &= mask
            if operator == "+":
                mode |= bits
            elif operator == "-":
                mode &= ~bits
            else:
                # As chmod(1), `=` keeps set-user-id and set-group-id of directories.
                cleared = mask & (0o777 if directory else 0o7777)
                mode = mode & ~cleared | bits
        return mode

    return change


def check_mode(chmod: str) -> None:
    """Raises InvalidParameter if `chmod` is no mode."""
    _mode_change(chmod)


__all__ = [
    "Destination",
    "Piece",
    "Selection",
    "Stream",
    "check_mode",
    "destination",
    "is_archive",
    "join",
    "lay_out",
    "select",
]
