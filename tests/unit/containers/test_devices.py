"""Edits of CDI specifications in config.json, and which limits of block devices an update takes
away."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.containers import devices
from engine.errors import InvalidParameter, NotFound
from engine.runtime.cdi import NONE, DeviceNode, Edits, Hook, Mount
from engine.runtime.users import Identity
from engine.wire import oci
from engine.wire.containers import DeviceMapping, HostConfig, ThrottleDevice, WeightDevice
from tests.unit.containers.test_spec import built, mounts_of

ROOT = oci.User(uid=0, gid=0)
NULL = (os.major(os.stat("/dev/null").st_rdev), os.minor(os.stat("/dev/null").st_rdev))


def nodes(*given: DeviceNode, user: oci.User = ROOT) -> list[tuple[oci.Device, oci.DeviceRule | None]]:
    return list(devices.requested(Edits(device_nodes=given), user))


def test_a_node_is_as_on_the_host_where_the_edit_does_not_say() -> None:
    ((device, rule),) = nodes(DeviceNode(path="/dev/x", host_path="/dev/null"))
    assert (device.path, device.type, device.major, device.minor) == ("/dev/x", "c", *NULL)
    assert (device.uid, device.gid, device.file_mode) == (None, None, None)
    assert rule == oci.DeviceRule(allow=True, type="c", major=NULL[0], minor=NULL[1], access="rwm")
    ((device, rule),) = nodes(DeviceNode(path="/dev/null", type="c", permissions="r", file_mode=0o400))
    assert (device.file_mode, rule and rule.access) == (0o400, "r")


def test_a_node_that_the_edit_describes_whole() -> None:
    given = DeviceNode(path="/dev/not-here", type="u", major=4, minor=5, uid=6, gid=7)
    ((device, rule),) = nodes(given, user=oci.User(uid=1, gid=2))
    assert (device.type, device.major, device.minor, device.uid, device.gid) == ("c", 4, 5, 6, 7)
    assert rule is not None and rule.type == "c"
    ((device, rule),) = nodes(DeviceNode(path="/dev/pipe", type="p"))
    assert (device.type, rule) == ("p", None)


def test_the_owner_of_a_node_is_the_containers_user() -> None:
    ((device, _),) = nodes(DeviceNode(path="/dev/null"), user=oci.User(uid=1, gid=2))
    assert (device.uid, device.gid) == (1, 2)


def test_nodes_that_are_missing_or_of_another_type() -> None:
    with pytest.raises(NotFound, match="CDI device injection failed: /dev/not-here: no such file"):
        nodes(DeviceNode(path="/dev/not-here"))
    with pytest.raises(InvalidParameter, match="/dev/null is of type c, not b"):
        nodes(DeviceNode(path="/dev/null", type="b"))
    with pytest.raises(InvalidParameter, match="/etc/passwd is not a device node"):
        nodes(DeviceNode(path="/etc/passwd"))


def edited(edits: Edits, **fields: Any) -> Any:
    return built(identity=Identity(5, 6, (6, 7), "/"), edits=edits, **fields)


def test_edits_in_the_document(tmp_path: Path) -> None:
    edits = Edits(
        env=("A=new", "B=2"),
        device_nodes=(DeviceNode(path="/dev/x", host_path="/dev/null", permissions="r"),),
        mounts=(
            Mount(host_path=str(tmp_path), container_path="/usr/lib//vendor/", options=("ro", "bind")),
            Mount(host_path="tmpfs", container_path="/scratch", type="tmpfs", options=("size=1m",)),
            Mount(host_path="/lib", container_path="/etc/hosts"),
        ),
        hooks=(
            Hook(hook_name="createContainer", path="/one", args=("one", "a"), env=("C=1",), timeout=3),
            Hook(hook_name="createContainer", path="/two"),
            Hook(hook_name="poststop", path="/three"),
        ),
        additional_gids=(7, 8),
    )
    mapped = DeviceMapping(path_on_host="/dev/zero", path_in_container="/dev/x")
    document = edited(edits, devices=[mapped])
    assert {"A=new", "B=2"} < set(document["process"]["env"])
    assert document["process"]["user"]["additionalGids"] == [6, 7, 8]
    found = mounts_of(document)
    assert found["/usr/lib/vendor"]["options"][:2] == ["bind", "ro"]
    assert (found["/scratch"]["type"], found["/scratch"]["options"]) == ("tmpfs", ["size=1m"])
    assert found["/etc/hosts"]["source"] == "/lib", "it replaces the engine's own"
    (node,) = document["linux"]["devices"]
    assert (node["path"], node["major"], node["minor"]) == ("/dev/x", *NULL), "it replaces the one that is mapped"
    assert document["linux"]["resources"]["devices"][-1]["access"] == "r"
    assert [hook["path"] for hook in document["hooks"]["createContainer"]] == ["/one", "/two"]
    assert document["hooks"]["createContainer"][0] == {
        "path": "/one",
        "args": ["one", "a"],
        "env": ["C=1"],
        "timeout": 3,
    }
    assert document["hooks"]["poststop"] == [{"path": "/three"}] and "prestart" not in document["hooks"]
    assert "hooks" not in edited(NONE)


@pytest.mark.parametrize("path", ["/proc/self", "/sys"])
def test_edits_mount_nothing_over_proc_and_sys(path: str) -> None:
    with pytest.raises(InvalidParameter):
        edited(Edits(mounts=(Mount(host_path="/lib", container_path=path),)))


def test_limits_that_an_update_takes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries with rate 0 are none. Devices that are gone are skipped."""

    def number(path: str, _field: str) -> tuple[int, int]:
        if path == "/dev/gone":
            raise NotFound(path)
        return 8, int(path[-1])

    monkeypatch.setattr(devices, "_block_device", number)

    def host(*limits: tuple[str, int]) -> HostConfig:
        return HostConfig(
            blkio_device_read_bps=[ThrottleDevice(path=path, rate=rate) for path, rate in limits],
            blkio_weight_device=[WeightDevice(path=path, weight=rate) for path, rate in limits],
        )

    before = host(("/dev/1", 5), ("/dev/2", 5), ("/dev/3", 0), ("/dev/gone", 5))
    after = host(("/dev/1", 6), ("/dev/2", 0))
    fields = ("blkio_weight_device", "blkio_device_read_bps")
    assert list(devices.lifted(before, after)) == [(field, 8, 2) for field in fields]
    assert list(devices.lifted(after, after)) == []
