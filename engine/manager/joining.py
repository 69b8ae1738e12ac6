"""How nodes come into the swarm, keep their certificates, and become and cease to be managers.

The serving side answers `FetchRoot`, `Join`, `Renew` of any node, and `AddMember`, `PromoteMember`,
`RemoveMember` of managers. The asking side is that of a manager that joins others.

A node's id is made of its first public key, so a `Join` that is repeated, to any manager, is about
the same node. The role of a certificate is the wish in the node's record; a manager that is to be
demoted gets a worker's certificate when its etcd member is removed, not before.

Threads: the event loop's.
Raises:  what the peer is refused with.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from engine.errors import Forbidden, InvalidParameter, ServerError, Unavailable, Unimplemented, WrongState, words
from engine.manager import records, roots
from engine.manager.ca import FOREIGN, Authority
from engine.manager.certificates import request_key
from engine.manager.control import validate
from engine.manager.identity import Identity
from engine.manager.kv import Etcd
from engine.manager.members import Members
from engine.manager.records import ID_LENGTH, NodeData, NodeRecord, base36
from engine.manager.store import Compare, Put, Stale, Store
from engine.manager.tls import Credentials, dial
from engine.swarm_session import messages
from engine.swarm_session.clock import Clock
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Done, Joined, MemberAdded, Message, Peer, Renewed
from engine.swarm_session.states import Role
from engine.system.threads import whole

ATTEMPTS = 5
"""Of a transaction whose records another manager changes meanwhile."""
ASK = 25.0
"""Seconds for an answer of another manager."""
ADDING = 120.0
"""Seconds that a joining manager waits for others that join, and for the guards."""
PROMOTING = 300.0
"""Seconds that a learner may need to catch up."""
LEAVING = 10.0
"""Seconds for which a manager that leaves by force looks for another one to remove its member."""
PAUSE = 0.2


class Joining:
    """The serving side."""

    def __init__(self, store: Store, etcd: Etcd, authority: Authority, clock: Clock, *, node: str) -> None:
        self._store = store
        self._authority = authority
        self._clock = clock
        self.members = Members(store, etcd, clock, node)

    async def serve(self, connection: Connection, message: Message, identity: Identity | None) -> None:
        """Answer one request. Who may send which verb was checked by the listener; the roles that
        the records wish are checked here.
        """
        match message:
            case messages.FetchRoot(seq=seq):
                await connection.send(Done(seq=seq, body=self._authority.root().encode()))
            case messages.Join():
                await connection.send(await self.join(message, connection.peer))
            case messages.Renew():
                await connection.send(await self.renew(message, identity, connection.peer))
            case messages.AddMember(seq=seq, peer_url=peer_url):
                node = await self._manager(identity)
                added = await self.members.add(node, peer_url)
                await connection.send(MemberAdded(seq=seq, member=added.member, initial_cluster=added.initial_cluster))
            case messages.PromoteMember(seq=seq, member=member):
                await self.members.promote(await self._manager(identity), member)
                await connection.send(Done(seq=seq))
            case messages.RemoveMember(seq=seq, force=force):
                await self.leave(_certified(identity, Role.MANAGER).node, force=force)
                await connection.send(Done(seq=seq))
            case _:
                raise Unimplemented(f"{type(message).__name__} is not served here")

    async def _manager(self, identity: Identity | None) -> str:
        """The sender's node. Raises Forbidden unless it is to be a manager, by certificate and
        record.
        """
        identity = _certified(identity, Role.MANAGER)
        await self._authority.admit(identity, Role.MANAGER)
        return identity.node

    def _wish(self, node: str) -> Role | None:
        record = self._store.record(records.NODES, node)
        return None if record is None else record.role

    # --- nodes ------------------------------------------------------------------------------------

    async def join(self, message: messages.Join, seen: str) -> Joined:
        """Give a new node its identity, and write its record.

        Raises InvalidParameter for a token that is not current and for a bad request, Forbidden for
        a key whose node was removed.
        """
        role = await self._role(message.token)
        availability = validate.availability(message.availability)
        public = request_key(message.csr).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        for _ in range(ATTEMPTS):
            cluster = self._store.get(records.CLUSTER)
            if cluster is None:
                raise Unavailable("the swarm's records are not loaded yet")
            node = node_id(cluster.record.id, public)
            if self._authority.barred(node):
                raise Forbidden(f"node {node} was removed from this swarm: join with a new key")
            present = self._store.get(records.NODES, node)
            if present is not None:
                role = present.record.role
            certificate = await self._authority.sign(message.csr, node, role, message.advertise or seen)
            now = self._clock.now()
            record = NodeRecord(created=now, updated=now, role=role, availability=availability)
            try:
                if present is None:
                    await self._store.commit(
                        [Put(records.NODES, node, record)],
                        [
                            Compare(records.NODES, node),
                            Compare(records.CLUSTER, "", cluster.revision),
                            Compare(records.CLAIMS, records.barred_claim(node)),
                        ],
                    )
            except Stale:
                role = await self._role(message.token)
                continue
            return Joined(
                seq=message.seq,
                node=node,
                swarm=cluster.record.id,
                certificate=certificate,
                root=self._authority.trusted(),
                role=role.label,
                managers=self.managers(),
                seen=seen,
                epoch=cluster.record.epoch,
            )
        raise Unavailable("the swarm's settings change too often: try again")

    async def _role(self, token: str) -> Role:
        """The role of a token. The cache may be behind another manager's rotation."""
        try:
            return self._authority.role_of(token)
        except InvalidParameter:
            await self._store.current()
            return self._authority.role_of(token)

    async def renew(self, message: messages.Renew, identity: Identity | None, seen: str) -> Renewed:
        """A new certificate in the role that the record wishes.

        Raises Forbidden for a removed node and for a proof that does not hold, Unavailable for a
        manager whose demotion is under way.
        """
        if identity is None:
            identity = await self._expired(message)
        await self._store.current()
        await self._authority.admit(identity)
        node = identity.node
        role = self._wish(node)
        if role is None:
            raise Forbidden(f"node {node} is not part of this swarm: it was removed")
        if role is Role.WORKER and identity.role is Role.MANAGER and await self.members.of(node) is not None:
            raise Unavailable(f"node {node} is being demoted: its member of etcd is not removed yet")
        data = await self._noted(identity)
        address = message.advertise or data.manager_address or seen
        return Renewed(
            seq=message.seq,
            certificate=await self._authority.sign(message.csr, node, role, address),
            root=self._authority.trusted(),
            role=role.label,
        )

    async def _expired(self, message: messages.Renew) -> Identity:
        """The identity of a node whose certificate has expired. The cache may be behind another
        manager's rotation. A request without one comes from a node whose valid certificate the
        listener has not recognized.
        """
        if not message.certificate:
            raise Forbidden(FOREIGN)
        try:
            return self._authority.expired(message.csr, message.certificate, message.signature)
        except Forbidden:
            if reason := await self._store.current():
                raise Unavailable(reason) from None
            return self._authority.expired(message.csr, message.certificate, message.signature)

    async def _noted(self, identity: Identity) -> NodeData:
        """The record of a node that asks for a certificate, in which it is noted during a rotation.
        Raises Forbidden for a removed node.
        """
        node = identity.node
        for _ in range(ATTEMPTS):
            known, entry = self._store.get(records.NODES, node), self._store.get(records.NODE_DATA, node)
            if known is None:
                raise Forbidden(f"node {node} is not part of this swarm: it was removed")
            before = entry.record if entry is not None else None
            data = roots.noted(self._authority.cluster, identity.certificate, before)
            if data == (before or NodeData()):
                return data
            try:
                await self._store.commit(
                    [Put(records.NODE_DATA, node, data)],
                    [
                        Compare(records.NODES, node, known.created, by_creation=True),
                        Compare(records.NODE_DATA, node, entry.revision if entry is not None else 0),
                    ],
                )
                return data
            except Stale:
                continue
        raise Unavailable(f"the record of node {node} changed at each attempt")

    def managers(self) -> tuple[Peer, ...]:
        """The managers that are present."""
        present = self._store.all(records.MANAGERS)
        return tuple(Peer(node=node, address=entry.record.address) for node, entry in sorted(present.items()))

    # --- managers ---------------------------------------------------------------------------------

    @whole
    async def leave(self, node: str, *, force: bool) -> None:
        """Remove the member of a manager that leaves the swarm. It is a worker before that, so that
        its record may be removed, and the leader finishes what is cut here.

        Raises WrongState when quorum would be lost, unless `force`.
        """
        if not force and (reason := await self.members.why_not(node)):
            raise WrongState(f"node {node} cannot leave: it would result in a loss of quorum: {reason}")
        for _ in range(ATTEMPTS):
            entry = self._store.get(records.NODES, node)
            if entry is None or entry.record.role is Role.WORKER:
                break
            record = msgspec.structs.replace(entry.record, role=Role.WORKER, updated=self._clock.now())
            try:
                await self._store.commit(
                    [Put(records.NODES, node, record)], [Compare(records.NODES, node, entry.revision)]
                )
                break
            except Stale:
                continue
        await self.members.remove(node, force=force)


def node_id(swarm: str, public: bytes) -> str:
    """The id of the node whose first key is `public` (DER): 128 bits, 25 characters."""
    found = hashlib.sha256(b"engined-swarm/1 node\0" + swarm.encode() + b"\0" + public).digest()
    return base36(int.from_bytes(found[:16], "big"), ID_LENGTH)


def _certified(identity: Identity | None, role: Role) -> Identity:
    if identity is None or identity.role is not role:
        raise Forbidden(f"this needs the certificate of a {role.label}")
    return identity


# --- the asking side ------------------------------------------------------------------------------


async def join_members(root: Path, peers: Sequence[Peer], peer_url: str) -> MemberAdded:
    """Have this node added as a learner by one of `peers`.

    `root` has the files of a manager. Raises what the managers refuse with, and ServerError when
    none of them answers.
    """
    return await _ask(root, peers, messages.AddMember(peer_url=peer_url), ADDING)  # type: ignore[return-value]


async def promoted(root: Path, peers: Sequence[Peer], member: int) -> None:
    """Wait until this node's learner votes.

    Raises NotFound when the managers have removed it: then it must be added again.
    """
    await _ask(root, peers, messages.PromoteMember(member=member), PROMOTING)


async def removed(root: Path, peers: Sequence[Peer], *, force: bool = False) -> None:
    """Have this node's member removed by another manager, because it leaves.

    Raises WrongState when quorum would be lost.
    """
    await _ask(root, peers, messages.RemoveMember(force=force), LEAVING)


async def _ask(root: Path, peers: Sequence[Peer], message: Message, limit: float) -> Message:
    """The answer of the first of `peers` that gives one. While they answer that it may succeed
    later, or do not answer, they are asked again, until `limit` seconds are over.
    """
    credentials = Credentials(root)
    loop = asyncio.get_running_loop()
    ends = loop.time() + limit
    connections: dict[str, Connection] = {}
    try:
        while True:
            troubles = []
            for peer in peers:
                try:
                    connection = connections.get(peer.address)
                    if connection is None or connection.closed.is_set():
                        connection = connections[peer.address] = await dial(peer.address, credentials.client())
                    answer: Message = await connection.ask(message, timeout=ASK)
                    return answer
                except (OSError, TimeoutError) as error:
                    troubles.append(f"{peer.address}: {words(error)}")
                except Unavailable as error:
                    troubles.append(f"{peer.address}: {error.message}")
                    break  # it decides as well as any other
            if loop.time() > ends:
                raise ServerError(f"no manager has carried it out: {'; '.join(troubles) or 'none is known'}")
            await asyncio.sleep(PAUSE)
    finally:
        for connection in connections.values():
            await connection.close()
