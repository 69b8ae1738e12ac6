"""Contexts that a build names by URL (`remote=`): a repository, an archive, or a Dockerfile alone.

Owns:    the connection or checkout, until the end of `fetch`.
Threads: the loop's.
Raises:  InvalidParameter for a URL of none of these; ServerError, in Docker's words, when it cannot
         be fetched or has another content.
Not here: repositories (git.py), files for ADD (fetching.py), what an archive contains (context.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

from engine.build.git import Checkout
from engine.images.remote import Remote
from engine.wire.build import BuildMessage

Report = Callable[[BuildMessage], None]


class Text(NamedTuple):
    """A Dockerfile alone: the build has an empty context."""

    content: bytes


class Archive(NamedTuple):
    """A tar archive, compressed or not. Errors of the connection are raised while it is read."""

    body: AsyncIterator[bytes]


Fetched = Text | Archive | Checkout


@contextlib.asynccontextmanager
async def fetch(
    url: str, remote: Remote, directory: Path, report: Report, *, keep_git_dir: bool = False
) -> AsyncIterator[Fetched]:
    """The context at `url`, for the time of the context manager.

    `directory`: for temporary files. `report` gets the progress of downloads. `keep_git_dir`: a
    checkout keeps its `.git`.
    """
    raise NotImplementedError
    yield


__all__ = ["Archive", "Fetched", "Report", "Text", "fetch"]
