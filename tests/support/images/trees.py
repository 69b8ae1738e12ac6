"""A tree of files as one value, so that two can be compared."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any


def snapshot(root: Path | str, *, times: bool = True) -> dict[str, tuple[Any, ...]]:
    """Every entry below `root` by relative path: type, mode, owner, mtime, content, link target,
    device, attributes, and the other names of the same file.
    """
    top = os.fspath(root)
    found: dict[str, tuple[Any, ...]] = {}
    first: dict[tuple[int, int], str] = {}
    paths = [top]
    while paths:
        path = paths.pop()
        status = os.lstat(path)
        name = os.path.relpath(path, top)
        kind = stat.S_IFMT(status.st_mode)
        content: Any = None
        if kind == stat.S_IFREG:
            data = Path(path).read_bytes()
            content = (len(data), hashlib.sha256(data).hexdigest())
        elif kind == stat.S_IFLNK:
            content = os.readlink(path)
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            content = (os.major(status.st_rdev), os.minor(status.st_rdev))
        elif kind == stat.S_IFDIR:
            paths += [os.path.join(path, entry) for entry in sorted(os.listdir(path), reverse=True)]
        same = first.setdefault((status.st_dev, status.st_ino), name) if kind != stat.S_IFDIR else name
        attributes = {
            key: os.getxattr(path, key, follow_symlinks=False) for key in os.listxattr(path, follow_symlinks=False)
        }
        found[name] = (
            oct(status.st_mode),
            status.st_uid,
            status.st_gid,
            status.st_mtime_ns if times else 0,
            content,
            same,
            attributes,
        )
    return found
