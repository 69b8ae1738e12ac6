"""A job: work that every engine does, and the rows of the table that it yields.

A job first calls `prepare` for each engine, which asserts that the engine's answers are right. Then
it takes samples in turns, each round with another engine first, so that noise of the host affects
all alike. An engine that lacks what the job needs, or answers wrongly, is left out of its rows with
the reason; the others continue.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bench import steps
from bench.engines import Engine, Engined
from bench.report import Row, Target
from bench.wire import Lacks

T = TypeVar("T")


@dataclass(frozen=True)
class Size:
    """Amount of work: a full run, or a quick one that only shows whether everything works."""

    quick: bool = False

    def rounds(self, full: int) -> int:
        return 1 if self.quick else full

    def of(self, full: T, quick: T) -> T:
        return quick if self.quick else full


@dataclass(frozen=True)
class Figure:
    """The description of one row of the table."""

    name: str
    what: str
    unit: str
    less_is_better: bool = True
    target: Target | None = None


def touch(size: int) -> None:
    """Use so many bytes of page cache and release them.

    A virtual machine may have returned free memory to its host. Using it again costs a fault per
    page, which takes several times as long as writing a file to it and has nothing to do with the
    engine. The bytes are written to a file, a megabyte at a time, because the kernel keeps free
    lists per page order, and anonymous memory would come from other lists.
    """
    piece = bytes(1 << 20)
    with tempfile.TemporaryFile(dir="/tmp", buffering=0) as file:
        for _ in range(0, size, len(piece)):
            file.write(piece)


ENOUGH = 2.0
"""Seconds after which no further request is timed."""


def costs(engine: Engine, count: int, request: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds until one of at most `count` requests is answered (median), and milliseconds of
    the engine's processor time for one (mean).
    """
    found: list[float] = []
    with engine.metered() as meter:
        while not found or (len(found) < count and sum(found) < ENOUGH):
            begin = time.perf_counter()
            request()
            found.append(time.perf_counter() - begin)
    return statistics.median(found) * 1000, meter.seconds / len(found) * 1000


def cost_figures(name: str, what: str) -> list[Figure]:
    """The two rows of `costs`."""
    target = Target({"dockerd": 2})
    return [
        Figure(name, what, "ms", target=target),
        Figure(f"{name}-cpu", "the engine's processor time for that", "ms", target=target),
    ]


@dataclass
class Job:
    """One job. The result of `prepare` is passed to `sample` and `finish`.

    `sample` returns one number per figure, in order.
    """

    name: str
    figures: Sequence[Figure]
    sample: Callable[[Engine, Any], float | tuple[float, ...]]
    rounds: int = 1
    prepare: Callable[[Engine], Any] = lambda _engine: None
    finish: Callable[[Engine, Any], None] = lambda _engine, _state: None
    idle: int | None = 0
    """Number of idle containers that run during the job. None: any number."""
    warm: bool = True
    """Take and discard one sample of each engine first: it fills caches."""
    rest: float = 0.5
    """Seconds before a sample in which an engine can finish background work that would slow the
    next engine.
    """
    flush: bool = False
    """Write back dirty pages before each sample, so that one engine's do not slow another."""
    memory: int = 0
    """Bytes of page cache to `touch` before each sample: more than the work fills."""
    ours: bool = False
    """Only engined takes part: the work would take a peer minutes."""
    default: bool = True
    """Part of a default run. Others run only when named."""
    _samples: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    _lacking: dict[str, str] = field(default_factory=dict)
    _wrong: dict[str, str] = field(default_factory=dict)

    def measure(self, engines: Sequence[Engine]) -> list[Row]:
        """Run the job. Raises only for an interruption."""
        here: dict[str, tuple[Engine, Any]] = {}
        prepared: list[tuple[Engine, Any]] = []
        try:
            for engine in engines:
                if self.ours and not isinstance(engine, Engined):
                    self._lacking[engine.name] = "not asked: it would take too long"
                    continue
                with self._dropping(engine, here):
                    if self.idle is not None:
                        steps.stock(engine, self.idle)
                    here[engine.name] = engine, self.prepare(engine)
                    prepared.append(here[engine.name])
            if self.warm and self.rounds > 1:
                for engine, state in list(here.values()):
                    with self._dropping(engine, here):
                        self.sample(engine, state)
            for turn in range(self.rounds):
                present = list(here.values())
                for at in range(len(present)):
                    engine, state = present[(turn + at) % len(present)]
                    with self._dropping(engine, here):
                        if self.flush:
                            os.sync()
                        time.sleep(self.rest)
                        touch(self.memory)
                        found = self.sample(engine, state)
                        values = found if isinstance(found, tuple) else (found,)
                        assert len(values) == len(self.figures), (self.name, values)
                        self._samples.setdefault(engine.name, []).append(values)
        finally:
            for engine, state in prepared:
                with self._dropping(engine, here):
                    self.finish(engine, state)
        return [self._row(at, figure) for at, figure in enumerate(self.figures)]

    @contextlib.contextmanager
    def _dropping(self, engine: Engine, here: dict[str, tuple[Engine, Any]]) -> Iterator[None]:
        try:
            yield
        except Lacks as reason:
            self._lacking[engine.name] = str(reason)
        except (AssertionError, ValueError, OSError, KeyError, IndexError, TypeError, RuntimeError) as reason:
            self._wrong[engine.name] = f"{type(reason).__name__}: {str(reason)[:500]}"
        else:
            return
        here.pop(engine.name, None)
        self._samples.pop(engine.name, None)

    def _row(self, at: int, figure: Figure) -> Row:
        return Row(
            name=figure.name,
            what=figure.what,
            unit=figure.unit,
            less_is_better=figure.less_is_better,
            target=figure.target,
            samples={name: [values[at] for values in samples] for name, samples in self._samples.items()},
            lacking=self._lacking,
            wrong=self._wrong,
        )
