"""Tasks: the documents, names, filters, and what is hidden."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidParameter, NotFound, ServerError
from engine.manager.records import (
    SERVICES,
    SPEC_VERSIONS,
    TASK_STATUS,
    TASKS,
    SpecVersion,
    Task,
    TaskStatus,
    new_id,
    spec_key,
)
from engine.manager.store import Put
from engine.swarm_session.states import TASK_STATES, TaskState
from engine.wire.nodes import DiscreteResource, GenericResource
from engine.wire.tasks import PortStatus
from tests.unit.manager.control.conftest import NODE, Swarm, spec


async def task(swarm: Swarm, service: str, status: TaskStatus | None = None, **fields: Any) -> str:
    key = new_id()
    now = swarm.clock.now()
    fields = {"version": 1, "created": now, "updated": now, "slot": 1} | fields
    await swarm.store.commit([Put(TASKS, key, Task(service=service, **fields))])
    if status is not None:
        await swarm.store.commit([Put(TASK_STATUS, key, status)])
    return key


async def test_a_task_from_new_to_its_end(swarm: Swarm) -> None:
    await swarm.found()
    web = await swarm.service("web", Labels={"a": "b"})
    key = await task(swarm, web, waits="no suitable node (1 node: not ready)")
    found = await swarm.tasks_inspect(key)
    assert found["ID"] == key and found["Name"] == f"web.1.{key}"
    assert found["ServiceID"] == web and found["Slot"] == 1 and "NodeID" not in found
    assert found["Spec"]["ContainerSpec"]["Image"] == "busybox"
    assert found["DesiredState"] == "running"
    assert found["Status"] == {
        "Timestamp": found["CreatedAt"],
        "State": "pending",
        "Message": "pending task scheduling",
        "Err": "no suitable node (1 node: not ready)",
        "PortStatus": {},
    }
    record = Task(service=web, version=1, slot=1, node=NODE, assigned=swarm.clock.now() + 1, created=swarm.clock.now())
    await swarm.store.commit([Put(TASKS, key, record)])
    found = await swarm.tasks_inspect(key)
    assert found["NodeID"] == NODE and found["Status"]["State"] == "assigned"
    status = TaskStatus(
        state=TaskState.RUNNING, since=swarm.clock.now(), message="started", container="c1", pid=77,
        ports=(PortStatus(protocol="tcp", target_port=80, published_port=8080, publish_mode="host"),),
    )  # fmt: skip
    await swarm.store.commit([Put(TASK_STATUS, key, status)])
    running = await swarm.tasks_inspect(key)
    assert running["Version"]["Index"] > found["Version"]["Index"]
    assert running["Status"]["State"] == "running" and running["Status"]["Message"] == "started"
    assert running["Status"]["ContainerStatus"] == {"ContainerID": "c1", "PID": 77, "ExitCode": 0}
    assert running["Status"]["PortStatus"]["Ports"] == [
        {"Protocol": "tcp", "TargetPort": 80, "PublishedPort": 8080, "PublishMode": "host"}
    ]
    ended = TaskStatus(
        state=TaskState.FAILED, since=swarm.clock.now(), message="started", error="task: non-zero exit (3)",
        container="c1", exit_code=3,
    )  # fmt: skip
    await swarm.store.commit([Put(TASK_STATUS, key, ended)])
    found = await swarm.tasks_inspect(key)
    assert found["Status"]["Err"] == "task: non-zero exit (3)"
    assert found["Status"]["ContainerStatus"]["ExitCode"] == 3
    await swarm.store.commit([Put(TASK_STATUS, key, TaskStatus(state=TaskState.REJECTED, since=1, error="no image"))])
    assert "ContainerStatus" not in (await swarm.tasks_inspect(key))["Status"]


async def test_a_task_shows_the_spec_that_it_was_made_of(swarm: Swarm) -> None:
    await swarm.found()
    web = await swarm.service("web")
    key = await task(swarm, web)
    version = (await swarm.services_inspect(web))["Version"]["Index"]
    first = SpecVersion((await _record(swarm, web)).spec)
    await swarm.store.commit([Put(SPEC_VERSIONS, spec_key(web, 1), first)])
    body = spec(TaskTemplate={"ContainerSpec": {"Image": "other"}})
    await swarm.services_update(web, body=body, version=version)
    assert (await swarm.tasks_inspect(key))["Spec"]["ContainerSpec"]["Image"] == "busybox"
    await swarm.services_remove(web)
    found = await swarm.tasks_inspect(key)
    assert found["Name"] == f"web.1.{key}" and found["Spec"]["ContainerSpec"]["Image"] == "busybox"


async def _record(swarm: Swarm, service: str) -> Any:
    record = swarm.store.record(SERVICES, service)
    assert record is not None
    return record


async def test_a_task_of_nothing_known(swarm: Swarm) -> None:
    await swarm.found()
    key = await task(swarm, "gone")
    found = await swarm.tasks_inspect(key)
    assert "Name" not in found and found["ServiceID"] == "gone"
    assert await swarm.tasks_list() == [], "those of a removed service are not listed"


async def test_lookups(swarm: Swarm) -> None:
    await swarm.found()
    web, every = await swarm.service("web"), await swarm.service("every", Mode={"Global": {}})
    first = await task(swarm, web)
    on_node = await task(swarm, every, slot=0, node=NODE)
    for text in (first, first[:9], f"web.1.{first}", "web", web):
        assert (await swarm.tasks_inspect(text))["ID"] == first, text
    assert (await swarm.tasks_inspect(f"every.{NODE}.{on_node}"))["ID"] == on_node
    for text in ("zzz", "web.2", f"web.2.{first}", f"every.1.{first}", "", f".{first}"):
        with pytest.raises(NotFound, match=r"task .* not found"):
            await swarm.tasks_inspect(text)
    await task(swarm, web, slot=2)
    with pytest.raises(ServerError, match=r"task web is ambiguous \(2 matches found\)"):
        await swarm.tasks_inspect("web")


async def test_list(swarm: Swarm) -> None:
    await swarm.found()
    worker = await swarm.node("w1")
    web = await swarm.service("web", Labels={"tier": "front"})
    db = await swarm.service("web-db", Labels={"tier": "back", "x": ""})
    w1 = await task(swarm, web, node=NODE)
    w2 = await task(swarm, web, node=worker, desired=TaskState.SHUTDOWN)
    d1 = await task(swarm, db, node=worker, desired=TaskState.READY)
    names = {w1: "w1", w2: "w2", d1: "d1"}

    async def listed(**filters: list[str]) -> list[str]:
        filters = {key.replace("_", "-"): values for key, values in filters.items()}
        return sorted(names[one["ID"]] for one in await swarm.tasks_list(filters=filters))

    assert await listed() == ["d1", "w1", "w2"]
    assert await listed(service=["web"]) == ["w1", "w2"]
    assert await listed(service=[web[:20], db]) == ["d1", "w1", "w2"]
    assert await listed(node=["w1"]) == ["d1", "w2"]
    assert await listed(node=[worker], service=["web"]) == ["w2"]
    assert await listed(desired_state=["running"]) == ["w1"]
    assert await listed(desired_state=["running", "shutdown", "accepted"]) == ["w1", "w2"]
    assert await listed(name=["web"]) == ["d1", "w1", "w2"]
    assert await listed(name=["web-"]) == ["d1"]
    assert await listed(name=["web."]) == await listed(name=["web.1"], service=["web"]) == ["w1", "w2"]
    assert await listed(name=[f"web.1.{w2}"]) == ["w2"]
    assert await listed(name=["web.2", "x"]) == []
    assert await listed(label=["tier"]) == ["d1", "w1", "w2"]
    assert await listed(label=["tier=back", "x"]) == ["d1"]
    assert await listed(id=[w1[:10], d1]) == ["d1", "w1"]
    assert await listed(runtime=["container"]) == ["d1", "w1", "w2"]
    assert await listed(runtime=["plugin"]) == []
    for key, what in (("service", "service"), ("node", "node")):
        with pytest.raises(NotFound, match=f"{what} nothing not found"):
            await swarm.tasks_list(filters={key: ["nothing"]})
    for filters in ({"desired-state": ["dead"]}, {"state": ["running"]}, {"runtime": ["x"]}):
        with pytest.raises(InvalidParameter, match=r"(?i)invalid"):
            await swarm.tasks_list(filters=filters)


@pytest.mark.parametrize("name", sorted(TASK_STATES))
async def test_every_state_filters(swarm: Swarm, name: str) -> None:
    await swarm.found()
    assert await swarm.tasks_list(filters={"desired-state": [name]}) == []
    assert await swarm.tasks_list(filters={"desired-state": [name.upper()]}) == []


async def test_tasks_to_be_removed_are_hidden(swarm: Swarm) -> None:
    await swarm.found()
    web = await swarm.service("web")
    key = await task(swarm, web, desired=TaskState.REMOVE)
    assert await swarm.tasks_list() == []
    assert await swarm.tasks_list(filters={"service": ["web"]}) == []
    assert await swarm.tasks_list(filters={"desired-state": ["remove"]}) == []
    assert (await swarm.tasks_inspect(key))["DesiredState"] == "remove"
    with pytest.raises(NotFound):
        await swarm.tasks_inspect("web")


async def test_up_to_date(swarm: Swarm) -> None:
    """Clients ask for it to show how an update proceeds."""
    await swarm.found()
    web = await swarm.service("web")
    old = await task(swarm, web)
    await swarm.store.commit([Put(SPEC_VERSIONS, spec_key(web, 1), SpecVersion((await _record(swarm, web)).spec))])
    filters = {"service": [web], "_up-to-date": ["true"]}
    assert [one["ID"] for one in await swarm.tasks_list(filters=filters)] == [old]
    scaled = await swarm.services_inspect(web)
    await swarm.services_update(
        web, body=spec(Mode={"Replicated": {"Replicas": 2}}), version=scaled["Version"]["Index"]
    )
    assert [one["ID"] for one in await swarm.tasks_list(filters=filters)] == [old]
    now = await swarm.services_inspect(web)
    body = spec(TaskTemplate={"ContainerSpec": {"Image": "other"}})
    await swarm.services_update(web, body=body, version=now["Version"]["Index"])
    assert await swarm.tasks_list(filters=filters) == []
    new = await task(swarm, web, version=3)
    assert [one["ID"] for one in await swarm.tasks_list(filters=filters)] == [new]
    job = await swarm.service("job", Mode={"GlobalJob": {}})
    first = await task(swarm, job, iteration=0)
    await task(swarm, job, iteration=-1)
    filters = {"service": [job], "_up-to-date": ["true"]}
    assert [one["ID"] for one in await swarm.tasks_list(filters=filters)] == [first]


async def test_jobs_and_generic_resources(swarm: Swarm) -> None:
    await swarm.found()
    job = await swarm.service("job", Mode={"ReplicatedJob": {}})
    generic = GenericResource(discrete_resource_spec=DiscreteResource("SSD", 2))
    key = await task(swarm, job, iteration=4, desired=TaskState.COMPLETE, generic=(generic,))
    found = await swarm.tasks_inspect(key)
    assert found["JobIteration"] == {"Index": 4} and found["DesiredState"] == "complete"
    assert "Slot" not in found and found["Name"] == f"job.1.{key}"
    second = await task(swarm, job, slot=2)
    assert (await swarm.tasks_inspect(second))["Slot"] == 1
    assert found["GenericResources"] == [{"DiscreteResourceSpec": {"Kind": "SSD", "Value": 2}}]


async def test_a_long_list_lets_others_run(swarm: Swarm) -> None:
    await swarm.found()
    web = await swarm.service("web")
    record = Task(service=web, version=1, slot=1)
    await swarm.store.commit_many([([Put(TASKS, new_id(), record)], []) for _ in range(2000)])
    assert len(await swarm.tasks_list(filters={"service": ["web"]})) == 2000
