"""A manager's `Control` over a store in memory, with a founded swarm."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest

from engine.errors import WrongState
from engine.manager import networks
from engine.manager.ca import Authority, found
from engine.manager.control.table import Control
from engine.manager.control.validate import DEFAULTS
from engine.manager.records import (
    MANAGERS,
    NODE_DATA,
    NODES,
    TASKS,
    ManagerPresence,
    NodeData,
    NodeRecord,
    new_id,
)
from engine.manager.store import Put, Store
from engine.swarm_session.messages import Call
from engine.swarm_session.states import Availability, NodeState, Role
from engine.wire.nodes import EngineDescription, NodeDescription
from tests.support.fakes.clock import FakeClock

NODE = "manager0000000000000000n1"


class Swarm:
    """The verbs, as a client calls them."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.store, self.clock = store, clock
        self.unsafe = ""
        """Why no member can be removed; "" when they can."""
        self.expelled: list[str] = []
        self.control = Control(
            store,
            clock,
            node=NODE,
            authority=Authority(store, clock),
            guard=self._guard,
            expel=self._expel,
            peers=self._peers,
        )

    async def _guard(self, node: str) -> str:
        return self.unsafe

    async def _expel(self, node: str) -> None:
        if self.unsafe:
            raise WrongState(self.unsafe)
        self.expelled.append(node)

    def _peers(self, network: str) -> set[str]:
        tasks = [entry.record for entry in self.store.all(TASKS).values()]
        return {task.node for task in tasks if any(one.network == network for one in task.networks)}

    async def found(self) -> None:
        """The records of a swarm of one manager."""
        founding = await found(DEFAULTS, self.clock, node=NODE, address="10.0.0.1:2377")
        await self.store.commit([*founding.changes, *networks.founding(founding.cluster, self.clock.now())])
        await self.node("manager1", key=NODE, role=Role.MANAGER)
        await self.store.commit([Put(MANAGERS, NODE, ManagerPresence(address="10.0.0.1:2377", member=1))])

    async def node(
        self, name: str, *, key: str = "", role: Role = Role.WORKER, state: NodeState = NodeState.READY,
        labels: dict[str, str] | None = None, engine_labels: dict[str, str] | None = None,
        certificate: Role | None = None, issuer: str = "",
        subnets: tuple[str, ...] = (), features: tuple[str, ...] = (),
    ) -> str:  # fmt: skip
        """Another node. Returns its id."""
        key = key or new_id()
        now = self.clock.now()
        description = NodeDescription(hostname=name, engine=EngineDescription(labels=engine_labels or {}))
        record = NodeRecord(created=now, updated=now, labels=labels or {}, role=role, availability=Availability.ACTIVE)
        data = NodeData(
            description=description,
            state=state,
            role=role if certificate is None else certificate,
            address="10.0.0.2",
            certificate=issuer,
            manager_address="10.0.0.2:2377",
            subnets=subnets,
            features=features,
        )
        await self.store.commit([Put(NODES, key, record), Put(NODE_DATA, key, data)])
        return key

    async def call(self, verb: str, name: str = "", body: Any = None, **query: Any) -> Any:
        """The decoded answer; None for an empty one."""
        data = b"" if body is None else msgspec.json.encode(body)
        done = await self.control.call(Call(seq=7, verb=verb, name=name, query=query, body=data))
        assert done.seq == 7
        return msgspec.json.decode(done.body) if done.body else None

    def __getattr__(self, name: str) -> Any:
        """`swarm.services_create(...)` for the verb services.create."""
        resource, verb = name.split("_", 1)
        return functools.partial(self.call, f"{resource}.{verb}")

    async def service(self, name: str = "web", **fields: Any) -> str:
        """A service of that name. Returns its id."""
        created = await self.call("services.create", body=spec(name, **fields))
        return str(created["ID"])


def spec(name: str = "web", **fields: Any) -> dict[str, Any]:
    """The smallest spec of a service."""
    return {"Name": name, "TaskTemplate": {"ContainerSpec": {"Image": "busybox"}}, **fields}


@pytest.fixture
def swarm(store: Store, clock: FakeClock) -> Swarm:
    return Swarm(store, clock)
