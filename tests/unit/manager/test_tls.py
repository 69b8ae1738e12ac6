"""The files of a node's identity: every crash leaves one whole pair, and contexts follow them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.manager import keys, tls
from engine.manager.certificates import Root, Subject, new_root, request_key
from engine.manager.tls import Credentials, split
from engine.swarm_session.clock import SECOND, SystemClock
from engine.swarm_session.states import Role

NOW = SystemClock().now()
ROOT = Root(*new_root(NOW))


def pair(node: str) -> tuple[str, str]:
    key = keys.new_key()
    public = request_key(keys.request(key))
    subject = Subject(node, Role.MANAGER, "swarm")
    return ROOT.issue(public, subject, address="", now=NOW, lifetime=3600 * SECOND), key


def node_of(credentials: Credentials) -> str:
    """The node of certificate and key, which fit together."""
    return str(keys.check(credentials.key_file.read_text(), credentials.certificate())["node"])


def test_files_are_private_and_whole(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    assert credentials.roots() == credentials.certificate() == ""
    with pytest.raises(FileNotFoundError):
        credentials.client()
    certificate, key = pair("one")
    credentials.install(roots=ROOT.pem, certificate=certificate, key=key)
    assert node_of(credentials) == "one" and credentials.roots() == ROOT.pem
    assert credentials.key_file.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["ca.crt", "node.crt", "node.key"]


@pytest.mark.parametrize("calls", range(12))
def test_a_crash_during_install_leaves_one_pair(tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies before its `calls`-th change of a name."""
    credentials = Credentials(tmp_path)
    first, second = pair("one"), pair("two")
    credentials.install(roots=ROOT.pem, certificate=first[0], key=first[1])

    class Crash(BaseException):
        pass

    left = calls
    real_rename, real_path_rename = os.rename, Path.rename

    def rename(*arguments: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash
        return (real_path_rename if isinstance(arguments[0], Path) else real_rename)(*arguments)  # type: ignore

    monkeypatch.setattr(tls.os, "rename", rename)
    monkeypatch.setattr(Path, "rename", rename)
    crashed = False
    try:
        credentials.install(certificate=second[0], key=second[1])
    except Crash:
        crashed = True
    monkeypatch.undo()
    restarted = Credentials(tmp_path)
    restarted.mend()
    assert node_of(restarted) == ("one" if crashed and calls < 2 else "two")
    restarted.client()
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".new", ".install"))]


def test_contexts_are_made_again_when_the_files_have_changed(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    first, second = pair("one"), pair("two")
    credentials.install(roots=ROOT.pem, certificate=first[0], key=first[1])
    context = credentials.client()
    assert credentials.client() is context
    Credentials(tmp_path).install(certificate=second[0], key=second[1])
    assert credentials.client() is not context


def test_files_that_do_not_fit_yet_change_nothing(tmp_path: Path) -> None:
    """Another process is between its two renames."""
    credentials = Credentials(tmp_path)
    certificate, key = pair("one")
    credentials.install(roots=ROOT.pem, certificate=certificate, key=key)
    context, server = credentials.client(), credentials.server()
    credentials.key_file.write_text(keys.new_key())
    assert credentials.client() is context and credentials.server() is server
    credentials.install(certificate=certificate, key=key)
    assert credentials.client() is not context


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1:2378", ("10.0.0.1", 2378)),
        ("10.0.0.1", ("10.0.0.1", 2377)),
        ("[fd00::1]:1", ("fd00::1", 1)),
        ("[fd00::1]", ("fd00::1", 2377)),
        ("fd00::1", ("fd00::1", 2377)),
        ("host", ("host", 2377)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert split(address) == expected


@pytest.mark.parametrize("address", ["", ":1", "x:0", "x:65536", "x:1a", "x:-1", "[::1]x", "[::1]:", "x:²"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConnectionError) if address != "[::1]:" else pytest.raises(AssertionError):
        split(address)
        raise AssertionError
