"""Services: create, list, inspect, update, rollback, remove, as a client sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.errors import Conflict, Forbidden, InvalidParameter, NotFound, ServerError
from engine.manager.control.context import OutOfSequence
from engine.manager.records import (
    CLAIMS,
    SERVICE_AUTH,
    SERVICE_STATUS,
    SERVICES,
    TASK_STATUS,
    TASKS,
    ServiceStatus,
    Task,
    TaskStatus,
    UpdateRecord,
    name_claim,
    new_id,
)
from engine.manager.store import Put, Store
from engine.swarm_session.states import TaskState
from tests.unit.manager.control.conftest import Swarm, spec


async def test_create_and_inspect(swarm: Swarm) -> None:
    await swarm.found()
    created = await swarm.services_create(body=spec(Labels={"a": "b"}))
    assert created == {"ID": created["ID"], "Warnings": None}
    assert len(created["ID"]) == 25
    for text in (created["ID"], "web", created["ID"][:10]):
        service = await swarm.services_inspect(text)
        assert service["ID"] == created["ID"]
        assert service["Spec"]["Name"] == "web"
        assert service["Spec"]["Labels"] == {"a": "b"}
        assert service["Spec"]["Mode"] == {"Replicated": {"Replicas": 1}}
        assert service["Spec"]["TaskTemplate"]["ContainerSpec"]["Image"] == "busybox"
        assert service["Version"]["Index"] > 0
        assert service["CreatedAt"] == service["UpdatedAt"] != ""
        assert "PreviousSpec" not in service and "UpdateStatus" not in service and "JobStatus" not in service


async def test_a_name_is_made(swarm: Swarm) -> None:
    await swarm.found()
    names = set()
    for _ in range(3):
        created = await swarm.services_create(body=spec(""))
        names.add((await swarm.services_inspect(created["ID"]))["Spec"]["Name"])
    assert len(names) == 3 and all("_" in name for name in names)


async def test_names_are_unique(swarm: Swarm) -> None:
    await swarm.found()
    service = await swarm.service()
    with pytest.raises(Conflict, match=r"name conflicts with an existing object.*web"):
        await swarm.services_create(body=spec())
    await swarm.services_remove(service)
    assert swarm.store.get(CLAIMS, name_claim("service", "web")) is None
    await swarm.services_create(body=spec())


async def test_of_many_creates_of_one_name_one_succeeds(swarm: Swarm) -> None:
    await swarm.found()
    results = await asyncio.gather(*(swarm.services_create(body=spec()) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(result, dict) for result in results) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 19
    assert len(swarm.store.all(SERVICES)) == 1


async def test_two_managers_accept_a_name_once(swarm: Swarm, etcd: Any, clock: Any) -> None:
    """The other one's cache does not have the service yet, and its transaction fails."""
    await swarm.found()
    other = Store(etcd, clock)
    await other.load()
    second = Swarm(other, clock)
    results = await asyncio.gather(
        swarm.services_create(body=spec()), second.services_create(body=spec()), return_exceptions=True
    )
    assert sorted(isinstance(result, Conflict) for result in results) == [False, True]
    await other.close()


async def test_another_manager_sees_what_was_written(swarm: Swarm, etcd: Any, clock: Any) -> None:
    await swarm.found()
    other = Store(etcd, clock)
    await other.load()
    second = Swarm(other, clock)
    service = await swarm.service()
    found = await second.services_inspect(service)
    await second.services_update(service, body=spec(Labels={"x": ""}), version=found["Version"]["Index"])
    await swarm.services_remove(service)
    with pytest.raises(NotFound):
        await second.services_remove(service)
    await other.close()


@pytest.mark.parametrize("text", ["nothing", "webb", "WEB", "../web", "web.1", " ", "{{", "é", "a" * 1000])
async def test_no_such_service(swarm: Swarm, text: str) -> None:
    await swarm.found()
    await swarm.service()
    for verb in ("inspect", "update", "remove"):
        with pytest.raises(NotFound, match=r"service .* not found"):
            await swarm.call(f"services.{verb}", text, spec(), version=1)


async def test_ambiguous(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    await swarm.found()
    ids = iter(("abc1", "abc2"))
    monkeypatch.setattr("engine.manager.control.services.new_id", lambda: next(ids))
    await swarm.service("one")
    await swarm.service("two")
    with pytest.raises(ServerError, match=r"service abc is ambiguous \(2 matches found\)") as caught:
        await swarm.services_inspect("abc")
    assert type(caught.value) is ServerError
    assert (await swarm.services_inspect("abc1"))["Spec"]["Name"] == "one"


async def test_a_name_comes_before_a_prefix(swarm: Swarm) -> None:
    await swarm.found()
    first = await swarm.service("first")
    second = await swarm.service(first[:4])
    assert (await swarm.services_inspect(first[:4]))["ID"] == second


async def test_update(swarm: Swarm) -> None:
    await swarm.found()
    service = await swarm.service()
    before = await swarm.services_inspect(service)
    swarm.clock.set(5)
    answer = await swarm.services_update(
        "web", body=spec(Mode={"Replicated": {"Replicas": 5}}), version=before["Version"]["Index"]
    )
    assert answer == {"Warnings": None}
    after = await swarm.services_inspect(service)
    assert after["Spec"]["Mode"] == {"Replicated": {"Replicas": 5}}
    assert after["PreviousSpec"] == before["Spec"]
    assert after["Version"]["Index"] > before["Version"]["Index"]
    assert after["CreatedAt"] == before["CreatedAt"] < after["UpdatedAt"]


async def test_update_out_of_sequence(swarm: Swarm) -> None:
    await swarm.found()
    service = await swarm.service()
    version = (await swarm.services_inspect(service))["Version"]["Index"]
    for wrong in (version - 1, version + 1, 0, -1, 1 << 63):
        with pytest.raises(OutOfSequence, match="update out of sequence") as caught:
            await swarm.services_update(service, body=spec(), version=wrong)
        assert isinstance(caught.value, ServerError)
    with pytest.raises(InvalidParameter, match="version"):
        await swarm.services_update(service, body=spec())
    assert (await swarm.services_inspect(service))["Version"]["Index"] == version


async def test_of_many_updates_of_one_version_one_succeeds(swarm: Swarm) -> None:
    await swarm.found()
    service = await swarm.service()
    version = (await swarm.services_inspect(service))["Version"]["Index"]
    results = await asyncio.gather(
        *(
            swarm.services_update(service, body=spec(Labels={"n": str(number)}), version=version)
            for number in range(10)
        ),
        return_exceptions=True,
    )
    assert sum(isinstance(result, dict) for result in results) == 1
    assert sum(isinstance(result, OutOfSequence) for result in results) == 9


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"Name": "other"}, "renaming services is not supported"),
        ({"Mode": {"Global": {}}}, "service mode change is not allowed"),
        ({"Mode": {"ReplicatedJob": {}}}, "service mode change is not allowed"),
        ({"Mode": {"GlobalJob": {}}}, "service mode change is not allowed"),
    ],
)
async def test_what_an_update_cannot_change(swarm: Swarm, changed: dict[str, Any], words: str) -> None:
    await swarm.found()
    service = await swarm.service()
    version = (await swarm.services_inspect(service))["Version"]["Index"]
    with pytest.raises(ServerError, match=words):
        await swarm.services_update(service, body=spec() | changed, version=version)
    assert (await swarm.services_inspect(service))["Version"]["Index"] == version


async def test_an_update_voids_the_status_of_the_one_before(swarm: Swarm) -> None:
    await swarm.found()
    service = await swarm.service()
    status = ServiceStatus(update=UpdateRecord("paused", swarm.clock.now(), 0, "task x failed"), version=1)
    await swarm.store.commit([Put(SERVICE_STATUS, service, status)])
    found = await swarm.services_inspect(service)
    assert found["UpdateStatus"]["State"] == "paused"
    assert found["UpdateStatus"]["Message"] == "task x failed"
    assert found["UpdateStatus"]["StartedAt"] and "CompletedAt" not in found["UpdateStatus"]
    await swarm.services_update(service, body=spec(), version=found["Version"]["Index"])
    assert "UpdateStatus" not in await swarm.services_inspect(service)


async def test_the_leaders_status_does_not_put_a_client_out_of_sequence(swarm: Swarm) -> None:
    await swarm.found()
    service = await swarm.service()
    version = (await swarm.services_inspect(service))["Version"]["Index"]
    await swarm.store.commit([Put(SERVICE_STATUS, service, ServiceStatus(update=UpdateRecord("updating"), version=1))])
    assert (await swarm.services_inspect(service))["Version"]["Index"] == version
    await swarm.services_update(service, body=spec(), version=version)


async def test_rollback(swarm: Swarm) -> None:
    await swarm.found()
    service = await swarm.service(Labels={"n": "1"})
    first = await swarm.services_inspect(service)
    with pytest.raises(InvalidParameter, match="does not have a previous spec"):
        await swarm.services_update(service, body=spec(), version=first["Version"]["Index"], rollback="previous")
    await swarm.services_update(service, body=spec(Labels={"n": "2"}), version=first["Version"]["Index"])
    second = await swarm.services_inspect(service)
    await swarm.services_update(service, body=second["Spec"], version=second["Version"]["Index"], rollback="previous")
    third = await swarm.services_inspect(service)
    assert third["Spec"] == first["Spec"] and third["PreviousSpec"] == second["Spec"]
    record = swarm.store.record(SERVICES, service)
    assert record is not None and record.rollback and record.version == 3
    with pytest.raises(InvalidParameter, match="rollback"):
        await swarm.services_update(service, body=spec(), version=third["Version"]["Index"], rollback="next")
    await swarm.services_update(service, body=spec(), version=third["Version"]["Index"], rollback="")
    record = swarm.store.record(SERVICES, service)
    assert record is not None and not record.rollback


async def test_credentials(swarm: Swarm) -> None:
    """They are kept apart, never shown, and follow the spec in a rollback."""
    await swarm.found()
    created = await swarm.services_create(body=spec(), registry_auth="one")
    service = created["ID"]

    async def update(**query: Any) -> None:
        version = (await swarm.services_inspect(service))["Version"]["Index"]
        await swarm.services_update(service, body=spec(), version=version, **query)

    def stored() -> tuple[str, str]:
        auth = swarm.store.record(SERVICE_AUTH, service)
        assert auth is not None
        return auth.header, auth.previous

    assert stored() == ("one", "")
    assert "one" not in str(await swarm.services_inspect(service))
    await update(registry_auth="two")
    assert stored() == ("two", "one")
    await update()
    assert stored() == ("two", "two")
    await update(registry_auth="three")
    await update(registry_auth_from="previous-spec")
    assert stored() == ("two", "three")
    await update(rollback="previous")
    assert stored() == ("three", "two")
    await update(registry_auth="", registry_auth_from="spec")
    assert stored() == ("three", "three")
    with pytest.raises(InvalidParameter, match="registryAuthFrom"):
        await update(registry_auth_from="elsewhere")
    await swarm.services_remove(service)
    assert swarm.store.get(SERVICE_AUTH, service) is None


async def test_a_service_without_credentials_has_no_record_of_them(swarm: Swarm) -> None:
    await swarm.found()
    service = await swarm.service()
    version = (await swarm.services_inspect(service))["Version"]["Index"]
    await swarm.services_update(service, body=spec(Labels={"a": ""}), version=version)
    assert swarm.store.get(SERVICE_AUTH, service) is None


async def test_remove(swarm: Swarm) -> None:
    await swarm.found()
    service = await swarm.service()
    await swarm.store.commit([Put(SERVICE_STATUS, service, ServiceStatus())])
    assert await swarm.services_remove("web") is None
    assert await swarm.services_list() == []
    assert not swarm.store.all(SERVICES) and not swarm.store.all(SERVICE_STATUS)
    with pytest.raises(NotFound, match="service web not found"):
        await swarm.services_remove("web")


async def test_list(swarm: Swarm) -> None:
    await swarm.found()
    assert await swarm.services_list() == []
    await swarm.service("web", Labels={"a": "1", "b": ""})
    await swarm.service("web-2", Mode={"Global": {}}, Labels={"a": "2"})
    await swarm.service("job", Mode={"ReplicatedJob": {}})
    await swarm.service("every", Mode={"GlobalJob": {}})

    async def names(**filters: list[str]) -> list[str]:
        return sorted(one["Spec"]["Name"] for one in await swarm.services_list(filters=filters))

    assert await names() == ["every", "job", "web", "web-2"]
    assert await names(name=["web"]) == ["web", "web-2"]
    assert await names(name=["web-", "jo"]) == ["job", "web-2"]
    assert await names(label=["a"]) == ["web", "web-2"]
    assert await names(label=["a=1"]) == ["web"]
    assert await names(label=["a", "b"]) == ["web"]
    assert await names(label=["b="]) == ["web"]
    assert await names(mode=["replicated"]) == ["web"]
    assert await names(mode=["global", "global-job"]) == ["every", "web-2"]
    assert await names(mode=["replicated-job"], name=["web"]) == []
    assert await names(runtime=["plugin"]) == []
    assert len(await names(runtime=["container"])) == 4
    first = (await swarm.services_list(filters={"name": ["job"]}))[0]["ID"]
    assert await names(id=[first[:8]]) == ["job"]
    for filters in ({"mode": ["both"]}, {"runtime": ["vm"]}, {"color": ["red"]}, {"Name": ["web"]}):
        with pytest.raises(InvalidParameter, match=r"(?i)invalid .*filter"):
            await swarm.services_list(filters=filters)


async def test_lists_follow_changes(swarm: Swarm) -> None:
    """Documents are kept encoded, until one of their records changes."""
    await swarm.found()
    service = await swarm.service()
    (first,) = await swarm.services_list()
    assert first == await swarm.services_inspect(service) and (await swarm.services_list()) == [first]
    await swarm.store.commit([Put(SERVICE_STATUS, service, ServiceStatus(update=UpdateRecord("paused"), version=1))])
    (second,) = await swarm.services_list()
    assert second["UpdateStatus"]["State"] == "paused" and second == await swarm.services_inspect(service)
    await swarm.services_update(service, body=spec(Labels={"a": ""}), version=second["Version"]["Index"])
    (third,) = await swarm.services_list(status=True)
    assert third.pop("ServiceStatus") == {"RunningTasks": 0, "DesiredTasks": 1, "CompletedTasks": 0}
    assert third == await swarm.services_inspect(service) != second
    await swarm.services_remove(service)
    assert await swarm.services_list() == []
    for number in range(150):
        service = await swarm.service(f"s{number}")
        assert len(await swarm.services_list()) == 1
        await swarm.services_remove(service)
    assert 0 < len(swarm.control._context.encoded) < 150, "documents of removed services are dropped"


async def _task(swarm: Swarm, service: str, desired: TaskState, state: TaskState, iteration: int = 0) -> None:
    key = new_id()
    task = Task(service=service, version=1, desired=desired, iteration=iteration)
    await swarm.store.commit(
        [Put(TASKS, key, task), Put(TASK_STATUS, key, TaskStatus(state=state, since=swarm.clock.now()))]
    )


async def test_numbers_of_tasks(swarm: Swarm) -> None:
    await swarm.found()
    web = await swarm.service("web", Mode={"Replicated": {"Replicas": 3}})
    every = await swarm.service("every", Mode={"Global": {}})
    job = await swarm.service("job", Mode={"ReplicatedJob": {"MaxConcurrent": 2, "TotalCompletions": 4}})
    await _task(swarm, web, TaskState.RUNNING, TaskState.RUNNING)
    await _task(swarm, web, TaskState.RUNNING, TaskState.STARTING)
    await _task(swarm, web, TaskState.SHUTDOWN, TaskState.FAILED)
    await _task(swarm, every, TaskState.RUNNING, TaskState.RUNNING)
    await _task(swarm, every, TaskState.RUNNING, TaskState.READY)
    await _task(swarm, every, TaskState.SHUTDOWN, TaskState.SHUTDOWN)
    await _task(swarm, job, TaskState.COMPLETE, TaskState.COMPLETE)
    await _task(swarm, job, TaskState.COMPLETE, TaskState.RUNNING)
    await _task(swarm, job, TaskState.COMPLETE, TaskState.COMPLETE, iteration=-1)
    found = {one["Spec"]["Name"]: one.get("ServiceStatus") for one in await swarm.services_list(status=True)}
    assert found == {
        "web": {"RunningTasks": 1, "DesiredTasks": 3, "CompletedTasks": 0},
        "every": {"RunningTasks": 1, "DesiredTasks": 2, "CompletedTasks": 0},
        "job": {"RunningTasks": 1, "DesiredTasks": 2, "CompletedTasks": 1},
    }
    assert all("ServiceStatus" not in one for one in await swarm.services_list())


async def test_jobs(swarm: Swarm) -> None:
    await swarm.found()
    job = await swarm.service("job", Mode={"ReplicatedJob": {"MaxConcurrent": 3}})
    found = await swarm.services_inspect(job)
    assert found["Spec"]["Mode"] == {"ReplicatedJob": {"MaxConcurrent": 3, "TotalCompletions": 3}}
    assert found["JobStatus"] == {"JobIteration": {"Index": 0}, "LastExecution": found["CreatedAt"]}
    swarm.clock.set(60)
    await swarm.services_update(job, body=found["Spec"], version=found["Version"]["Index"])
    again = await swarm.services_inspect(job)
    assert again["JobStatus"] == {"JobIteration": {"Index": 1}, "LastExecution": again["UpdatedAt"]}
    assert again["UpdatedAt"] > found["CreatedAt"]


async def test_defaults_are_inserted_on_request(swarm: Swarm) -> None:
    await swarm.found()
    service = await swarm.service(
        TaskTemplate={"ContainerSpec": {"Image": "a"}, "RestartPolicy": {"Condition": "none"}}
    )
    plain = (await swarm.services_inspect(service))["Spec"]
    assert "UpdateConfig" not in plain
    full = (await swarm.services_inspect(service, insert_defaults=True))["Spec"]
    assert full["UpdateConfig"] == full["RollbackConfig"]
    assert full["UpdateConfig"]["Parallelism"] == 1
    assert full["UpdateConfig"]["FailureAction"] == "pause"
    assert full["UpdateConfig"]["Monitor"] == 5_000_000_000
    assert full["UpdateConfig"]["Order"] == "stop-first"
    template = full["TaskTemplate"]
    assert template["ContainerSpec"]["StopGracePeriod"] == 10_000_000_000
    assert template["RestartPolicy"] == {"Condition": "none", "Delay": 5_000_000_000, "MaxAttempts": 0}
    assert template["Placement"] == {}
    assert template["Resources"] == {"Limits": {}, "Reservations": {}}
    assert (await swarm.services_inspect(service))["Spec"] == plain


async def test_networks(swarm: Swarm) -> None:
    await swarm.found()
    for field in ("Networks", "TaskTemplate"):
        for target in ("host", "bridge", "none", "ingress", "mine", "0123abcd"):
            networks = [{"Target": target}]
            body = spec()
            if field == "Networks":
                body["Networks"] = networks
            else:
                body["TaskTemplate"]["Networks"] = networks
            with pytest.raises(Forbidden, match=f"{target} is not eligible for docker services"):
                await swarm.services_create(body=body, local_networks=["mine", "0123abcd"])
    with pytest.raises(NotFound, match="network other not found"):
        await swarm.services_create(body=spec(Networks=[{"Target": "other"}]), local_networks=["mine"])
    with pytest.raises(NotFound, match="network other not found"):
        await swarm.services_create(body=spec(Networks=[{"Target": "other"}]), node_local_networks=True)
    service = await swarm.service()
    version = (await swarm.services_inspect(service))["Version"]["Index"]
    body = spec(Networks=[{"Target": "host"}])
    await swarm.services_update(service, body=body, version=version, node_local_networks=True)
    found = (await swarm.services_inspect(service))["Spec"]
    assert found["TaskTemplate"]["Networks"] == [{"Target": "host"}] and "Networks" not in found


async def test_a_long_body(swarm: Swarm) -> None:
    await swarm.found()
    await swarm.service(Labels={"a": "x" * (4_190_000)})
    with pytest.raises(InvalidParameter, match="more than 4194304"):
        await swarm.services_create(body=spec("long", Labels={"a": "x" * (4 << 20)}))


async def test_a_refused_request_changes_nothing(swarm: Swarm) -> None:
    await swarm.found()
    revision = swarm.store.revision
    for body in (
        {"Name": "x"},
        spec(Mode={"Replicated": {}, "Global": {}}),
        spec("a b"),
        {"Name": 5},
        [],
        "text",
        spec(EndpointSpec={"Ports": [{"TargetPort": 80, "PublishedPort": 99999}]}),
    ):
        with pytest.raises(InvalidParameter):
            await swarm.services_create(body=body)
    assert swarm.store.revision == revision
