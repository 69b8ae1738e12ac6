"""The changes of an overlay made the content of a layer where they lie (`Layers.seal`).

The upper directory of an overlay has a layer's format already. What does not belong to it is
removed first: mount points that the engine made, changes below declared volumes, and directories
that were copied up for those alone. Then the layer's tar stream is hashed, and its tar-split data
written. No file is copied.

Nothing may change the tree meanwhile. It is hostile all the same: links in it are not followed, and
everything is opened and removed by descriptor.

Blocking: run it in a thread. Not here: unmounting (storage/overlay.py), the ingest's fate
(layers.py). Raises: ServerError with the kernel's reason, InvalidParameter for a file whose name
means a deletion in a layer.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from engine._fast import pack, tree
from engine.errors import InvalidParameter, ServerError, reason_with_file
from engine.images import tarsplit
from engine.storage import lowers
from engine.storage.lowers import Lowers
from engine.storage.snapshots import Ingest
from engine.system import files

_CHUNK = 256 * 1024
_WHITEOUT = ".wh."
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Sealed(NamedTuple):
    """diff_id, and bytes of regular files and of links' targets."""

    diff_id: str
    size: int


def seal(
    ingest: Ingest, below: Sequence[Path], drop: Sequence[str], stop: threading.Event, implied: Sequence[bytes] = ()
) -> Sealed:
    """See `Layers.seal`; `below` are the directories of the layers below, topmost first. Ends early
    with ServerError when `stop` is set.
    """
    try:
        with contextlib.ExitStack() as stack:
            root = files.open_directory(ingest.path)
            stack.callback(os.close, root)
            under = stack.enter_context(Lowers(below))
            _remove_stubs(root, ingest.stubs, under)
            for path in drop:
                _drop(root, path, under)
            if (model := under.find(b"")) is not None:
                # A stream has no entry for the root, so a copy of the layer has these attributes.
                stack.callback(os.close, model)
                lowers.copy_attributes(model, root)
            lowers.inherit(root, under, implied)
            return _pack(ingest, root, stop)
    except OSError as error:
        if error.errno == errno.EINVAL and os.path.basename(str(error.filename)).startswith(_WHITEOUT):
            raise InvalidParameter(
                f"/{error.filename}: a name that begins with {_WHITEOUT} stands for a deletion in a layer"
            ) from error
        raise ServerError(f"making a layer of the changes in {ingest.path}: {reason_with_file(error)}") from error


def _pack(ingest: Ingest, root: int, stop: threading.Event) -> Sealed:
    digest = hashlib.sha256()
    with contextlib.suppress(FileNotFoundError):  # of an extraction
        os.unlink(ingest.path.parent / tarsplit.FILE)
    writer = tarsplit.Writer(ingest.path.parent / tarsplit.FILE, root)
    try:
        packer = pack.Packer(root, b"", top=False, fine=True, layer=True, tar_split=writer)
        try:
            buffer = memoryview(bytearray(_CHUNK))
            while got := packer.readinto(buffer):
                digest.update(buffer[:got])
                if stop.is_set():
                    raise ServerError(f"making a layer of the changes in {ingest.path} was cancelled")
            writer.finish(packer.size)
            for path in packer.sockets:
                _remove_socket(root, os.fsdecode(path))
            return Sealed(f"sha256:{digest.hexdigest()}", packer.content)
        finally:
            packer.close()
    finally:
        writer.close()


def _remove_stubs(root: int, stubs: Sequence[str], under: Lowers) -> None:
    """Remove mount points that are still as they were made."""
    for path in reversed(stubs):
        with _if_there(), _parent(root, path) as (parent, name):
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                with contextlib.suppress(OSError):  # it is in use
                    os.rmdir(name, dir_fd=parent)
            elif stat.S_ISREG(found.st_mode) and found.st_size == 0:
                os.unlink(name, dir_fd=parent)
    _remove_unchanged(root, stubs, under)


def _remove_socket(root: int, path: str) -> None:
    """Remove an entry that the stream does not have. The directory keeps the times that its entry
    in the stream has.
    """
    with _parent(root, path) as (parent, name):
        status = os.fstat(parent)
        os.unlink(name, dir_fd=parent)
        os.utime(f"/proc/self/fd/{parent}", ns=(status.st_atime_ns, status.st_mtime_ns))


def _drop(root: int, path: str, under: Lowers) -> None:
    """Remove the changes at and below `path`. A new directory stays, as the mount point of a volume
    would, empty and with Docker's mode.
    """
    path = os.path.normpath(f"/{path}").lstrip("/")
    if not path or "\0" in path:
        return
    with _if_there(), _parent(root, path) as (parent, name):
        new = stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        if new and (model := under.find(os.fsencode(path))) is not None:
            os.close(model)
            new = False
        tree.remove_tree(parent, os.fsencode(name))
        if new:
            os.mkdir(name, 0o755, dir_fd=parent)
            os.chmod(name, 0o755, dir_fd=parent)
    _remove_unchanged(root, [path], under)


def _remove_unchanged(root: int, paths: Sequence[str], under: Lowers) -> None:
    """Remove the directories above `paths` that overlayfs has copied up for them alone: they are
    empty now and look like those below.
    """
    above = {parent for path in paths for parent in _above(path)}
    for path in sorted(above, key=len, reverse=True):
        with _if_there(), contextlib.ExitStack() as stack:
            found = files.open_without_links(root, path, _DIRECTORY)
            stack.callback(os.close, found)
            if os.listdir(found) or lowers.is_opaque(found):
                continue
            model = under.find(os.fsencode(path))
            if model is None:
                continue
            stack.callback(os.close, model)
            if lowers.looks_like(found, model):
                parent, name = stack.enter_context(_parent(root, path))
                os.rmdir(name, dir_fd=parent)
            else:
                status = os.fstat(model)
                os.utime(found, ns=(status.st_atime_ns, status.st_mtime_ns))


def _above(path: str) -> list[str]:
    """The directories above a relative path, without the root."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: end + 1]) for end in range(len(parts))]


@contextlib.contextmanager
def _if_there() -> Iterator[None]:
    """Ignore that a path does not or cannot exist, or leads through a link or something else that
    is no directory.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise


@contextlib.contextmanager
def _parent(root: int, path: str) -> Iterator[tuple[int, str]]:
    """A descriptor of the directory above `path`, and the last name of `path`."""
    above, _, name = path.rpartition("/")
    parent = files.open_without_links(root, above, os.O_PATH | os.O_DIRECTORY)
    try:
        yield parent, name
    finally:
        os.close(parent)


__all__ = ["Sealed", "seal"]
