"""The frontend `dockerfile.v0` on the engine's own builder: a client's options as the options of a
build, and its files as the context.

The Dockerfile comes from the client's directory `dockerfile`, and the context from `context`, or
from a URL, or from an archive that the client uploads. The client leaves out what `.dockerignore`
excludes.

Not here: what a build does (`builder/builder.py`), the protocol (`control.py`).
Threads: the event loop's; a small archive is read in a thread.
Raises:  InvalidParameter and Unimplemented that name the client's option.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import functools
import logging
import posixpath
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, TypeAlias
from urllib.parse import urlsplit

import msgspec

from engine.builder import bases, calls, context, followed, git, kept, options
from engine.builder.buildkit import cache_imports, filesync, layouts
from engine.builder.buildkit.control_messages import CacheEntry, SourceInfo
from engine.builder.buildkit.details import LARGEST, Named, Unsupported
from engine.builder.buildkit.progress import Progress, Steps, VertexProgress
from engine.builder.buildkit.services import Session
from engine.builder.buildkit.session import Sessions
from engine.builder.cache import Uses
from engine.builder.dialect import BUILDKIT
from engine.builder.dockerfile import lines, stages
from engine.builder.dockerfile.scope import Platforms
from engine.builder.dockerfile.stages import Dockerfile
from engine.builder.dockerfile.walk import Base
from engine.builder.imported import Imports
from engine.builder.kept import KeptContexts
from engine.builder.options import SANDBOX, Options, PruneOptions
from engine.builder.output import Log
from engine.builder.prune import Entry, Pruned
from engine.builder.remote import is_url
from engine.builder.reports import CheckWarning, Report
from engine.builder.source import Opened, Source
from engine.builder.steps import base as names
from engine.builder.trees import Tree
from engine.config.cache import CachePolicy
from engine.errors import EngineError, InvalidParameter, Unimplemented, words
from engine.images import reference
from engine.images.archive import ARCHITECTURE, is_digest
from engine.images.credentials import NOBODY, Credentials
from engine.images.remote import Remote
from engine.images.store import ImageStore
from engine.wire.containers import HostConfig, Ulimit

_log = logging.getLogger(__name__)

DOCKERFILE_V0, GATEWAY = "dockerfile.v0", "gateway.v0"
DOCKERFILE_LIMIT = 20 << 20
"""Bytes of the archive with the Dockerfile and its .dockerignore."""
UPLOAD_HOST = "buildkit-session"
"""The host of URLs that name an archive which the client uploads."""
_LOCAL, _IMAGE, _INPUT = "local:", "docker-image://", "input:"
_CAPABILITIES = frozenset(
    f"moby.buildkit.frontend.{name}" for name in ("inputs", "subrequests", "contexts", "gitquerystring")
)
_NAMED = b"FROM scratch\nCOPY . /\n"
"""A named context that is a directory becomes an image."""
_OR_UNLIMITED = "-1|[0-9]{1,18}"
_HUB_HOST = "registry-1.docker.io"

ImageOf: TypeAlias = Callable[[str], Awaitable[str]]
"""The image of another build's result, when it is built."""


class Builder(Protocol):
    """The engine's builder."""

    def build(self, body: AsyncIterator[bytes], options: Options, /) -> AsyncGenerator[Report, None]: ...

    def build_from(self, opened: Opened, options: Options, /) -> AsyncGenerator[Report, None]: ...

    def context(
        self, body: AsyncIterator[bytes], options: Options, log: Log, /
    ) -> AbstractAsyncContextManager[tuple[Tree, bytes]]: ...

    async def call(
        self, name: str, raw: bytes, filename: str, ignored: Sequence[str], options: Options, /
    ) -> calls.Answer: ...

    @property
    def registries(self) -> Remote: ...

    @property
    def contexts(self) -> KeptContexts: ...

    @property
    def entitlements(self) -> Collection[str]: ...

    async def policies(self) -> list[CachePolicy]: ...

    def uses(self) -> Uses: ...

    async def usage(self) -> list[Entry]: ...

    async def prune(self, options: PruneOptions, /) -> Pruned: ...


class Wanted(NamedTuple):
    """A build that a client asks for, valid."""

    options: Options
    filename: str
    """Path of the Dockerfile."""
    context: str
    """Name of the client's directory."""
    dockerfile: str
    """Name of the client's directory with the Dockerfile."""
    own_dockerfile: bool
    """The Dockerfile is the client's although the context is not."""
    url: str
    """Of the context, instead of a directory of the client."""
    named: dict[str, str]
    """Contexts that stand for images in the Dockerfile: `local:` with the name of a directory of
    the client, `docker-image://` with the name of an image, `oci-layout://` with one of the
    client's image layouts, `input:` with the name of a result, or the URL of a repository or an
    archive.
    """
    inputs: dict[str, str]
    """Results of other builds, by name."""
    imports: list[CacheEntry]
    """Caches of the build."""
    sessions: dict[str, str]
    """Sessions that serve a directory, if it is not the build's own session."""
    call: str
    """What is asked of the Dockerfile, by its name in `calls.py`; empty for a build."""
    shared_keys: dict[str, str]
    """Names that clients give the directories of named contexts."""


def read(attributes: Mapping[str, str], frontend: str, gateway: str, inputs: Mapping[str, str] | None = None) -> Wanted:
    """The options of `dockerfile.v0`. `gateway`: the address that `host-gateway` stands for.
    `inputs`: results of other builds, by name.
    """
    _check(attributes, frontend, inputs or {})
    arguments, labels = _with_prefix(attributes, "build-arg:"), _with_prefix(attributes, "label:")
    network = attributes.get("force-network-mode", "")
    host = HostConfig(
        network_mode="" if network in ("default", "sandbox") else network,
        shm_size=_number(attributes, "shm-size"),
        cgroup_parent=attributes.get("cgroup-parent", ""),
        memory=_number(attributes, "memory"),
        memory_swap=_number(attributes, "memswap", _OR_UNLIMITED),
        cpu_shares=_number(attributes, "cpushares"),
        cpu_period=_number(attributes, "cpuperiod"),
        cpu_quota=_number(attributes, "cpuquota", _OR_UNLIMITED),
        cpuset_cpus=attributes.get("cpusetcpus", ""),
        cpuset_mems=attributes.get("cpusetmems", ""),
        ulimits=_ulimits(attributes.get("ulimit", "")) or None,
        extra_hosts=[entry.replace("=", ":", 1) for entry in listed(attributes, "add-hosts")] or None,
    )
    named = ",".join(listed(attributes, "platform"))
    if "," in named:
        raise Unimplemented("platform: this engine builds for one platform at a time")
    url = attributes.get("context", "")
    filename = attributes.get("filename", "") or "Dockerfile"
    return Wanted(
        options=Options(
            dialect=BUILDKIT,
            dockerfile=filename,
            remote="" if _upload_path(url) else url,
            no_cache=attributes.get("no-cache") == "",
            no_cache_stages=frozenset(entry.strip().lower() for entry in listed(attributes, "no-cache")),
            cache_namespace=attributes.get("build-arg:BUILDKIT_CACHE_MOUNT_NS", ""),
            hostname=attributes.get("build-arg:BUILDKIT_SANDBOX_HOSTNAME", "")
            or attributes.get("hostname", "")
            or SANDBOX,
            force_remove=True,  # BuildKit leaves no containers
            pull=attributes.get("image-resolve-mode", "") == "pull",
            host=options.host(host, gateway),
            arguments=dict(arguments),
            labels=labels,
            target=attributes.get("target", ""),
            platform=options.platform(named, BUILDKIT),
        ),
        filename=filename,
        context=attributes.get("contextkey", "") or "context",
        dockerfile=attributes.get("dockerfilekey", "") or "dockerfile",
        own_dockerfile=bool(url) and "dockerfilekey" in attributes,
        url=url,
        named=_with_prefix(attributes, "context:"),
        inputs=dict(inputs or {}),
        imports=cache_imports.entries(attributes),
        sessions=_with_prefix(attributes, "local-sessionid:"),
        call=attributes.get("requestid", ""),
        shared_keys=_with_prefix(attributes, "sharedkey:localdir:"),
    )


def _check_context(name: str, source: str, inputs: Mapping[str, str]) -> None:
    """Raises Unimplemented for a named context of another kind, InvalidParameter for an input that
    the client has not sent.
    """
    if source.startswith(layouts.SCHEME):
        layouts.check(source)
    elif not source.startswith((_LOCAL, _IMAGE, _INPUT)) and not _fetched(source):
        raise Unimplemented(f"named context {name[:200]!r}: {source[:200]!r} is not supported")
    if source.startswith(_INPUT) and source.removeprefix(_INPUT) not in inputs:
        raise InvalidParameter(f"named context {name[:200]!r}: its input is missing")


def _check(given: Mapping[str, str], frontend: str, inputs: Mapping[str, str]) -> None:
    """Raises Unimplemented for what only BuildKit has."""
    if frontend == GATEWAY:
        frontend = given.get("source", "")
        if lines.serves(frontend):
            frontend = DOCKERFILE_V0
    if frontend != DOCKERFILE_V0:
        raise Unimplemented(f"frontend {frontend[:200]!r} is not supported: this engine reads Dockerfiles itself")
    _check_parts(given)
    for name in given:
        if name.startswith("context:"):
            _check_context(name.removeprefix("context:"), given[name], inputs)
        if name == "attest:sbom":
            raise Unimplemented("SBOM attestations are not supported")
        if name == "contextsubdir" and given[name].strip("/."):
            raise Unimplemented("contextsubdir is not supported: a repository's URL may name a directory")


def _check_parts(given: Mapping[str, str]) -> None:
    """Raises Unsupported for a call or a capability that BuildKit's frontend has and this one
    not.
    """
    for asked in filter(None, given.get("frontend.caps", "").split(",")):
        name, _, forward = asked.partition("+")
        if name not in _CAPABILITIES and forward != "forward":
            raise Unsupported(f"unsupported frontend capability {name[:100]}", Named("FrontendCap", name[:100]))
    call = given.get("requestid", "")
    if call and call not in (calls.LINT, calls.OUTLINE, calls.TARGETS, calls.DESCRIBE):
        raise Unsupported(f"unsupported request {call[:100]}", Named("Subrequest", call[:100]))


def _with_prefix(given: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}


def listed(given: Mapping[str, str], name: str) -> list[str]:
    """The value of an option that is a line of CSV. Raises InvalidParameter."""
    text = given.get(name, "")
    try:
        return [each for row in csv.reader([text]) for each in row if each]
    except csv.Error as error:
        raise InvalidParameter(f"invalid value for {name}: {text[:100]!r}: {words(error)}") from None


def _number(given: Mapping[str, str], name: str, numbers: str = "[0-9]{1,18}") -> int:
    """Zero when it is not given."""
    text = given.get(name, "") or "0"
    if not re.fullmatch(numbers, text, re.ASCII):
        raise InvalidParameter(f"invalid value for {name}: {text[:100]!r} is not a number")
    return int(text)


def _ulimits(text: str) -> list[Ulimit]:
    """`nofile=1024:2048,core=0`"""
    found = []
    for each in filter(None, text.split(",")):
        name, _, limits = each.partition("=")
        soft, colon, hard = limits.partition(":")
        try:
            found.append(Ulimit(name=name, soft=int(soft), hard=int(hard if colon else soft)))
        except ValueError:
            raise InvalidParameter(f"invalid value for ulimit: {each[:100]!r}") from None
    return found


def _fetched(url: str) -> bool:
    """True if the engine fetches the files that the URL names."""
    return git.source_of_context(url) is not None or is_url(url)


def _upload_path(url: str) -> str:
    """The path of an upload's URL; "" for other URLs."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return parts.path if parts.hostname == UPLOAD_HOST else ""


def patterns(raw: bytes) -> tuple[str, ...]:
    """The patterns of a .dockerignore as clients take them: no comments, clean paths without a
    leading slash.
    """
    found = []
    for line in raw.decode("utf-8-sig", "surrogateescape").splitlines():
        if line.startswith("#"):
            continue
        pattern = line.strip()
        inverted = pattern.startswith("!")
        pattern = pattern.removeprefix("!").strip() if inverted else pattern
        if pattern:
            pattern = posixpath.normpath(pattern).replace("//", "/")
            pattern = pattern[1:] if len(pattern) > 1 and pattern[0] == "/" else pattern
        elif not inverted:
            continue
        found.append("!" + pattern if inverted else pattern)
    return tuple(found)


# --- a build --------------------------------------------------------------------------------------


class Files:
    """The files of one build's client."""

    def __init__(
        self,
        sessions: Sessions,
        session_id: str,
        wanted: Wanted,
        images: ImageStore,
        builder: Builder,
        image_of: ImageOf,
    ) -> None:
        self._sessions = sessions
        self._builder = builder
        self._session_id = session_id
        self._wanted = wanted
        self._images = images
        self._image_of = image_of
        self.credentials: dict[str, Credentials] = {}
        """By registry domain; known before the build pulls something."""
        self.dockerfile = b""
        """The client's, once it is received."""
        self._definition_vertex: VertexProgress | None = None

    async def imports(self, builder: Builder, given: Sequence[CacheEntry], progress: Progress) -> Imports | None:
        """The caches of the build that can be read. `given`: those of the request itself."""
        wanted = cache_imports.unique((*self._wanted.imports, *given))
        if not wanted:
            return None
        platform = self._wanted.options.platform
        return await cache_imports.opened(wanted, self._session, builder.registries, platform, progress)

    async def _session(self, name: str = "") -> Session:
        return await self._sessions.find(self._wanted.sessions.get(name, "") or self._session_id)

    def start(self, builder: Builder, chosen: Options, progress: Progress) -> AsyncGenerator[Report, None]:
        """Begin the build. `chosen`: the options of `wanted` with what the exporter adds."""
        if not self._wanted.url:
            return builder.build_from(lambda _: self._open(builder, progress, chosen), chosen)
        body = _nothing() if chosen.remote else self._upload()
        if self._wanted.own_dockerfile:
            return builder.build_from(lambda log: self._open_remote(builder, body, progress, chosen, log), chosen)
        return builder.build(body, chosen)

    async def call(self, builder: Builder, progress: Progress) -> dict[str, bytes]:
        """The documents that answer the client's call. Raises InvalidParameter for a Dockerfile
        that cannot be built, unless it is checked.
        """
        wanted = self._wanted
        if wanted.call == calls.DESCRIBE:
            return calls.describe()
        chosen = msgspec.structs.replace(
            wanted.options,
            session=self._session_id,
            credentials=self.credentials,
            contexts={options.context_key(name): _known(source) for name, source in wanted.named.items()},
        )
        raw, ignored = await self._texts(builder, progress, chosen)
        if wanted.call != calls.TARGETS:
            await self._ask_credentials(await asyncio.to_thread(_images_of, raw, chosen), chosen)
        answer = await builder.call(wanted.call, raw, wanted.filename, patterns(ignored), chosen)
        for warning in answer.warnings:
            self.warn(progress, warning)
        return answer.documents

    async def _texts(self, builder: Builder, progress: Progress, chosen: Options) -> tuple[bytes, bytes]:
        """The Dockerfile, and what it ignores of a context that the client has."""
        if self._wanted.url and not self._wanted.own_dockerfile:
            body = _nothing() if chosen.remote else self._upload()
            async with builder.context(body, chosen, Log(self._images.temporary)) as (_, raw):
                return raw, b""
        raw, ignored = await self._definition(progress)
        return raw, b"" if self._wanted.url else await self._ignored(progress, ignored)

    def warn(self, progress: Progress, warning: CheckWarning) -> None:
        """Show a failed check."""
        vertex = self._definition_vertex
        if vertex is None:
            vertex = self._definition_vertex = progress.vertex(_definition_name(self._wanted.filename))
            vertex.end()
        text = self.dockerfile if len(self.dockerfile) <= LARGEST else b""
        source = SourceInfo(filename=self._wanted.filename, data=text, language="Dockerfile") if text else None
        vertex.warn(warning, source)

    async def named(self, builder: Builder, progress: Progress) -> dict[str, str]:
        """The images that the named contexts stand for. A directory and a URL are the empty root
        until a valid Dockerfile uses them (`_used`), unless the context has the Dockerfile.
        """
        found = {}
        for name, source in self._wanted.named.items():
            if source.startswith(layouts.SCHEME):
                with progress.during(f"[context {name}] load image from layout"):
                    session = await self._session()
                    platform = self._wanted.options.platform
                    found[options.context_key(name)] = await layouts.load(session, source, platform, self._images)
                continue
            if source.startswith(_IMAGE):
                found[options.context_key(name)] = source.removeprefix(_IMAGE)
                continue
            if source.startswith(_INPUT):
                result_id = self._wanted.inputs[source.removeprefix(_INPUT)]
                found[options.context_key(name)] = await self._image_of(result_id)
                continue
            later = not self._wanted.url or self._wanted.own_dockerfile
            found[options.context_key(name)] = (
                _known(source) if later else await self._made(builder, progress, name, source)
            )
        return found

    async def _used(self, builder: Builder, progress: Progress, chosen: Options, file: Dockerfile) -> Mapping[str, str]:
        """The images of all named contexts, those of the directories and URLs that the file uses
        among them.
        """
        others = layouts.SCHEME, _IMAGE, _INPUT
        waiting = {name: source for name, source in self._wanted.named.items() if not source.startswith(others)}
        if not waiting:
            return chosen.contexts
        known = await self._bases(file, chosen)
        used = await asyncio.to_thread(followed.names, file, chosen.target, lambda stage: known[stage.index])
        keys = None if used is None else {options.context_key(name) for name in used}
        found = dict(chosen.contexts)
        for name, source in waiting.items():
            key = options.context_key(name)
            if keys is None or key in keys:
                found[key] = await self._made(builder, progress, name, source)
        return found

    async def _made(self, builder: Builder, progress: Progress, name: str, source: str) -> str:
        """The image of a directory or a URL, from the cache unless its files have changed."""
        steps = Steps(Progress(""))
        opened = functools.partial(self._open_named, builder, progress, name, source)
        async with contextlib.aclosing(builder.build_from(opened, Options(dialect=BUILDKIT))) as reports:
            async for report in reports:
                steps.take(report)
        return steps.image_id

    @contextlib.asynccontextmanager
    async def _open_named(
        self, builder: Builder, progress: Progress, name: str, source: str, log: Log
    ) -> AsyncIterator[Source]:
        if source.startswith(_LOCAL):
            yield Source(_NAMED, lambda _: self._named(progress, name, source.removeprefix(_LOCAL)))
        else:
            yield Source(_NAMED, lambda _: self._fetched_named(builder, progress, name, source, log))

    @contextlib.asynccontextmanager
    async def _named(self, progress: Progress, name: str, directory: str) -> AsyncIterator[Tree]:
        with progress.during(f"[context {name}] load from client") as vertex:
            ignored = (await self._small(directory, ".dockerignore")).get(".dockerignore", b"")
            received = await self._receive(directory, ignored, vertex)
        try:
            yield received
        finally:
            await received.close()

    @contextlib.asynccontextmanager
    async def _fetched_named(
        self, builder: Builder, progress: Progress, name: str, url: str, log: Log
    ) -> AsyncIterator[Tree]:
        chosen = Options(remote=url, content=_NAMED, session=self._session_id)
        async with contextlib.AsyncExitStack() as stack:
            with progress.during(f"[context {name}] {git.without_password(url)}"):
                tree, _ = await stack.enter_async_context(builder.context(_nothing(), chosen, log))
            yield tree

    async def _followed(self, file: Dockerfile, chosen: Options) -> tuple[str, ...] | None:
        """What the build reads of the context; None for all. Images are looked up on the loop."""
        known = await self._bases(file, chosen)
        return await asyncio.to_thread(followed.paths, file, chosen.target, lambda stage: known[stage.index])

    async def _bases(self, file: Dockerfile, chosen: Options) -> dict[int, Base | None]:
        """What is known of the images that the target's stages begin with, by stage."""

        def begun_with() -> list[stages.Image]:
            named = (image for each in stages.needed(file, chosen.target) for image in stages.images(file, each))
            return [image for image in named if image.is_base and image.name != stages.SCRATCH]

        images = await asyncio.to_thread(begun_with)
        if chosen.pull:  # another image may be there when the build begins
            return dict.fromkeys([image.stage.index for image in images])
        return {image.stage.index: base for image, base in await bases.all_here(images, chosen, self._images)}

    async def _no_files(self) -> context.Context:
        async def empty() -> AsyncIterator[bytes]:
            yield bytes(1024)

        return await context.receive(empty(), self._images.temporary, self._images.layers, links_out=True)

    async def _receive(
        self, directory: str, ignored: bytes, vertex: VertexProgress, follow: tuple[str, ...] = ()
    ) -> context.Context:
        """A directory of the client, without the files that it ignores; of them the paths in
        `follow`, if there are any. Files that did not change since the last transfer are not sent.
        """
        session = await self._session(directory)
        hint = self._wanted.shared_keys.get(directory, "")
        key = await asyncio.to_thread(kept.key_of, session.peer, session.shared_key, directory, hint)
        what = "local source for context" if directory == self._wanted.context else f"local source for {directory}"
        counted, excluded = _Counted(vertex), patterns(ignored)

        async def copy(receiver: filesync.Receiver, paths: Sequence[str]) -> None:
            found = tuple(paths) or follow
            await session.sync(directory, receiver, exclude=excluded, follow=found, received=counted.add)

        async with self._builder.contexts.transfer(key, what, session.id) as transfer:
            received = await transfer.receive(copy)
        vertex.status(f"transferring context: {_size(counted.size)}", complete=True)
        return received

    async def _upload(self) -> AsyncIterator[bytes]:
        session = await self._session()
        async with contextlib.aclosing(session.upload(_upload_path(self._wanted.url), UPLOAD_HOST)) as chunks:
            async for chunk in chunks:
                yield chunk

    @contextlib.asynccontextmanager
    async def _open(self, builder: Builder, progress: Progress, chosen: Options) -> AsyncIterator[Source]:
        raw, ignored = await self._definition(progress)
        await self._ask_credentials(await asyncio.to_thread(_images_of, raw, chosen), chosen)
        yield Source(
            raw,
            lambda file: self._context(progress, chosen, file, ignored),
            lambda file: self._used(builder, progress, chosen, file),
        )

    @contextlib.asynccontextmanager
    async def _context(
        self, progress: Progress, chosen: Options, file: Dockerfile, ignored: bytes | None
    ) -> AsyncIterator[Tree]:
        ignored = await self._ignored(progress, ignored)
        follow = await self._followed(file, chosen)
        if follow == ():
            received = await self._no_files()
        else:
            with progress.during("[internal] load build context") as vertex:
                received = await self._receive(self._wanted.context, ignored, vertex, follow or ())
        try:
            yield received
        finally:
            await received.close()

    @contextlib.asynccontextmanager
    async def _open_remote(
        self, builder: Builder, body: AsyncIterator[bytes], progress: Progress, chosen: Options, log: Log
    ) -> AsyncIterator[Source]:
        raw, _ = await self._definition(progress)
        await self._ask_credentials(await asyncio.to_thread(_images_of, raw, chosen), chosen)

        @contextlib.asynccontextmanager
        async def opened(_file: Dockerfile) -> AsyncIterator[Tree]:
            async with builder.context(body, msgspec.structs.replace(chosen, content=raw), log) as (tree, _):
                yield tree

        yield Source(raw, opened, lambda file: self._used(builder, progress, chosen, file))

    async def _ignored(self, progress: Progress, own: bytes | None) -> bytes:
        """The .dockerignore of the context; `own`: that of the Dockerfile, if it has one."""
        with progress.during("[internal] load .dockerignore") as vertex:
            if own is None:
                own = (await self._small(self._wanted.context, ".dockerignore")).get(".dockerignore", b"")
            vertex.status(f"transferring context: {_size(len(own))}", complete=True)
        return own

    async def _definition(self, progress: Progress) -> tuple[bytes, bytes | None]:
        """The client's Dockerfile, and the file of its own with what it ignores."""
        name = self._wanted.filename
        with progress.during(_definition_name(name)) as vertex:
            self._definition_vertex = vertex
            found = await self._small(self._wanted.dockerfile, name, f"{name}.dockerignore", name.lower())
            raw = found.get(name, found.get(name.lower()))
            if raw is None:
                raise InvalidParameter(f"failed to read dockerfile: open {name}: no such file or directory")
            self.dockerfile = raw
            vertex.status(f"transferring dockerfile: {_size(len(raw))}", complete=True)
        return raw, found.get(f"{name}.dockerignore")

    async def _small(self, directory: str, *names: str) -> dict[str, bytes]:
        """The content of a few files, those of them that exist; links are followed."""
        session = await self._session(directory)
        received = filesync.InMemory(DOCKERFILE_LIMIT, names[0])
        await session.sync(directory, received, follow=names)
        return {name: content for name in names if (content := received.content(name)) is not None}

    async def _ask_credentials(self, images: Iterable[stages.Image], chosen: Options) -> None:
        """Ask the client for credentials for each registry that has an image which is not here."""
        if not chosen.pull:
            images = [image for image, base in await bases.all_here(images, chosen, self._images) if base is None]
        if not images:
            return
        domains = await asyncio.to_thread(lambda: registries(names.named(image.name, chosen) for image in images))
        if not domains:
            return
        session = await self._session()
        for domain in domains:
            try:
                credentials = await session.auth(_HUB_HOST if domain == reference.DEFAULT_DOMAIN else domain)
            except EngineError as error:
                _log.info("no credentials for %s: %s", domain, error.message)
                continue
            if credentials is not NOBODY:
                self.credentials[domain] = credentials


def _definition_name(filename: str) -> str:
    return f"[internal] load build definition from {posixpath.basename(filename)}"


def _known(source: str) -> str:
    """The image that a named context stands for, without making it; empty if it is not known."""
    if source.startswith(_IMAGE):
        return source.removeprefix(_IMAGE)
    return "" if source.startswith((_INPUT, layouts.SCHEME)) else names.SCRATCH


def _parsed(raw: bytes, chosen: Options) -> stages.Dockerfile:
    own = f"linux/{ARCHITECTURE}"
    platforms = Platforms(build=own, target=own)
    return stages.read(lines.parse(raw), chosen.arguments, platforms, chosen.target, dialect=chosen.dialect)


def _images_of(raw: bytes, chosen: Options) -> tuple[stages.Image, ...]:
    """The images that a Dockerfile names, each once for a platform; none for one that cannot be
    built: the build will say it.

    Blocking, for it may be large.
    """
    try:
        file = stages.replaced(_parsed(raw, chosen), lambda name: options.context_key(name) in chosen.contexts)
        images = (image for stage in file.stages for image in stages.images(file, stage))
        return tuple({(image.name, image.stage.platform): image for image in images}.values())
    except InvalidParameter:
        return ()


def registries(images: Iterable[str]) -> set[str]:
    """The domains of images that are named by a reference."""
    found = set()
    for name in images:
        if name and name != stages.SCRATCH and not is_digest(name) and not name.isdigit():
            with contextlib.suppress(InvalidParameter):
                found.add(reference.parse(name).domain)
    return found


class _Counted:
    """Shows how many bytes have arrived."""

    _EVERY = 1 << 20

    def __init__(self, vertex: VertexProgress) -> None:
        self._vertex = vertex
        self._shown = 0
        self.size = 0

    def add(self, size: int) -> None:
        self.size += size
        if self.size - self._shown >= self._EVERY:
            self._shown = self.size
            self._vertex.status("transferring context", self.size)


async def _nothing() -> AsyncIterator[bytes]:
    """An empty body."""
    no_chunks: tuple[bytes, ...] = ()
    for chunk in no_chunks:
        yield chunk


def _size(count: int) -> str:
    """As BuildKit shows sizes: `2B`, `1.35kB`."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.4g}{unit}"
        size /= 1000
    return f"{size:.4g}GB"


__all__ = ["Builder", "Files", "Opened", "Wanted", "listed", "patterns", "read", "registries"]
