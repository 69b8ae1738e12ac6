"""Variables of a build: build arguments and the scopes of ARG and ENV.

An argument's value is the client's, or else the default of the stage's ARG line, or else the value
that it has before the first FROM. Which of ARG and ENV overrides the other is the dialect's. Pure.
Not here: the replacement in words (images/instructions/words.py).
Threads: one at a time.
"""

from __future__ import annotations

import copy
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from engine.builder.dialect import CLASSIC, Dialect
from engine.errors import InvalidParameter
from engine.images.instructions import records, words
from engine.images.instructions.records import Arg, Instruction

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
PROXIES = frozenset(name for upper in _PROXIES for name in (upper, upper.lower()))
"""Arguments that RUN gets without an ARG line. They are then not part of the cache's key, and not
in the history.
"""


ATTESTATIONS = frozenset(("BUILDKIT_SBOM_SCAN_CONTEXT", "BUILDKIT_SBOM_SCAN_STAGE"))
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


_COMPONENT = re.compile(r"[a-z0-9_.-]+")
_COMPONENT_RULE = "^[A-Za-z0-9_.-]+$"


def normalized(platform: str) -> str:
    """`os/architecture[/variant]` with the usual names; an architecture alone is Linux's."""
    parts = platform.lower().split("/")
    if len(parts) > 3:
        raise InvalidParameter(f'"{platform}": cannot parse platform specifier: invalid argument'[:300])
    for part in parts:
        if not _COMPONENT.fullmatch(part):
            raise InvalidParameter(
                f'"{part}" is an invalid component of "{platform}": platform specifier component must match '
                f'"{_COMPONENT_RULE}": invalid argument'[:500]
            )
    if len(parts) == 1:
        parts = ["linux", *parts]
    architecture = "/".join(parts[1:])
    return f"{parts[0]}/{_ARCHITECTURES.get(architecture, architecture)}"


class Environment(NamedTuple):
    """`variables`: what RUN gets besides ENV. `key`: those that count for the cache and stand in
    the record (`|N k=v …`). Both are sorted lists of `name=value`. `declared`: all
    arguments in the order of their lines, with their values or those of ENV (`RUN |N k=v …`).
    """

    variables: list[str]
    key: list[str]
    declared: list[str]


class Arguments:
    """The build arguments of a whole build, shared by its scopes.

    `given`: the client's; None as a value means that the default holds.
    """

    def __init__(
        self,
        given: Mapping[str, str | None],
        platforms: Platforms,
        target: str = "",
        dialect: Dialect = CLASSIC,
    ) -> None:
        for name, value in given.items():
            if value is not None and "\0" in value:
                raise InvalidParameter(f"build-arg {name}: {words.NUL}"[:300])
        self.dialect = dialect
        self.given = {name: value for name, value in given.items() if value is not None}
        self._names = sorted(given)
        self._declared: set[str] = set()
        self._global = {name: self.given.get(name, value) for name, value in platforms.variables(target).items()}
        self._automatic = frozenset(self._global)
        self.source_date_epoch = self.given.get("SOURCE_DATE_EPOCH")
        """Also without an ARG line: the time of the image and the latest time of its files."""

    def declare_global(self, arg: Arg, escape: str = "\\") -> None:
        """An ARG line before the first FROM. Its default may use earlier ones."""
        expanded = self.expand(arg, ChainMap({}, self._global), escape)
        assert isinstance(expanded, Arg)
        for name, default in expanded.pairs:
            self._declared.add(name)
            value = self.given.get(name, default)
            if value is not None:
                self._global[name] = value

    def expand(self, instruction: Instruction, variables: Mapping[str, str], escape: str) -> Instruction:
        """As `records.expand`, but for an ARG whose variables are ordered."""
        if not isinstance(instruction, Arg) or not self.dialect.ordered_variables:
            return records.expand(instruction, variables, escape)
        seen: Any = copy.copy(variables)  # of its own kind: it may record what is missing
        pairs = []
        for name, written in instruction.pairs:
            default = written
            if written is not None and name not in self.given:
                default = words.expanded(written, seen, escape)
            value = self._value(name, default)
            if value is not None:
                seen[name] = value
            pairs.append((name, default))
        return msgspec.structs.replace(instruction, pairs=tuple(pairs))

    def check(self, instruction: Instruction, escape: str) -> None:
        """Raises what `expand` raises whatever the variables are."""
        if not isinstance(instruction, Arg) or not self.dialect.ordered_variables:
            records.check(instruction, escape)
            return
        for name, default in instruction.pairs:
            if default is not None and name not in self.given:
                words.check(default, escape)

    def global_variables(self) -> Mapping[str, str]:
        """The variables that FROM lines see, after the ARG lines so far."""
        return MappingProxyType(self._global)

    def declare(self, name: str, default: str | None) -> str | None:
        """The value of an argument that a stage declares; None when it has none."""
        self._declared.add(name)
        return self._value(name, default)

    def _value(self, name: str, default: str | None) -> str | None:
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

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._dialect = arguments.dialect
        self._values: dict[str, str | None] = {}
        self._names: dict[str, None] = {}
        """Of all ARG lines, in their order."""
        self._after_env: set[str] = set()
        """Arguments that override an ENV of their name, which stands before them."""

    def declare(self, arg: Arg) -> None:
        """An expanded ARG line."""
        for name, default in arg.pairs:
            self._names[name] = None
            value = self._arguments.declare(name, default)
            if value is not None or not self._dialect.ordered_variables:
                self._values[name] = value
            if value is not None and self._dialect.ordered_variables:
                self._after_env.add(name)

    def set_by_env(self, names: Iterable[str]) -> None:
        """An ENV line sets these variables."""
        self._after_env.difference_update(names)

    def following(self) -> Scope:
        """For a stage that begins with this one (`FROM name`), after its last line. The variables
        of its image are set again.
        """
        other = Scope(self._arguments)
        if self._dialect.ordered_variables:
            other._values, other._names = dict(self._values), dict(self._names)
        return other

    def value(self, name: str, env: Mapping[str, str]) -> str | None:
        """One of `variables`; None if it is not among them. `env`: the configuration's, by name."""
        found = self._values.get(name)
        return found if found is not None and (name not in env or name in self._after_env) else env.get(name)

    def variables(self, env: Sequence[str] | None) -> dict[str, str]:
        """Name → value for `records.expand`. `env`: the configuration's."""
        found = dict(line.partition("=")[::2] for line in env or ())
        return found | self._arguments_beside(found)

    def _arguments_beside(self, env: Iterable[str]) -> dict[str, str]:
        """The arguments that these names of ENV do not override."""
        overridden = {*env} - self._after_env
        return {name: value for name, value in self._values.items() if value is not None and name not in overridden}

    def run_environment(self, env: Sequence[str] | None) -> Environment:
        """The arguments that a RUN gets; those that `env` has too are left out."""
        names = {line.partition("=")[0] for line in env or ()}
        declared = self._arguments_beside(names)
        for name in ATTESTATIONS:
            declared.pop(name, None)
        given = {name: value for name, value in self._arguments.given.items() if name in PROXIES}
        if self._dialect.all_proxies:
            upper = {name.upper(): value for name, value in sorted(given.items())}
            proxies = {each: value for name, value in upper.items() if value for each in (name, name.lower())}
        else:
            proxies = {name: given[name] for name in given if name not in names and name not in self._values}
        variables = self.variables(env)
        named = [f"{name}={variables.get(name, '')}" for name in self._names]
        return Environment(_lines(declared | proxies), _lines(declared), named)


def _lines(values: Mapping[str, str]) -> list[str]:
    return sorted(f"{name}={value}" for name, value in values.items())


__all__ = ["ATTESTATIONS", "PROXIES", "Arguments", "Environment", "Platforms", "Scope", "normalized"]
