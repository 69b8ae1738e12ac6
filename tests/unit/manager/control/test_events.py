"""Changes of the store as events of the API."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from engine.manager.control import events
from engine.manager.records import NODE_DATA, SERVICE_STATUS, ServiceStatus, UpdateRecord
from engine.manager.store import Put
from engine.swarm_session.messages import Change, Watch
from engine.swarm_session.states import NodeState
from tests.unit.manager.control.conftest import Swarm, spec


class Watcher:
    """The reading end of a connection, as far as `watch` uses it."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    async def stream(self, message: Change) -> None:
        self.changes.append(message)

    def taken(self) -> list[Change]:
        taken, self.changes = self.changes, []
        return taken


@contextlib.asynccontextmanager
async def watching(swarm: Swarm) -> Any:
    await swarm.found()
    watcher = Watcher()
    task = asyncio.create_task(swarm.control.watch(watcher, Watch(seq=9)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    try:
        yield watcher
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert events.watch not in swarm.store._subscribers  # type: ignore[comparison-overlap]


async def test_services(swarm: Swarm) -> None:
    async with watching(swarm) as watcher:
        service = await swarm.service()
        await swarm.clock.settle()
        (created,) = watcher.taken()
        assert created == Change(
            seq=9, kind="service", action="create", id=service, attributes={"name": "web"}, time=swarm.clock.now()
        )
        index = (await swarm.services_inspect(service))["Version"]["Index"]
        body = spec(TaskTemplate={"ContainerSpec": {"Image": "nginx"}}, Mode={"Replicated": {"Replicas": 3}})
        await swarm.services_update(service, body=body, version=index)
        await swarm.clock.settle()
        (updated,) = watcher.taken()
        assert updated.action == "update" and updated.attributes == {
            "name": "web", "image.old": "busybox", "image.new": "nginx", "replicas.old": "1", "replicas.new": "3",
        }  # fmt: skip
        await swarm.store.commit([Put(SERVICE_STATUS, service, ServiceStatus(update=UpdateRecord("updating")))])
        await swarm.store.commit(
            [Put(SERVICE_STATUS, service, ServiceStatus(update=UpdateRecord("updating"), iteration=1))]
        )
        await swarm.clock.settle()
        (state,) = watcher.taken()
        assert state.attributes == {"name": "web", "updatestate.old": "", "updatestate.new": "updating"}
        await swarm.services_remove(service)
        await swarm.clock.settle()
        (removed,) = watcher.taken()
        assert removed.action == "remove" and removed.attributes == {"name": "web"} and removed.id == service


async def test_nodes(swarm: Swarm) -> None:
    async with watching(swarm) as watcher:
        worker = await swarm.node("w1")
        await swarm.clock.settle()
        created, ready = watcher.taken()
        assert (created.kind, created.action, ready.action) == ("node", "create", "update")
        assert ready.attributes == {"name": "w1", "state.old": "unknown", "state.new": "ready"}
        index = (await swarm.nodes_inspect(worker))["Version"]["Index"]
        await swarm.nodes_update(worker, body={"Role": "manager", "Availability": "drain"}, version=index)
        await swarm.clock.settle()
        (updated,) = watcher.taken()
        assert updated.attributes == {
            "name": "w1", "availability.old": "active", "availability.new": "drain",
            "role.old": "worker", "role.new": "manager",
        }  # fmt: skip
        data = swarm.store.record(NODE_DATA, worker)
        assert data is not None
        await swarm.store.commit([Put(NODE_DATA, worker, msgspec.structs.replace(data, session="s"))])
        await swarm.store.commit([Put(NODE_DATA, worker, msgspec.structs.replace(data, state=NodeState.DOWN))])
        await swarm.clock.settle()
        (down,) = watcher.taken()
        assert down.attributes == {"name": "w1", "state.old": "ready", "state.new": "down"}
        demoted = {"Role": "worker", "Availability": "active"}
        index = (await swarm.nodes_inspect(worker))["Version"]["Index"]
        await swarm.nodes_update(worker, body=demoted, version=index)
        await swarm.nodes_remove(worker)
        await swarm.clock.settle()
        assert [one.action for one in watcher.taken()] == ["update", "remove"]


async def test_secrets_and_configs(swarm: Swarm) -> None:
    async with watching(swarm) as watcher:
        for sort in ("secret", "config"):
            body = {"Name": "one", "Data": "YWJj"}
            key = (await swarm.call(f"{sort}s.create", body=body))["ID"]
            index = (await swarm.call(f"{sort}s.inspect", key))["Version"]["Index"]
            await swarm.call(f"{sort}s.update", key, body | {"Labels": {"a": "b"}}, version=index)
            await swarm.call(f"{sort}s.remove", key)
            await swarm.clock.settle()
            changes = watcher.taken()
            assert [one.action for one in changes] == ["create", "update", "remove"]
            assert all(one.kind == sort and one.attributes == {"name": "one"} for one in changes)


async def test_a_slow_watcher_loses_events_and_nothing_else(swarm: Swarm, monkeypatch: Any) -> None:
    monkeypatch.setattr(events, "LIMIT", 5)
    async with watching(swarm) as watcher:
        room = asyncio.Event()

        async def stream(message: Change) -> None:
            await room.wait()
            watcher.changes.append(message)

        watcher.stream = stream
        for number in range(20):
            await swarm.service(f"s{number}")
        room.set()
        await swarm.clock.settle()
        assert 5 <= len(watcher.taken()) <= 6
