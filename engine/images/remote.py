"""Operations with registries and other hosts: pull, push, import by URL, login, search. Each uses
the client's own credentials.

The package `registry`, and aiohttp with it, is loaded in a thread when it is first needed: it takes
15 MB and a fifth of a second.

Owns: the registry client. Not here: the protocol (registry/), the work (pull.py, push.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from engine import metrics
from engine.config import Config
from engine.errors import Forbidden, InvalidParameter, NotFound, ServerError, Unauthorized
from engine.events import EventLog
from engine.images import importing, platforms, pull, push, reference
from engine.images.archive import is_digest
from engine.images.credentials import Credentials
from engine.images.pull import Downloads, Resolved
from engine.images.push import Pushing
from engine.images.record import ImageRecord
from engine.images.reference import Reference
from engine.images.store import ImageStore
from engine.images.turns import Turns
from engine.system.tasks import spawn
from engine.wire.images import DistributionInspect, ImageConfig, Platform, Progress, SearchResult

if TYPE_CHECKING:
    from engine.images.registry import Registries, Repository

SEARCH_LIMIT = 25
MAX_SEARCH_LIMIT = 100
SEARCH_FILTERS = ("is-automated", "is-official", "stars")
RESERVED = "scratch"
"""The Dockerfile keyword for an empty base image."""

_COMPILED = ("aiohttp", "frozenlist", "multidict", "propcache", "yarl")
"""Packages with shared objects. Importing them page-faults the files in while holding the GIL, so
`_load_client` warms the page cache first.
"""
_URL = re.compile(r"https?://[^/?#\s]+\S*\Z")
"""URL of an archive to import, which must have a host."""
_USER = re.compile(r"(?<=://)[^/?#]*@")
"""User and password of a URL. The image says where it was imported from, but not them."""


class Search(NamedTuple):
    """A search. A filter that is None is not applied."""

    term: str
    limit: int = SEARCH_LIMIT
    stars: int = 0
    automated: bool | None = None
    official: bool | None = None


class Pulling:
    """A pull whose name was resolved; `run` does the work."""

    def __init__(
        self,
        remote: Remote,
        repository: Repository,
        name: Reference,
        found: list[Resolved | Reference],
        platform: Platform | None,
    ) -> None:
        self._remote = remote
        self._repository = repository
        self._name = name
        self._found = found
        self._platform = platform

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Pull every resolved image.

        Raises EngineError of the first that fails; earlier ones stay.
        """
        changed = False
        began = time.monotonic()

        def pulled(name: Reference, new: bool) -> None:
            nonlocal changed
            changed = changed or new
            self._remote.pulled(name)

        store, downloads = self._remote.store, self._remote.downloads
        with store.idle.work():
            for image in self._found:
                resolved = (
                    image
                    if isinstance(image, Resolved)
                    else await pull.resolve(self._repository, image, self._platform)
                )
                steps = pull.bring(store, downloads, self._repository, resolved, pulled)
                async with contextlib.aclosing(steps):
                    async for progress in steps:
                        yield progress
                if warning := self._mismatch(resolved):
                    yield Progress(status=f"WARNING: {warning}")
        metrics.IMAGE_ACTIONS.since("pull", began)
        name = self._name._replace(tag="") if self._name.digest else self._name
        what = "Downloaded newer image for" if changed else "Image is up to date for"
        yield Progress(status=f"Status: {what} {name.familiar}")

    def _mismatch(self, resolved: Resolved) -> str:
        """As in Docker, an image that has only one platform is pulled whatever platform was
        requested, with a warning.
        """
        name = resolved.name._replace(tag="") if resolved.name.digest else resolved.name
        record = self._remote.store.index.owner(name)
        if self._platform is None or record is None:
            return ""
        return platforms.mismatch(name.familiar, record.config, self._platform)


class Sending:
    """A push whose images were found; `run` does the work."""

    def __init__(self, remote: Remote, pushing: Pushing, images: list[tuple[Reference, ImageRecord]]) -> None:
        self._remote = remote
        self._pushing = pushing
        self._images = images

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Raises EngineError."""
        began = time.monotonic()
        with self._remote.store.idle.work():
            async with contextlib.aclosing(self._pushing.run(self._images)) as steps:
                async for progress in steps:
                    yield progress
        metrics.IMAGE_ACTIONS.since("push", began)
        for name, record in self._images:
            self._remote.pushed(name, record)


class Remote:
    """The registries used by one engine."""

    def __init__(self, config: Config, store: ImageStore, events: EventLog) -> None:
        self._config = config
        self._events = events
        self._registries: Registries | None = None
        self._module: Any = None
        """`engine.images.registry`, once it is loaded."""
        self._packing = push.packing_threads()
        self._loading = asyncio.Lock()
        self.store = store
        self.downloads = Downloads(store.temporary, config.max_downloads)
        self._uploads = Turns(config.max_uploads)
        store.idle.when_idle(self._release)

    def configure(self, config: Config) -> None:
        """Take the values that a reload may change."""
        self._config = config
        self.downloads.turns.limit(config.max_downloads)
        self._uploads.limit(config.max_uploads)
        if self._registries is not None:
            self._registries.configure(config)

    @property
    def mirrored(self) -> bool:
        """A mirror may answer instead of Docker Hub."""
        return bool(self._config.registry_mirrors)

    async def close(self) -> None:
        if self._registries is not None:
            await self._registries.rest()

    def _release(self) -> None:
        if self._registries is not None:
            spawn(self._registries.rest(), "closing idle connections to registries")

    @property
    def loaded(self) -> bool:
        """The client of registries has been loaded."""
        return self._registries is not None

    async def client(self) -> Registries:
        """The client of all registries, loaded when it is first asked for."""
        async with self._loading:
            if self._registries is None:
                self._module = await asyncio.to_thread(_load_client)
                self._registries = self._module.Registries(self._config)
            return self._registries

    async def repository(self, name: Reference, credentials: Credentials, actions: str = "pull") -> Repository:
        """The repository that a name belongs to, seen with one client's credentials."""
        client = await self.client()
        await client.look_up(name.domain)
        repository: Repository = self._module.Repository(client, name.domain, name.path, credentials, actions)
        return repository

    # --- pull -------------------------------------------------------------------------------------

    async def pull(self, image: str, tag: str, credentials: Credentials, platform: Platform | None = None) -> Pulling:
        """Resolve a name in its registry, for a platform or this host. A name without tag and
        digest means every tag of the repository.

        Raises InvalidParameter for a malformed name, Forbidden for a reserved one, NotFound for an
        image that is missing or that this client may not read.
        """
        name = _pulled_name(image, tag)
        if name.familiar_repository == RESERVED:
            raise Forbidden(f"'{RESERVED}' is a reserved name")
        repository = await self.repository(name, credentials)
        with self.store.idle.work():
            if name.tag or name.digest:
                return Pulling(self, repository, name, [await pull.resolve(repository, name, platform)], platform)
            tags = await repository.tags()
        if not tags:
            raise NotFound(f"repository {name.familiar} has no tags")
        every = [reference.with_tag(name.repository, tag) for tag in tags]
        return Pulling(self, repository, name, [*every], platform)

    def pulled(self, name: Reference) -> None:
        record = self.store.get(name._replace(tag="").canonical if name.digest else name.canonical)
        attributes = {**record.labels, "name": name.familiar_repository}
        self._events.publish("image", "pull", name.familiar, attributes)

    async def described(self, image: str, credentials: Credentials) -> DistributionInspect:
        """The manifest or index of a name in its registry, and its platforms. Nothing is pulled.

        Raises InvalidParameter for a malformed name. The registry's refusals are passed on:
        Unauthorized, Forbidden, NotFound, ServerError.
        """
        if is_digest(image) or is_digest(f"sha256:{image}"):
            raise ServerError(f"no manifest found for full image ID {image}")
        name = reference.parse(image).tagged()
        repository = await self.repository(name, credentials)
        try:
            with self.store.idle.work():
                return await pull.described(repository, name)
        except ServerError as error:
            kind = self._module.REFUSALS.get(error.status) if isinstance(error, self._module.Failure) else None
            if kind is None:
                raise
            raise kind(error.message) from error

    async def configuration(self, image: str, credentials: Credentials, platform: Platform | None) -> ImageConfig:
        """The configuration of an image for a platform or this host, without its layers. Raises as
        `pull` does.
        """
        name = reference.parse(image)
        name = name if name.digest else name.tagged()
        repository = await self.repository(name, credentials)
        with self.store.idle.work():
            return await pull.configuration(repository, name, platform)

    # --- push -------------------------------------------------------------------------------------

    async def push(self, image: str, tag: str, credentials: Credentials, platform: Platform | None = None) -> Sending:
        """Choose the images to push. Raises InvalidParameter for a malformed name, NotFound for an
        unknown image and for one of another than the wanted platform.
        """
        name = reference.parse(image)
        if name.digest:
            raise InvalidParameter("cannot push a digest reference")
        if tag:
            name = reference.with_tag(name._replace(tag="").canonical, tag)
        images = push.chosen(self.store, name)
        for found, record in images:
            platforms.check(found.familiar, record.config, platform)
        return Sending(self, await self.pushing(name, credentials), images)

    async def pushing(self, name: Reference, credentials: Credentials) -> Pushing:
        """A push to the repository that a name belongs to."""
        repository = await self.repository(name, credentials, "pull,push")
        return self.pushing_to(repository)

    def pushing_to(self, repository: Repository) -> Pushing:
        """A push to a repository, or to what takes blobs and manifests as one does."""
        return Pushing(self.store, repository, self._packing, self._uploads)

    def pushed(self, name: Reference, record: ImageRecord) -> None:
        attributes = {**record.labels, "name": name.familiar_repository}
        self._events.publish("image", "push", name.familiar, attributes)

    # --- import, login, search --------------------------------------------------------------------

    def bring(
        self,
        source: str,
        body: AsyncIterator[bytes],
        repository: str,
        tag: str,
        changes: Sequence[str],
        message: str,
        platform: Platform | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Import the archive in `body` when `source` is `-`, otherwise at that URL. Raises
        InvalidParameter before anything is read.
        """
        if platform is not None and platform.os != "linux":
            raise InvalidParameter(f'platform: operating system "{platform.os}" is not supported')
        name = reference.with_tag(repository, tag) if repository else None
        importing.check(changes)
        named = source
        if source != "-":
            source = source if "://" in source else f"http://{source}"
            _check_url(source)
            named = _USER.sub("", source)

        async def run() -> AsyncGenerator[Progress, None]:
            with self.store.idle.work():
                if source == "-":
                    image_id = await self._import(body, named, name, changes, message, platform)
                else:
                    client = await self.client()
                    async with client.body(source) as chunks:
                        yield Progress(status=f"Downloading from {named}")
                        image_id = await self._import(chunks, named, name, changes, message, platform)
            yield Progress(status=image_id)

        return run()

    async def _import(
        self,
        body: AsyncIterator[bytes],
        source: str,
        name: Reference | None,
        changes: Sequence[str],
        message: str,
        platform: Platform | None,
    ) -> str:
        return await importing.bring(self.store, self._events, body, source, name, changes, message, platform)

    async def log_in(self, credentials: Credentials) -> str:
        """The identity token that a registry issues for credentials, or "" when it accepts them
        without one.

        Raises Unauthorized when it rejects them, ServerError.
        """
        client = await self.client()
        try:
            with self.store.idle.work():
                return await client.log_in(credentials)
        except ServerError as error:
            if isinstance(error, self._module.Failure) and error.status == 401:
                raise Unauthorized(error.message) from error
            raise

    async def search(self, wanted: Search, credentials: Credentials) -> list[SearchResult]:
        """Search a registry; results with the most stars first. `term` may begin with the
        registry's host. Raises ServerError.
        """
        term = wanted.term
        if not term:
            raise InvalidParameter("missing parameter: term")
        domain, rest = reference.split(term)
        if domain == reference.DEFAULT_DOMAIN:
            rest = rest.removeprefix("library/")
        client = await self.client()
        with self.store.idle.work():
            found = await client.search(domain, rest, wanted.limit, credentials)
        chosen = [
            result
            for result in found
            if result.star_count >= wanted.stars
            and wanted.automated in (None, result.is_automated)
            and wanted.official in (None, result.is_official)
        ]
        return sorted(chosen, key=lambda result: -result.star_count)[: wanted.limit]


def _load_client() -> ModuleType:
    """The package `registry`. Blocking."""
    for name in _COMPILED:
        spec = importlib.util.find_spec(name)
        for place in (spec and spec.submodule_search_locations) or ():
            for path in Path(place).rglob("*.so"):
                path.read_bytes()
    return importlib.import_module("engine.images.registry")


def _check_url(text: str) -> None:
    """Raises InvalidParameter unless `text` is the URL of an archive on a host."""
    try:
        valid = _URL.match(text) is not None and urlsplit(text).port != 0
    except ValueError:  # the port, or the brackets of an IPv6 address
        valid = False
    if not valid:
        raise InvalidParameter(f"invalid URL of an archive: {text}"[:300])


def _pulled_name(image: str, tag: str) -> Reference:
    """`fromImage` with `tag`, which may be a digest and replaces the tag in `fromImage`."""
    name = reference.parse(image.removesuffix(":"))
    if not tag:
        return name
    if ":" in tag:
        if not is_digest(tag):
            raise InvalidParameter(f"invalid digest: {tag}"[:300])
        return name._replace(tag="", digest=tag)
    return reference.with_tag(name._replace(tag="", digest="").canonical, tag)


__all__ = ["SEARCH_FILTERS", "Pulling", "Remote", "Search", "Sending"]
