"""The systemd cgroup driver: names, paths and the choice of the driver. What systemd itself does is
in tests/system/test_scopes.py.
"""

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ServerError
from engine.runtime import cgroups, scopes

ID = "a1" * 32


@pytest.mark.parametrize(
    ("parent", "path"),
    [
        ("", f"/system.slice/docker-{ID}.scope"),
        ("user.slice", f"/user.slice/docker-{ID}.scope"),
        ("a-b-c.slice", f"/a.slice/a-b.slice/a-b-c.slice/docker-{ID}.scope"),
        ("-.slice", f"/docker-{ID}.scope"),
    ],
)
def test_the_cgroup_of_a_scope_follows_from_its_names(parent: str, path: str) -> None:
    assert cgroups.path(ID, parent, "systemd") == path
    oci_path = cgroups.oci_path(ID, parent, "systemd")
    assert oci_path == f"{parent or 'system.slice'}:docker:{ID}"
    assert cgroups.of_oci_path(ID, oci_path) == path


@pytest.mark.parametrize("parent", ["", "x", "/a/b", "a:b:c"])
def test_the_path_of_cgroupfs_is_its_own(parent: str) -> None:
    path = cgroups.oci_path(ID, parent, "cgroupfs")
    assert path == cgroups.path(ID, parent) == cgroups.of_oci_path(ID, path)
    assert cgroups.of_oci_path(ID, "") == f"/engined/{ID}"


def test_an_id_is_read_from_the_name_of_a_scope() -> None:
    assert scopes.container_id(scopes.scope(ID)) == ID
    for name in (ID, "ssh.service", "docker-abc.scope", f"docker-{ID}.slice"):
        assert scopes.container_id(name) == name


@pytest.mark.parametrize(
    ("reason", "away"),
    [
        ("sd-bus call: Message recipient disconnected from message bus without replying", True),
        ("cannot open sd-bus: Connection refused", True),
        (f"sd-bus call: Unit docker-{ID}.scope already exists.", False),
        ("sd-bus call: Cannot set property AllowedCPUs", False),
        ("open executable: Permission denied", False),
    ],
)
def test_a_runtime_says_that_systemd_was_away(reason: str, away: bool) -> None:
    assert scopes.was_away(reason) is away


def test_a_scope_is_known_by_its_path() -> None:
    assert scopes.is_scope(cgroups.path(ID, "a-b.slice", "systemd"))
    for path in (cgroups.path(ID, "", "cgroupfs"), f"/system.slice/docker-{ID}.scope/x", "/a/docker-abc.scope", ""):
        assert not scopes.is_scope(path)


@pytest.mark.parametrize(
    "parent", ["a.slice", "-.slice", "a-b.slice", "machine_1.slice", r"a\x2db.slice", "x" * 249 + ".slice"]
)
def test_slices_are_parents(parent: str) -> None:
    scopes.check_parent(parent)


@pytest.mark.parametrize(
    "parent",
    [
        *(".slice", "slice", "a", "/a.slice", "a/b.slice", "a.slice/", "a--b.slice", "-a.slice", "a-.slice"),
        *("--.slice", "a b.slice", "a.slice\n", "ä.slice", "a.scope", "x" * 250 + ".slice"),
    ],
)
def test_other_parents_are_refused_with_dockers_words(parent: str) -> None:
    with pytest.raises(ValueError, match="cgroup-parent for systemd cgroup should be a valid slice named as"):
        scopes.check_parent(parent)


@given(st.text(max_size=40))
def test_a_parent_that_is_taken_has_a_directory(text: str) -> None:
    try:
        scopes.check_parent(text)
    except ValueError:
        return
    found = scopes.directory(text)
    assert found == "" if text == "-.slice" else found.rpartition("/")[2] == text
    assert all(each.endswith(".slice") for each in found.split("/")[1:])


@pytest.mark.parametrize(
    ("options", "mode", "booted", "chosen"),
    [
        ((), "v2", True, "systemd"),
        ((), "v2", False, "cgroupfs"),
        ((), "v1", True, "cgroupfs"),
        ((), "hybrid", True, "cgroupfs"),
        (("native.cgroupdriver=cgroupfs",), "v2", True, "cgroupfs"),
        (("native.cgroupdriver=systemd",), "v1", True, "systemd"),
        (("native.cgroupdriver=cgroupfs", "native.cgroupdriver=systemd"), "v2", True, "systemd"),
    ],
)
def test_the_driver_is_dockerds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], mode: str, booted: bool, chosen: str
) -> None:
    monkeypatch.setattr(scopes, "BOOTED", tmp_path if booted else tmp_path / "missing")
    monkeypatch.setattr(scopes, "BUS", tmp_path / "bus")
    with socket.socket(socket.AF_UNIX) as bus:
        bus.bind(str(scopes.BUS))
        bus.listen(0)
        for _ in range(3):  # the third does not fit into its queue
            assert scopes.driver(options, mode) == chosen
    assert scopes.driver((), "v2") == "cgroupfs", "nothing listens any more"


def test_a_driver_that_the_host_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "BOOTED", tmp_path / "missing")
    with pytest.raises(ServerError, match="systemd is not process 1 of this host"):
        scopes.driver(("native.cgroupdriver=systemd",), "v2")
    monkeypatch.setattr(scopes, "BOOTED", tmp_path)
    monkeypatch.setattr(scopes, "BUS", tmp_path / "missing")
    assert scopes.driver((), "v2") == "cgroupfs"
    with pytest.raises(ServerError, match=r"D-Bus does not run .*: apt install dbus"):
        scopes.driver(("native.cgroupdriver=systemd",), "v2")
