"""Variables of a build: build arguments and the scopes of ARG and ENV.

Pure. Not here: the replacement in words (images/instructions/words.py).
Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from engine.images.instructions.records import Arg


class Platforms(msgspec.Struct, frozen=True, kw_only=True):
    """`os/architecture[/variant]` of the machine that builds, and of the image."""

    build: str
    target: str


class Environment(NamedTuple):
    """`variables`: what RUN gets besides ENV. `key`: those that count for the cache and stand in
    the record (`|N k=v …`). Both are sorted lists of `name=value`.
    """

    variables: list[str]
    key: list[str]


class Arguments:
    """The build arguments of a whole build, shared by its scopes."""

    def __init__(self, given: Mapping[str, str | None], platforms: Platforms) -> None:
        self.given = given

    def declare_global(self, arg: Arg, escape: str) -> None:
        """An ARG line before the first FROM. Its default may use earlier ones."""
        raise NotImplementedError

    def global_variables(self) -> dict[str, str]:
        """The variables that FROM lines see."""
        raise NotImplementedError

    def unconsumed(self) -> list[str]:
        """Sorted names of given arguments that no ARG line has declared so far, except predefined
        ones.
        """
        raise NotImplementedError


class Scope:
    """One stage."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments

    def declare(self, arg: Arg) -> None:
        """An expanded ARG line."""
        raise NotImplementedError

    def variables(self, env: Sequence[str] | None) -> dict[str, str]:
        """Name → value for `records.expand`; `env` (the configuration's) overrides arguments."""
        raise NotImplementedError

    def run_environment(self, env: Sequence[str] | None) -> Environment:
        """The arguments that a RUN gets; those that `env` has too are left out."""
        raise NotImplementedError
