"""The facade of swarm mode, and all of it that a daemon outside of a swarm loads.

Refuses requests in Docker's words while this node is part of no swarm (`NoSwarm`). The modules that
do the work are imported when there is a swarm to be a part of: by ROOT/swarm/state.json at start,
or by an init or a join.

Owns:    the membership, while there is one, and the swarm's networks on this node.
Threads: the event loop's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cluster.phases import NOT_A_MANAGER, Phase
from engine.errors import NoSwarm, ServerError

if TYPE_CHECKING:
    from engine.cluster.attaching import Attaching
    from engine.cluster.membership import Membership
    from engine.cluster.parts import Parts
    from engine.cluster.views import NodeNetworks
    from engine.networks.network import NetworkRecord
    from engine.swarm_session.messages import Change, Done, LogLine
    from engine.wire.swarm import InitRequest, JoinRequest

_log = logging.getLogger(__name__)


class Cluster:
    """This engine's part in a swarm, if it has one."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._membership: Membership | None = None
        self._networks: NodeNetworks | None = None
        self._attaching: Attaching | None = None
        self._verbs = 0
        """Inits, joins and leaves in progress: each of them has the membership."""
        directory = parts.config.root / "swarm"
        if (directory / "state.json").exists():
            self._load()
        elif directory.exists():  # cut before it began, or after it ended
            _sweep(directory)

    def _load(self) -> Membership:
        if self._membership is None:
            from engine.cluster.agent import Agent
            from engine.cluster.attaching import Attaching
            from engine.cluster.membership import Membership
            from engine.cluster.views import NodeNetworks

            self._networks = NodeNetworks(self._parts)
            self._attaching = Attaching(self._parts, self._networks)
            self._parts.attachments.lender = self._attaching
            agent = functools.partial(Agent, networks=self._networks, attaching=self._attaching)
            self._membership = Membership(self._parts, agent)
            self._membership.load()
        return self._membership

    def _forget(self) -> None:
        self._membership = self._networks = self._attaching = None
        self._parts.attachments.lender = None

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[Membership]:
        """The membership, for one verb.

        After the last verb it is forgotten if it is none any more.
        """
        membership = self._load()
        self._verbs += 1
        try:
            yield membership
        finally:
            self._verbs -= 1
            if not self._verbs and membership.phase is Phase.NONE:
                self._forget()

    # --- the daemon's life ------------------------------------------------------------------------

    async def restore(self) -> None:
        """Make the swarm's networks again as they were, before containers are restored."""
        if self._membership is None or self._networks is None or self._attaching is None:
            return
        try:
            self._attaching.restore()
            await self._networks.restore(self._membership.node)
        except ServerError as error:
            _log.error("the swarm's networks: %s", error.message)

    def start(self) -> None:
        """Take part in the swarm again, in the background. The containers are restored."""
        if self._membership is not None:
            if self._attaching is not None:
                self._attaching.settle()
            self._membership.start()

    async def close(self, *, stop: bool) -> None:
        """End the daemon's part; tasks and the manager's process run on. With `stop` the process
        ends too. Its state stays, for the next start.
        """
        if self._membership is not None:
            await self._membership.close(stop=stop)
        if self._attaching is not None:
            await self._attaching.close()

    # --- what this node is ------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """LocalNodeState of /info: inactive, pending, active or error."""
        return "inactive" if self._membership is None else self._membership.state

    @property
    def active(self) -> bool:
        return self.state == "active"

    @property
    def is_manager(self) -> bool:
        """The requests of `call` go to this node's own manager."""
        return self._membership is not None and self._membership.is_manager

    @property
    def header(self) -> str:
        """The header Swarm of /_ping."""
        state = self.state
        return f"active/{'manager' if self.is_manager else 'worker'}" if state == "active" else state

    async def info(self) -> dict[str, Any]:
        """The fields of Swarm in /info, by their names there. Does not wait for quorum."""
        if self._membership is None:
            return {"LocalNodeState": "inactive"}
        return await self._membership.info()

    def networks(self) -> list[NetworkRecord]:
        """The networks of the swarm that this node was sent."""
        return [] if self._networks is None else self._networks.records()

    # --- requests ---------------------------------------------------------------------------------

    async def call(self, verb: str, name: str = "", query: dict[str, Any] | None = None, body: bytes = b"") -> Done:
        """One verb of the API, carried out by the manager (`engine/manager/control`).

        `body` is JSON of the newest version's document, as that of the answer. `Done.warning`
        tells that the answer may be old.
        Raises NoSwarm when this node is no manager, and the kinds that the manager raises.
        """
        return await self._manager().call(verb, name, query, body)

    def follow(self, of: str, name: str, query: dict[str, Any]) -> AsyncGenerator[tuple[LogLine, ...], None]:
        """The log lines of a service or task. Iterate under `contextlib.aclosing`."""
        return self._manager().follow(of, name, query)

    def watch(self) -> AsyncGenerator[Change, None]:
        """Changes of the swarm's objects, until the manager ends. Iterate as `follow`."""
        return self._manager().watch()

    def _manager(self) -> Membership:
        if self._membership is None:
            raise NoSwarm(NOT_A_MANAGER)
        return self._membership

    # --- membership -------------------------------------------------------------------------------

    async def init(self, request: InitRequest) -> str:
        """Make a swarm with this node as its manager. Returns the node's id."""
        with self._in_use() as membership:
            return await membership.init(request)

    async def join(self, request: JoinRequest) -> None:
        """Join the swarm of one of the request's managers, in the role of its token."""
        with self._in_use() as membership:
            await membership.join(request)

    async def leave(self, force: bool) -> None:
        """Leave the swarm. A manager leaves by force only."""
        if self._membership is None:
            raise NoSwarm("This node is not part of a swarm")
        with self._in_use() as membership:
            await membership.leave(force)


def _sweep(directory: Path) -> None:
    """Remove the directory if there is nothing in it but a file that was just being written."""
    for path in directory.glob(".state.json.*"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()
