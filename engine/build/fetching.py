"""Files that ADD fetches by URL.

Owns:    the file, which has no name on disk, until the end of `download`.
Threads: the loop's; bytes are written and hashed in a thread.
Raises:  InvalidParameter for a URL without a file name and for a checksum that does not match,
         ServerError when it cannot be fetched.
Not here: repositories (git.py), contexts (remote.py), unpacking: what was fetched is a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from engine.build.remote import Report
from engine.build.trees import Tree
from engine.images.remote import Remote


class Download(NamedTuple):
    """A file with mode 0600, the server's modification time (or 0), and a name."""

    name: str
    tree: Tree
    """One file, of this name."""
    digest: str
    """`sha256:…` of the content."""


@contextlib.asynccontextmanager
async def download(
    url: str, remote: Remote, directory: Path, report: Report, *, checksum: str = "", named: bool = True
) -> AsyncIterator[Download]:
    """The file at `url`, for the time of the context manager.

    The name comes from the URL's path, or else from Content-Disposition. If neither has one, that
    is an error when `named` is set: the destination is a directory. Otherwise any name will do.
    `checksum`: `sha256:…` that the content must have.
    """
    raise NotImplementedError
    yield


__all__ = ["Download", "download"]
