"""One stage of a build: its steps in order, each from the cache or run.

A step is looked up by its key. If the cache has no result, the step runs, once for all builds that
need it at this time (`sharing.py`). With `nocache` nothing is looked up or shared; results are
stored.

Owns:    descriptors of the roots that its steps read, until the stage ends.
Threads: the event loop's.
Not here: what each kind of step does (steps/), the order of stages (`build.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from engine._fast import layer
from engine.builder import cachefrom, copying, imported, keys, options
from engine.builder.dockerfile import created_by, lines, stages, titles
from engine.builder.dockerfile.scope import Scope
from engine.builder.dockerfile.stages import Dockerfile, Stage
from engine.builder.options import Options
from engine.builder.output import Log
from engine.builder.parts import Parts
from engine.builder.reports import CacheHit, ImageMade, StepBegun
from engine.builder.state import State, after
from engine.builder.steps import base
from engine.builder.trees import Tree
from engine.errors import EngineError, InvalidParameter, NotFound, Unimplemented
from engine.images.archive import MAX_DOCUMENT
from engine.images.instructions import records
from engine.images.instructions.mounts import RunMount
from engine.images.instructions.records import Arg, Expose, Instruction, Label
from engine.images.record import ImageRecord
from engine.system import files
from engine.system.threads import opened, uninterrupted
from engine.wire.containers import Config
from engine.wire.images import Platform

T = TypeVar("T")

MAX_DOCUMENTS = 256 << 20
"""Bytes of the documents of all images that one build makes."""


class Step:
    """One numbered step of a build's output."""

    __slots__ = ("done", "expanded", "instruction", "lines", "log", "number", "place", "shown", "text", "total")

    def __init__(
        self,
        text: str,
        log: Log,
        instruction: Instruction | None = None,
        lines: tuple[int, int] | None = None,
        *,
        expanded: bool = False,
    ) -> None:
        """`instruction`: None for FROM and for ARG before it. `lines`: as in `StepBegun`.
        `expanded`: it has no variables.
        """
        self.text = text
        self.log = log
        self.instruction = instruction
        self.lines = lines
        self.expanded = expanded
        self.number = self.total = 0
        self.place: Place | None = None
        """Of its line in BuildKit's progress; None if it has none there."""
        self.shown = text
        """The name of that line, without its place."""
        self.done = False
        """Set before the log is closed, if the step succeeded."""

    def begin(self) -> None:
        """Announce the step. One that stands in another step's output has no number."""
        if self.number:
            vertex = f"{self.place}{self.shown}" if self.place is not None else ""
            self.log.write(StepBegun(self.number, self.total, self.text, vertex, self.lines))


class Place(NamedTuple):
    """What the name of a step begins with in BuildKit's progress. `stage`: empty for one alone."""

    stage: str
    number: int
    total: int

    def moved(self, number: int, total: int) -> Place:
        """The place after so many other lines, of so many instructions."""
        return Place(self.stage, self.number + number, self.total + total)

    def __str__(self) -> str:
        name = f"{self.stage} " if self.stage else ""
        return f"[{name}{self.number:{len(str(self.total))}}/{self.total}] "


class Stages(Protocol):
    """The other stages, as one stage uses them: see `build.Build`."""

    async def result_of(self, index: int, user: int, log: Log) -> State: ...

    def scope_of(self, index: int) -> Scope: ...

    def origin(self, name: str, platform: Platform | None, log: Log) -> contextlib.AbstractContextManager[Log]: ...

    def use(self, state: State) -> State: ...

    def failed(self, step: Step) -> None: ...


class Site:
    """What all stages of one build share."""

    def __init__(self, parts: Parts, options: Options, dockerfile: Dockerfile, context: Tree, stages: Stages) -> None:
        self.parts = parts
        self.options = options
        self.dockerfile = dockerfile
        self.context = context
        self.stages = stages
        self.id = secrets.token_hex(16)
        """Part of the keys of a build that shares nothing."""
        self.epoch = _epoch(options.arguments.get("SOURCE_DATE_EPOCH"))
        self.made: list[tuple[int, State]] = []
        """The results of steps that may make layers, with their stages."""
        self.cache_from: tuple[ImageRecord, ...] = ()
        found = []
        for name in options.cache_from:
            with contextlib.suppress(EngineError):  # Docker ignores those that it does not have
                found.append(parts.images.get(name))
        self.cache_from = tuple(found)
        self._images: dict[str, ImageRecord] = {}
        self._resolving: dict[str, asyncio.Lock] = {}
        self._scratch = asyncio.Lock()
        self._context_directory = -1
        self._owned = contextlib.AsyncExitStack()
        self._documents = 0
        """Bytes of the documents that this build has made."""

    async def close(self) -> None:
        """Remove the directories that `context_directory` made."""
        await uninterrupted(self._owned.aclose())

    def charge(self, state: State) -> None:
        """Account for the document of a new image. Raises InvalidParameter when one, or all
        together, are too large.
        """
        self._documents += len(state.raw)
        if len(state.raw) > MAX_DOCUMENT or self._documents > MAX_DOCUMENTS:
            raise InvalidParameter(
                f"configuration and history of an image have more than {MAX_DOCUMENT >> 20} MiB, "
                f"or those of all steps more than {MAX_DOCUMENTS >> 20} MiB"
            )

    async def image(self, name: str, platform: Platform | None, log: Log) -> ImageRecord:
        """The image that FROM or `from` names. It is looked up or pulled once, so all steps of the
        build see the same one.
        """
        key = f"{name} {platform}"
        async with self._resolving.setdefault(key, asyncio.Lock()):
            if key not in self._images:
                record = await base.resolve(name, platform, self.options, self.parts, log)
                if self.options.based_on is not None:
                    self.options.based_on(name, record)
                self._images[key] = record
        return self._images[key]

    async def context_directory(self) -> int:
        """A descriptor of a directory with the files of the context, made when it is first asked
        for.
        """
        async with self._scratch:
            if self._context_directory < 0:
                directory = await self.scratch_directory(self._owned)
                await self.parts.images.layers.work(_lay_out_context, self.context, directory)
                self._context_directory = directory
            return self._context_directory

    async def scratch_directory(self, borrowed: contextlib.AsyncExitStack) -> int:
        """A descriptor of a new directory, which is removed with `borrowed`."""
        path = self.parts.images.temporary / f"build-{secrets.token_hex(8)}"
        borrowed.push_async_callback(asyncio.to_thread, files.remove_tree, path)
        await uninterrupted(asyncio.to_thread(path.mkdir, 0o700))
        descriptor = await opened(asyncio.to_thread(files.open_directory, path))
        borrowed.callback(os.close, descriptor)
        return descriptor

    async def secret(self, name: str) -> bytes | None:
        """A secret of the client's session; None when it has none of that name."""
        if not self.options.session:
            return None
        session = await self.parts.sessions.find(self.options.session)
        try:
            return await session.secret(name)
        except (NotFound, Unimplemented):
            return None

    async def ssh_socket(self, mount: RunMount, borrowed: contextlib.AsyncExitStack) -> int:
        """A descriptor of a socket to the client's SSH agent; -1 when it forwards none."""
        if not self.options.session:
            return -1
        session = await self.parts.sessions.find(self.options.session)
        directory = str(self.parts.images.temporary)
        mode = 0o600 if mount.mode is None else mount.mode
        owner = {"uid": mount.uid or 0, "gid": mount.gid or 0}
        try:
            path = await borrowed.enter_async_context(session.ssh(mount.id, directory, **owner, mode=mode))
        except (NotFound, Unimplemented):
            return -1
        socket = os.open(path, os.O_PATH | os.O_CLOEXEC)
        borrowed.callback(os.close, socket)
        return socket


def _lay_out_context(context: Tree, directory: int) -> None:
    """Extract the whole context. Blocking. The directory itself has the mode that it has in
    BuildKit, so that any USER may read it.
    """
    os.fchmod(directory, 0o755)
    selection = copying.select(context, ["."], destination_is_directory=True)
    place = copying.destination(directory, "/", directory=True)
    stream = copying.Stream(selection, place, -1, now=time.time_ns())
    try:
        layer.unpack(stream, directory, b"")
    finally:
        stream.close()


def _epoch(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise InvalidParameter(f"invalid SOURCE_DATE_EPOCH: {text[:100]!r}: it must be seconds since 1970")
    return int(text)


class OtherRoot(NamedTuple):
    """The root of another stage or image: a descriptor, and a key of its content."""

    descriptor: int
    key: str


Apply = Callable[["StageBuild", Instruction, Log], Awaitable[None]]
"""A kind of step: changes the stage's state."""


Make = Callable[[Log, Callable[[str], None]], Awaitable[State]]
"""Makes the state of a step that is not in the cache. It writes to the log, and calls the second
argument with the chain_id of its layer before it commits it.
"""


class StageBuild:
    """See the module."""

    def __init__(self, site: Site, stage: Stage, begin: Callable[[StageBuild, Log], Awaitable[State]], apply: Apply):
        """`begin` carries out FROM, `apply` every other instruction."""
        self.site = site
        self.stage = stage
        self.scope = Scope(site.dockerfile.arguments)
        self.state = State(key="")
        self.cmd_set = False
        """CMD was set in this stage: ENTRYPOINT then keeps it."""
        self._begin = begin
        self._apply = apply
        directory = site.parts.images.temporary
        ends = site.dockerfile.ends
        self.steps = [Step(stage.text, Log(directory), None, (stage.line, ends.get(stage.line, stage.line)))]
        self.steps += [
            Step(each.text, Log(directory), each, (each.line, ends.get(each.line, each.line)))
            for each in stage.instructions
        ]
        self.first = Place("", 0, 0)
        """The place of FROM in BuildKit's progress, whether it has a line there or not."""
        self._root: tuple[str, int] = ("", -1)
        self.no_cache = site.options.no_cache or self._filtered()
        """Nothing is looked up."""

    def _filtered(self) -> bool:
        """True if the stage, or one that it begins with, is among `no_cache_stages`."""
        stage: Stage | None = self.stage
        while stage is not None:
            if stage.name and stage.name.lower() in self.site.options.no_cache_stages:
                return True
            stage = None if stage.parent is None else self.site.dockerfile.stages[stage.parent]
        return False

    @property
    def index(self) -> int:
        return self.stage.index

    @property
    def platform(self) -> Platform | None:
        """The platform that FROM or the client asks for."""
        return options.platform(self.stage.platform, self.site.options.dialect) or self.site.options.platform

    def add_labels(self, labels: Mapping[str, str]) -> None:
        """The client's labels: each a LABEL after the last step, which wins over the file's. They
        are taken as they are.
        """
        for name, value in sorted(labels.items()):
            text = f"LABEL {name}={value}"
            label = Label(text=text, pairs=((name, value),))
            self.steps.append(Step(text, Log(self.site.parts.images.temporary), label, expanded=True))

    async def run(self) -> State:
        """Carry out every step. Returns the state after the last one."""
        try:
            for step in self.steps:
                await asyncio.sleep(0)  # most steps take a millisecond and wait for nothing
                try:
                    await self._step(step)
                except Exception:
                    self.site.stages.failed(step)
                    raise
                if step is self.steps[-1] and self.state.image_id:
                    step.log.write(ImageMade(self.state.image_id))
                step.done = True
                step.log.close()
            return self.state
        finally:
            for step in self.steps:
                step.log.close()
            await self._close_root()

    async def _step(self, step: Step) -> None:
        if step.instruction is None:
            step.begin()
            self.state = self.site.stages.use(await self._begin(self, step.log))
            await self._run_triggers(step.log)
        else:
            variables = self.scope.variables(self.state.config.env)
            if step.place is not None:
                step.shown = titles.title(step.instruction, variables, self.site.dockerfile.escape)
            step.begin()
            await self.apply(step.instruction, step.log, expanded=step.expanded)
        step.log.say(f" ---> {self.state.short}\n", classic=True)

    async def apply(self, instruction: Instruction, log: Log, *, expanded: bool = False) -> None:
        """Carry out one instruction."""
        if not expanded:
            variables = self.scope.variables(self.state.config.env)
            try:
                given = instruction
                instruction = await self.compute(
                    lambda: self.site.dockerfile.arguments.expand(given, variables, self.site.dockerfile.escape),
                    large=isinstance(given, Expose),
                )
            except InvalidParameter as error:
                raise lines.at_line(error, instruction.line, instruction.text) from error
        await self._apply(self, instruction, log)

    async def _run_triggers(self, log: Log) -> None:
        """The base's ONBUILD instructions, each once."""
        triggers = self.state.config.on_build or ()
        if not triggers:
            return
        self.state = _without_triggers(self.state)
        log.say(f"# Executing {len(triggers)} build trigger{'s' if len(triggers) > 1 else ''}...\n", classic=True)
        shown = 0
        for text in triggers:
            whole = self.site.options.dialect.whole_arrays
            instruction = records.read_text(text, self.site.dockerfile.escape, whole_arrays=whole)
            if not self.site.options.numbered_steps:
                log.say(f"Step 1 : {instruction.text}\n", classic=True)
            if self.site.options.dialect.side_by_side and titles.has_line(instruction):
                shown += 1
                self._announce_trigger(instruction, self.first.moved(shown, len(triggers)), log)
            await self.apply(instruction, log)
        for step in self.steps:
            if step.place is not None:
                step.place = step.place.moved(shown, len(triggers))

    def _announce_trigger(self, instruction: Instruction, place: Place, log: Log) -> None:
        """A trigger has a line of its own in BuildKit's progress."""
        name = titles.title(instruction, self.scope.variables(self.state.config.env), self.site.dockerfile.escape)
        log.write(StepBegun(0, 0, instruction.text, f"{place}ONBUILD {name}", self.steps[0].lines))

    # --- for the kinds of steps -------------------------------------------------------------------

    async def compute(self, work: Callable[[], T], *, large: bool = False) -> T:
        """What `work` makes of the configuration: in a thread if that is `large`."""
        return await asyncio.to_thread(work) if large or self.state.large else work()

    def after(self, before: State, *, key: str, config: Config, command: Sequence[str], **more: Any) -> State:
        """The image that a step makes of `before`. `more`: of `state.after`."""
        comment = created_by.COMMENT if self.own_history else ""
        return after(before, key=key, config=config, command=command, epoch=self.site.epoch, comment=comment, **more)

    @property
    def own_history(self) -> bool:
        """See `Dialect.own_history`."""
        return self.site.options.dialect.own_history

    async def reach(
        self,
        key: str,
        command: Sequence[str],
        config: Config,
        log: Log,
        make: Make | None = None,
        *,
        author: str | None = None,
        known_as: Sequence[str] = (),
        makes_layer: bool = True,
        with_others: object = "",
    ) -> None:
        """Go to the state of `key`: from the cache, or by `make`, which without one only changes
        the configuration.

        `command`: what the history shows. `known_as`: further keys of the same result, already
        looked up. `with_others`: builds at this time share a run of `make` if it is the same.
        """
        before, cache = self.state, self.site.parts.cache
        state = self.look_up(key, command, config, author=author, makes_layer=makes_layer)
        if state is not None:
            log.write(CacheHit())
        elif make is None:
            state = await self.compute(
                lambda: self.after(before, key=key, config=config, command=command, author=author),
                large=bool(config.exposed_ports),
            )
            cache.add(state, before.key, " ".join(command))
        else:
            making = make

            async def store(log: Log) -> State:
                async with self.site.parts.images.claimed() as claim:
                    made = await self._imported(key, command, config, log, claim, author)
                    made = made or await making(log, claim)
                    cache.add(made, before.key, " ".join(command))
                cache.write_soon()
                return made

            imports = self.site.options.imports
            names = imports.names if imports is not None else ()
            shared = keys.key_of(key, "run", self.site.id if self.no_cache else "", with_others, names)
            state = await self.site.parts.shared.once(shared, log, store)
        self.site.charge(state)
        for other in known_as:
            cache.know(other, state, before.key, " ".join(command))
        self.state = self.site.stages.use(state)
        if make is not None:
            self.site.made.append((self.index, state))

    async def _imported(
        self,
        key: str,
        command: Sequence[str],
        config: Config,
        log: Log,
        claim: Callable[[str], None],
        author: str | None,
    ) -> State | None:
        """The result of a step from a cache that the client names. None if no cache has it, or if
        its layers cannot be fetched.
        """
        imports, before = self.site.options.imports, self.state
        below = before.document.rootfs.diff_ids
        hit = None if imports is None or self.no_cache else imports.find(key, below)
        if hit is None:
            return None
        try:
            await imported.bring(hit, self.site.parts, claim, log)
        except EngineError as error:
            log.say(f"cache {hit.cache.name}: {error.message}\n")
            return None
        log.write(CacheHit())
        diff_id = hit.layers[-1].diff_id if len(hit.layers) > len(below) else ""
        return await self.compute(
            lambda: self.after(
                before,
                key=key,
                config=config,
                command=command,
                diff_id=diff_id,
                author=author,
                created=hit.created,
            )
        )

    def look_up(
        self, key: str, command: Sequence[str], config: Config, *, author: str | None = None, makes_layer: bool = True
    ) -> State | None:
        """The result of a step from the cache. With `cachefrom` only from those images."""
        site = self.site
        if self.no_cache:
            return None
        if not site.options.cache_from:
            return site.parts.cache.find(key)
        found = cachefrom.find(
            *(self.state, site.cache_from),
            key=key,
            command=command,
            config=config,
            author=author,
            layer=makes_layer,
            epoch=site.epoch,
        )
        if found is not None:
            site.parts.cache.add(found, self.state.key, " ".join(command))
        return found

    def declare(self, argument: Arg) -> None:
        """An ARG of this stage: later steps see it."""
        self.scope.declare(argument)

    def go_on(self, state: State, log: Log) -> None:
        """Go to a state that was found in the cache."""
        log.write(CacheHit())
        self.state = self.site.stages.use(state)
        self.site.made.append((self.index, state))

    @contextlib.asynccontextmanager
    async def other_root(
        self, name: str, log: Log, *, mount: bool = False, mapped: bool = False
    ) -> AsyncIterator[OtherRoot]:
        """The merged root of the stage or image that `--from` or `from=` names, for the time of the
        context. `mount`: it is that of a mount. `mapped`: as for `Snapshots.mount`.
        """
        site = self.site
        other = stages.referred(site.dockerfile, self.stage, name, mount=mount)
        if other is not None:
            state = await site.stages.result_of(other.index, self.index, log)
        elif base.named(name, site.options).lower() == base.SCRATCH:
            state = base.empty(None, site.options.dialect)
        else:
            with site.stages.origin(name, self.platform, log) as origin:
                state = base.of_image(await site.image(name, self.platform, origin), site.options.dialect)
        site.stages.use(state)
        # Mounted within the context: kernels before 6.15 copy no directory of a detached mount, as
        # a `RUN --mount` of it needs.
        async with site.parts.images.snapshots.content(state.top, mapped=mapped) as descriptor:
            yield OtherRoot(descriptor, keys.key_of("", "content", state.chain_ids))

    async def root(self) -> int:
        """A descriptor of the stage's root as of now, to look at; -1 without layers. It stays the
        stage's, and is valid until the next step.
        """
        top, descriptor = self._root
        if top != self.state.top:
            await self._close_root()
            if self.state.top:
                descriptor = await self.site.parts.images.snapshots.open_content(self.state.top)
                self._root = (self.state.top, descriptor)
        return self._root[1]

    async def _close_root(self) -> None:
        (_, descriptor), self._root = self._root, ("", -1)
        if descriptor >= 0:
            await uninterrupted(asyncio.to_thread(os.close, descriptor))


def _without_triggers(state: State) -> State:
    document = state.document
    return msgspec.structs.replace(
        state, document=msgspec.structs.replace(document, config=msgspec.structs.replace(state.config, on_build=None))
    )


__all__ = ["Apply", "Make", "Site", "StageBuild", "Step"]
