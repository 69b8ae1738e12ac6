"""An image of a client's OCI layout (`--build-context name=oci-layout://…`): read blob by blob
through the session's content service, and loaded as an archive of it would be.

Threads: the event loop's. Not here: archives and their verification (`images/archive.py`), the call
        (`services.py`).
Raises:  Unimplemented when the client offers no such service, NotFound for an image of another
        platform, InvalidParameter for a damaged layout, ServerError with the client's reason.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator

import msgspec

from engine.builder.buildkit import filesync
from engine.builder.buildkit.messages import Stat
from engine.builder.buildkit.services import Session
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.images import platforms
from engine.images.archive import MAX_DOCUMENT, decode
from engine.images.store import ImageStore
from engine.wire.images import Manifest, Platform

SCHEME = "oci-layout://"
_SOURCE = re.compile(r"oci-layout://(?P<store>[^/@:]+)(:[^/@]*)?@(?P<digest>sha256:[0-9a-f]{64})")
_OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def check(source: str) -> None:
    """Raises InvalidParameter unless it names a layout of the client and a digest in it."""
    if not _SOURCE.fullmatch(source):
        raise InvalidParameter(f"{source[:200]!r}: an image layout needs a name and a digest")


async def load(session: Session, source: str, platform: Platform | None, images: ImageStore) -> str:
    """Have the image in the store. Returns its id."""
    found = _SOURCE.fullmatch(source)
    assert found is not None
    layout = _Layout(session, found["store"])
    digest = found["digest"]
    raw = await session.small_blob(layout.store, digest, MAX_DOCUMENT)
    manifest = decode(raw, Manifest, digest)
    if manifest.manifests:
        wanted = platform or platforms.HOST
        entry = platforms.best(wanted, [(each.platform, each) for each in manifest.manifests])
        if entry is None:
            raise NotFound(f"{source[:200]!r}: no image for {platforms.text_of(wanted)}")
        digest = entry.digest
        raw = await session.small_blob(layout.store, digest, MAX_DOCUMENT)
        manifest = decode(raw, Manifest, digest)
    if manifest.config is None:
        raise InvalidParameter(f"{source[:200]!r}: {digest} is not the manifest of an image")
    if manifest.config.digest not in images.index:
        body = layout.archive(digest, raw, manifest)
        async with contextlib.aclosing(images.load(body, quiet=True, platform=platform)) as steps:
            async for _ in steps:
                pass
    return manifest.config.digest


class _Layout:
    def __init__(self, session: Session, store: str) -> None:
        self._session = session
        self.store = f"oci:{store}"

    async def archive(self, digest: str, raw: bytes, manifest: Manifest) -> AsyncIterator[bytes]:
        """The layout of one image as a tar archive."""
        assert manifest.config is not None
        media_type = manifest.media_type or _OCI_MANIFEST
        index = {
            "schemaVersion": 2,
            "manifests": [{"mediaType": media_type, "digest": digest, "size": len(raw)}],
        }
        for name, content in (
            ("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'),
            ("index.json", msgspec.json.encode(index)),
            (_name(digest), raw),
        ):
            yield _header(name, len(content)) + content + bytes(-len(content) % 512)
        sizes = {blob.digest: blob.size for blob in (manifest.config, *manifest.layers)}
        if min(sizes.values()) < 0:
            raise InvalidParameter(f"{digest}: a blob of negative size")
        for blob, size in sizes.items():
            yield _header(_name(blob), size)
            left = size
            async with contextlib.aclosing(self._session.blob(self.store, blob)) as chunks:
                async for chunk in chunks:
                    left -= len(chunk)
                    if left < 0:
                        break
                    yield chunk
            if left:
                raise ServerError(f"the client's image layout: {blob} has not the size of its descriptor")
            yield bytes(-size % 512)
        yield bytes(1024)


def _header(name: str, size: int) -> bytes:
    return filesync.header(Stat(path=name, mode=0o644, size=size))


def _name(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


__all__ = ["SCHEME", "check", "load"]
