"""Members of etcd with the certificates of a swarm: which peers may connect."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

from engine.errors import ServerError
from engine.manager import ca, cfssl, keys
from engine.manager.ca import Founding
from engine.manager.certificates import Root, Subject
from engine.manager.kv import EtcdError
from engine.manager.member import Member
from engine.manager.tls import Credentials
from engine.swarm_session.clock import SystemClock
from engine.swarm_session.states import Role
from engine.wire.swarm import RaftConfig, SwarmSpec


async def identity(founding: Founding, directory: Path, node: str, role: Role, address: str) -> None:
    """The files of one more node of this swarm."""
    key, root = keys.new_key(), founding.cluster.root
    certificate = await ca._issue(
        Root(root, founding.ca_key.key),
        founding.cluster.spec.ca_config,
        keys.request(key),
        Subject(node, role, founding.cluster.id),
        address=address,
        now=SystemClock().now(),
        trusted=root,
        external=cfssl.sign,
    )
    Credentials(directory).install(roots=root, certificate=certificate, key=key)


def member(base: Path, node: str, address: str) -> Member:
    return Member(base / node, base / f"run-{node}", node=node, listen=address, advertise=address, raft=RaftConfig())


def fetches(directory: Path, url: str) -> bool:
    """Returns True if TLS with this identity leads to an answer of etcd's peer side."""
    host, _, port = url.removeprefix("https://").rpartition(":")
    files = {"--cacert": "ca.crt", "--cert": "node.crt", "--key": "node.key"}
    given = [word for option, name in files.items() for word in (option, str(directory / name))]
    resolve = ["--resolve", f"swarm-manager:{port}:{host}"]
    done = subprocess.run(
        ["curl", "-sf", "--http1.1", "--max-time", "10", *given, *resolve, f"https://swarm-manager:{port}/members"],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0 and b"peerURLs" in done.stdout


def test_a_manager_that_connects_from_another_address(tmp_path: Path) -> None:
    """On loopback, every connection to 127.0.0.1 comes from 127.0.0.1, which is not the second
    manager's advertised address. A worker's certificate is refused all the same."""

    async def story() -> None:
        for name in ("a", "b", "w"):
            (tmp_path / name).mkdir()
            (tmp_path / f"run-{name}").mkdir()
        founding = await ca.found(SwarmSpec(), SystemClock(), node="a", address="127.0.0.1:2377")
        Credentials(tmp_path / "a").install(
            roots=founding.cluster.root, certificate=founding.certificate, key=founding.key
        )
        await identity(founding, tmp_path / "b", "b", Role.MANAGER, "127.0.0.2:2377")
        await identity(founding, tmp_path / "w", "w", Role.WORKER, "127.0.0.3:2377")
        first, second = member(tmp_path, "a", "127.0.0.1:2377"), member(tmp_path, "b", "127.0.0.2:2377")
        etcd = await first.start()
        try:
            added = await etcd.add_learner(second.peer_url)
            await second.start(initial_cluster=f"a={first.peer_url},b={second.peer_url}")
            for attempt in range(100):
                try:
                    await etcd.promote(added.id)
                    break
                except (EtcdError, ServerError):
                    assert attempt < 99
                    await asyncio.sleep(0.1)
            assert sorted((each.name, each.learner) for each in await etcd.members()) == [("a", False), ("b", False)]
            assert await asyncio.to_thread(fetches, tmp_path / "b", first.peer_url)
            assert not await asyncio.to_thread(fetches, tmp_path / "w", first.peer_url)
        finally:
            await second.stop()
            await first.stop()

    asyncio.run(story())
