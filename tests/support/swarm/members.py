"""Real etcd members for tests, with the certificates of one swarm."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path

from engine.manager import keys
from engine.manager.certificates import Root, Subject, new_root, request_key
from engine.manager.kv import EtcdError
from engine.manager.member import Member
from engine.swarm_session.states import Role
from engine.wire.swarm import RaftConfig

FAST = RaftConfig(election_tick=1, heartbeat_tick=1)
"""A third of the usual election timeout, so that tests of failures are short."""

_ports = itertools.count(12_000 + os.getpid() % 1000 * 4)


class Swarm:
    """A root certificate, and directories of members below one that is removed at the end."""

    def __init__(self, raft: RaftConfig = FAST, directory: Path | None = None) -> None:
        self.directory = directory or Path(tempfile.mkdtemp(prefix="swarm-", dir="/tmp"))
        self.raft = raft
        self.root = Root(*new_root(time.time_ns()))
        self.members: list[Member] = []

    def member(self, node: str, *, address: str = "127.0.0.1", port: int = 0, role: Role = Role.MANAGER) -> Member:
        """A member that has not started, or another one over the same directories."""
        root, run = self.directory / node / "root", self.directory / node / "run"
        if not root.exists():
            root.mkdir(parents=True)
            run.mkdir()
            self.certify(node, address, role=role)
        port = port or next(_ports)
        listen = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        member = Member(root, run, node=node, listen=listen, advertise=listen, raft=self.raft)
        self.members.append(member)
        return member

    def certify(self, node: str, address: str, *, role: Role = Role.MANAGER, root: Root | None = None) -> None:
        directory = self.directory / node / "root"
        key = keys.new_key()
        certificate = (root or self.root).issue(
            request_key(keys.request(key)),
            Subject(node, role, "swarm"),
            address=address,
            now=time.time_ns(),
            lifetime=3600 * 1_000_000_000,
        )
        (directory / "node.key").write_text(key)
        (directory / "node.crt").write_text(certificate)
        (directory / "ca.crt").write_text(self.root.pem)

    async def close(self) -> None:
        for member in self.members:
            await member.stop()
            await member.etcd.close()
        shutil.rmtree(self.directory, ignore_errors=True)


async def joined(member: Member, through: Member) -> None:
    """Start `member` as a learner of the cluster of `through`, and let it vote."""
    added = await through.etcd.add_learner(member.peer_url)
    known = await through.etcd.members()
    names = ",".join(f"{each.name or member.node}={each.peer_url}" for each in known)
    await member.start(initial_cluster=names)
    for _ in range(200):
        try:
            await through.etcd.promote(added.id)
            break
        except EtcdError:
            await asyncio.sleep(0.05)
    else:
        raise AssertionError("the learner does not catch up")
    for _ in range(200):
        if not (await member.etcd.status()).learner:
            return
        await asyncio.sleep(0.02)
