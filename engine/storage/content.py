"""Blobs by digest: ROOT/content/sha256/<hex>, each a file that was verified before it got its name.

Owns: that directory and ROOT/tmp. Not here: who uses a blob (images/store.py deletes those that no record names).
Blocking: run in a thread what is more than a few kilobytes.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from engine.errors import InvalidParameter, NotFound, ServerError
from engine.system import files

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Content:
    """The blobs of one engine."""

    def __init__(self, root: Path) -> None:
        """Makes the directories, and empties ROOT/tmp of what a crash left."""
        self._blobs = root / "content" / "sha256"
        self.temporary = root / "tmp"
        self._blobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.remove_tree(self.temporary)
        self.temporary.mkdir(mode=0o700)
        for name in os.listdir(self._blobs):
            if name.startswith("."):  # written when the engine was killed
                os.unlink(self._blobs / name)

    def ingest(self, data: bytes, expected: str | None = None) -> str:
        """Keep `data`; its digest. Raises InvalidParameter when that is not `expected`."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if expected is not None and digest != expected:
            raise InvalidParameter(f"content has digest {digest}, expected {expected}")
        path = self.path(digest)
        if not path.exists():
            files.write_atomically(path, data, 0o600)
        return digest

    def path(self, digest: str) -> Path:
        """Where the blob is, or would be. Raises InvalidParameter for what is no sha256 digest."""
        if not _DIGEST.fullmatch(digest):
            raise InvalidParameter(f"invalid digest: {digest}")
        return self._blobs / digest[7:]

    def read(self, digest: str, limit: int = 64 << 20) -> bytes:
        """A whole blob, verified again. Raises NotFound, and ServerError when its file was damaged."""
        try:
            data = files.read_file(self.path(digest), limit)
        except FileNotFoundError as error:
            raise NotFound(f"No such blob: {digest}") from error
        except OSError as error:
            raise ServerError(f"blob {digest}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != digest[7:]:
            raise ServerError(f"blob {digest} is damaged")
        return data

    def open(self, digest: str) -> int:
        """A descriptor for reading; the caller closes it. Raises NotFound."""
        try:
            return os.open(self.path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFound(f"No such blob: {digest}") from error

    def delete(self, digest: str) -> None:
        """Remove a blob; absent is fine."""
        self.path(digest).unlink(missing_ok=True)

    def digests(self) -> set[str]:
        """Every blob that is there."""
        return {f"sha256:{name}" for name in os.listdir(self._blobs) if not name.startswith(".")}
