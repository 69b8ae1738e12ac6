"""Variables of a build: build arguments and the scopes of ARG and ENV.

An argument's value is the client's, or else the default of the stage's ARG line, or else the value
that it has before the first FROM. ENV overrides arguments of the same name. Pure. Not here: the
replacement in words (images/instructions/words.py).
Threads: one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from engine.build.dialect import CLASSIC, Dialect
from engine.errors import InvalidParameter
from engine.images.instructions import records, words
from engine.images.instructions.records import Arg, Instruction

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
PROXIES = frozenset(name for upper in _PROXIES for name in (upper, upper.lower()))
"""Arguments that RUN gets without an ARG line. They are then not part of the cache's key, and not
in the history.
"""


_OF_ATTESTATIONS = frozenset(("BUILDKIT_SBOM_SCAN_CONTEXT", "BUILDKIT_SBOM_SCAN_STAGE"))
"""Arguments that are for the frontend alone."""


class Platforms(msgspec.Struct, frozen=True, kw_only=True):
    """`os/architecture[/variant]` of the machine that builds, and of the image."""

    build: str
    target: str

    def variables(self, stage: str = "") -> dict[str, str]:
        """The automatic arguments, for the target stage of that name."""
        found: dict[str, str] = {}
        for prefix, platform in (("BUILD", self.build), ("TARGET", self.target)):
            system, architecture, variant = [*platform.split("/"), "", "", ""][:3]
            found |= {
                f"{prefix}PLATFORM": platform,
                f"{prefix}OS": system,
                f"{prefix}ARCH": architecture,
                f"{prefix}VARIANT": variant,
            }
        return found | {"TARGETSTAGE": stage or "default"}


_ARCHITECTURES = {
    "x86_64": "amd64",
    "x86-64": "amd64",
    "aarch64": "arm64",
    "arm64/v8": "arm64",
    "i386": "386",
    "i486": "386",
    "i586": "386",
    "i686": "386",
    "arm": "arm/v7",
    "armhf": "arm/v7",
    "armel": "arm/v6",
    "amd64/v1": "amd64",
}


def normalized(platform: str) -> str:
    """`os/architecture[/variant]` with the usual names; an architecture alone is Linux's."""
    parts = platform.lower().split("/")
    if len(parts) > 3 or not all(re.fullmatch(r"[a-z0-9_.-]+", part) for part in parts):
        raise InvalidParameter(f'"{platform}" is an invalid platform: it must be os/architecture[/variant]'[:300])
    if len(parts) == 1:
        parts = ["linux", *parts]
    architecture = "/".join(parts[1:])
    return f"{parts[0]}/{_ARCHITECTURES.get(architecture, architecture)}"


class Environment(NamedTuple):
    """`variables`: what RUN gets besides ENV. `key`: those that count for the cache and stand in
    the record (`|N k=v …`). Both are sorted lists of `name=value`.
    """

    variables: list[str]
    key: list[str]


class Arguments:
    """The build arguments of a whole build, shared by its scopes.

    `given`: the client's; None as a value means that the default holds.
    """

    def __init__(self, given: Mapping[str, str | None], platforms: Platforms, target: str = "") -> None:
        for name, value in given.items():
            if value is not None and "\0" in value:
                raise InvalidParameter(f"build-arg {name}: {words.NUL}"[:300])
        self.given = {name: value for name, value in given.items() if value is not None}
        self._names = sorted(given)
        self._declared: set[str] = set()
        self._global = {name: self.given.get(name, value) for name, value in platforms.variables(target).items()}
        self._automatic = frozenset(self._global)
        self.source_date_epoch = self.given.get("SOURCE_DATE_EPOCH")
        """Also without an ARG line: the time of the image and the latest time of its files."""

    def declare_global(self, arg: Arg, escape: str = "\\") -> None:
        """An ARG line before the first FROM. Its default may use earlier ones."""
        expanded = self.expand(arg, self._global, escape)
        assert isinstance(expanded, Arg)
        for name, default in expanded.pairs:
            self._declared.add(name)
            value = self.given.get(name, default)
            if value is not None:
                self._global[name] = value

    def expand(self, instruction: Instruction, variables: Mapping[str, str], escape: str) -> Instruction:
        """As `records.expand`. A default that cannot be expanded is no error where the client gives
        a value (`ARG name=${other:?}`).
        """
        try:
            return records.expand(instruction, variables, escape)
        except InvalidParameter:
            if not isinstance(instruction, Arg):
                raise
            pairs = tuple((name, None if name in self.given else value) for name, value in instruction.pairs)
            expanded = records.expand(msgspec.structs.replace(instruction, pairs=pairs), variables, escape)
            assert isinstance(expanded, Arg)
            return msgspec.structs.replace(
                expanded,
                pairs=tuple(
                    raw if pair[0] in self.given else pair
                    for raw, pair in zip(instruction.pairs, expanded.pairs, strict=True)
                ),
            )

    def global_variables(self) -> dict[str, str]:
        """The variables that FROM lines see."""
        return dict(self._global)

    def declare(self, name: str, default: str | None) -> str | None:
        """The value of an argument that a stage declares; None when it has none."""
        self._declared.add(name)
        if name in self.given:
            return self.given[name]
        return self._global.get(name) if default is None else default

    def mention(self, names: Iterable[str]) -> None:
        """Names in ARG lines of stages, whether these run or not."""
        self._declared.update(names)

    def unconsumed(self) -> list[str]:
        """Sorted names of given arguments that no ARG line has declared so far, except predefined
        ones.
        """
        return [
            name
            for name in self._names
            if name not in self._declared
            and name not in PROXIES
            and name not in self._automatic
            and name != "SOURCE_DATE_EPOCH"
            and not name.startswith("BUILDKIT_")
        ]


class Scope:
    """One stage."""

    def __init__(self, arguments: Arguments, dialect: Dialect = CLASSIC) -> None:
        self._arguments = arguments
        self._dialect = dialect
        self._values: dict[str, str | None] = {}

    def declare(self, arg: Arg) -> None:
        """An expanded ARG line."""
        for name, default in arg.pairs:
            value = self._arguments.declare(name, default)
            if value is not None or not self._dialect.keeps_arguments:
                self._values[name] = value

    def following(self) -> Scope:
        """For a stage that begins with this one (`FROM name`), after its last line."""
        other = Scope(self._arguments, self._dialect)
        if self._dialect.keeps_arguments:
            other._values = dict(self._values)
        return other

    def variables(self, env: Sequence[str] | None) -> dict[str, str]:
        """Name → value for `records.expand`; `env` (the configuration's) overrides arguments."""
        found = {name: value for name, value in self._values.items() if value is not None}
        found.update(line.partition("=")[::2] for line in env or ())
        return found

    def run_environment(self, env: Sequence[str] | None) -> Environment:
        """The arguments that a RUN gets; those that `env` has too are left out."""
        overridden = {line.partition("=")[0] for line in env or ()}
        declared = {
            name: value
            for name, value in self._values.items()
            if value is not None and name not in overridden and name not in _OF_ATTESTATIONS
        }
        given = {name: value for name, value in self._arguments.given.items() if name in PROXIES}
        if self._dialect.all_proxies:
            proxies = {name: value for each, value in sorted(given.items()) for name in (each.upper(), each.lower())}
        else:
            proxies = {name: given[name] for name in given if name not in overridden and name not in self._values}
        return Environment(_lines(declared | proxies), _lines(declared))


def _lines(values: Mapping[str, str]) -> list[str]:
    return sorted(f"{name}={value}" for name, value in values.items())


__all__ = ["PROXIES", "Arguments", "Environment", "Platforms", "Scope", "normalized"]
