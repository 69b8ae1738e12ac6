"""Builds of the engine: from a request's body and parameters to an image.

A build reads the whole Dockerfile and opens its context, and only then pulls or runs something. The
client of a session sends its context when the Dockerfile is known to be valid. A failure before the
first output is raised before the first message, so that the client gets it as an HTTP error.

Owns:    the build cache, the directories of cache mounts, kept contexts, steps under way.
Threads: the event loop's.
Raises:  InvalidParameter for a bad context or Dockerfile; StepFailed, EngineError of a step.
Not here: one build (`build.py`), what the cache keeps (`cache.py`, `prune.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from engine import metrics
from engine.builder import bases, calls, context, lint, prune, remote, rules
from engine.builder.build import Build
from engine.builder.buildkit.session import Sessions
from engine.builder.cache import Cache, Uses
from engine.builder.caches import Caches
from engine.builder.collection import Collector
from engine.builder.dialect import BUILDKIT
from engine.builder.dockerfile import lines, stages
from engine.builder.dockerfile.scope import Platforms
from engine.builder.dockerfile.stages import Dockerfile
from engine.builder.dockerfile.walk import Base, Place, Walk
from engine.builder.errors import AtLine
from engine.builder.git import Checkout
from engine.builder.kept import KeptContexts
from engine.builder.options import Options, PruneOptions, context_key
from engine.builder.output import Log
from engine.builder.parts import Parts
from engine.builder.remote import Text
from engine.builder.reports import FIRST_LANE, OfStage, Report, StepBegun, StepEnded
from engine.builder.sharing import SharedSteps
from engine.builder.source import Opened, Source
from engine.builder.trees import DirectoryTree, MemoryTree, Tree, source_path
from engine.config import Config
from engine.config.cache import CachePolicy
from engine.containers.containers import Containers
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.events import EventLog
from engine.images.archive import ARCHITECTURE
from engine.images.instructions.records import Instruction
from engine.images.remote import Remote
from engine.images.store import ImageStore
from engine.storage.records import Records
from engine.system.tasks import shield, spawn
from engine.system.threads import cancelled

DEFAULT_NAMES = ("Dockerfile", "dockerfile", "Containerfile")
DOCKERFILE_LIMIT = 16 << 20
"""Bytes of a Dockerfile."""


class Builder:
    """See the module."""

    def __init__(
        self,
        config: Config,
        records: Records,
        containers: Containers,
        images: ImageStore,
        registries: Remote,
        events: EventLog,
        sessions: Sessions,
    ) -> None:
        """Reads the records; blocking, at start, after `ImageStore.open`."""
        self._parts = Parts(
            config=config,
            containers=containers,
            images=images,
            remote=registries,
            events=events,
            cache=Cache(records, images),
            caches=Caches(config.root),
            contexts=KeptContexts(config.root, images.temporary),
            shared=SharedSteps(images.temporary),
            sessions=sessions,
        )
        self._collector = Collector(self._parts)
        self._sweeping: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to remove what a crash has left, and what is too much: the last run may have ended
        before its last collection.
        """
        self._parts.cache.open()
        self._sweeping = spawn(self._sweep(), "removing the rest of build caches and contexts")
        self._collector.soon()

    async def _sweep(self) -> None:
        await self._parts.contexts.sweep()
        await self._parts.caches.sweep()

    async def close(self) -> None:
        """End the work in the background, and write what the cache has not written yet. No build
        runs any more.
        """
        await self._collector.close()
        if self._sweeping is not None:
            await cancelled(self._sweeping)
        await self._parts.contexts.close()
        await self._parts.cache.close()

    def build(self, body: AsyncIterator[bytes], options: Options) -> AsyncGenerator[Report, None]:
        """Build an image. `body`: the context, unless `options.remote` names another one. The last
        `ImageMade` has the id.

        If the generator is closed, the build is cancelled and leaves nothing but finished steps.
        """

        @contextlib.asynccontextmanager
        async def opened(log: Log) -> AsyncIterator[Source]:
            async with self.context(body, options, log) as (tree, raw):
                yield Source(raw, lambda _: contextlib.nullcontext(tree))

        return self.build_from(opened, options)

    async def build_from(self, opened: Opened, options: Options) -> AsyncGenerator[Report, None]:
        """As `build`, with a Dockerfile and a context that the caller opens."""
        opening = Log(self._parts.images.temporary)
        ready: asyncio.Future[Build] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    source = await stack.enter_async_context(opened(opening))
                    dockerfile = await self._valid(source.raw, options, opening)
                    chosen = options
                    if source.named is not None:
                        chosen = msgspec.structs.replace(options, contexts=await source.named(dockerfile))
                    tree = await stack.enter_async_context(source.context(dockerfile))
                    build = Build(self._parts, chosen, dockerfile, tree)
                    opening.close()
                    ready.set_result(build)
                    await build.work()
            except asyncio.CancelledError:
                ready.cancel()
                raise
            except BaseException as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                raise
            finally:
                opening.close()

        metrics.BUILDS.add()
        with self._parts.images.idle.work(), _cancellation_counted():
            working = asyncio.create_task(work())
            try:
                async for report in opening.read():
                    yield report
                build = await shield(ready)
                async for report in build.reports():
                    yield report
                await working
            finally:
                await cancelled(working)
                self._collector.soon()

    # --- the context ------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def context(
        self, body: AsyncIterator[bytes], options: Options, log: Log
    ) -> AsyncIterator[tuple[Tree, bytes]]:
        """The context of `build`, and its Dockerfile."""
        content = options.content
        images = self._parts.images
        async with contextlib.AsyncExitStack() as stack:
            archive = body
            if options.remote:
                fetched = await stack.enter_async_context(
                    remote.fetch(
                        *(options.remote, self._parts.remote, images.temporary, log.write),
                        keep_git_dir=options.arguments.get("BUILDKIT_CONTEXT_KEEP_GIT_DIR") in ("1", "true"),
                        sessions=self._parts.sessions,
                        session_id=options.session,
                    )
                )
                if isinstance(fetched, Text):
                    name = posixpath.basename(urlsplit(options.remote).path)
                    yield (
                        (MemoryTree({}), fetched.content)
                        if content is None
                        else (
                            MemoryTree({name: fetched.content} if name else {}),
                            content,
                        )
                    )
                    return
                if isinstance(fetched, Checkout):
                    yield await images.layers.work(_checked_out, fetched.root, options, content)
                    return
                archive = fetched.body
            received = await context.receive(archive, images.temporary, images.layers, links_out=True)
            stack.push_async_callback(received.close)
            name, raw = options.dockerfile, content
            if raw is None:
                name = find_dockerfile(received, options)
                raw = await images.layers.work(_read, received, name)
            await images.layers.work(received.drop_ignored, name)
            yield received, raw

    async def _valid(self, raw: bytes, options: Options, log: Log) -> Dockerfile:
        """The Dockerfile of a build; what is to be said of it goes to the log."""
        if not raw.strip():
            metrics.BUILDS_FAILED.add("dockerfile_empty_error")
            name = (
                "the Dockerfile"
                if options.dialect.checks
                else f"The Dockerfile ({options.dockerfile or DEFAULT_NAMES[0]})"
            )
            raise InvalidParameter(f"{name} cannot be empty")

        def read() -> Dockerfile:
            return stages.read(
                *(lines.parse(raw), options.arguments, _platforms(options), options.target), dialect=options.dialect
            )

        try:
            dockerfile = await (self._checked(raw, options, log) if options.dialect.checks else asyncio.to_thread(read))
            await asyncio.to_thread(stages.check, dockerfile, options.target)
        except InvalidParameter as error:
            metrics.BUILDS_FAILED.add(_reason(error.message))
            raise
        if not options.dialect.checks:
            for warning in dockerfile.warnings:
                log.say(f"[Warning] {warning}\n")
        return dockerfile

    # --- what is said of a Dockerfile -------------------------------------------------------------

    async def _checked(self, raw: bytes, options: Options, log: Log) -> Dockerfile:
        """The file of a build; its warnings go to the log. Raises InvalidParameter for a file that
        cannot be built, and for one that wants its warnings to be errors.
        """

        def begin() -> tuple[lint.Check, list[stages.Image], dict[str, int]]:
            check = lint.Check(raw, _request(options, runs=True))
            return check, check.images, bases.titles(check.images, options)

        check, images, titles = await asyncio.to_thread(begin)
        known: dict[int, Base] = {}
        failure = None
        lanes = range(FIRST_LANE, FIRST_LANE - len(titles), -1)
        for lane, (title, line) in zip(lanes, titles.items(), strict=True):
            log.write(OfStage(lane, StepBegun(0, 0, title, title, (line, line))))
        try:
            known = await bases.find(images, options, self._parts)
        except AtLine as error:
            failure = error
        findings = await asyncio.to_thread(_findings, check, known, failure)
        for warning in findings.warnings:
            log.write(warning.report)
        for failed in (False, True):  # the last report is of the one that failed
            for lane, line in zip(lanes, titles.values(), strict=True):
                if (failure is not None and line == failure.line) == failed:
                    log.write(OfStage(lane, StepEnded(failed)))
        if failure is not None:
            raise ServerError(failure.reason) from failure
        if findings.place is not None:
            line, last = findings.place
            raise AtLine(findings.error, line, findings.error, last) from check.failure
        if findings.error:
            raise InvalidParameter(findings.error) from check.failure
        assert check.file is not None
        return check.file

    async def call(
        self, name: str, raw: bytes, filename: str, ignored: Sequence[str], options: Options
    ) -> calls.Answer:
        """The answer to a call of `calls.py`. `ignored`: of .dockerignore.

        Raises InvalidParameter if the file cannot be built, but for a check.
        """
        if name == calls.LINT:
            return await self._lint(raw, filename, options, ignored)
        if name == calls.TARGETS:
            return calls.Answer(await asyncio.to_thread(_targets, raw))
        check = await asyncio.to_thread(lint.Check, raw, _request(options))
        if check.file is None:
            raise InvalidParameter(_findings(check, {}).error)
        file, known = check.file, await bases.find(check.images, options, self._parts)
        findings = await asyncio.to_thread(_findings, check, known)
        walk = Walk(file, lambda stage: known.get(stage.index))
        return calls.Answer(
            await asyncio.to_thread(calls.outline, raw, file, options.target, walk),
            [each.report for each in findings.warnings],
        )

    async def _lint(self, raw: bytes, filename: str, options: Options, ignored: Sequence[str]) -> calls.Answer:
        request = msgspec.structs.replace(_request(options), every=True, ignored=tuple(ignored))
        check = await asyncio.to_thread(lint.Check, raw, request)
        known: dict[int, Base] = {}
        failure = None
        try:
            known = await bases.find(check.images, options, self._parts)
        except InvalidParameter as error:
            failure = error
        findings = await asyncio.to_thread(_findings, check, known, failure)
        return calls.Answer(await asyncio.to_thread(calls.lint, raw, filename, findings))

    # --- the cache --------------------------------------------------------------------------------

    @property
    def contexts(self) -> KeptContexts:
        """Contents of clients' directories."""
        return self._parts.contexts

    def uses(self) -> Uses:
        """Keeps results of builds from prunes, until it is released."""
        return self._parts.cache.uses()

    async def usage(self) -> list[prune.Entry]:
        """Everything in the cache, the least recently used first."""
        return await prune.entries(self._parts)

    async def policies(self) -> list[CachePolicy]:
        """What keeps the cache small."""
        return await self._collector.policies()

    @property
    def registries(self) -> Remote:
        """Registries, for caches that clients name."""
        return self._parts.remote

    @property
    def entitlements(self) -> Collection[str]:
        """What builds may ask for beyond the ordinary."""
        return self._parts.config.build_entitlements

    async def prune(self, options: PruneOptions) -> prune.Pruned:
        """Remove records of the build cache, with images that only it needs."""
        return await prune.prune(self._parts, options)


def _platforms(options: Options) -> Platforms:
    own = f"linux/{ARCHITECTURE}"
    wanted = options.platform
    target = own if wanted is None else "/".join(filter(None, (wanted.os, wanted.architecture, wanted.variant)))
    return Platforms(build=own, target=target)


def _request(options: Options, *, runs: bool = False) -> lint.Request:
    """`runs`: the instructions are to be carried out."""

    def refuse(instruction: Instruction, place: Place) -> None:
        rules.check(instruction, place.directory, options)
        if runs:
            rules.permit(instruction, place.architecture, options)

    return lint.Request(
        arguments=options.arguments,
        platforms=_platforms(options),
        target=options.target,
        replaced=lambda name: context_key(name) in options.contexts,
        refuse=refuse,
    )


def _findings(check: lint.Check, known: Mapping[int, Base], failure: InvalidParameter | None = None) -> lint.Findings:
    return check.findings(lambda stage: known.get(stage.index), failure)


def _targets(raw: bytes) -> dict[str, bytes]:
    document = lines.parse(raw)
    return calls.targets(raw, document, [stages.read_line(line, document.escape, BUILDKIT) for line in document.lines])


@contextlib.contextmanager
def _cancellation_counted() -> Iterator[None]:
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        metrics.BUILDS_FAILED.add("build_canceled")
        raise


def _reason(message: str) -> str:
    """Why a Dockerfile cannot be built, as the metric names it."""
    if message.startswith(("failed to reach build target", "target stage ")):
        return "build_target_not_reachable_error"
    return "unknown_instruction_error" if "unknown instruction" in message else "dockerfile_syntax_error"


def find_dockerfile(tree: Tree, options: Options) -> str:
    """The path of the instruction file in a context: the named one, or that of a default name."""
    name = options.dockerfile
    if name:
        path = source_path(name, rooted=options.dialect.rooted_sources)
        if not path or "\0" in path or tree.resolve(path) is None:
            raise InvalidParameter(f"Cannot locate specified Dockerfile: {name}")
        return path
    for each in DEFAULT_NAMES:
        if tree.resolve(each) is not None:
            return each
    raise InvalidParameter(f"Cannot locate specified Dockerfile: {DEFAULT_NAMES[0]}")


def _checked_out(root: int, options: Options, given: bytes | None) -> tuple[Tree, bytes]:
    """The context in a checkout's directory, and the Dockerfile: the one `given`, or one of the
    directory, which `.dockerignore` may exclude.
    """
    if given is not None:
        return context.of_directory(root, ""), given
    whole = DirectoryTree(root)
    path = find_dockerfile(whole, options)
    return context.of_directory(root, path), _read(whole, path)


def _read(tree: Tree, path: str) -> bytes:
    try:
        return tree.read(path, DOCKERFILE_LIMIT)
    except NotFound as error:
        raise InvalidParameter(f"Cannot locate specified Dockerfile: {path}") from error


__all__ = ["DEFAULT_NAMES", "Builder", "find_dockerfile"]
