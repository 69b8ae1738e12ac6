"""Changes of a swarm as events: their scope, their time, and a manager that ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator

import pytest

from engine.cluster import announcements
from engine.errors import NoSwarm
from engine.events import EventLog
from engine.swarm_session.messages import Change


def test_changes_are_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "PAUSE", 0.0)
    created = Change(kind="service", action="create", id="s1", attributes={"name": "web"}, time=5_000_000_007)
    removed = Change(kind="secret", action="remove", id="x1", attributes={"name": "key"})
    rounds: Iterator[list[Change] | Exception] = iter(
        [[created], NoSwarm("it starts"), ConnectionError(), KeyError("a bug"), [removed]]
    )
    done = asyncio.Event()

    async def watch() -> AsyncGenerator[Change, None]:
        changes = next(rounds, None)
        if changes is None:
            done.set()
            await asyncio.Event().wait()
        elif isinstance(changes, Exception):
            raise changes
        else:
            for change in changes:
                yield change

    async def run() -> list[tuple[str, str, str, str]]:
        events = EventLog()
        task = asyncio.create_task(announcements.announce(watch, events))
        async with asyncio.timeout(60):
            await done.wait()
        task.cancel()
        found = events.history(0)
        assert found[0].time_nano == 5_000_000_007 and found[0].actor.attributes == {"name": "web"}
        return [(event.type, event.action, event.actor.id, event.scope) for event in found]

    assert asyncio.run(run()) == [("service", "create", "s1", "swarm"), ("secret", "remove", "x1", "swarm")]
