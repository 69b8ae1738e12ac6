"""Random faults in a swarm of three managers: whatever happens, no two tasks share a place, and
when it is quiet everything is as the services say. The seed of a failure is in the test's name.
"""

from __future__ import annotations

import random

import pytest

from engine.errors import EngineError
from engine.manager import tasks as rules
from engine.manager.records import NODE_DATA, NODES, SERVICES, SPEC_VERSIONS, TASK_STATUS, TASKS, Task, spec_key
from engine.manager.store import Store
from engine.swarm_session.states import Availability, NodeState, TaskState
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd
from tests.support.fakes.swarm import Swarm, seconds

MANAGERS = 3


class Chaos:
    def __init__(self, swarm: Swarm, etcd: FakeEtcd, seed: int) -> None:
        self.swarm = swarm
        self.etcd = etcd
        self.dice = random.Random(seed)
        self.start_first: set[str] = set()
        """Services in which a slot may have two tasks."""
        self._number = 0
        self._node = 0

    # --- what may happen --------------------------------------------------------------------------

    async def something(self) -> str:
        events = [
            (self.create, 3),
            (self.update, 6),
            (self.remove, 1),
            (self.fail_task, 6),
            (self.node_down, 2),
            (self.node_back, 4),
            (self.availability, 3),
            (self.label, 2),
            (self.add_node, 1),
            (self.remove_node, 1),
            (self.other_leader, 4),
            (self.lose_answers, 2),
        ]
        event = self.dice.choices([event for event, _ in events], [weight for _, weight in events])[0]
        await self.swarm.do(event())
        return event.__name__

    def fields(self) -> dict[str, object]:
        dice = self.dice
        return {
            "image": f"busybox:{dice.choice('123')}",
            "restart": {
                "Condition": dice.choice(["any", "any", "on-failure"]),
                "Delay": seconds(dice.choice([0, 1, 5])),
            },
            "update": {
                "Parallelism": dice.choice([0, 1, 2]),
                "Delay": seconds(dice.choice([0, 1])),
                "FailureAction": dice.choice(["pause", "continue", "rollback"]),
                "Order": dice.choice(["stop-first", "stop-first", "start-first"]),
                "Monitor": seconds(2),
            },
            "constraints": dice.choice([[], [], ["node.labels.l!=x"]]),
        }

    def note(self, service: str, fields: dict[str, object]) -> None:
        if fields["update"]["Order"] == "start-first":  # type: ignore[index]
            self.start_first.add(service)

    async def create(self) -> None:
        if len(self.swarm.store.all(SERVICES)) >= 6:
            return
        self._number += 1
        fields = self.fields()
        if self.dice.random() < 0.3:
            fields["mode"] = {"Global": {}}
        else:
            fields["replicas"] = self.dice.randrange(0, 8)
        key = await self.swarm.create(f"s{self._number}", **fields)
        self.note(key, fields)

    def service(self) -> str | None:
        return self.dice.choice(sorted(self.swarm.store.all(SERVICES)) or [None])  # type: ignore[list-item]

    async def update(self) -> None:
        key = self.service()
        if key is None:
            return
        record = self.swarm.store.record(SERVICES, key)
        assert record is not None
        fields = self.fields()
        if rules.is_global(record.spec):
            fields["mode"] = {"Global": {}}
        else:
            fields["replicas"] = self.dice.choice([rules.replicas(record.spec), self.dice.randrange(0, 8)])
        self.note(key, fields)
        await self.swarm.update(key, **fields)

    async def remove(self) -> None:
        if (key := self.service()) is not None:
            await self.swarm.remove(key)

    async def fail_task(self) -> None:
        running = sorted(key for key, node in self.swarm.agents.running.items() if node not in self.swarm.agents.dead)
        for key in self.dice.sample(running, min(len(running), self.dice.choice([1, 1, 3]))):
            state = self.dice.choice([TaskState.FAILED, TaskState.FAILED, TaskState.COMPLETE])
            await self.swarm.agents.report(key, state)

    def node(self) -> str | None:
        return self.dice.choice(sorted(self.swarm.store.all(NODES)) or [None])  # type: ignore[list-item]

    async def node_down(self) -> None:
        if (node := self.node()) is not None:
            await self.swarm.observe(node, self.dice.choice([NodeState.DOWN, NodeState.UNKNOWN]))

    async def node_back(self) -> None:
        if (node := self.node()) is not None:
            await self.swarm.observe(node, NodeState.READY)

    async def availability(self) -> None:
        if (node := self.node()) is not None:
            await self.swarm.wish(node, availability=self.dice.choice(list(Availability)))

    async def label(self) -> None:
        if (node := self.node()) is not None:
            await self.swarm.wish(node, labels={"l": self.dice.choice("xy")})

    async def add_node(self) -> None:
        if len(self.swarm.store.all(NODES)) < 8:
            self._node += 1
            await self.swarm.node(f"new{self._node:02}")

    async def remove_node(self) -> None:
        if (node := self.node()) is not None and len(self.swarm.store.all(NODES)) > 2:
            await self.swarm.remove_node(node)

    async def other_leader(self) -> None:
        await self.swarm.lead(self.dice.randrange(MANAGERS), depose=self.dice.random() < 0.5)

    async def lose_answers(self) -> None:
        self.etcd.lose_answers = self.dice.choice([1, 3])

    # --- what must hold ---------------------------------------------------------------------------

    def check(self, event: str) -> None:
        """No two tasks share a place: neither in the records, nor as containers that could see each
        other.
        """
        store = self.swarm.store
        wanted: dict[tuple[str, rules.Place], list[str]] = {}
        running: dict[tuple[str, rules.Place], list[str]] = {}
        for key, entry in store.all(TASKS).items():
            task: Task = entry.record
            if task.service in self.start_first:
                continue
            place = (task.service, rules.place_of(task))
            if rules.live(task):
                wanted.setdefault(place, []).append(key)
            data = store.record(NODE_DATA, task.node)
            reachable = data is not None and data.state is NodeState.READY
            if key in self.swarm.agents.running and reachable and task.node not in self.swarm.agents.dead:
                running.setdefault(place, []).append(key)
        assert all(len(keys) == 1 for keys in wanted.values()), (event, wanted)
        for place, keys in running.items():
            # a node that comes back still has what has been replaced while it was away
            surplus = [key for key in keys if (task := store.record(TASKS, key)) and rules.live(task)]
            assert len(surplus) <= 1, (event, place, keys)

    async def settle(self) -> None:
        """Everything is well again, and time passes."""
        await self.swarm.do(self.heal())
        await self.swarm.run(180)

    async def heal(self) -> None:
        self.etcd.lose_answers = 0
        await self.swarm.lead(self.dice.randrange(MANAGERS))
        for node in list(self.swarm.store.all(NODES)):
            await self.swarm.wish(node, availability=Availability.ACTIVE, labels={})
            await self.swarm.observe(node, NodeState.READY)

    def check_quiet(self) -> None:
        swarm, store = self.swarm, self.swarm.store
        for key, entry in store.all(SERVICES).items():
            running = swarm.running(key)
            assert set(running) == set(swarm.tasks(key)), (key, entry.record)
            places = sorted(str(rules.place_of(task)) for task in running.values())
            done = {
                rules.place_of(task) for name, task in swarm.all_tasks(key).items() if rules.done(store, name, task)
            } - {rules.place_of(task) for task in running.values()}
            if rules.is_global(entry.record.spec):
                assert len(running) + len(done & set(store.all(NODES))) == len(store.all(NODES))
            else:
                assert len(running) + len(done) == rules.replicas(entry.record.spec), (running, done)
            assert len(places) == len(set(places))
            assert swarm.update_state(key) in {
                "", "completed", "paused", "rollback_completed", "rollback_paused",
            }  # fmt: skip
        live = {key for key, entry in store.all(TASKS).items() if rules.live(entry.record)}
        assert set(swarm.agents.running) == live, "no container without a task, and the other way round"
        assert {entry.record.service for entry in store.all(TASKS).values()} <= set(store.all(SERVICES))
        used = {spec_key(entry.record.service, entry.record.version) for entry in store.all(TASKS).values()}
        current = {spec_key(key, entry.record.version) for key, entry in store.all(SERVICES).items()}
        assert used <= set(store.all(SPEC_VERSIONS)) <= used | current
        assert set(store.all(TASK_STATUS)) <= set(store.all(TASKS))


@pytest.mark.parametrize("seed", range(16))
async def test_random_faults(etcd: FakeEtcd, store: Store, clock: FakeClock, seed: int) -> None:
    peers = [Store(etcd.peer(), clock) for _ in range(MANAGERS - 1)]
    for peer in peers:
        await peer.load()
    swarm = Swarm(store, clock, peers)
    chaos = Chaos(swarm, etcd, seed)
    await swarm.nodes(4)
    await swarm.lead()
    try:
        for _ in range(60):
            event = await chaos.something()
            chaos.check(event)
            for _ in range(chaos.dice.randrange(1, 8)):
                await swarm.run(chaos.dice.choice([0.05, 0.3, 1.0]))
                chaos.check(event)
        await chaos.settle()
        chaos.check_quiet()
        assert all(dict(each.all(TASKS)) == dict(store.all(TASKS)) for each in peers)
    finally:
        await swarm.depose()
        for peer in peers:
            await peer.close()


async def test_no_quorum_leaves_everything_as_it_is(etcd: FakeEtcd, store: Store, clock: FakeClock) -> None:
    swarm = Swarm(store, clock)
    await swarm.nodes(3)
    await swarm.lead()
    try:
        web = await swarm.create(replicas=4, restart={"Delay": 0})
        await swarm.run(1)
        before = swarm.tasks(web)
        await swarm.agents.report(min(before), TaskState.FAILED)
        etcd.down = True
        await swarm.run(60)
        assert len(swarm.agents.running) == 3
        etcd.down = False
        await swarm.run(30)
        assert len(swarm.running(web)) == len(swarm.agents.running) == 4
        assert len(set(before) & set(swarm.tasks(web))) == 3
    except EngineError:
        pytest.fail("a loop gave up")
    finally:
        await swarm.depose()
