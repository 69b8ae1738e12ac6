"""Facts about the programs that the engine executes, for /info and /version: the features of OCI
runtimes, and the version of the init program.

A program is executed at the first request, and again only when its file has changed, so that a
start of the engine does not wait for it.

Owns:    the answers. Threads: any, one at a time. Raises nothing: a program that does not answer
has no features and no version.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from engine.common.facts import ProgramFacts
from engine.errors import InvalidParameter
from engine.runtime import features, init
from engine.runtime.oci import words_of_version

T = TypeVar("T")


class Programs:
    """See the module."""

    def __init__(self, runtimes: Callable[[], Mapping[str, Sequence[str]]], init_path: str = "") -> None:
        """`runtimes`: the programs of now with their arguments, by name.

        `init_path`: the configured init program.
        """
        self._runtimes = runtimes
        self._init_path = init_path
        self._reading = threading.Lock()
        self._features = _Answers(features.read)
        self._versions = _Answers(words_of_version)

    def read(self) -> ProgramFacts:
        """Blocks on processes."""
        with self._reading:
            found = {name: self._features.of(*program) for name, program in self._runtimes().items()}
            version = ""
            with contextlib.suppress(InvalidParameter):  # there is none
                _, version = self._versions.of(init.program(self._init_path))
        return ProgramFacts(init_version=version, features={name: text for name, text in found.items() if text})


class _Answers(Generic[T]):
    """Answers by program, as long as its file stays the same."""

    def __init__(self, ask: Callable[..., T]) -> None:
        self._ask = ask
        self._known: dict[tuple[str, ...], tuple[object, T]] = {}

    def of(self, *program: str) -> T:
        identity = _identity(program[0])
        known = self._known.get(program)
        if known is None or known[0] != identity:
            known = self._known[program] = identity, self._ask(*program)
        return known[1]


def _identity(path: str) -> object:
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


__all__ = ["Programs"]
