"""What etcd is given: timings, flags, versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ServerError
from engine.manager.member import Member, flags, split_address, timings
from engine.manager.versions import check
from engine.wire.swarm import RaftConfig


@pytest.mark.parametrize(
    ("election", "heartbeat", "expected"),
    [
        (0, 0, (100, 1000)),  # the defaults are etcd's own
        (3, 1, (100, 1000)),
        (10, 1, (100, 1000)),
        (20, 1, (100, 2000)),
        (4, 3, (200, 1000)),  # five heartbeats fit into a timeout
        (1000, 1, (100, 50_000)),
        (1, 1, (66, 333)),
    ],
)
def test_timings(election: int, heartbeat: int, expected: tuple[int, int]) -> None:
    assert timings(RaftConfig(election_tick=election, heartbeat_tick=heartbeat)) == expected


@given(st.integers(1, 1 << 31), st.integers(1, 1 << 31))
def test_etcd_takes_any_timings(election: int, heartbeat: int) -> None:
    beat, timeout = timings(RaftConfig(election_tick=election, heartbeat_tick=heartbeat))
    assert beat >= 10 and 5 * beat <= timeout <= 50_000


def given_flags(**more: object) -> dict[str, str]:
    arguments = flags(
        node="n1",
        data=Path("/root/etcd"),
        directory=Path("/root"),
        listen_url="https://10.0.0.1:7946",
        peer_url="https://192.0.2.1:7946",
        **{"raft": RaftConfig(), **more},  # type: ignore[arg-type]
    )
    return dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)


def test_flags_of_a_new_cluster() -> None:
    found = given_flags()
    assert found["initial-cluster"] == "n1=https://192.0.2.1:7946"
    assert found["initial-cluster-state"] == "new"
    assert (found["snapshot-count"], found["max-snapshots"]) == ("10000", "1")
    assert found["listen-client-urls"] == "unix://etcd:0"
    assert found["peer-client-cert-auth"] == "true"
    assert "force-new-cluster" not in found


def test_flags_of_settings_and_of_a_joining_member() -> None:
    raft = RaftConfig(snapshot_interval=500, keep_old_snapshots=3)
    found = given_flags(raft=raft, initial_cluster="n0=https://a:1,n1=https://192.0.2.1:7946", force=True)
    assert found["initial-cluster"] == "n0=https://a:1,n1=https://192.0.2.1:7946"
    assert found["initial-cluster-state"] == "existing"
    assert (found["snapshot-count"], found["max-snapshots"]) == ("500", "4")
    assert "force-new-cluster" in found


@pytest.mark.parametrize("version", ["3.4.18", "3.4.23", "3.5.3", "3.5.16", "3.6.0"])
def test_versions(version: str) -> None:
    found = check(f"etcd Version: {version}\nGit SHA: 1\nGo Version: go1.19.8\n")
    assert ".".join(map(str, found)) == version


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("3.3.25", "3.3.25 is too old"),
        ("3.4.17", "3.4.17 is too old"),
        ("3.5.0", "loses data"),
        ("3.5.2", "loses data"),
        ("4.0.0", "not supported"),
    ],
)
def test_versions_that_are_refused(version: str, words: str) -> None:
    with pytest.raises(ServerError, match=words):
        check(f"etcd Version: {version}")


def test_an_unknown_version() -> None:
    with pytest.raises(ServerError, match="unknown version"):
        check("command not found")


def test_addresses() -> None:
    assert split_address("10.0.0.1:2377") == ("10.0.0.1", 2377)
    assert split_address("[fd00::1]:2377") == ("fd00::1", 2377)


async def test_the_port_of_peers_is_kept(tmp_path: Path) -> None:
    def member(port: int) -> Member:
        address = f"127.0.0.1:{port}"
        return Member(tmp_path, tmp_path, node="n1", listen=address, advertise=address, raft=RaftConfig())

    first = member(33_000)
    assert first.peer_url == "https://127.0.0.1:38569"
    assert not first.exists
    assert member(34_000).peer_url == first.peer_url
    first.wipe()
    high = member(65_000).peer_url  # 70569 is no port: any free one
    assert high.startswith("https://127.0.0.1:") and high != first.peer_url
    assert member(65_000).peer_url == high
