"""The stages of a Dockerfile, gone through without running them: each instruction with the
variables before it, and the ONBUILD triggers of its base.

Pure. Not here: what is looked for (`build/lint.py`, `build/calls.py`, `build/followed.py`), the
images that stages begin with (`build/bases.py`).
Raises: InvalidParameter for words that cannot be expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from engine.build.dockerfile import stages
from engine.build.dockerfile.scope import Scope
from engine.build.dockerfile.stages import Dockerfile, Stage
from engine.images.instructions import records
from engine.images.instructions.records import Arg, Env, Instruction, OnBuild, Shell, Workdir


class Base(NamedTuple):
    """What must be known of an image that a stage begins with. `platform`: `os/architecture`."""

    env: Sequence[str] = ()
    triggers: Sequence[str] = ()
    shell: Sequence[str] = ()
    platform: str = ""


class Variables(dict[str, str]):
    """Variables at one place, and which names were looked up: `missing`, in this order, are
    unset.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        super().__init__(variables)
        self.missing: list[str] = []
        self.found: set[str] = set()

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        """The value; of an unset variable the default."""
        if name in self:
            self.found.add(name)
        else:
            self.missing.append(name)
        return super().get(name, default)


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
        self.has_shell = bool(base.shell)
        self.has_workdir = False
        """A WORKDIR line stands before."""

    def following(self) -> Place:
        """The begin of a stage that begins with this one, whose end this place is."""
        other = Place(self._file, self.scope.following(), Base(triggers=self.triggers))
        other.env = dict(self.env)
        other.declared, other.names = set(self.declared), dict(self.names)
        other.has_shell, other.has_workdir = self.has_shell, self.has_workdir
        return other

    def variables(self) -> Variables:
        """Those that the next instruction sees."""
        return Variables(self.scope.variables([f"{name}={value}" for name, value in self.env.items()]))

    def take(self, instruction: Instruction, variables: Variables) -> Instruction:
        """Go on behind an instruction. Returns it with these variables replaced."""
        expanded = self._file.arguments.expand(instruction, variables, self._file.escape)
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
        return expanded


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
            base = Base() if stage.base == stages.SCRATCH else self._base(stage)
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
