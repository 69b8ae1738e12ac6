"""The daemon's part in deliveries: documents, spools of removed containers, states, events."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config
from engine.containers import delivery
from engine.containers.delivery import Deliveries
from engine.errors import ServerError
from engine.events import EventLog
from engine.logs import cursor, deliveries
from engine.logs.cursor import Cursor
from engine.logs.deliveries import Delivery, Syslog
from engine.plugins.discovery import Discovery
from engine.plugins.registry import Plugins

LINE = b'{"log":"x\\n","stream":"stdout","time":"2026-01-01T00:00:00.000000001Z"}\n'
ID = "a" * 64


class World:
    def __init__(self, base: Path, start: str = "lenient") -> None:
        config = Config(root=base / "root", run=base / "run", log_start=start)
        config.root.mkdir()
        config.run.mkdir()
        self.logs = config.root / "logs"
        self.shipper = config.run / "shipper"
        self.shipped = 0
        self.events = EventLog()
        self.deliveries = Deliveries(config, self.events, "box", self._ship, Plugins(Discovery((), ()), 5))

    def _ship(self) -> None:
        self.shipped += 1

    def spool(self, lines: int, acknowledged: int, container: str = ID) -> Path:
        """A container's directory, with so many lines of which the target has some."""
        document = Delivery(id=container, name="web", tag="t", target=Syslog("tcp", "box", 1))
        asyncio.run(self.deliveries.prepare(document))
        directory = self.logs / container
        (directory / "spool.log").write_bytes(LINE * lines)
        inode = (directory / "spool.log").stat().st_ino
        size = len(LINE) * acknowledged
        (directory / "cursor").write_bytes(cursor.encode(Cursor(inode, size, size, acknowledged, 1)))
        return directory

    def actions(self) -> list[str]:
        return [each.action for each in self.events.history(0)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_document_may_have_secrets(world: World) -> None:
    directory = world.spool(0, 0)
    assert stat.S_IMODE((directory / "delivery").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert deliveries.decode((directory / "delivery").read_bytes()).id == ID


def test_a_target_that_is_away_refuses_a_strict_start(tmp_path: Path) -> None:
    world = World(tmp_path, "strict")
    document = Delivery(id=ID, name="web", tag="t", target=Syslog("unix", path=str(tmp_path / "absent")))
    with pytest.raises(ServerError, match=r"failed to initialize logging driver: .*No such file"):
        asyncio.run(world.deliveries.prepare(document))
    assert not world.logs.exists()


def test_the_spool_of_a_removed_container_goes_when_nothing_waits(world: World) -> None:
    directory = world.spool(3, 3)
    asyncio.run(world.deliveries.removed(ID))
    assert not directory.exists() and world.shipped == 0
    asyncio.run(world.deliveries.removed(ID))  # one without a remote target


def test_the_spool_of_a_removed_container_stays_while_lines_wait(world: World) -> None:
    directory = world.spool(3, 2)
    asyncio.run(world.deliveries.removed(ID))
    (left,) = (world.logs / "undelivered").iterdir()
    container, _, seconds = left.name.partition(".")
    assert container == ID and abs(time.time() - int(seconds)) < 60
    assert not directory.exists() and world.shipped == 1


@pytest.mark.parametrize(("live", "lines", "shipped"), [([ID], 3, 0), ([ID], 4, 1), ([], 3, 0), ([], 4, 1)])
def test_the_daemons_start_looks_at_what_is_left(world: World, live: list[str], lines: int, shipped: int) -> None:
    directory = world.spool(lines, 3)
    asyncio.run(world.deliveries.sweep(live, lambda container_id: False))
    assert world.shipped == shipped
    assert directory.exists() == bool(live)
    assert (world.logs / "undelivered").exists() == (not live and shipped == 1)


def test_rotated_files_count_until_the_acknowledged_one(world: World) -> None:
    directory = world.spool(3, 1)
    os.rename(directory / "spool.log", directory / "spool.log.2")
    (directory / "spool.log.1").write_bytes(LINE * 5)
    (directory / "spool.log").write_bytes(LINE)
    (directory / "spool.log.3").write_bytes(LINE * 7)
    found = asyncio.run(world.deliveries.state(ID))
    assert found is not None
    assert (found.state, found.waiting, found.waiting_bytes) == ("waiting", None, 8 * len(LINE))
    assert (found.delivered, found.dropped) == (0, 1)


def test_states_without_a_shipper(world: World) -> None:
    assert asyncio.run(world.deliveries.state(ID)) is None
    assert asyncio.run(world.deliveries.totals()) is None
    world.spool(3, 3)
    found = asyncio.run(world.deliveries.state(ID))
    assert found is not None
    assert (found.state, found.waiting, found.waiting_bytes, found.address) == ("delivered", 0, 0, "tcp://box:1")


def reported(world: World, *changes: dict[str, Any]) -> None:
    for each in changes:
        document = {"driver": "syslog", "address": "tcp://box:1", **each}
        world.deliveries._publish(delivery._changes.decode(json.dumps(document).encode()))


def test_a_target_is_reported_once_by_all_shippers(world: World) -> None:
    away = {"action": "unreachable", "error": "refused", "containers": 2}
    reported(world, away, away, {**away, "address": "tcp://other:1"})
    assert world.actions() == ["log-unreachable", "log-unreachable"]
    reported(world, {"action": "reachable"}, away)
    assert world.actions()[2:] == ["log-reachable", "log-unreachable"]
    assert world.events.history(0)[-1].actor.attributes == {
        "name": "box",
        "driver": "syslog",
        "address": "tcp://box:1",
        "containers": "2",
        "error": "refused",
    }


def test_a_target_that_no_container_uses_is_forgotten(world: World) -> None:
    """The next container with that target is reported again."""
    away = {"action": "unreachable", "error": "refused"}
    reported(world, away, {"action": "forgotten"}, away)
    assert world.actions() == ["log-unreachable", "log-unreachable"]


def test_lost_lines_are_an_event(world: World) -> None:
    reported(world, {"action": "lost", "container": ID, "lines": 7})
    (event,) = world.events.history(0)
    assert event.action == "log-lost"
    assert (event.actor.attributes["container"], event.actor.attributes["lines"]) == (ID, "7")
