"""The files of a membership, cut at each moment of an exchange."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.phases import Phase
from engine.cluster.state import Directory, State, new_id
from engine.errors import ServerError
from engine.swarm_session.messages import Peer
from tests.unit.cluster.world import KEY, ROOT, certificate


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    made = Directory(tmp_path / "swarm")
    made.make()
    return made


def test_no_state_is_no_swarm(tmp_path: Path) -> None:
    missing = Directory(tmp_path / "swarm")
    assert missing.load() == State()
    assert missing.certificate() is None and not missing.has_member()
    missing.settle()
    missing.erase()


def test_a_state_comes_back(directory: Directory) -> None:
    kept = State(
        phase=Phase.JOINING,
        listen="0.0.0.0:2377",
        remotes=("10.0.0.9:2377",),
        token="t",
        managers=(Peer(node="m", address="10.0.0.9:2377"),),
        epoch=3,
        request='{"Spec":{}}',
    )
    directory.save(kept)
    assert directory.load() == kept
    assert (directory.path / "state.json").stat().st_mode & 0o777 == 0o600
    assert directory.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"phase":"gone"}', b"\xff"])
def test_a_state_that_is_none(text: bytes, directory: Directory) -> None:
    (directory.path / "state.json").write_bytes(text)
    with pytest.raises(ServerError, match=r"state\.json"):
        directory.load()


def test_fields_of_a_later_version_are_ignored(directory: Directory) -> None:
    (directory.path / "state.json").write_bytes(b'{"phase":"worker","node":"n","later":1}')
    assert directory.load() == State(phase=Phase.WORKER, node="n")


@pytest.mark.parametrize("renames", range(2))
def test_an_exchange_that_was_cut(renames: int, directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once both new files are there, the next daemon finishes the exchange."""
    directory.install(certificate("n1", "worker"), KEY, ROOT)
    new = certificate("n1", "manager")
    real, done = os.rename, 0

    def rename(source: Path, target: Path) -> None:
        nonlocal done
        if str(target).endswith(("node.key", "node.crt")):
            done += 1
            if done > renames:
                raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr("os.rename", rename)
    with pytest.raises(KeyboardInterrupt):
        directory.install(new, "new key", ROOT)
    monkeypatch.undo()
    again = Directory(directory.path)
    again.settle()
    assert (again.certificate_text(), again.key()) == (new, "new key")
    assert not list(directory.path.glob("*.new"))


def test_a_key_without_a_certificate_changes_nothing(directory: Directory) -> None:
    directory.install(certificate("n1", "worker"), KEY, ROOT)
    directory.keep_request("new key", "csr")
    again = Directory(directory.path)
    again.settle()
    assert again.key() == KEY


def test_the_request_under_way_is_kept(directory: Directory) -> None:
    assert directory.kept_request() is None
    directory.keep_request("KEY\n", "-----BEGIN CERTIFICATE REQUEST-----\nCSR\n")
    assert Directory(directory.path).kept_request() == ("KEY\n", "-----BEGIN CERTIFICATE REQUEST-----\nCSR\n")
    directory.install(certificate("n1", "worker"), "KEY\n", ROOT)
    assert directory.kept_request() is None
    assert directory.key() == "KEY\n" and directory.roots() == ROOT
    assert (directory.path / "node.key").stat().st_mode & 0o777 == 0o600


def test_what_is_no_certificate_changes_nothing(directory: Directory) -> None:
    directory.install(certificate("n1", "worker"), KEY, ROOT)
    with pytest.raises(ServerError, match="not valid"):
        directory.install("none", "other", "other")
    assert directory.key() == KEY and directory.roots() == ROOT


def test_erase_ends_with_the_state(directory: Directory) -> None:
    directory.save(State(phase=Phase.LEAVING))
    (directory.path / "etcd" / "member").mkdir(parents=True)
    (directory.path / "link").symlink_to("/")
    directory.erase()
    assert not directory.path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("place", ["etcd", "etcd/member", "."])
def test_mount_points_are_emptied_and_stay(directory: Directory, place: str) -> None:
    directory.save(State(phase=Phase.LEAVING))
    mounted = directory.path / place
    (directory.path / "etcd" / "member").mkdir(parents=True)
    with bound(mounted):
        (directory.path / "etcd" / "member" / "wal").mkdir(parents=True)
        (directory.path / "etcd" / "lost+found").mkdir()
        assert directory.has_member()
        directory.remove_member()
        assert not list(directory.path.rglob("wal")) and not directory.has_member()
        directory.install(certificate("n1", "worker"), KEY, ROOT)
        directory.erase()
        assert mounted.is_dir() and not list(mounted.iterdir())
        assert directory.load() == State() and not directory.certificate_text()
        directory.make()
    directory.erase()
    assert not directory.path.exists()


@contextlib.contextmanager
def bound(path: Path) -> Iterator[None]:
    """The directory is a mount point. Its mount has the same content."""
    subprocess.run(["mount", "--bind", path, path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@given(st.integers(0, 2**128 - 1))
def test_ids(number: int) -> None:
    found = new_id()
    assert len(found) == 25 and found.isalnum() and found == found.lower()
