"""The stages of a Dockerfile, gone through without running them: each instruction with the
variables before it, and the ONBUILD triggers of its base.

Pure. Not here: what is looked for (`builder/lint.py`, `builder/calls.py`, `builder/followed.py`),
the images that stages begin with (`builder/bases.py`).
Raises: InvalidParameter for words that cannot be expanded.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from engine.builder.dockerfile import stages
from engine.builder.dockerfile.scope import Scope
from engine.builder.dockerfile.stages import Dockerfile, Stage
from engine.images.instructions import records
from engine.images.instructions.records import Arg, Env, Instruction, OnBuild, Shell, Workdir


class Base(NamedTuple):
    """What must be known of an image that a stage begins with. `platform`: `os/architecture`.
    `directory`: the working directory.
    """

    env: Sequence[str] = ()
    triggers: Sequence[str] = ()
    shell: Sequence[str] = ()
    platform: str = ""
    directory: str = ""


class Variables(Mapping[str, str]):
    """Variables at one place, and which names were looked up: `missing`, in this order, are
    unset. Those of the file are not copied, so they must not change meanwhile.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._below = variables
        self._own: dict[str, str] = {}
        """Set here, over those."""
        self.missing: list[str] = []
        self.found: set[str] = set()

    def __copy__(self) -> Variables:
        """Other variables on the same ones, and the same names that were looked up."""
        other = Variables(self._below)
        other._own, other.missing, other.found = dict(self._own), self.missing, self.found
        return other

    def __setitem__(self, name: str, value: str) -> None:
        self._own[name] = value

    def __getitem__(self, name: str) -> str:
        return self._own[name] if name in self._own else self._below[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._below

    def __iter__(self) -> Iterator[str]:
        return iter({**self._below, **self._own})

    def __len__(self) -> int:
        return len({**self._below, **self._own})

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        """The value; of an unset variable the default."""
        if name not in self:
            self.missing.append(name)
            return default
        self.found.add(name)
        return self[name]


class Place:
    """One place in a stage."""

    def __init__(self, file: Dockerfile, scope: Scope, base: Base) -> None:
        self._file = file
        self.scope = scope
        self.env = dict(line.partition("=")[::2] for line in base.env)
        self.triggers = [*base.triggers]
        self.declared: set[str] = set()
        """Names of ARG lines."""
        self.names = dict.fromkeys(self.env)
        """Names of all variables, in the order of the lines that set them first."""
        self.platform = base.platform
        """`os/architecture`; empty if it is not known."""
        self.directory = base.directory
        """The working directory, which may have `..`; empty for `/`."""
        self.has_shell = bool(base.shell)
        self.has_workdir = False
        """A WORKDIR line stands before."""

    @property
    def architecture(self) -> str:
        """Empty if it is not known."""
        return self.platform.split("/")[1] if self.platform else ""

    def following(self) -> Place:
        """The begin of a stage that begins with this one, whose end this place is."""
        base = Base(triggers=self.triggers, platform=self.platform, directory=self.directory)
        other = Place(self._file, self.scope.following(), base)
        other.env = dict(self.env)
        other.declared, other.names = set(self.declared), dict(self.names)
        other.has_shell, other.has_workdir = self.has_shell, self.has_workdir
        return other

    def variables(self) -> Variables:
        """Those that the next instruction sees, until `leave`."""
        return Variables(_Visible(self))

    def expand(self, instruction: Instruction, variables: Variables) -> Instruction:
        """An instruction with these variables replaced."""
        return self._file.arguments.expand(instruction, variables, self._file.escape)

    def take(self, instruction: Instruction) -> Instruction:
        """Go on behind an instruction. Returns it with its variables replaced."""
        expanded = self.expand(instruction, self.variables())
        self.leave(expanded)
        return expanded

    def leave(self, expanded: Instruction) -> None:
        """Go on behind an instruction whose variables are replaced."""
        match expanded:
            case Arg():
                self.scope.declare(expanded)
                self.declared.update(name for name, _ in expanded.pairs)
                self.names |= dict.fromkeys(name for name, _ in expanded.pairs)
            case Env():
                self.env.update(expanded.pairs)
                self.names |= dict.fromkeys(name for name, _ in expanded.pairs)
                self.scope.set_by_env(name for name, _ in expanded.pairs)
            case OnBuild():
                self.triggers.append(expanded.trigger)
            case Shell():
                self.has_shell = True
            case Workdir():
                self.has_workdir = True
                self.directory = posixpath.join(self.directory, expanded.path)


class _Visible(Mapping[str, str]):
    """The variables of a place as it is now. To copy them at each line takes the square of a file's
    length.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def __getitem__(self, name: str) -> str:
        value = self._place.scope.value(name, self._place.env)
        if value is None:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return self._place.scope.value(str(name), self._place.env) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())

    def _whole(self) -> dict[str, str]:
        return self._place.scope.variables([f"{name}={value}" for name, value in self._place.env.items()])


class Walk:
    """One way through a file. Stages are asked for after those that they begin with."""

    def __init__(self, file: Dockerfile, base: Callable[[Stage], Base | None]) -> None:
        """`base`: the image of a stage that begins with none of the others; None if it is not
        known.
        """
        self._file = file
        self._base = base
        self._places: dict[int, Place | None] = {}

    def enter(self, stage: Stage) -> Place | None:
        """The begin of a stage, which moves on with `Place.take`. None if its base is not known."""
        if stage.parent is not None:
            before = self._places[stage.parent]
            place = None if before is None else before.following()
        else:
            base = Base(platform=stage.platform) if stage.base == stages.SCRATCH else self._base(stage)
            place = None if base is None else Place(self._file, Scope(self._file.arguments), base)
        self._places[stage.index] = place
        return place

    def instructions(self, stage: Stage, place: Place) -> Iterator[Instruction]:
        """The triggers of the base, which have the line of FROM, and the stage's own lines."""
        triggers, place.triggers = place.triggers, []
        for text in triggers:
            trigger = records.read_text(text, self._file.escape, whole_arrays=self._file.arguments.dialect.whole_arrays)
            yield msgspec.structs.replace(trigger, line=stage.line)
        yield from stage.instructions


__all__ = ["Base", "Place", "Variables", "Walk"]
