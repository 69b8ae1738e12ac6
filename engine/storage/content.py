"""Blobs by digest, in ROOT/content/sha256/<hex>. Each file is verified before it gets its name.

Owns: that directory, and ROOT/tmp or its own directory in DOCKER_TMPDIR. Not here: who uses a blob
      (images/store.py deletes blobs that no record names). Blocking: use a thread for more than a
      few kilobytes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
from pathlib import Path

from engine.errors import InvalidParameter, NotFound, ServerError, reason
from engine.system import files

_log = logging.getLogger(__name__)

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def _temporary(root: Path) -> Path:
    """The directory of temporary files: ROOT/tmp, or one in DOCKER_TMPDIR. Raises ServerError if
    another user may have made it.
    """
    elsewhere = os.environ.get("DOCKER_TMPDIR", "")
    place = root / "tmp"
    place.mkdir(mode=0o700, exist_ok=True)
    if not elsewhere:
        return place
    place = Path(elsewhere).resolve() / f"engined-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ServerError(f"DOCKER_TMPDIR: {place} exists and is not a directory of mode 0700 of this user")
    return place


class Content:
    """The blobs of one engine."""

    def __init__(self, root: Path) -> None:
        """Creates the directories, and removes files that a crash left in the temporary one."""
        self._blobs = root / "content" / "sha256"
        self._blobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        # It is not removed itself: on a full disk it could not be made again.
        self.temporary = _temporary(root)
        for name in os.listdir(self.temporary):
            files.remove_tree(self.temporary / name)
        for name in os.listdir(self._blobs):
            if name.startswith("."):  # still being written when the engine was killed
                os.unlink(self._blobs / name)

    def ingest(self, data: bytes, expected: str | None = None) -> str:
        """Store `data`; returns its digest.

        Raises InvalidParameter if the digest is not `expected`, ServerError if the blob cannot be
        written.
        """
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if expected is not None and digest != expected:
            raise InvalidParameter(f"content has digest {digest}, expected {expected}")
        path = self.path(digest)
        if not path.exists():
            try:
                files.write_atomically(path, data, 0o600)
            except OSError as error:
                raise ServerError(f"storing blob {digest}: {reason(error)}") from error
        return digest

    def path(self, digest: str) -> Path:
        """The path of the blob, whether it exists or not.

        Raises InvalidParameter if it is not a sha256 digest.
        """
        if not _DIGEST.fullmatch(digest):
            raise InvalidParameter(f"invalid digest: {digest}")
        return self._blobs / digest[7:]

    def read(self, digest: str, limit: int = 64 << 20) -> bytes:
        """A whole blob, verified again. Raises NotFound, and ServerError if its file is damaged."""
        try:
            data = files.read_file(self.path(digest), limit)
        except FileNotFoundError as error:
            raise NotFound(f"No such blob: {digest}") from error
        except OSError as error:
            raise ServerError(f"blob {digest}: {reason(error)}") from error
        if hashlib.sha256(data).hexdigest() != digest[7:]:
            raise ServerError(f"blob {digest} is damaged")
        return data

    def open(self, digest: str) -> int:
        """A descriptor for reading; the caller closes it. Raises NotFound, ServerError."""
        try:
            return os.open(self.path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFound(f"No such blob: {digest}") from error
        except OSError as error:
            raise ServerError(f"blob {digest}: {reason(error)}") from error

    def delete(self, digest: str) -> None:
        """Remove a blob, if it exists.

        A failure is only logged. No record names the blob any more, so the next start tries again.
        """
        try:
            self.path(digest).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("removing blob %s: %s", digest, reason(error))

    def digests(self) -> set[str]:
        """Every stored blob."""
        return {f"sha256:{name}" for name in os.listdir(self._blobs) if not name.startswith(".")}
