"""The answers of `docker build --check` and `--call`: what is said of a Dockerfile without building
it. JSON for programs, and text for clients that print it as it is.

Pure. Not here: the checks (`lint.py`), who asks (`buildkit/frontend.py`).
Source: BuildKit's `frontend/subrequests`, and what dockerd 28.5.2 answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from engine.builder.dockerfile import stages
from engine.builder.dockerfile.lines import Document
from engine.builder.dockerfile.stages import Dockerfile, Stage
from engine.builder.dockerfile.walk import Variables, Walk
from engine.builder.lint import Findings
from engine.builder.reports import CheckWarning
from engine.images.instructions import words
from engine.images.instructions.records import Arg, From, Instruction, Run

LINT, OUTLINE, TARGETS = "frontend.lint", "frontend.outline", "frontend.targets"
DESCRIBE = "frontend.subrequests.describe"

_VERSION = b"1.0.0"

_MOST_RANGES = 100
"""Of one place: a heredoc may have a million lines."""


class Answer(NamedTuple):
    """The answer to a call: documents by name, and warnings to show beside it."""

    documents: dict[str, bytes]
    warnings: Sequence[CheckWarning] = ()


class _Position(msgspec.Struct):
    line: int


class _Range(msgspec.Struct):
    start: _Position
    end: _Position


class _Location(msgspec.Struct, omit_defaults=True):
    ranges: tuple[_Range, ...] = ()


class _Warning(msgspec.Struct, rename="camel", omit_defaults=True):
    rule_name: str
    description: str
    detail: str
    location: _Location
    url: str = ""


class _Source(msgspec.Struct, omit_defaults=True):
    filename: str
    language: str
    data: bytes = b""


class _Error(msgspec.Struct):
    message: str
    location: _Location


class _Lint(msgspec.Struct, rename="camel"):
    warnings: list[_Warning] | None
    sources: list[_Source]
    build_error: _Error | msgspec.UnsetType = msgspec.UNSET


class _Argument(msgspec.Struct, omit_defaults=True, kw_only=True):
    name: str
    description: str = ""
    value: str = ""
    location: _Location


class _Needed(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A secret, or an SSH agent, where a stage mounts it first: later mounts of it may differ."""

    name: str
    required: bool = False
    location: _Location


class _Outline(msgspec.Struct, omit_defaults=True):
    name: str = ""
    description: str = ""
    args: list[_Argument] = []
    secrets: list[_Needed] = []
    ssh: list[_Needed] = []
    sources: list[bytes] = []


class _Target(msgspec.Struct, omit_defaults=True):
    base: str
    location: _Location
    name: str = ""
    default: bool = False
    description: str = ""
    platform: str = ""


class _Targets(msgspec.Struct):
    targets: list[_Target]
    sources: list[bytes]


class _Named(msgspec.Struct):
    name: str
    description: str = ""


class _Call(msgspec.Struct):
    name: str
    description: str
    opts: list[_Named] | None
    version: str = _VERSION.decode()
    type: str = "rpc"
    inputs: None = None
    metadata: tuple[_Named, ...] = (_Named("result.json"), _Named("result.txt"))
    refs: None = None


_CALLS = [
    _Call(OUTLINE, "List all parameters current build target supports", [_Named("target", "Target build stage")]),
    _Call(TARGETS, "List all targets current build supports", []),
    _Call(DESCRIBE, "List available subrequest types", None),
]


def describe() -> dict[str, bytes]:
    """Which calls there are."""
    rows = [(call.name.removeprefix("frontend."), call.version, call.description) for call in _CALLS]
    return _answer(_CALLS, _table([("NAME", "VERSION", "DESCRIPTION"), *rows], 1))


def lint(raw: bytes, filename: str, findings: Findings) -> dict[str, bytes]:
    """The warnings of a file, and why it cannot be built."""
    document = _Lint(
        [
            _Warning(
                rule_name=warning.rule.name,
                description=warning.rule.description,
                url=warning.rule.url,
                detail=warning.detail,
                location=_location(warning.first, warning.last),
            )
            for warning in findings.warnings
        ]
        or None,
        [_Source(filename, "Dockerfile", raw)],
    )
    if findings.error:
        document.build_error = _Error(
            findings.error, _Location() if findings.place is None else _location(*findings.place)
        )
    lines = raw.decode(errors="replace").split("\n")
    text = "".join(
        f"\nWARNING: {warning.rule.name}{f' - {warning.rule.url}' if warning.rule.url else ''}\n{warning.detail}\n"
        f"{excerpt(filename, lines, warning.first, warning.last)}"
        for warning in sorted(findings.warnings, key=lambda warned: warned.first)
    )
    status = b"1" if findings.warnings or findings.error else b"0"
    return {**_answer(document, text), "result.statuscode": status}


def excerpt(filename: str, lines: Sequence[str], first: int, last: int) -> str:
    """Lines of a file with some around them, as BuildKit shows them."""
    if not 1 <= first <= len(lines):
        return ""
    begin, end, most, added = first, min(last, len(lines)), 4 if first == last else 2, 0
    while added < most:
        if begin > 1:
            begin, added = begin - 1, added + 1
        if end < len(lines):
            end, added = end + 1, added + 1
        added += 1
    rule = "-" * 20 + "\n"
    shown = (
        f" {number:3} | {'>>>' if first <= number <= last else '   '} {lines[number - 1]}\n"
        for number in range(begin, end + 1)
    )
    return f"{filename}:{first}\n{rule}{''.join(shown)}{rule}"


def targets(raw: bytes, document: Document, instructions: Iterable[Instruction]) -> dict[str, bytes]:
    """The stages of a file. Variables are not replaced."""
    found = [
        _Target(
            name=each.name,
            description=_comment(document.comments, each.line, each.name),
            base=each.image,
            platform=each.platform,
            location=_location(each.line, document.ends[each.line]),
        )
        for each in instructions
        if isinstance(each, From)
    ]
    if found:
        found[-1].default = True
    rows = [(f"{each.name} (default)".strip() if each.default else each.name, each.description) for each in found]
    return _answer(_Targets(found, [raw]), _table([("TARGET", "DESCRIPTION"), *rows], 1))


# --- outline --------------------------------------------------------------------------------------


def outline(raw: bytes, file: Dockerfile, target: str, walk: Walk) -> dict[str, bytes]:
    """The arguments, secrets and SSH agents that a target takes. `walk`: one that has not begun.
    Raises InvalidParameter.
    """
    goal = file.stages[stages.target_index(file, target)]
    known = _global_arguments(file)
    uses = {stage.index: _uses(file, stage, walk, known) for stage in stages.needed(file, target)}
    arguments: dict[str, _Argument] = {}
    secrets: dict[str, _Needed] = {}
    agents: dict[str, _Needed] = {}
    for each in _from(file, goal, uses):
        arguments = each.arguments | arguments
        secrets = each.secrets | secrets
        agents = each.agents | agents
    document = _Outline(
        name=goal.name,
        description=_comment(file.comments, goal.line, goal.name),
        args=_sorted(arguments.values()),
        secrets=_sorted(secrets.values()),
        ssh=_sorted(agents.values()),
        sources=[raw],
    )
    return _answer(document, _shown(document))


class _Global(msgspec.Struct):
    """An argument before the first FROM, and the names of those that its default takes."""

    argument: _Argument
    takes: set[str]


class _Uses(msgspec.Struct):
    """What one stage takes."""

    arguments: dict[str, _Argument] = {}
    secrets: dict[str, _Needed] = {}
    agents: dict[str, _Needed] = {}


def _global_arguments(file: Dockerfile) -> dict[str, _Global]:
    found: dict[str, _Global] = {}
    values = file.arguments.global_variables()
    for line in file.global_arguments:
        for name, default in line.pairs:
            takes: set[str] = set()
            if default is not None and name not in file.arguments.given:
                takes = _names_in(default, values, file.escape)
                if name in takes and name in found:
                    takes |= found[name].takes
            argument = _argument(file, line, name, values.get(name))
            found[name] = _Global(argument, takes - {name})
    return found


def _uses(file: Dockerfile, stage: Stage, walk: Walk, known: Mapping[str, _Global]) -> _Uses:
    uses = _Uses()
    taken: list[str] = []
    for base_stage in _line_of_bases(file, stage):
        for text in (base_stage.written.image, base_stage.written.platform):
            taken += _names_in(text, file.arguments.global_variables(), file.escape)
    place = walk.enter(stage)
    for instruction in walk.instructions(stage, place) if place is not None else ():
        expanded = place.take(instruction) if place is not None else instruction
        if isinstance(expanded, Arg):
            for name, default in expanded.pairs:
                inherited = default is None and name not in file.arguments.given
                if inherited and name in file.arguments.global_variables():
                    taken.append(name)
                else:
                    value = file.arguments.declare(name, default)
                    uses.arguments[name] = _argument(file, expanded, name, value)
        if isinstance(expanded, Run):
            location = _location(expanded.line, file.ends.get(expanded.line, expanded.line))
            for mount in expanded.mounts:
                taken_by = {"secret": uses.secrets, "ssh": uses.agents}.get(mount.type)
                if taken_by is not None:
                    name = mount.id or "default"
                    taken_by.setdefault(name, _Needed(name=name, required=mount.required, location=location))
    for name in taken:  # grows
        if name in known and name not in uses.arguments:
            uses.arguments[name] = known[name].argument
            taken += known[name].takes
    return uses


def _line_of_bases(file: Dockerfile, stage: Stage) -> Iterator[Stage]:
    """The stage, the one that it begins with, and so on."""
    yield stage
    while stage.parent is not None:
        stage = file.stages[stage.parent]
        yield stage


def _from(file: Dockerfile, goal: Stage, uses: Mapping[int, _Uses]) -> list[_Uses]:
    """The target's own needs, and those of the stages that it uses: the base first."""
    order: dict[int, None] = {}
    left = [goal.index]
    while left:
        index = left.pop()
        if index not in order:
            order[index] = None
            stage = file.stages[index]
            left += sorted(stages.used(file, stage) - {stage.parent}, reverse=True)
            left += [] if stage.parent is None else [stage.parent]
    return [uses[index] for index in order]


def _names_in(text: str, variables: Mapping[str, str], escape: str) -> set[str]:
    seen = Variables(variables)
    words.expanded(text, seen, escape)
    return seen.found


def _argument(file: Dockerfile, line: Arg, name: str, value: str | None) -> _Argument:
    location = _location(line.line, file.ends.get(line.line, line.line))
    description = _comment(file.comments, line.line, name)
    return _Argument(name=name, description=description, value=value or "", location=location)


def _shown(document: _Outline) -> str:
    parts = []
    if document.name or document.description:
        rows = [("TARGET:", document.name or "(default)")]
        rows += [("DESCRIPTION:", document.description)] if document.description else []
        parts.append(_table(rows, 1))
    if document.args:
        arguments = [(each.name, each.value, each.description) for each in document.args]
        parts.append(_table([("BUILD ARG", "VALUE", "DESCRIPTION"), *arguments], 3))
    for title, needed in (("SECRET", document.secrets), ("SSH", document.ssh)):
        if needed:
            required = [(each.name, "true" if each.required else "") for each in needed]
            parts.append(_table([(title, "REQUIRED"), *required], 3))
    return "".join(f"{part}\n" for part in parts)


# --- parts ----------------------------------------------------------------------------------------


def _location(first: int, last: int) -> _Location:
    """A range for each line; one for all of very many."""
    step = 1 if last - first < _MOST_RANGES else last - first + 1
    return _Location(
        tuple(_Range(_Position(line), _Position(line + step - 1)) for line in range(first, last + 1, step))
    )


_Placed = TypeVar("_Placed", _Argument, _Needed)


def _sorted(found: Iterable[_Placed]) -> list[_Placed]:
    return sorted(found, key=lambda each: each.location.ranges[0].start.line)


def _comment(comments: Mapping[int, tuple[str, ...]], line: int, name: str) -> str:
    """The description of a stage or an argument: what follows its name in a comment above."""
    if not name:
        return ""
    return next((each[len(name) + 1 :] for each in comments.get(line, ()) if each.startswith(f"{name} ")), "")


def _answer(document: object, text: str) -> dict[str, bytes]:
    raw = msgspec.json.format(msgspec.json.encode(document), indent=2)
    return {"result.json": raw, "result.txt": text.encode(), "version": _VERSION}


def _table(rows: Sequence[Sequence[str]], padding: int) -> str:
    """Columns as Go's text/tabwriter sets them: all but the last are padded."""
    widths = [max(map(len, column)) + padding for column in zip(*rows, strict=True)]
    return "".join(
        "".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)) + f"{row[-1]}\n"
        for row in rows
    )


__all__ = ["DESCRIBE", "LINT", "OUTLINE", "TARGETS", "Answer", "describe", "excerpt", "lint", "outline", "targets"]
