"""A FUSE file system whose server never answers, as a dead NFS server is seen by its clients."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from engine.system import mounts


@contextlib.contextmanager
def dead_mount(place: Path) -> Iterator[None]:
    """Mounted at `place`, which is made.

    At the end all calls that wait for it fail with ENOTCONN.
    """
    place.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        # fuse(4): user_id and group_id are those of the process that mounts
        mounts.mount("dead", place, "fuse", 0, f"fd={server},rootmode=40000,user_id=0,group_id=0,allow_other")
    except BaseException:
        os.close(server)
        raise
    try:
        yield
    finally:
        os.close(server)  # the kernel ends the connection
        mounts.unmount(place)
        place.rmdir()
