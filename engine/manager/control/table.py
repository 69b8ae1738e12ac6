"""The table of verbs, and `Control`, which carries out a request.

A read waits until the cache has every write that any manager has acknowledged, so that a client may
ask another manager than the one that it wrote to. A write works on the cache at once: what it read
is compared in its transaction. When that fails, or when the request was refused, it is tried again
if the cache was behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from engine.errors import Conflict, Forbidden, InvalidParameter, NotFound, Unavailable
from engine.manager.ca import Authority
from engine.manager.control import events, networks, nodes, services, swarm, tasks
from engine.manager.control.context import Context, Expel, Guard, Peers, Precondition
from engine.manager.control.data import CONFIG, SECRET
from engine.manager.store import Fenced, Stale, Store
from engine.swarm_session.clock import Clock
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Call, Done, Watch

ATTEMPTS = 20
"""Of one write, while others change the same records."""


class Verb(NamedTuple):
    run: Callable[[Context, Call], Awaitable[bytes]]
    writes: bool = False
    waits: bool = True
    """False for a read that takes the cache as it is."""


VERBS = {
    "swarm.inspect": Verb(swarm.inspect),
    "swarm.update": Verb(swarm.update, writes=True),
    "swarm.unlockkey": Verb(swarm.unlock_key, waits=False),
    "info": Verb(swarm.info, waits=False),
    "nodes.list": Verb(nodes.list_all),
    "nodes.inspect": Verb(nodes.inspect),
    "nodes.update": Verb(nodes.update, writes=True),
    "nodes.remove": Verb(nodes.remove, writes=True),
    "services.list": Verb(services.list_all),
    "services.inspect": Verb(services.inspect),
    "services.create": Verb(services.create, writes=True),
    "services.update": Verb(services.update, writes=True),
    "services.remove": Verb(services.remove, writes=True),
    "tasks.list": Verb(tasks.list_all),
    "tasks.inspect": Verb(tasks.inspect),
    "networks.list": Verb(networks.list_all),
    "networks.inspect": Verb(networks.inspect),
    "networks.create": Verb(networks.create, writes=True),
    "networks.remove": Verb(networks.remove, writes=True),
    "networks.prune": Verb(networks.prune, writes=True),
    "secrets.list": Verb(SECRET.list_all),
    "secrets.inspect": Verb(SECRET.inspect),
    "secrets.create": Verb(SECRET.create, writes=True),
    "secrets.update": Verb(SECRET.update, writes=True),
    "secrets.remove": Verb(SECRET.remove, writes=True),
    "configs.list": Verb(CONFIG.list_all),
    "configs.inspect": Verb(CONFIG.inspect),
    "configs.create": Verb(CONFIG.create, writes=True),
    "configs.update": Verb(CONFIG.update, writes=True),
    "configs.remove": Verb(CONFIG.remove, writes=True),
}


async def _unguarded(node: str) -> str:
    return ""


async def _no_member(node: str) -> None:
    pass


def _no_peers(network: str) -> tuple[str, ...]:
    return ()


class Control:
    """Carries out the verbs at one manager.

    `guard(node)` returns why the etcd member of a node cannot be removed now, or "". `expel(node)`
    removes it.
    `peers(network)` returns the nodes with endpoints on it.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        node: str,
        authority: Authority,
        guard: Guard = _unguarded,
        expel: Expel = _no_member,
        peers: Peers = _no_peers,
    ) -> None:
        self._store = store
        self._clock = clock
        self._context = Context(store, clock, node, authority, guard, expel, peers)

    async def call(self, message: Call) -> Done:
        """Raises the kind of `errors` that the request is refused with."""
        verb = VERBS.get(message.verb)
        if verb is None:
            raise NotFound(f"no such verb: {message.verb}")
        if verb.writes:
            return Done(seq=message.seq, body=await self._write(verb, message))
        warning = await self._store.current() if verb.waits else ""
        context = msgspec.structs.replace(self._context, old=True) if warning else self._context
        return Done(seq=message.seq, body=await verb.run(context, message), warning=warning)

    async def _write(self, verb: Verb, message: Call) -> bytes:
        refused = False
        for _ in range(ATTEMPTS):
            seen = self._store.revision
            try:
                return await verb.run(self._context, message)
            except Fenced:
                raise
            except Stale:
                await self._store.current()
            except (NotFound, InvalidParameter, Forbidden, Conflict, Precondition):
                if refused:
                    raise
                refused = True
                await self._store.current()
                if self._store.revision == seen:
                    raise
        raise Unavailable(f"{message.verb}: other requests change the same objects all the time: try again")

    async def watch(self, connection: Connection, message: Watch) -> None:
        """Send the changes that are events until cancelled."""
        await events.watch(self._store, self._clock, connection, message)
