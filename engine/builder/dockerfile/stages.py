"""The stages of a Dockerfile: their bases, names, and which of them a target needs.

Pure. Not here: running them (`builder/stage.py`), the platform of an image (scope.py).
Raises: InvalidParameter that names the line and the instruction.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from engine.builder.dialect import CLASSIC, Dialect
from engine.builder.dockerfile.lines import Document, at_line, check_frontend
from engine.builder.dockerfile.scope import Arguments, Platforms, normalized
from engine.builder.errors import Circular
from engine.errors import InvalidParameter
from engine.images import reference
from engine.images.instructions import records
from engine.images.instructions.records import Arg, Copy, From, Instruction, OnBuild, Run
from engine.images.instructions.words import Line

SCRATCH = "scratch"

_IDENTIFIER = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"[-+]?[0-9]{1,18}")


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """`base`: an image, `scratch`, or what `parent` names. `parent`: the index of the earlier stage
    that this one continues; that stage's arguments hold here too (Scope.copy), and its ONBUILD
    triggers run first. `platform`: empty for the target's. `text`: of the FROM line. `written`: the
    line before its variables were replaced.
    """

    index: int
    name: str = ""
    base: str
    parent: int | None = None
    platform: str = ""
    text: str
    line: int
    written: From
    instructions: tuple[Instruction, ...] = ()


class Dockerfile(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is for the scopes of its stages."""

    stages: tuple[Stage, ...]
    by_name: Mapping[str, Sequence[int]]
    """The indexes of the stages of each name, in their order."""
    escape: str
    warnings: tuple[str, ...]
    global_arguments: tuple[Arg, ...]
    arguments: Arguments
    ends: Mapping[int, int]
    """As in `Document`, and so are the comments."""
    comments: Mapping[int, tuple[str, ...]]


def read(
    document: Document,
    scope_arguments: Mapping[str, str | None],
    platforms: Platforms,
    target: str = "",
    *,
    dialect: Dialect = CLASSIC,
    instructions: Sequence[Instruction] | None = None,
) -> Dockerfile:
    """All stages, checked. `target` is only the value of TARGETSTAGE, which is the name of the last
    stage without one. `instructions`: of all lines, where these have been read.
    """
    if dialect.frontends:
        check_frontend(scope_arguments.get("BUILDKIT_SYNTAX") or document.syntax)
    if instructions is None:
        instructions = [read_line(line, document.escape, dialect) for line in document.lines]
    numbered = list(zip(document.lines, instructions, strict=True))
    if not target:
        target = next((last.name for _, last in reversed(numbered) if isinstance(last, From)), "")
    arguments = Arguments(scope_arguments, platforms, target, dialect)
    global_arguments: list[Arg] = []
    stages: list[Stage] = []
    named: dict[str, list[int]] = {}
    bodies: list[list[Instruction]] = []
    for line, instruction in numbered:
        try:
            if isinstance(instruction, From):
                stage = _stage(instruction, line, len(stages), named, arguments, document.escape)
                stages.append(stage)
                if stage.name:
                    named.setdefault(stage.name, []).append(stage.index)
                bodies.append([])
            elif bodies:
                bodies[-1].append(instruction)
            elif isinstance(instruction, Arg):
                arguments.declare_global(instruction, document.escape)
                global_arguments.append(instruction)
            else:
                raise InvalidParameter("no build stage in current context")
        except InvalidParameter as error:
            raise at_line(error, line.number, line.original) from error
    if not stages:
        raise InvalidParameter("No image was generated. Is your Dockerfile empty? (it has no FROM)")
    for body in bodies:
        arguments.mention(name for one in body if isinstance(one, Arg) for name, _ in one.pairs)
    file = Dockerfile(
        stages=tuple(
            msgspec.structs.replace(stage, instructions=tuple(body)) for stage, body in zip(stages, bodies, strict=True)
        ),
        by_name=named,
        escape=document.escape,
        warnings=document.warnings,
        global_arguments=tuple(global_arguments),
        arguments=arguments,
        ends=document.ends,
        comments=document.comments,
    )
    _ordered(file, range(len(stages)))
    return file


def check(dockerfile: Dockerfile, target: str) -> None:
    """Raises InvalidParameter for words of the stages that the target needs which no values of
    variables make valid. Other stages are not run.
    """
    for stage in needed(dockerfile, target):
        for instruction in stage.instructions:
            try:
                dockerfile.arguments.check(instruction, dockerfile.escape)
            except InvalidParameter as error:
                raise at_line(error, instruction.line, instruction.text) from error


def read_line(line: Line, escape: str, dialect: Dialect) -> Instruction:
    """The instruction of one line. Raises AtLine."""
    try:
        instruction = records.read(msgspec.structs.replace(line, whole_arrays=dialect.whole_arrays), escape)
        if isinstance(instruction, Run) and instruction.command == "" and not dialect.bare_run:
            raise InvalidParameter("RUN requires at least one argument")
        return instruction
    except InvalidParameter as error:
        raise at_line(error, line.number, line.original) from error


def _stage(
    instruction: From, line: Line, index: int, named: Mapping[str, Sequence[int]], arguments: Arguments, escape: str
) -> Stage:
    expanded = records.expand(instruction, arguments.global_variables(), escape)
    assert isinstance(expanded, From)
    if not expanded.image:
        raise InvalidParameter(f"base name ({instruction.image}) should not be blank")
    if instruction.platform and not expanded.platform:
        raise InvalidParameter(f"empty platform value from expression {instruction.platform}")
    earlier = named.get(expanded.image if arguments.dialect.earlier_stages else expanded.image.lower())
    parent = earlier[-1] if earlier else None
    if parent is None and expanded.image != SCRATCH and not _IDENTIFIER.fullmatch(expanded.image):
        _check_reference(expanded.image)
    try:
        platform = normalized(expanded.platform) if expanded.platform else ""
    except InvalidParameter as error:
        raise InvalidParameter(f"failed to parse platform {instruction.platform}: {error.message}") from error
    return Stage(
        index=index,
        name=expanded.name,
        base=expanded.image,
        parent=parent,
        platform=platform,
        text=line.original,
        line=line.number,
        written=instruction,
    )


def _check_reference(image: str) -> None:
    """Raises InvalidParameter unless it is a name of an image."""
    try:
        reference.parse(image)
    except InvalidParameter as error:
        directory, slash, name = image.rpartition("/")
        domain, _, below = f"{directory}{slash}{re.split('[:@]', name)[0]}".partition("/")
        path = f"{domain}/{below}" if below else f"library/{domain}"
        if below and (re.search("[.:]", domain) or domain == "localhost"):
            path = below
        why = error.message.removesuffix(f": {image!r}").replace(
            "repository name must", f"repository name ({path}) must"
        )
        raise InvalidParameter(f'failed to parse stage name "{image}": {why}'[:500]) from error


def replaced(dockerfile: Dockerfile, is_image: Callable[[str], bool]) -> Dockerfile:
    """The same file, where images stand for the stages whose names `is_image` knows: these begin
    with the image of their name, and have no instructions.
    """
    return msgspec.structs.replace(
        dockerfile,
        stages=tuple(
            msgspec.structs.replace(stage, base=stage.name, parent=None, platform="", instructions=())
            if stage.name and is_image(stage.name)
            else stage
            for stage in dockerfile.stages
        ),
    )


def referred(dockerfile: Dockerfile, stage: Stage, name: str, *, mount: bool = False) -> Stage | None:
    """The stage that `--from=name` in `stage` means, by its name or number. None: an image of that
    name, or the build's context when it is empty. `mount`: it is `from=name` of a mount.
    """
    stages = dockerfile.stages
    earlier_stages = dockerfile.arguments.dialect.earlier_stages
    named = dockerfile.by_name.get(name.lower())
    if named:
        before = len(named) if earlier_stages else bisect.bisect_left(named, stage.index)
        return stages[named[max(before, 1) - 1]]
    if (mount and earlier_stages) or not _NUMBER.fullmatch(name):
        return None
    if not 0 <= int(name) < len(stages):
        raise InvalidParameter(f"invalid stage index {int(name)}")
    return stages[int(name)]


def sources(dockerfile: Dockerfile, stage: Stage, instruction: Instruction) -> Iterator[tuple[str, Stage | None]]:
    """The names in `origins`, and the stages that they mean in `stage`. Raises InvalidParameter."""
    for name in origins(instruction):
        yield name, referred(dockerfile, stage, name, mount=isinstance(instruction, Run))


def needed(dockerfile: Dockerfile, target: str) -> tuple[Stage, ...]:
    """The stages that the target needs, in the order of the file, but each after those that it
    uses; the target is the last one. An empty target is the last stage of the file.
    """
    return _ordered(dockerfile, [target_index(dockerfile, target)])


def target_index(dockerfile: Dockerfile, target: str) -> int:
    """The index of the stage of that name or number."""
    stages = dockerfile.stages
    if not target:
        return len(stages) - 1
    if named := dockerfile.by_name.get(target.lower()):
        return named[-1]
    if re.fullmatch(r"[0-9]{1,9}", target) and int(target) < len(stages):
        return int(target)
    raise InvalidParameter(f"failed to reach build target {target} in Dockerfile"[:300])


def _ordered(dockerfile: Dockerfile, wanted: Iterable[int]) -> tuple[Stage, ...]:
    """These stages and those that they use, each after those that it uses."""
    uses = {stage.index: sorted(used(dockerfile, stage)) for stage in dockerfile.stages}
    done: dict[int, Stage] = {}
    for first in wanted:
        path: list[tuple[int, Iterator[int]]] = [(first, iter(uses[first]))] if first not in done else []
        open_ = {first}
        while path:
            index, rest = path[-1]
            following = next((other for other in rest if other not in done), None)
            if following is None:
                path.pop()
                open_.discard(index)
                done[index] = dockerfile.stages[index]
            elif following in open_:
                waiting = [at for at, _ in path]
                waiting = [*waiting[waiting.index(following) :], following]
                raise _circular(dockerfile, waiting)
            else:
                open_.add(following)
                path.append((following, iter(uses[following])))
    return tuple(done.values())


def _circular(dockerfile: Dockerfile, waiting: Sequence[int]) -> Circular:
    """The fault of stages each of which waits for the next one; the last one is the first."""
    found = dockerfile.stages
    first = found[waiting[0]]
    return Circular(
        f"circular dependency detected on stage: {first.name or first.index}",
        [_use(dockerfile, found[one], other) for one, other in reversed([*itertools.pairwise(waiting)])],
    )


def _use(dockerfile: Dockerfile, stage: Stage, other: int) -> int:
    """The line that makes a stage wait for another one."""
    for instruction in stage.instructions:
        if any(meant is not None and meant.index == other for _, meant in sources(dockerfile, stage, instruction)):
            return instruction.line
    return stage.line


def used(dockerfile: Dockerfile, stage: Stage) -> set[int]:
    """The indices of the stages that a stage uses itself, its parent among them."""
    found: set[int] = set()
    instructions: list[Instruction] = list(stage.instructions)
    if stage.parent is not None:
        found.add(stage.parent)
        triggers = [one for one in dockerfile.stages[stage.parent].instructions if isinstance(one, OnBuild)]
        for one in triggers:
            try:
                trigger = records.read_text(one.trigger)
            except InvalidParameter as error:
                raise at_line(error, one.line, one.text) from error
            instructions.append(msgspec.structs.replace(trigger, line=stage.line, text=stage.text))
    for instruction in instructions:
        try:
            meant = [other for _, other in sources(dockerfile, stage, instruction)]
        except InvalidParameter as error:
            raise at_line(error, instruction.line, instruction.text) from error
        found.update(other.index for other in meant if other is not None)
    return found


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image that a stage begins with or takes files of. `line`, `text`: where it is named."""

    stage: Stage
    name: str
    line: int
    text: str
    is_base: bool = False


def images(dockerfile: Dockerfile, stage: Stage) -> Iterator[Image]:
    """Those that a stage names itself, not those of triggers. An image of which many instructions
    take files is there once, at the first of them. Raises InvalidParameter.
    """
    if stage.parent is None:
        yield Image(stage=stage, name=stage.base, line=stage.line, text=stage.text, is_base=True)
    seen: set[str] = set()
    for instruction in stage.instructions:
        for name, other in sources(dockerfile, stage, instruction):
            if other is None and name not in seen:
                seen.add(name)
                yield Image(stage=stage, name=name, line=instruction.line, text=instruction.text)


def is_one(dockerfile: Dockerfile) -> bool:
    """True if the build has one stage. Images that COPY names and sources of mounts count, as in
    BuildKit.
    """
    stages = dockerfile.stages
    mounts = any(isinstance(each, Run) and each.mounts for each in stages[0].instructions)
    return len(stages) == 1 and not mounts and not any(origins(each) for each in stages[0].instructions)


def origins(instruction: Instruction) -> list[str]:
    """Names of the stages, images and named contexts of which an instruction takes files."""
    if isinstance(instruction, Copy):
        return [instruction.from_] if instruction.from_ else []
    if isinstance(instruction, Run):
        return [mount.from_ for mount in instruction.mounts if mount.from_]
    return []


__all__ = [
    "SCRATCH",
    "Dockerfile",
    "Image",
    "Stage",
    "check",
    "images",
    "is_one",
    "needed",
    "origins",
    "read",
    "read_line",
    "referred",
    "replaced",
    "sources",
    "target_index",
    "used",
]
