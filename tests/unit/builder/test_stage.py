"""What all stages of a build share: limits of the documents that they make, and the epoch. And what
runs in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.builder import stage
from engine.builder.dockerfile import lines, stages
from engine.builder.dockerfile.scope import Platforms
from engine.builder.options import Options
from engine.builder.output import Log
from engine.builder.stage import Site, StageBuild
from engine.builder.state import State
from engine.errors import InvalidParameter
from engine.images.archive import MAX_DOCUMENT
from engine.images.instructions.records import Instruction
from engine.wire.containers import Config
from engine.wire.images import ImageConfig

ABSENT: Any = None


def site(**arguments: str | None) -> Site:
    return Site(ABSENT, Options(arguments=arguments), ABSENT, ABSENT, ABSENT)


def test_one_document_has_a_limit() -> None:
    site().charge(State(key="", raw=bytes(MAX_DOCUMENT)))
    with pytest.raises(InvalidParameter, match="more than 4 MiB"):
        site().charge(State(key="", raw=bytes(MAX_DOCUMENT + 1)))


def test_all_documents_together_have_a_limit() -> None:
    charged, one = site(), State(key="", raw=bytes(MAX_DOCUMENT))
    for _ in range(stage.MAX_DOCUMENTS // MAX_DOCUMENT):
        charged.charge(one)
    with pytest.raises(InvalidParameter, match="all steps more than 256 MiB"):
        charged.charge(one)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "9" * 13, "\u0663"])
def test_an_epoch_that_is_none(text: str) -> None:
    with pytest.raises(InvalidParameter, match="SOURCE_DATE_EPOCH"):
        site(SOURCE_DATE_EPOCH=text)


def test_an_epoch() -> None:
    assert site(SOURCE_DATE_EPOCH="1700000000").epoch == 1_700_000_000
    assert site(SOURCE_DATE_EPOCH=None).epoch is site().epoch is None


class Others:
    """The other stages of a build without any."""

    def use(self, state: State) -> State:
        return state


def stage_of(count: int) -> StageBuild:
    """A stage of LABELs."""
    (found,) = stages_of("FROM scratch\n" + "".join(f"LABEL l{number}=\n" for number in range(count)))
    return found


def stages_of(text: str, **options: Any) -> list[StageBuild]:
    file = stages.read(lines.parse(text.encode()), {}, Platforms(build="linux/amd64", target="linux/amd64"))
    parts: Any = SimpleNamespace(images=SimpleNamespace(temporary=Path("/nonexistent")))
    others: Any = Others()

    async def begin(build: StageBuild, log: Log) -> State:
        return State(key="")

    async def apply(build: StageBuild, instruction: Instruction, log: Log) -> None:
        pass

    site = Site(parts, Options(**options), file, ABSENT, others)
    return [StageBuild(site, stage, begin, apply) for stage in file.stages]


def test_steps_that_wait_for_nothing_let_others_run() -> None:
    async def work() -> None:
        build, turns = stage_of(100), 0
        running = asyncio.create_task(build.run())
        while not running.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns >= len(build.steps)

    asyncio.run(work())


@pytest.mark.parametrize(("ports", "raw", "large"), [(500, 0, False), (501, 0, True), (0, 1 << 20, True)])
def test_a_large_configuration_is_computed_in_a_thread(ports: int, raw: int, large: bool) -> None:
    async def work() -> None:
        build = stage_of(0)
        config = Config(exposed_ports={f"{port}/tcp": {} for port in range(ports)})
        build.state = State(key="", raw=bytes(raw), document=ImageConfig(config=config))
        assert (await build.compute(threading.get_ident) != threading.get_ident()) is large
        assert await build.compute(threading.get_ident, large=True) != threading.get_ident()

    asyncio.run(work())


def test_stages_without_the_cache() -> None:
    """A stage that begins with such a one would find what was made of its former result."""
    found = stages_of("FROM a AS One\nFROM one AS two\nFROM two\nFROM a\n", no_cache_stages=frozenset(("one",)))
    assert [stage.no_cache for stage in found] == [True, True, True, False]
    assert all(stage.no_cache for stage in stages_of("FROM a\nFROM a\n", no_cache=True))
