"""One repository of a registry: manifests, tags and blobs, in both directions (OCI distribution
specification).

Reads try the mirrors first, each with its own login; writes go to the registry itself.

Not here: requests (session.py), a blob's way into a file (download.py), use of the content
(pull.py, push.py).
Raises: Failure, NotFound, Unauthorized, ServerError.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

import aiohttp
import msgspec
from yarl import URL

from engine.errors import NotFound, ServerError, Unauthorized
from engine.images.credentials import NOBODY, Credentials, next_page
from engine.images.reference import DEFAULT_DOMAIN
from engine.images.registry.download import BlobFile, download
from engine.images.registry.session import (
    MAX_ANSWER,
    Failure,
    Registries,
    Retrying,
    Site,
    decode,
    failure_of,
    not_reported,
    read,
    shown,
)
from engine.system.tasks import shield

T = TypeVar("T")

_SPOILT = ("BLOB_UPLOAD_INVALID", "BLOB_UPLOAD_UNKNOWN", "DIGEST_INVALID", "SIZE_INVALID")
"""Codes that an upload gets for what it has sent (distribution specification, "Error Codes")."""

MAX_MANIFEST = 4 << 20
"""Bytes of a manifest, as registries limit them too (distribution specification, "Pushing
Manifests").
"""
MAX_TAGS = 10_000

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
ACCEPT = ", ".join((DOCKER_MANIFEST, OCI_MANIFEST, DOCKER_LIST, OCI_INDEX, "*/*;q=0.1"))


class NoManifest(NotFound):
    """The repository has no manifest of that tag or digest."""


class Outgoing(Protocol):
    """A blob to upload; `digest` is valid when `chunks` has ended."""

    @property
    def digest(self) -> str: ...
    def chunks(self) -> AsyncGenerator[bytes, None]: ...


S = TypeVar("S", bound=Outgoing)


class Fetched(NamedTuple):
    """A manifest as stored in the registry."""

    raw: bytes
    media_type: str
    """Content-Type without its parameters."""
    digest: str


class _Page(msgspec.Struct):
    tags: list[str] | None = None


class Repository:
    """One repository, seen with one client's credentials."""

    def __init__(
        self, registries: Registries, domain: str, path: str, credentials: Credentials = NOBODY, actions: str = "pull"
    ) -> None:
        self._registries = registries
        self.domain = domain
        self.path = path
        scopes = [f"repository:{path}:{actions}"]
        origins = registries.origins(domain, mirrors=actions == "pull")
        # A mirror is a third party: it never gets the registry's credentials.
        self._sites = [Site(registries, origin, NOBODY, scopes) for origin in origins[:-1]]
        self._sites.append(Site(registries, origins[-1], credentials, scopes))
        self._logged_in = credentials.given
        self._at = 0

    @property
    def host(self) -> str:
        """The registry's host, the key for limits per registry."""
        return str(self._site.base.host)

    @property
    def _site(self) -> Site:
        return self._sites[self._at]

    def _is_last(self, site: Site) -> bool:
        """True for the registry itself. A mirror that fails is not worth a long wait."""
        return site is self._sites[-1]

    async def _anywhere(self, attempt: Callable[[Site], Awaitable[T]]) -> T:
        """Ask the mirror that answered last, then the ones after it, then the registry itself.

        Raises the ServerError of the last one.
        """
        while True:
            site = self._site
            try:
                return await attempt(site)
            except ServerError:
                if self._is_last(site):
                    raise
                if site is self._site:
                    self._at += 1

    # --- reading ----------------------------------------------------------------------------------

    async def manifest(self, name: str) -> Fetched:
        """The manifest with this tag or digest; with a digest its content is verified.

        Raises NotFound when it is missing or the client may not read it, Unauthorized when the
        registry refuses the client's credentials, otherwise ServerError.
        """
        try:
            return await self.stored(name)
        except Failure as error:
            if not error.refuses:
                raise
            raise self._no_access(error, name) from None

    async def stored(self, name: str) -> Fetched:
        """As `manifest`, but raises Failure with the registry's own words."""
        return await self._anywhere(lambda site: site.persist(lambda: self._manifest(site, name)))

    def _familiar(self) -> str:
        if self.domain != DEFAULT_DOMAIN:
            return f"{self.domain}/{self.path}"
        return self.path.removeprefix("library/")

    def _no_access(self, error: Failure, name: str) -> NotFound | Unauthorized:
        familiar = self._familiar()
        if error.status == 404 and error.code != "NAME_UNKNOWN":
            separator = "@" if name.startswith("sha256:") else ":"
            return NoManifest(f"manifest for {familiar}{separator}{name} not found: {error.message}")
        words = (
            f"pull access denied for {familiar}, repository does not exist or may require 'docker login': "
            f"{error.message}"
        )
        return Unauthorized(words) if error.status == 401 and self._logged_in else NotFound(words)

    async def _manifest(self, site: Site, name: str) -> Fetched:
        total = self._registries.stall * 4  # a slow drip of bytes must not go on forever
        async with site.exchange(
            "GET", await site.url(self.path, "manifests", name), {"Accept": ACCEPT}, total=total
        ) as answer:
            if answer.status != 200:
                raise await failure_of(answer)
            media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if media_type.startswith("text/"):
                raise Failure(f"unsupported manifest media type and no default available: {media_type}", 500)
            raw = await read(answer, MAX_MANIFEST)
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if name.startswith("sha256:") and digest != name:
            raise Failure(f"manifest verification failed for digest {name}", 500)
        return Fetched(raw, media_type, digest)

    async def tags(self) -> list[str]:
        """Every tag. Raises NotFound and Unauthorized as `manifest` does."""
        try:
            return await self._anywhere(lambda site: site.persist(lambda: self._tags(site)))
        except Failure as error:
            if not error.refuses:
                raise
            raise self._no_access(Failure(error.message, 401 if error.status == 401 else 403), "") from None

    async def _tags(self, site: Site) -> list[str]:
        found: dict[str, None] = {}
        url = (await site.url(self.path, "tags", "list")) % {"n": "1000"}
        seen: set[URL] = set()
        while url not in seen:
            seen.add(url)
            async with site.exchange("GET", url, total=self._registries.stall * 4) as answer:
                if answer.status != 200:
                    raise await failure_of(answer)
                page = decode(await read(answer, MAX_ANSWER), _Page, f"tags of {self._familiar()}")
                link = next_page(answer.headers.getall("Link", []))
            found.update(dict.fromkeys(page.tags or ()))
            if len(found) > MAX_TAGS or len(seen) > MAX_TAGS:
                raise ServerError(f"{self._familiar()} has more than {MAX_TAGS} tags")
            if not link:
                break
            url = site.target(url, link)
        return list(found)

    async def blob(self, digest: str, limit: int) -> bytes:
        """A small blob, verified. Raises ServerError."""
        return await self._anywhere(
            lambda site: site.persist(lambda: self._blob(site, digest, limit), patient=self._is_last(site))
        )

    async def _blob(self, site: Site, digest: str, limit: int) -> bytes:
        async with site.exchange(
            "GET", await site.url(self.path, "blobs", digest), total=self._registries.stall * 4
        ) as answer:
            if answer.status != 200:
                raise await failure_of(answer)
            raw = await read(answer, limit)
        if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
            raise Failure(f"filesystem layer verification failed for digest {digest}", 500)
        return raw

    async def fetch(
        self,
        digest: str,
        size: int,
        target: int,
        report: Callable[[int], None],
        retrying: Retrying = not_reported,
    ) -> None:
        """Receive a blob of `size` bytes into an empty file, and verify it. Raises ServerError.

        `report` is called with the number of bytes in the file, in any thread. Bytes received
        before a connection broke are kept.
        """
        file = BlobFile(target, size, report)
        await self._anywhere(
            lambda site: download(site, self.path, digest, file, retrying, patient=self._is_last(site))
        )
        if await file.digest() != digest:
            raise ServerError(f"filesystem layer verification failed for digest {digest}")

    # --- writing ----------------------------------------------------------------------------------

    async def has_blob(self, digest: str, retrying: Retrying = not_reported) -> bool:
        """Raises Failure."""
        return await self._site.persist(lambda: self._has_blob(digest), retrying, patient=True)

    async def _has_blob(self, digest: str) -> bool:
        site = self._site
        async with site.exchange(
            "HEAD", await site.url(self.path, "blobs", digest), total=self._registries.stall
        ) as answer:
            if answer.status == 200:
                return True
            if answer.status == 404:
                return False
            raise await failure_of(answer)

    async def mount(self, digest: str, source: str) -> bool:
        """Mount a blob of another repository of the registry.

        False when the registry wants an upload instead.
        """
        site = self._site
        url = (await site.url(self.path, "blobs", "uploads/")) % {"mount": digest, "from": source}
        scopes = (f"repository:{source}:pull",)
        try:
            async with site.exchange("POST", url, scopes=scopes, total=self._registries.stall) as answer:
                if answer.status == 202 and "Location" in answer.headers:
                    await self._cancel_upload(site, site.target(url, answer.headers["Location"]))
                return answer.status == 201
        except Failure:
            return False  # an upload reports the error, if there is one

    async def _cancel_upload(self, site: Site, url: URL) -> None:
        with contextlib.suppress(Failure):
            async with site.exchange("DELETE", url, total=self._registries.stall):
                pass

    async def upload(self, source: Callable[[], S], retrying: Retrying = not_reported) -> S:
        """Upload a blob; returns its description.

        `source` is called for each try. Raises ServerError.
        """

        async def attempt() -> S:
            sent = source()
            async with contextlib.aclosing(sent.chunks()) as chunks:
                await self._upload(chunks, lambda: sent.digest)
            return sent

        return await self._site.persist(attempt, retrying, patient=True)

    async def _upload(self, chunks: AsyncIterator[bytes], digest: Callable[[], str]) -> None:
        site = self._site
        stall = self._registries.stall
        url = await site.url(self.path, "blobs", "uploads/")
        async with site.exchange("POST", url, total=stall) as answer:
            if answer.status != 202 or "Location" not in answer.headers:
                raise await failure_of(answer)
            url = site.target(url, answer.headers["Location"])
        done = False
        try:
            try:
                async with asyncio.timeout(stall) as limit:
                    body = _watched(chunks, limit, stall)
                    kind = {"Content-Type": "application/octet-stream"}
                    async with site.exchange("PATCH", url, kind, body=body) as answer:
                        if answer.status != 202:
                            raise await _failure_of_upload(answer)
                        url = site.target(url, answer.headers.get("Location", str(url)))
            except TimeoutError:
                raise Failure(f'Patch "{shown(url)}": stalled for {stall:g} s', transient=True) from None
            # The registry may take a while to store a large blob.
            async with site.exchange("PUT", url.update_query({"digest": digest()}), total=max(stall, 300)) as answer:
                if answer.status not in (201, 204):
                    raise await _failure_of_upload(answer)
            done = True
        finally:
            if not done:
                await shield(self._cancel_upload(site, url))

    async def put_manifest(self, name: str, raw: bytes, media_type: str) -> None:
        """Raises Failure."""
        await self._site.persist(lambda: self._put_manifest(name, raw, media_type), patient=True)

    async def _put_manifest(self, name: str, raw: bytes, media_type: str) -> None:
        site = self._site
        url = await site.url(self.path, "manifests", name)
        total = self._registries.stall * 4
        async with site.exchange("PUT", url, {"Content-Type": media_type}, body=raw, total=total) as answer:
            if answer.status not in (200, 201, 202):
                raise await failure_of(answer)


async def _failure_of_upload(answer: aiohttp.ClientResponse) -> Failure:
    """A new upload may succeed when the registry has lost this one, as it does when it starts
    again, or when the bytes have changed on the way.
    """
    failure = await failure_of(answer)
    failure.transient |= answer.status == 404 or failure.code in _SPOILT
    return failure


async def _watched(chunks: AsyncIterator[bytes], limit: asyncio.Timeout, stall: float) -> AsyncIterator[bytes]:
    """The chunks; each one postpones the time limit."""
    loop = asyncio.get_running_loop()
    async for chunk in chunks:
        limit.reschedule(loop.time() + stall)
        yield chunk
    limit.reschedule(loop.time() + stall)


__all__ = ["MAX_MANIFEST", "Fetched", "Outgoing", "Repository"]
