"""The facade: the modules that a daemon outside of a swarm loads, and its replies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cluster import membership
from engine.cluster.cluster import Cluster
from engine.cluster.membership import Membership
from engine.cluster.phases import Phase
from engine.cluster.state import State
from engine.config import Config
from engine.errors import InvalidParameter, NoSwarm
from engine.wire.swarm import InitRequest
from tests.support.fakes.overlays import MemoryRecords, fake_networks

LOADED = """
import engine.daemon, sys
print(*(name for name in sys.modules if name.startswith(("engine.manager", "engine.cluster.", "engine.wire."))))
print(*(name for name in ("cryptography", "h2", "engine.rpc") if name in sys.modules))
"""


def test_a_daemon_outside_of_a_swarm_loads_the_facade_alone() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    ours, packages = done.stdout.split("\n")[:2]
    loaded = set(ours.split())
    assert {name for name in loaded if name.startswith("engine.cluster.")} == {
        "engine.cluster.cluster",
        "engine.cluster.parts",
        "engine.cluster.phases",
    }
    assert not {name for name in loaded if name.startswith("engine.manager")}
    assert not loaded & {f"engine.wire.{name}" for name in ("swarm", "nodes", "services", "tasks", "secrets")}
    assert packages == ""


def test_outside_of_a_swarm(tmp_path: Path) -> None:
    parts: Any = SimpleNamespace(config=Config(root=tmp_path, run=tmp_path))
    cluster = Cluster(parts)

    async def test() -> None:
        cluster.start()
        assert (cluster.state, cluster.header, cluster.is_manager) == ("inactive", "inactive", False)
        assert not cluster.active
        assert await cluster.info() == {"LocalNodeState": "inactive"}
        with pytest.raises(NoSwarm, match="not a swarm manager"):
            await cluster.call("nodes.list")
        for stream in (cluster.watch, lambda: cluster.follow("service", "web", {})):
            with pytest.raises(NoSwarm, match="not a swarm manager"):
                stream()
        with pytest.raises(NoSwarm, match="not part of a swarm"):
            await cluster.leave(force=True)
        await cluster.close(stop=True)

    asyncio.run(test())


def test_a_verb_that_fails_leaves_another_one_its_membership(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients at the same time: the first is refused, and the second has its membership."""
    tries = asyncio.Semaphore(0)

    class Slow(Membership):
        async def init(self, request: InitRequest) -> str:
            await tries.acquire()
            if request.listen_addr:
                self._state = State(phase=Phase.MANAGER)
                return "n1"
            raise InvalidParameter("ListenAddr")

    monkeypatch.setattr(membership, "Membership", Slow)
    parts: Any = SimpleNamespace(
        config=Config(root=tmp_path, run=tmp_path),
        networks=fake_networks(),
        records=MemoryRecords(),
        attachments=SimpleNamespace(lender=None),
    )
    cluster = Cluster(parts)

    async def test() -> None:
        first = asyncio.ensure_future(cluster.init(InitRequest()))
        second = asyncio.ensure_future(cluster.init(InitRequest(listen_addr="eth0")))
        await asyncio.sleep(0)
        tries.release()
        with pytest.raises(InvalidParameter):
            await first
        tries.release()
        assert await second == "n1"
        assert cluster.is_manager
        assert parts.attachments.lender is not None

    asyncio.run(test())
