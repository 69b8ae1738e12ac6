"""Directories that mounts come from and are filled from: the host path of a bind, a plugin's mount,
the image's content below a destination.

Blocking: run them in a thread. Descriptors are the caller's to close.
Raises: InvalidParameter for a destination that is a file of the image, ServerError that names the
path and the kernel's reason; see `open_below` for its own.
Not here: the local driver's directories (`local.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable

from engine._fast import copy, tree
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.system import files, mounts
from engine.wire.containers import MountPoint


def open_in_image(root: int, destination: str) -> int | None:
    """A descriptor of the image's directory there; None when there is none."""
    try:
        return files.open_in_root(root, destination, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            with contextlib.suppress(OSError):
                found = files.open_in_root(root, destination, os.O_PATH)
                try:
                    exists = not stat.S_ISDIR(os.fstat(found).st_mode)
                finally:
                    os.close(found)
                if exists:
                    raise InvalidParameter(
                        f"cannot mount volume over existing file, file exists {destination}"
                    ) from error
            return None
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise ServerError(f"the image's {destination}: {error.strerror}") from error


def open_below(top: int, name: str, subpath: str) -> int:
    """A descriptor (O_PATH) of a part of a volume or image, whose content `top` is and `name` the
    name for messages. Links are followed within it only.

    Raises NotFound when there is no such file, InvalidParameter when a link leads out of it.
    """
    try:
        return files.open_beneath(top, subpath, os.O_PATH)
    except OSError as error:
        place = f"{name}/{subpath}"
        if error.errno in (errno.EXDEV, errno.ELOOP):
            raise InvalidParameter(f"{place}: path concatenation escapes the base directory") from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise NotFound(f"cannot access path {place}: {(error.strerror or '').lower()}") from error
        raise ServerError(f"cannot access path {place}: {(error.strerror or '').lower()}") from error


def ensure_sources(points: Iterable[MountPoint], owner: tuple[int, int] = (0, 0)) -> None:
    """Prepare the host paths of these binds for a start. `owner`: uid and gid of new directories,
    those of the root of containers.
    """
    for point in points:
        _ensure_source(point, owner)


def open_path(path: str, owner: tuple[int, int] = (0, 0)) -> int:
    """A descriptor of a bind's host path, created as a directory if it is missing, as a start would
    create it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            _make_directories(path, owner)
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise ServerError(f"mount source '{path}': {(error.strerror or '').lower()}") from error


def _make_directories(path: str, owner: tuple[int, int]) -> None:
    missing = []
    if owner != (0, 0):
        above = path
        while not os.path.lexists(above):
            missing.append(above)
            above = os.path.dirname(above)
    os.makedirs(path, exist_ok=True)
    for each in missing:
        os.chown(each, *owner, follow_symlinks=False)


def _ensure_source(point: MountPoint, owner: tuple[int, int]) -> None:
    """A bind's host path, created as a directory if it is missing, as Docker does; its mount gets
    the propagation that the bind requires.
    """
    try:
        _make_directories(point.source, owner)
    except FileExistsError:
        pass  # a file, a socket: it is bound as it is
    except OSError as error:
        raise ServerError(
            f"error while creating mount source path '{point.source}': {(error.strerror or '').lower()}"
        ) from error
    kind = point.propagation.removeprefix("r")
    if kind not in ("shared", "slave"):
        return
    path = os.path.realpath(point.source)
    above = mounts.containing(path)
    if kind == "shared" and "shared:" not in above.propagation:
        raise ServerError(f"path {point.source} is mounted on {above.target} but it is not a shared mount")
    if kind == "slave" and "shared:" not in above.propagation and "master:" not in above.propagation:
        raise ServerError(f"path {point.source} is mounted on {above.target} but it is not a shared or slave mount")


def populate(name: str, source: int, target: int) -> None:
    """Copy the content, mode and owner of the directory `source` into the directory `target` if
    that is empty. Raises ServerError; then the copy has been removed.
    """
    if os.listdir(target):
        return
    try:
        copy.copy_tree(source, target)
    except OSError as error:
        for entry in os.listdir(source):
            with contextlib.suppress(OSError):
                tree.remove_tree(target, os.fsencode(entry))
        raise ServerError(
            f"error while copying the image's content into volume {name}: {error.filename}: "
            f"{(error.strerror or '').lower()}"
        ) from error


def populate_path(name: str, source: int, path: str) -> None:
    """As `populate`, into the directory where a plugin has mounted the volume."""
    try:
        target = files.open_directory(path)
    except OSError as error:
        raise ServerError(
            f"error while copying the image's content into volume {name}: {path}: {(error.strerror or '').lower()}"
        ) from error
    try:
        populate(name, source, target)
    finally:
        os.close(target)
