"""What an engine does with registries, and other hosts that have images: pull, push, import, log in, search.

Everything here takes the client's own credentials.

registry.py, and aiohttp with it, is loaded in a thread when it is first needed: it takes 15 MB and a fifth of a second.
Owns: the registries' client. Not here: the protocol (registry.py), the work (pull.py, push.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from engine.config import Config
from engine.errors import Forbidden, InvalidParameter, NotFound
from engine.events import EventLog
from engine.images import making, pull, push, reference
from engine.images.archive import is_digest
from engine.images.credentials import Credentials
from engine.images.pull import Downloads, Resolved
from engine.images.push import Pushing
from engine.images.reference import Reference
from engine.images.store import ImageRecord, ImageStore
from engine.wire.images import Progress, SearchResult

if TYPE_CHECKING:
    from engine.images.registry import Registries, Repository

SEARCH_LIMIT = 25
MAX_SEARCH_LIMIT = 100
RESERVED = "scratch"
"""What a Dockerfile calls the image of nothing."""

_COMPILED = ("aiohttp", "frozenlist", "multidict", "propcache", "yarl")
"""Packages of which the loader maps files that it then reads with the interpreter's lock held, for as long as the disk takes: read before."""
_URL = re.compile(r"https?://[^/?#\s]+\S*\Z")
"""Of an archive: with a host."""


class Pulling:
    """A pull whose name was found; `run` does the work."""

    def __init__(
        self, remote: Remote, repository: Repository, name: Reference, found: list[Resolved | Reference]
    ) -> None:
        self._remote = remote
        self._repository = repository
        self._name = name
        self._found = found

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Have every image that was found. Raises EngineError of the first that fails; those before it stay."""
        changed = False

        def pulled(name: Reference, new: bool) -> None:
            nonlocal changed
            changed = changed or new
            self._remote.pulled(name)

        for found in self._found:
            resolved = found if isinstance(found, Resolved) else await pull.resolve(self._repository, found)
            store, downloads = self._remote.store, self._remote.downloads
            steps = pull.bring(store, downloads, self._repository, resolved, pulled)
            async with contextlib.aclosing(steps):
                async for progress in steps:
                    yield progress
        name = self._name._replace(tag="") if self._name.digest else self._name
        what = "Downloaded newer image for" if changed else "Image is up to date for"
        yield Progress(status=f"Status: {what} {name.familiar}")


class Sending:
    """A push whose images were found; `run` does the work."""

    def __init__(self, remote: Remote, pushing: Pushing, images: list[tuple[Reference, ImageRecord]]) -> None:
        self._remote = remote
        self._pushing = pushing
        self._images = images

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Raises EngineError."""
        async with contextlib.aclosing(self._pushing.run(self._images)) as steps:
            async for progress in steps:
                yield progress
        for name, record in self._images:
            self._remote.pushed(name, record)


class Remote:
    """The registries, as one engine uses them."""

    def __init__(self, config: Config, store: ImageStore, events: EventLog) -> None:
        self._config = config
        self._events = events
        self._registries: Registries | None = None
        self._packing: ThreadPoolExecutor | None = None
        self._loading = asyncio.Lock()
        self.store = store
        self.downloads = Downloads(store.temporary)

    async def close(self) -> None:
        if self._registries is not None:
            await self._registries.close()
        if self._packing is not None:
            self._packing.shutdown(wait=False)

    async def client(self) -> Registries:
        """The client of all registries, loaded when it is first asked for."""
        async with self._loading:
            if self._registries is None:
                module = await asyncio.to_thread(_load_client)
                self._registries = module.Registries(self._config)
            return self._registries

    # --- pull -------------------------------------------------------------------------------------------------------

    async def pull(self, image: str, tag: str, credentials: Credentials) -> Pulling:
        """Find what a name means in its registry; without tag and digest every tag of the repository.

        Raises InvalidParameter for what is no name, Forbidden for one that no registry has, NotFound for what is not there or not for this client.
        """
        name = _pulled_name(image, tag)
        if name.familiar_repository == RESERVED:
            raise Forbidden(f"'{RESERVED}' is a reserved name")
        repository = (await self.client()).repository(name.domain, name.path, credentials)
        if name.tag or name.digest:
            return Pulling(self, repository, name, [await pull.resolve(repository, name)])
        tags = await repository.tags()
        if not tags:
            raise NotFound(f"repository {name.familiar} has no tags")
        return Pulling(self, repository, name, [reference.with_tag(name.repository, tag) for tag in tags])

    def pulled(self, name: Reference) -> None:
        record = self.store.get(name._replace(tag="").canonical if name.digest else name.canonical)
        attributes = {**record.labels, "name": name.familiar_repository}
        self._events.publish("image", "pull", name.familiar, attributes)

    # --- push -------------------------------------------------------------------------------------------------------

    async def push(self, image: str, tag: str, credentials: Credentials) -> Sending:
        """What is to be pushed where. Raises InvalidParameter for what is no name of a repository, NotFound for an unknown image."""
        name = reference.parse(image)
        if name.digest:
            raise InvalidParameter("cannot push a digest reference")
        if tag:
            name = reference.with_tag(name._replace(tag="").canonical, tag)
        images = push.chosen(self.store, name)
        repository = (await self.client()).repository(name.domain, name.path, credentials, "pull,push")
        if self._packing is None:
            self._packing = push.packing_threads()
        return Sending(self, Pushing(self.store, repository, self._packing), images)

    def pushed(self, name: Reference, record: ImageRecord) -> None:
        attributes = {**record.labels, "name": name.familiar_repository}
        self._events.publish("image", "push", name.familiar, attributes)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def bring(
        self, source: str, body: AsyncIterator[bytes], repository: str, tag: str, changes: Sequence[str], message: str
    ) -> AsyncGenerator[Progress, None]:
        """Import the archive in `body` when `source` is `-`, else at that URL. Raises InvalidParameter before anything is read."""
        name = reference.with_tag(repository, tag) if repository else None
        making.check(changes)
        if source != "-" and "://" not in source:
            source = f"http://{source}"
        if source != "-" and not _URL.match(source):
            raise InvalidParameter(f"invalid URL of an archive: {source}"[:300])

        async def run() -> AsyncGenerator[Progress, None]:
            if source == "-":
                chunks = body
            else:
                yield Progress(status=f"Downloading from {source}")
                chunks = (await self.client()).body(source)
            image_id = await making.bring(self.store, self._events, chunks, source, name, changes, message)
            yield Progress(status=image_id)

        return run()

    async def log_in(self, credentials: Credentials) -> str:
        """The identity token that a registry gives for credentials, or "" when it takes them as they are. Raises ServerError."""
        return await (await self.client()).log_in(credentials)

    async def search(self, term: str, limit: int, credentials: Credentials) -> list[SearchResult]:
        """What a registry has by a name, the most starred first. `term` may begin with the registry's host. Raises ServerError."""
        if not term:
            raise InvalidParameter("missing parameter: term")
        domain, rest = reference.split(term)
        if domain == reference.DEFAULT_DOMAIN:
            rest = rest.removeprefix("library/")
        found = await (await self.client()).search(domain, rest, limit, credentials)
        return sorted(found, key=lambda result: -result.star_count)[:limit]


def _load_client() -> ModuleType:
    """registry.py. Blocking."""
    for name in _COMPILED:
        spec = importlib.util.find_spec(name)
        for place in (spec and spec.submodule_search_locations) or ():
            for path in Path(place).rglob("*.so"):
                path.read_bytes()
    return importlib.import_module("engine.images.registry")


def _pulled_name(image: str, tag: str) -> Reference:
    """`fromImage` with `tag`, which may be a digest, and takes the place of what `fromImage` itself says."""
    name = reference.parse(image.removesuffix(":"))
    if not tag:
        return name
    if ":" in tag:
        if not is_digest(tag):
            raise InvalidParameter(f"invalid digest: {tag}"[:300])
        return name._replace(tag="", digest=tag)
    return reference.with_tag(name._replace(tag="", digest="").canonical, tag)


__all__ = ["Pulling", "Remote"]
