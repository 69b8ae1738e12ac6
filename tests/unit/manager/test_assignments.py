"""What an agent is sent, against what it should have: random changes of the store, applied to an
agent's copy message by message.
"""

from __future__ import annotations

import random

import pytest

from engine.manager import records
from engine.manager.assignments import AssignmentSet
from engine.manager.records import ConfigRecord, SecretRecord, ServiceAuth, SpecVersion, spec_key
from engine.manager.store import Change, Delete, Event, Put, Store
from engine.swarm_session.states import TaskState
from engine.wire.secrets import ConfigSpec, SecretSpec
from engine.wire.tasks import ConfigReference, SecretReference
from tests.unit.manager.agents import Agent, found, spec, status_record, task

SERVICES = ("s1", "s2", "s3")
SECRETS = ("x1", "x2", "x3")
CONFIGS = ("c1", "c2")
STATES = (TaskState.READY, TaskState.RUNNING, TaskState.SHUTDOWN, TaskState.REMOVE)


def unseal(_id: str, data: bytes) -> bytes:
    return bytes(reversed(data))


async def setting(store: Store) -> None:
    changes: list[Change] = []
    for id in SECRETS:
        changes.append(
            Put(records.SECRETS, id, SecretRecord(created=0, updated=0, spec=SecretSpec(name=id), data=id.encode()))
        )
    for id in CONFIGS:
        changes.append(
            Put(records.CONFIGS, id, ConfigRecord(created=0, updated=0, spec=ConfigSpec(name=id), data=id.encode()))
        )
    for number, service in enumerate(SERVICES):
        for version in (1, 2, 3):
            chosen = spec(
                service,
                secrets=[SecretReference(secret_id=id, secret_name=id) for id in SECRETS[: (number + version) % 4]],
                configs=[ConfigReference(config_id=id, config_name=id) for id in CONFIGS[: (number * version) % 3]],
            )
            changes.append(Put(records.SPEC_VERSIONS, spec_key(service, version), SpecVersion(chosen)))
    await store.commit(changes)


def expect(store: Store, agent: Agent, auth: bool = True) -> None:
    """The agent's copy is what the store says of its node."""
    wanted = {}
    for key in store.tasks_on("n1"):
        record = store.record(records.TASKS, key)
        status = store.record(records.TASK_STATUS, key)
        if record is not None and record.assigned and (status is None or status.state != TaskState.ORPHANED):
            wanted[key] = record
    assert agent.tasks.keys() == wanted.keys()
    specs = {spec_key(record.service, record.version) for record in wanted.values()}
    assert agent.specs.keys() == specs
    secrets, configs = set(), set()
    for key, record in wanted.items():
        have = agent.tasks[key]
        assert (have.desired, have.service, have.spec) == (
            record.desired,
            record.service,
            spec_key(record.service, record.version),
        )
        container = agent.specs[have.spec].task_template.container_spec
        assert container is not None
        assert have.secrets == tuple(each.secret_id for each in container.secrets)
        secrets |= set(have.secrets)
        configs |= set(have.configs)
    assert agent.secrets == {id: bytes(reversed(id.encode())) for id in secrets}
    assert agent.configs == {id: bytes(reversed(id.encode())) for id in configs}


@pytest.mark.parametrize("seed", range(12))
async def test_random_changes(store: Store, seed: int) -> None:
    chance = random.Random(seed)
    await found(store, "n1", "n2")
    await setting(store)
    agent = Agent("n1")
    assignments = AssignmentSet(store, unseal, "n1")
    dirty: set[str] = set()

    def changed(event: Event) -> None:
        if event.kind is records.TASKS or event.kind is records.TASK_STATUS:
            dirty.add(event.key)

    agent.apply(assignments.whole())
    store.subscribe(changed)
    for _ in range(120):
        key = f"t{chance.randrange(12)}"
        known = store.record(records.TASKS, key)
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                new = task(
                    chance.choice(("n1", "n1", "n2")),
                    chance.choice(SERVICES),
                    chance.randrange(1, 4),
                    desired=chance.choice(STATES),
                    assigned=chance.choice((0, 1, 1)),
                )
                await store.commit([Put(records.TASKS, key, new)])
            case 4 | 5 if known is not None:
                await store.commit([Delete(records.TASKS, key), Delete(records.TASK_STATUS, key)])
            case 6 if known is not None:
                state = chance.choice((TaskState.RUNNING, TaskState.FAILED, TaskState.ORPHANED))
                await store.commit([Put(records.TASK_STATUS, key, status_record(state))])
            case 7:
                service = chance.choice(SERVICES)
                await store.commit([Put(records.SERVICE_AUTH, service, ServiceAuth(str(chance.random())))])
            case 8:
                agent = Agent("n1")
                assignments = AssignmentSet(store, unseal, "n1")
                dirty.clear()
                agent.apply(assignments.whole())
            case _:
                pass
        if chance.random() < 0.5:
            tasks, dirty_now = set(dirty), dirty.clear()
            assert dirty_now is None
            message = assignments.changes(tasks)
            if message is not None:
                agent.apply(message)
            expect(store, agent)
    message = assignments.changes(dirty)
    if message is not None:
        agent.apply(message)
    expect(store, agent)
    await store.commit(
        [Delete(records.TASKS, key) for key in list(store.all(records.TASKS))] or [Delete(records.TASKS, "t0")]
    )
    message = assignments.changes([f"t{number}" for number in range(12)])
    if message is not None:
        agent.apply(message)
    assert not (agent.tasks or agent.specs or agent.secrets or agent.configs)
    assert not (assignments._specs or assignments._secrets or assignments._configs or assignments._services)
    assert not assignments._auths
