"""One build: its stages as tasks, and their output in the order of the Dockerfile.

A stage waits for the stages that it begins with or copies from, and for nothing else, so
independent stages run side by side. Stages that the target does not need are not run, and their
bases are not pulled, unless an ONBUILD trigger of a base copies from them. The first failure ends
all stages. The output shown is what a serial build would have shown: every step up to the failed
one. If a later stage fails first, its failed step follows those that have ended. BuildKit's clients
see the stages side by side.

Owns:    the tasks of the stages, from `work` until its end; what it uses of the cache.
Threads: the event loop's.
Raises:  StepFailed for a RUN whose command failed, EngineError of any step.
Not here: one stage (`stage.py`), contexts (`builder.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator

import msgspec

from engine.builder import cacheconfig, keys, state
from engine.builder.context import Context
from engine.builder.dockerfile import stages as dockerfiles
from engine.builder.dockerfile import titles
from engine.builder.dockerfile.scope import Scope
from engine.builder.dockerfile.stages import Dockerfile
from engine.builder.options import Options, context_key
from engine.builder.output import Log
from engine.builder.parts import Parts
from engine.builder.reports import (
    FIRST_LANE,
    CheckWarning,
    ImageMade,
    OfStage,
    Report,
    StepBegun,
    StepEnded,
    Transfer,
)
from engine.builder.stage import Place, Site, StageBuild, Step
from engine.builder.state import Made, State
from engine.builder.steps import base, copy, meta, run
from engine.builder.trees import Tree
from engine.errors import InvalidParameter
from engine.images.instructions.records import Add, Copy, Instruction, Run
from engine.system.tasks import shield
from engine.system.threads import cancelled
from engine.wire.images import Platform

MAX_STEPS = 1000
"""Steps of one build. Each is an image, whose document has the history of those before it."""


class Build:
    """See the module."""

    def __init__(self, parts: Parts, options: Options, dockerfile: Dockerfile, context: Tree) -> None:
        """Raises InvalidParameter for a target that the file does not have."""
        self._parts = parts
        self._options = options
        self._dockerfile = dockerfile
        self._needed = dockerfiles.needed(dockerfile, options.target)
        self._site = Site(parts, options, dockerfile, context, self)
        self._results: dict[int, asyncio.Task[State]] = {}
        self._uses: dict[int, set[int]] = {}
        """By stage: the stages whose results it has asked for."""
        self._failed: Step | None = None
        """The first step that failed."""
        self._sought: set[str] = set()
        """Of `_origins`, those that were looked up."""
        self._not_found: Step | None = None
        """Of these, the one whose failure made the first step fail."""
        self._end = Log(parts.images.temporary)
        self._stages = [StageBuild(self._site, stage, begin, apply) for stage in self._needed]
        self._stages[-1].add_labels(options.labels)
        self._shown = tuple(self._stages)
        """Those whose steps have lines of their own; the last one is the target."""
        self.steps = [
            *(Step(argument.text, Log(parts.images.temporary)) for argument in dockerfile.global_arguments),
            *(step for stage in self._stages for step in stage.steps),
        ]
        if len(self.steps) > MAX_STEPS:
            raise InvalidParameter(f"the Dockerfile has {len(self.steps)} steps of at most {MAX_STEPS}")
        for number, step in enumerate(self.steps, 1):
            step.number, step.total = number, len(self.steps)
        for step in self.steps[: len(dockerfile.global_arguments)]:
            step.begin()
            step.done = True
            step.log.close()
        bases: set[tuple[str, str]] = set()
        for stage in sorted(self._stages, key=lambda stage: stage.index):
            _name_vertices(stage, bases, alone=dockerfiles.is_one(dockerfile))
        self._origins = self._found_origins({image for image, _ in bases}) if options.dialect.side_by_side else {}
        # Last: `work` releases them, and a refused build does no work.
        self._used = parts.cache.uses()

    def _found_origins(self, bases: Collection[str]) -> dict[str, Step]:
        """A step for each image of which the stages take files, and which none begins with."""
        found: dict[str, Step] = {}
        for stage in self._needed:
            for image in dockerfiles.images(self._dockerfile, stage):
                name = context_key(image.name)
                known = name in bases or name in found or name in self._options.contexts
                if not image.is_base and not known:
                    found[name] = Step("", Log(self._parts.images.temporary), None, (image.line, image.line))
        return found

    # --- output -----------------------------------------------------------------------------------

    async def reports(self) -> AsyncIterator[Report]:
        """The reports of all steps, and those of the end."""
        shown = self._side_by_side() if self._options.dialect.side_by_side else self._in_turn()
        async with contextlib.aclosing(shown):
            async for report in shown:
                yield report
        async for report in self._end.read():
            yield report

    async def _in_turn(self) -> AsyncGenerator[Report, None]:
        """In the order of the file, up to the first step that failed."""
        for step in self.steps:
            async for report in step.log.read():
                yield report
            step.log.release()
            if not step.done:
                break
        failed = self._failed
        if failed is not None and failed is not step and failed in self.steps:
            async for report in failed.log.read():
                yield report

    async def _side_by_side(self) -> AsyncGenerator[Report, None]:
        """As they come, each with its stage. The last one names the step that failed."""
        readers = [self._of_stage(stage) for stage in self._shown]
        readers += [self._of_origin(FIRST_LANE - at, step) for at, step in enumerate(self._origins.values())]
        waiting = {asyncio.ensure_future(anext(reader, None)): reader for reader in readers}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    reader = waiting.pop(task)
                    report = task.result()
                    if report is not None:
                        yield report
                        waiting[asyncio.ensure_future(anext(reader, None))] = reader
        finally:
            for task in waiting:
                await cancelled(task)
            for reader in readers:
                await reader.aclose()
        for stage in self._shown:
            if self._failed in stage.steps:
                yield OfStage(stage.index, StepEnded(failed=True))
        for at, origin in enumerate(self._origins.values()):
            if origin is self._not_found:
                yield OfStage(FIRST_LANE - at, StepEnded(failed=True))

    async def _of_stage(self, stage: StageBuild) -> AsyncGenerator[OfStage, None]:
        for step in stage.steps:
            async for report in step.log.read():
                # the result is the last image, and only the target's
                if not isinstance(report, CheckWarning | OfStage | ImageMade) or (
                    isinstance(report, ImageMade) and stage is self._shown[-1]
                ):
                    yield OfStage(stage.index, report)
            step.log.release()
            if not step.done:
                break
            yield OfStage(stage.index, StepEnded())

    async def _of_origin(self, lane: int, step: Step) -> AsyncGenerator[OfStage, None]:
        async for report in step.log.read():
            if isinstance(report, StepBegun | Transfer):
                yield OfStage(lane, report)
        step.log.release()
        if step.done:
            yield OfStage(lane, StepEnded())

    # --- work -------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Build and tag the target. Ends every task and every log, however it ends."""
        try:
            try:
                result = await self._run()
            finally:
                for step in (*self.steps, *self._origins.values()):
                    step.log.close()
            context = self._site.context
            if isinstance(context, Context):
                # Before the layers are written back: the file of the context need not be.
                await context.close()
            await self._finish(result)
        finally:
            self._end.close()
            try:
                await self._parts.cache.settle()  # steps of a build that failed are results, too
            finally:
                try:
                    await self._site.close()
                finally:
                    await self._used.release()

    async def _run(self) -> State:
        for stage in self._stages:
            self._start(stage)
        tasks = [*self._results.values()]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = next((task for task in tasks if task.done() and not task.cancelled() and task.exception()), None)
            if failed is not None:
                failed.result()
            return tasks[-1].result()
        finally:
            tasks = [*self._results.values()]
            for task in tasks:
                task.cancel()
            for task in tasks:
                await cancelled(task)

    def _start(self, stage: StageBuild) -> None:
        self._results[stage.index] = asyncio.create_task(stage.run())

    def _start_late(self, index: int, log: Log) -> None:
        """Start a stage that no instruction of the target's stages names.

        Its output goes to `log`.
        """
        stage = StageBuild(self._site, self._dockerfile.stages[index], begin, apply)
        self._stages.append(stage)
        for step in stage.steps:
            log.say(f"Step : {step.text}\n")
            log.follow(step.log)
        self._start(stage)

    async def _finish(self, result: State) -> None:
        if not result.image_id:
            if not self._options.dialect.empty_images:
                raise InvalidParameter("No image was generated. Is your Dockerfile empty?")
            result = state.without_steps(result, epoch=self._site.epoch)
            self._end.write(ImageMade(result.image_id))
        elif self._options.inline_cache and (inline := self._inline_cache(result)):
            document = msgspec.structs.replace(result.document, cache=inline)
            diff_ids = document.rootfs.diff_ids
            result = state.recorded(document, result.key, result.image_id, result.chain_ids, diff_ids)
            self._end.write(ImageMade(result.image_id))
        unused = self._dockerfile.arguments.unconsumed()
        if unused:
            names = f"[{' '.join(unused)}]"
            if self._options.unused_arguments_fail:
                await self._parts.cache.write()
                raise InvalidParameter(f"One or more build-args {names} were not consumed, failing build.")
            self._end.say(f"[Warning] One or more build-args {names} were not consumed\n", classic=True)
        if self._options.result is not None:
            self._options.result(result)
        await self._parts.cache.write_result(result, self._options.tags)
        if self._options.export is not None:
            await self._options.export(self._made())
        self._end.say(f"Successfully built {result.short}\n", classic=True)
        for name in self._options.tags:
            self._end.say(f"Successfully tagged {name.familiar}\n", classic=True)

    def _made(self) -> list[Made]:
        """The steps that may have made layers."""
        stages, index = set(), self._needed[-1].index
        while index not in stages:
            stages.add(index)
            parent = self._dockerfile.stages[index].parent
            index = index if parent is None else parent
        return [Made(state, index in stages) for index, state in self._site.made]

    def _inline_cache(self, result: State) -> str:
        """The steps that made the layers of the image, as its field; empty without one."""
        whole, found = result.document.rootfs.diff_ids, {}
        for made, in_image in self._made():
            diff_ids = made.document.rootfs.diff_ids
            if in_image and diff_ids and diff_ids == whole[: len(diff_ids)]:
                found[made.key] = cacheconfig.Step(made.key, len(diff_ids) - 1, made.document.created)
        return cacheconfig.write_inline(found.values()) if found else ""

    # --- for stages -------------------------------------------------------------------------------

    async def result_of(self, index: int, user: int, log: Log) -> State:
        """The state at the end of another stage of this build, for the stage `user`. Starts it if a
        trigger of a base is the first that needs it. Raises InvalidParameter if the two wait for
        each other.
        """
        self._uses.setdefault(user, set()).add(index)
        if self._needs(index, user):
            name = self._dockerfile.stages[index].name or index
            raise InvalidParameter(f"circular dependency detected on stage: {name}")
        if index not in self._results:
            self._start_late(index, log)
        return await shield(self._results[index])

    def _needs(self, index: int, other: int) -> bool:
        """True if the stage `index` is `other`, or waits for it, directly or not."""
        found = [index]
        for each in found:
            found += self._uses.get(each, set()) - {*found}
        return other in found

    @contextlib.contextmanager
    def origin(self, name: str, platform: Platform | None, log: Log) -> Iterator[Log]:
        """The log of an image of which a stage takes files, while it is looked up: of a line of its
        own in BuildKit's progress, or that of the stage's step.
        """
        key = context_key(name)
        step = self._origins.get(key)
        if step is None or key in self._sought:
            yield log
            return
        self._sought.add(key)
        title = f"FROM {key}"
        step.log.write(StepBegun(0, 0, title, title, step.lines))
        try:
            yield step.log
            step.done = True
        except Exception:
            if self._failed is None:  # its step fails next
                self._not_found = step
            raise
        finally:
            step.log.close()

    def failed(self, step: Step) -> None:
        """A step of a stage has failed."""
        self._failed = self._failed or step

    def scope_of(self, index: int) -> Scope:
        """The arguments of another stage of this build."""
        return next(stage.scope for stage in self._stages if stage.index == index)

    def use(self, state: State) -> State:
        """Keep the layers of a state as long as this build runs."""
        self._used.add(state)
        if self._options.dialect.owns_cache:
            self._parts.cache.own(state.image_id)
        return state


def _name_vertices(build: StageBuild, bases: set[tuple[str, str]], *, alone: bool) -> None:
    """Name the steps of a stage as BuildKit does: with the name of the stage, unless it is `alone`
    in the file, and their numbers among those that its progress has. `bases`: the images of stages
    before, with their platforms. An image has one line.
    """
    stage = build.stage
    options = build.site.options
    replaced = bool(stage.name) and context_key(stage.name) in options.contexts
    from_image = stage.parent is None and stage.base != base.SCRATCH and not replaced
    counted = [step for step in build.steps if isinstance(step.instruction, titles.SHOWN)]
    name = "" if alone else stage.name or f"stage-{stage.index}"
    place = build.first = Place(name, int(from_image), len(counted) + from_image)
    if from_image:
        image = context_key(stage.base)
        build.steps[0].shown = f"FROM {image}"
        if (image, stage.platform) not in bases:
            build.steps[0].place = place
        bases.add((image, stage.platform))
    for step in counted:
        if step.instruction is not None and titles.has_line(step.instruction):
            step.place = place = place.moved(1, 0)


async def begin(stage: StageBuild, log: Log) -> State:
    """FROM."""
    wanted, site = stage.stage, stage.site
    if wanted.parent is not None:
        found = await site.stages.result_of(wanted.parent, stage.index, log)
        stage.scope = site.stages.scope_of(wanted.parent).following()
        return base.inherited(found, site.options.dialect)
    found = base.empty(stage.platform, site.options.dialect)
    if base.named(wanted.base, site.options) != base.SCRATCH:
        found = base.of_image(await site.image(wanted.base, stage.platform, log), site.options.dialect)
    if site.options.dialect.own_history:
        found = msgspec.structs.replace(found, key=keys.key_of(found.key, "history"))
    if site.epoch is not None:  # it changes the times of all that is made on the base
        found = msgspec.structs.replace(found, key=keys.key_of(found.key, "epoch", site.epoch))
    return found


async def apply(stage: StageBuild, instruction: Instruction, log: Log) -> None:
    """Every other instruction, whose variables are replaced."""
    if isinstance(instruction, Run):
        await run.apply(stage, instruction, log)
    elif isinstance(instruction, Copy | Add):
        await copy.apply(stage, instruction, log)
    else:
        await meta.apply(stage, instruction, log)


__all__ = ["Build"]
