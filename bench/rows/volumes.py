"""Volumes: created, removed, listed, and their disk usage, with 100 and 2,000 of them. Of each, the
time until the answer and the engine's processor time.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import steps, wire
from bench.engines import Engine
from bench.job import Job, Size, cost_figures, costs
from bench.rows.reads import filtered

CONTENT = bytes(1000)
"""What the file in each volume has. It makes a disk usage that can be checked."""
USAGE = "/v1.42/system/df?type=volume"
"""The first version that can leave out everything but volumes."""


def volume_name(number: int) -> str:
    return f"volume-{number:04}"


def create(connection: wire.Connection, name: str) -> str:
    """Returns the volume's directory."""
    made = connection.expect(201, "POST", "/volumes/create", {"Name": name})
    return str(json.loads(wire.joined(made))["Mountpoint"])


def remove(connection: wire.Connection, name: str) -> None:
    connection.expect(204, "DELETE", f"/volumes/{name}")


def names(connection: wire.Connection, target: str) -> set[str]:
    """Names in a list of volumes."""
    return {volume["Name"] for volume in connection.json("GET", target)["Volumes"] or []}


def stock(engine: Engine, count: int) -> None:
    """Create or remove volumes until there are `count`."""

    def fill(connection: wire.Connection, name: str) -> None:
        Path(create(connection, name), "file").write_bytes(CONTENT)

    with engine.connection() as connection:
        have = names(connection, "/volumes")
        wanted = {volume_name(number) for number in range(count)}
        steps.side_by_side(engine, sorted(have - wanted), remove)
        steps.side_by_side(engine, sorted(wanted - have), fill)
        have = names(connection, "/volumes")
    assert have == wanted, f"{len(have)} volumes, not {count}"


def created(count: int) -> Callable[[Engine, Any], tuple[float, float]]:
    """One create after the other, and no volume is removed meanwhile."""

    def sample(engine: Engine, _: Any) -> tuple[float, float]:
        numbers = itertools.count()
        with engine.connection() as connection:
            found = costs(engine, count, lambda: create(connection, volume_name(next(numbers))))
        stock(engine, 0)
        return found

    return sample


def created_and_removed(count: int) -> Callable[[Engine, Any], tuple[float, float]]:
    def sample(engine: Engine, _: Any) -> tuple[float, float]:
        with engine.connection() as connection:

            def life() -> None:
                create(connection, "life")
                remove(connection, "life")

            return costs(engine, count, life)

    return sample


def read_jobs(size: Size, called: int, count: int) -> list[Job]:
    """Jobs with `count` volumes, which row names call `called`."""
    last = volume_name(count - 1)
    one = f"/volumes?filters={filtered(name=last)}"

    def listing(engine: Engine) -> str:
        stock(engine, count)
        return "/volumes"

    def filtering(engine: Engine) -> str:
        stock(engine, count)
        with engine.connection() as connection:
            assert names(connection, one) == {last}
        return one

    def usage(engine: Engine) -> str:
        stock(engine, count)
        with engine.connection() as connection:
            shown = connection.json("GET", USAGE)["Volumes"]
        sizes = [volume["UsageData"]["Size"] for volume in shown]
        assert sizes == [len(CONTENT)] * count, f"{len(sizes)} volumes of {set(sizes)} bytes"
        return USAGE

    def sample(engine: Engine, target: str) -> tuple[float, float]:
        with engine.connection() as connection:
            return costs(engine, size.of(100, 2), lambda: connection.expect(200, "GET", target))

    def job(name: str, what: str, prepare: Callable[[Engine], str]) -> Job:
        figures = cost_figures(f"{name}-{called}", what)
        return Job(f"{name}-{called}", figures, sample, size.rounds(3), prepare, idle=None)

    return [
        job("volume-df", f"disk usage of {count:,} volumes", usage),
        job("volume-list", f"list of {count:,} volumes", listing),
        job("volume-filter", f"list of {count:,} volumes, one name asked for", filtering),
    ]


def jobs(size: Size) -> list[Job]:
    """The last one, which no engine lacks, removes the volumes again."""
    many = size.of(100, 3)
    life = "create and removal of a volume"
    found = [
        Job("volume-create", cost_figures("volume-create", "create of a volume"), created(many), size.rounds(3)),
        Job("volume-life", cost_figures("volume-life", life), created_and_removed(many), size.rounds(3)),
        *read_jobs(size, 100, size.of(100, 10)),
        *read_jobs(size, 2000, size.of(2000, 50)),
    ]
    found[-1].finish = lambda engine, _: stock(engine, 0)
    return found
