"""The OCI runtimes of this engine by name: the one that was chosen at its start, those that the
operator has configured, and the other one of crun and runc if it is installed.

A container keeps its runtime, also if the engine's choice changes later, because one runtime does
not read the state of another. Its record has that runtime's name apart from the one that inspect
shows: where the engine chose the default runtime itself, the default's name is Docker's, `runc`, so
that the value of an inspect is accepted by any engine.

Not here: how one works and is tested (`oci.py`). Raises InvalidParameter for an unknown name.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.config import runtime
from engine.errors import InvalidParameter, ServerError
from engine.runtime.oci import CANDIDATES, SEARCH, Runtime, words_of_version

_log = logging.getLogger(__name__)

RUNC = "runc"
_DOCKERS_DEFAULTS = (RUNC, "io.containerd.runc.v2")
"""Names that mean the default runtime, unless a runtime is installed under that name."""


class Runtimes:
    """The runtimes by name."""

    def __init__(self, default: Runtime, others: Mapping[str, Runtime] | None = None, *, chosen: bool = False) -> None:
        """`chosen`: the operator has named the default runtime."""
        self.default = default
        self.default_name = default.name if chosen else RUNC
        """For clients."""
        self._by_name = dict.fromkeys(_DOCKERS_DEFAULTS, default) | dict(others or {}) | {default.name: default}

    @classmethod
    def find(cls, choice: str, configured: Sequence[str], run: Path) -> Runtimes:
        """Test the default runtime, and look for the others. Blocks on processes.

        `choice`: as for `Runtime.probe`, or one of the names of `configured`, whose entries are
        NAME=PATH [ARGUMENTS]. Raises ServerError if no default runtime works.
        """
        programs = {name: _Program.of(words) for name, words in map(runtime, configured)}
        if choice and choice not in programs and choice not in CANDIDATES and _which(choice) is None:
            raise ServerError(f"the default runtime {choice!r} does not exist: no --add-runtime has that name")
        program = programs.get(choice, _Program(choice))
        default = Runtime.probe(program.path, run, program.arguments, no_pivot=program.no_pivot)
        if choice in programs:
            default = msgspec.structs.replace(default, name=choice)
        others: dict[str, Runtime] = {}
        for name in CANDIDATES:
            path = _which(name)
            if path is not None and path != default.path:
                others[name] = _untested(name, path, name, "", default.root)
        for name, program in programs.items():
            path = _which(program.path)
            if path is None:
                _log.warning("runtime %s: %s is not executable", name, program.path)
                path = program.path
            family, version = words_of_version(path, *program.arguments)
            made = _untested(name, path, family, version, default.root)
            others[name] = msgspec.structs.replace(made, arguments=program.arguments, no_pivot=program.no_pivot)
        return cls(default, others, chosen=bool(choice))

    def become(self, others: Runtimes) -> None:
        """Have the runtimes of another configuration from now on. What runs keeps the names."""
        self.default, self.default_name, self._by_name = others.default, others.default_name, others._by_name

    def programs(self) -> dict[str, tuple[str, ...]]:
        """Programs with their arguments by name, sorted: every name that a create accepts."""
        return {name: self._by_name[name].command for name in sorted(self._by_name)}

    def named(self, name: str) -> Runtime:
        """The runtime for a new container. Raises InvalidParameter for an unknown name."""
        found = self._by_name.get(name or self.default.name)
        if found is None:
            raise InvalidParameter(f"Unknown runtime specified {name}: unknown or invalid runtime name: {name}")
        return found

    def check_configured(self, name: str) -> None:
        """Before a start. Raises InvalidParameter if the operator has removed the container's
        runtime from the configuration. One that the engine chose itself may be missing now.
        """
        if name not in CANDIDATES:
            self.named(name)

    def of(self, name: str) -> Runtime:
        """The runtime of a container that has kept this name; the default one for a name that is no
        longer configured.
        """
        return self._by_name.get(name, self.default)

    def shown(self, older: str) -> str:
        """What inspect shows of a container whose record has no runtime apart from the shown one:
        earlier versions of this engine kept `crun` there, too, if they had chosen it themselves.
        """
        return older if older and older != "crun" else self.default_name


class _Program(NamedTuple):
    """A configured runtime. `--no-pivot` is an argument of `run`, and not of the program."""

    path: str
    arguments: tuple[str, ...] = ()
    no_pivot: bool = False

    @classmethod
    def of(cls, words: Sequence[str]) -> _Program:
        arguments = tuple(word for word in words[1:] if word != _NO_PIVOT)
        return cls(words[0], arguments, _NO_PIVOT in words[1:])


_NO_PIVOT = "--no-pivot"


def _which(program: str) -> str | None:
    """Its path; None if it is not executable."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{SEARCH}")


def _untested(name: str, path: str, family: str, version: str, root: str) -> Runtime:
    return Runtime(name=name, path=path, version=version, family=family, reason="configured", root=root)
