"""Nodes: list, inspect, update, remove, and the guards of managers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from engine.errors import InvalidParameter, NotFound, ServerError
from engine.manager.ca import Authority
from engine.manager.control.context import OutOfSequence, Precondition
from engine.manager.records import (
    CLAIMS,
    LEADER,
    MANAGERS,
    NODE_DATA,
    NODES,
    Leader,
    ManagerPresence,
    barred_claim,
)
from engine.manager.store import Delete, Put
from engine.swarm_session.states import NodeState, Role
from tests.unit.manager.control.conftest import NODE, Swarm


def wanted(**fields: Any) -> dict[str, Any]:
    return {"Role": "worker", "Availability": "active", **fields}


async def version(swarm: Swarm, node: str) -> int:
    return int((await swarm.nodes_inspect(node))["Version"]["Index"])


async def test_inspect(swarm: Swarm) -> None:
    await swarm.found()
    worker = await swarm.node("w1", labels={"disk": "ssd"}, engine_labels={"zone": "a"})
    for text in (worker, "w1", worker[:12]):
        found = await swarm.nodes_inspect(text)
        assert found["ID"] == worker
        assert found["Spec"] == {"Labels": {"disk": "ssd"}, "Role": "worker", "Availability": "active"}
        assert found["Description"]["Hostname"] == "w1"
        assert found["Status"] == {"State": "ready", "Addr": "10.0.0.2"}
        assert "ManagerStatus" not in found


async def test_managers(swarm: Swarm) -> None:
    await swarm.found()
    assert (await swarm.nodes_inspect(NODE))["ManagerStatus"] == {"Reachability": "reachable", "Addr": "10.0.0.1:2377"}
    await swarm.store.commit([Put(LEADER, "", Leader(NODE, 3))])
    assert (await swarm.nodes_inspect(NODE))["ManagerStatus"] == {
        "Leader": True, "Reachability": "reachable", "Addr": "10.0.0.1:2377",
    }  # fmt: skip
    await swarm.store.commit([Delete(MANAGERS, NODE)])
    status = (await swarm.nodes_inspect(NODE))["ManagerStatus"]
    assert status == {"Reachability": "unreachable", "Addr": "10.0.0.2:2377"}
    promoted = await swarm.node("w1", role=Role.MANAGER, certificate=Role.WORKER)
    assert "ManagerStatus" not in await swarm.nodes_inspect(promoted)
    demoted = await swarm.node("w2", role=Role.WORKER, certificate=Role.MANAGER)
    assert "ManagerStatus" not in await swarm.nodes_inspect(demoted)
    await swarm.store.commit([Put(MANAGERS, demoted, ManagerPresence(address="10.0.0.3:2377", member=3))])
    assert (await swarm.nodes_inspect(demoted))["ManagerStatus"]["Addr"] == "10.0.0.3:2377"


async def test_a_node_that_has_not_reported(swarm: Swarm) -> None:
    await swarm.found()
    worker = await swarm.node("w1")
    await swarm.store.commit([Delete(NODE_DATA, worker)])
    found = await swarm.nodes_inspect(worker)
    assert found["Status"] == {"State": "unknown"}
    assert len(await swarm.nodes_list()) == 2


async def test_lookups(swarm: Swarm) -> None:
    await swarm.found()
    one = await swarm.node("twin")
    two = await swarm.node("twin")
    with pytest.raises(ServerError, match=r"node twin is ambiguous \(2 matches found\)"):
        await swarm.nodes_inspect("twin")
    for verb in ("inspect", "update", "remove"):
        with pytest.raises(NotFound, match="node zzz not found"):
            await swarm.call(f"nodes.{verb}", "zzz", wanted(), version=1)
    assert {(await swarm.nodes_inspect(key))["ID"] for key in (one, two)} == {one, two}


async def test_list(swarm: Swarm) -> None:
    await swarm.found()
    await swarm.node("alpha", engine_labels={"zone": "a", "rack": "1"}, labels={"disk": "ssd"})
    await swarm.node("beta", engine_labels={"zone": "b"})

    async def names(**filters: list[str]) -> list[str]:
        filters = {key.replace("_", "."): values for key, values in filters.items()}
        return sorted(one["Description"]["Hostname"] for one in await swarm.nodes_list(filters=filters))

    assert await names() == ["alpha", "beta", "manager1"]
    assert await names(name=["al", "man"]) == ["alpha", "manager1"]
    assert await names(id=[NODE[:9]]) == ["manager1"]
    assert await names(role=["manager"]) == ["manager1"]
    assert await names(role=["manager", "worker"]) == ["alpha", "beta", "manager1"]
    assert await names(role=[""]) == ["alpha", "beta", "manager1"]
    assert await names(label=["zone"]) == ["alpha", "beta"]
    assert await names(label=["zone=a", "rack"]) == ["alpha"]
    assert await names(label=["disk=ssd"]) == []
    assert await names(node_label=["disk=ssd"]) == ["alpha"]
    assert await names(membership=["accepted"]) == ["alpha", "beta", "manager1"]
    assert await names(membership=["pending"]) == []
    for filters in ({"role": ["boss"]}, {"membership": ["maybe"]}, {"state": ["ready"]}):
        with pytest.raises(InvalidParameter):
            await swarm.nodes_list(filters=filters)


async def test_update(swarm: Swarm) -> None:
    await swarm.found()
    worker = await swarm.node("w1", labels={"old": ""})
    swarm.clock.set(3)
    body = wanted(Name="first", Labels={"new": "1"}, Availability="drain")
    assert await swarm.nodes_update("w1", body=body, version=await version(swarm, worker)) is None
    found = await swarm.nodes_inspect(worker)
    assert found["Spec"] == {"Name": "first", "Labels": {"new": "1"}, "Role": "worker", "Availability": "drain"}
    assert found["UpdatedAt"] > found["CreatedAt"]
    await swarm.nodes_update(worker, body=wanted(), version=found["Version"]["Index"])
    assert (await swarm.nodes_inspect(worker))["Spec"] == {"Labels": {}, "Role": "worker", "Availability": "active"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"Availability": "active"}, "Role"),
        ({"Role": "worker"}, "Availability"),
        ({"Role": "boss", "Availability": "active"}, "Role: invalid value 'boss'"),
        ({"Role": "worker", "Availability": "gone"}, "Availability: invalid value 'gone'"),
        ({"Role": "worker", "Availability": "active", "Labels": {"": "x"}}, "Labels"),
        ({"Role": 1, "Availability": "active"}, "Role"),
        ({"Role": "worker", "Availability": "active", "Labels": [1]}, "Labels"),
    ],
)
async def test_bad_updates(swarm: Swarm, body: Any, field: str) -> None:
    await swarm.found()
    worker = await swarm.node("w1")
    before = await version(swarm, worker)
    with pytest.raises(InvalidParameter, match=field):
        await swarm.nodes_update(worker, body=body, version=before)
    with pytest.raises(InvalidParameter, match="version"):
        await swarm.nodes_update(worker, body=wanted())
    with pytest.raises(OutOfSequence, match="update out of sequence"):
        await swarm.nodes_update(worker, body=wanted(), version=before + 1)
    assert await version(swarm, worker) == before


async def test_a_heartbeat_does_not_put_a_client_out_of_sequence(swarm: Swarm) -> None:
    await swarm.found()
    worker = await swarm.node("w1")
    before = await version(swarm, worker)
    data = swarm.store.record(NODE_DATA, worker)
    assert data is not None
    await swarm.store.commit([Put(NODE_DATA, worker, msgspec.structs.replace(data, state=NodeState.DOWN))])
    await swarm.nodes_update(worker, body=wanted(), version=before)


async def test_promotion_and_demotion(swarm: Swarm) -> None:
    await swarm.found()
    worker = await swarm.node("w1")
    await swarm.nodes_update(worker, body=wanted(Role="manager"), version=await version(swarm, worker))
    assert (await swarm.nodes_inspect(worker))["Spec"]["Role"] == "manager"
    swarm.unsafe = "1 of 2 managers reachable"
    with pytest.raises(Precondition, match=r"loss of quorum.*1 of 2 managers reachable"):
        await swarm.nodes_update(NODE, body=wanted(), version=await version(swarm, NODE))
    swarm.unsafe = ""
    await swarm.nodes_update(NODE, body=wanted(), version=await version(swarm, NODE))
    with pytest.raises(Precondition, match="last manager of the swarm"):
        await swarm.nodes_update(worker, body=wanted(), version=await version(swarm, worker))
    await swarm.nodes_update(
        worker, body=wanted(Role="manager", Availability="drain"), version=await version(swarm, worker)
    )


async def test_two_demotions_at_a_time(swarm: Swarm) -> None:
    """They may not both succeed: one of them would be that of the last manager."""
    await swarm.found()
    other = await swarm.node("m2", role=Role.MANAGER)
    versions = [await version(swarm, node) for node in (NODE, other)]
    results = await asyncio.gather(
        *(
            swarm.nodes_update(node, body=wanted(), version=seen)
            for node, seen in zip((NODE, other), versions, strict=True)
        ),
        return_exceptions=True,
    )
    assert [isinstance(result, Precondition) for result in results].count(True) == 1
    assert [result for result in results if result is None] == [None]


async def test_remove(swarm: Swarm) -> None:
    await swarm.found()
    worker = await swarm.node("w1")
    with pytest.raises(Precondition, match="is not down and can't be removed"):
        await swarm.nodes_remove(worker)
    assert await swarm.nodes_remove("w1", force=True) is None
    assert swarm.store.get(NODES, worker) is None and swarm.store.get(NODE_DATA, worker) is None
    assert Authority(swarm.store, swarm.clock).barred(worker)
    down = await swarm.node("w2", state=NodeState.DOWN)
    await swarm.nodes_remove(down)
    assert len(await swarm.nodes_list()) == 1


async def test_managers_are_not_removed(swarm: Swarm) -> None:
    await swarm.found()
    with pytest.raises(Precondition, match="must be demoted to worker before removal"):
        await swarm.nodes_remove(NODE, force=True)
    promoted = await swarm.node("w1", role=Role.MANAGER, certificate=Role.WORKER)
    with pytest.raises(Precondition, match="must be demoted"):
        await swarm.nodes_remove(promoted, force=True)
    demoted = await swarm.node("w2", certificate=Role.MANAGER, state=NodeState.DOWN)
    await swarm.store.commit([Put(MANAGERS, demoted, ManagerPresence(address="10.0.0.3:2377", member=3))])
    swarm.unsafe = "1 of 2 managers reachable"
    with pytest.raises(Precondition, match=r"cannot leave yet: 1 of 2 managers reachable"):
        await swarm.nodes_remove(demoted, force=True)
    assert swarm.store.get(NODES, demoted) is not None
    swarm.unsafe = ""
    await swarm.nodes_remove(demoted)
    assert swarm.expelled == [demoted] and swarm.store.get(NODES, demoted) is None


async def test_a_manager_that_was_just_demoted_is_removed(swarm: Swarm) -> None:
    """Its certificate is still a manager's, and it is a member."""
    await swarm.found()
    demoted = await swarm.node("w1", certificate=Role.MANAGER)
    with pytest.raises(Precondition, match="is not down"):
        await swarm.nodes_remove(demoted)
    assert swarm.expelled == []
    await swarm.nodes_remove(demoted, force=True)
    assert swarm.expelled == [demoted] and swarm.store.get(NODES, demoted) is None


async def test_bars_end(swarm: Swarm) -> None:
    """Those of nodes whose certificates have expired long ago go with the next removal."""
    await swarm.found()
    first, second = await swarm.node("w1"), await swarm.node("w2")
    await swarm.nodes_remove(first, force=True)
    swarm.clock.set(400 * 24 * 3600)
    await swarm.nodes_remove(second, force=True)
    assert swarm.store.get(CLAIMS, barred_claim(first)) is None
    assert swarm.store.get(CLAIMS, barred_claim(second)) is not None
