from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.containers import security
from engine.errors import EngineError, InvalidParameter, NotFound
from engine.managed_plugins import spec
from engine.managed_plugins.record import PluginRecord
from engine.runtime import capabilities
from engine.runtime.cgroups import Cgroups
from engine.runtime.oci import Runtime
from engine.runtime.users import Identity
from engine.wire import oci
from engine.wire.plugins import PluginConfig, PluginMount, PluginSettings

ID = "c" * 64
V1 = Cgroups(mode="v1", controllers={"memory": "/nowhere"})
V2 = Cgroups(mode="v2", controllers={}, unified="/nowhere")


def place(**changes: Any) -> spec.Place:
    values: dict[str, Any] = {
        "rootfs": "/r",
        "sockets": Path("/run/e/plugins/c"),
        "logging": Path("/run/e/plugins/c.logging"),
        "netns": Path("/run/e/netns"),
        "identity": Identity(0, 0, (0,), "/root"),
        "runtime": Runtime(name="crun", path="/crun", version="", reason="", root="/run"),
        "cgroups": V2,
    }
    return spec.Place(**values | changes)


def record(settings: dict[str, Any] | None = None, **config: Any) -> PluginRecord:
    document = {"Interface": {"Types": ["docker.volumedriver/1.0"], "Socket": "p.sock"}, "Entrypoint": ["/p", "a"]}
    return PluginRecord(
        id=ID,
        name="p:latest",
        config=msgspec.convert(document | config, PluginConfig),
        settings=msgspec.convert(settings or {}, PluginSettings),
        chain_id="",
    )


def built(at: spec.Place | None = None, settings: dict[str, Any] | None = None, **config: Any) -> Any:
    """The document as the runtime reads it."""
    return msgspec.json.decode(oci.encode(spec.build(record(settings, **config), at or place())))


def mounts_of(document: Any) -> dict[str, Any]:
    return {mount["destination"]: mount for mount in document["mounts"]}


def namespaces_of(document: Any) -> set[str]:
    return {each["type"] for each in document["linux"]["namespaces"]}


def test_process() -> None:
    at = place(identity=Identity(5, 6, (6,), "/home"))
    process = built(at, {"Env": ["A=1", "PATH=/p"], "Args": ["b"]}, WorkDir="/w/./x")["process"]
    assert process["args"] == ["/p", "a", "b"]
    assert process["env"] == ["PATH=/p", "A=1", "HOME=/home"]
    assert process["cwd"] == "/w/x"
    assert process["user"] == {"uid": 5, "gid": 6, "additionalGids": [6]}
    assert "noNewPrivileges" not in process
    assert built()["process"]["cwd"] == "/"


def test_root_and_control_group() -> None:
    document = built()
    assert document["root"] == {"path": "/r"}
    assert document["linux"]["cgroupsPath"] == f"/engined/{ID}"


def test_confinement() -> None:
    document = built(Linux={"Capabilities": ["CAP_SYS_ADMIN", "NET_ADMIN"]})
    granted = [*capabilities.granted(("SYS_ADMIN", "NET_ADMIN"))]
    found = document["process"]["capabilities"]
    assert found == {"bounding": granted, "effective": granted, "permitted": granted}
    linux = document["linux"]
    assert linux["maskedPaths"] == list(security.MASKED_PATHS)
    assert linux["readonlyPaths"] == list(security.READONLY_PATHS)

    def allowed(filter_: Any) -> set[str]:
        return {
            name
            for rule in filter_["syscalls"]
            if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("args")
            for name in rule["names"]
        }

    assert "mount" in allowed(linux["seccomp"])
    assert "mount" not in allowed(built()["linux"]["seccomp"])


def test_apparmor_denies_mounts_so_a_plugin_that_mounts_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec.apparmor, "default", lambda: "engined-default")
    assert built()["process"]["apparmorProfile"] == "engined-default"
    assert "apparmorProfile" not in built(Linux={"Capabilities": ["CAP_SYS_ADMIN"]})["process"]


def test_capabilities_are_checked() -> None:
    with pytest.raises(InvalidParameter, match=r'Linux\.Capabilities: unknown capability: "CAP_FLY"'):
        built(Linux={"Capabilities": ["CAP_FLY"]})


def test_namespaces() -> None:
    own = {"mount", "uts", "network", "pid", "ipc", "cgroup"}
    assert namespaces_of(built()) == own
    assert namespaces_of(built(place(cgroups=V1))) == own - {"cgroup"}
    assert namespaces_of(built(PidHost=True)) == own - {"pid"}
    assert namespaces_of(built(IpcHost=True)) == own - {"ipc"}
    for kind in ("", "none", "null", "bridge"):
        assert namespaces_of(built(Network={"Type": kind})) == own
    assert namespaces_of(built(Network={"Type": "host"})) == own - {"network"}


@pytest.mark.parametrize("kind", ["HOST", "container:x"])
def test_other_networks_are_refused(kind: str) -> None:
    with pytest.raises(InvalidParameter, match=r"Network\.Type: .* is not supported: it must be host, bridge or none"):
        built(Network={"Type": kind})


def test_standard_mounts() -> None:
    found = mounts_of(built())
    assert [*found] == [
        *("/proc", "/dev", "/dev/pts", "/sys", "/sys/fs/cgroup", "/dev/mqueue", "/dev/shm"),
        "/run/docker/plugins",
    ]
    assert found["/run/docker/plugins"]["source"] == "/run/e/plugins/c"
    assert found["/run/docker/plugins"]["options"][:2] == ["rbind", "rprivate"]
    assert "ro" in found["/sys/fs/cgroup"]["options"]
    assert mounts_of(built(IpcHost=True))["/dev/shm"]["source"] == "/dev/shm"


def test_files_of_the_hosts_network() -> None:
    found = mounts_of(built(Network={"Type": "host"}))
    assert found["/etc/hosts"]["source"] == "/etc/hosts"
    assert "ro" in found["/etc/resolv.conf"]["options"]
    assert "/run/e/netns" not in found
    assert "/etc/hosts" not in mounts_of(built())


def test_network_driver_sees_the_sandboxes() -> None:
    interface = {"Types": ["docker.networkdriver/1.0"], "Socket": "p.sock"}
    found = mounts_of(built(Interface=interface, Network={"Type": "host"}))["/run/e/netns"]
    assert found["source"] == "/run/e/netns"
    assert "rslave" in found["options"]
    assert "/run/e/netns" not in mounts_of(built(Interface=interface))


def test_log_driver_sees_its_fifos() -> None:
    found = mounts_of(built(Interface={"Types": ["docker.logdriver/1.0"], "Socket": "p.sock"}))
    assert found["/run/docker/logging"]["source"] == "/run/e/plugins/c.logging"


def test_propagated_mount() -> None:
    document = built(place(propagated="/run/e/root/0"), PropagatedMount="/data/")
    assert mounts_of(document)["/data"] == {
        "destination": "/data",
        "type": "bind",
        "source": "/run/e/root/0",
        "options": ["rbind", "rw", "rshared"],
    }
    # Otherwise the runtime would make its source private before it binds it.
    assert document["linux"]["rootfsPropagation"] == "shared"
    assert "rootfsPropagation" not in built()["linux"]


@pytest.mark.parametrize("path", ["data", "/", "/proc", "/proc/x", "/sys", "/..", "/" + "x" * 300])
def test_invalid_propagated_mounts(path: str) -> None:
    with pytest.raises(InvalidParameter, match="PropagatedMount"):
        built(place(propagated="/run/e/root/0"), PropagatedMount=path)


def own_mount(**fields: Any) -> dict[str, Any]:
    return {"Mounts": [{"Name": "m", "Destination": "/m", "Type": "bind", "Source": "/"} | fields]}


def test_own_mounts(tmp_path: Path) -> None:
    settings = {
        "Mounts": [
            {"Name": "deep", "Destination": "/m/deep", "Type": "bind", "Source": str(tmp_path)},
            {"Name": "m", "Destination": "/m", "Type": "bind", "Source": str(tmp_path), "Options": ["bind", "ro"]},
            {"Name": "t", "Destination": "/t", "Type": "tmpfs", "Source": "tmpfs", "Options": ["size=1m", "noexec"]},
            {"Name": "s", "Destination": "/s", "Type": "", "Source": str(tmp_path), "Options": ["rbind", "rslave"]},
        ]
    }
    document = built(settings=settings)
    found = mounts_of(document)
    assert [*found].index("/m") < [*found].index("/m/deep")
    assert found["/m"]["options"][:3] == ["bind", "ro", "rprivate"]
    assert found["/m/deep"]["options"][:2] == ["rbind", "rprivate"]
    assert found["/t"]["options"] == ["size=1m", "noexec"]
    assert found["/s"]["options"][:2] == ["rbind", "rslave"]
    assert document["linux"]["rootfsPropagation"] == "rslave"


def test_the_hosts_devices_replace_the_own_ones() -> None:
    found = mounts_of(built(settings=own_mount(Destination="/dev", Source="/dev", Options=["rbind"])))
    assert found["/dev"]["source"] == "/dev"
    assert "/dev/pts" not in found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"Source": "relative"}, "Mounts: m: its source 'relative' is not an absolute path"),
        ({"Source": ""}, "Mounts: m: its source '' is not an absolute path"),
        ({"Source": None}, "Mounts: m: its source '' is not an absolute path"),
        ({"Type": "proc"}, "Mounts: m: type 'proc' is not supported: it must be bind or tmpfs"),
        ({"Options": ["rbind", "context=x"]}, "Mounts: m: invalid option 'context=x'"),
        ({"Type": "tmpfs", "Options": ["upperdir=/x"]}, 'Mounts: m: Tmpfs: Invalid tmpfs option "upperdir=/x"'),
        ({"Destination": "m"}, "Mounts: m: .*must be absolute"),
        ({"Destination": ""}, "Mounts: m: it has no destination"),
        ({"Destination": "/proc/sys"}, "Mounts: m: invalid mount destination '/proc/sys'"),
        ({"Destination": "/run/docker/plugins"}, "Mounts: two of them are at /run/docker/plugins"),
        ({"Name": "", "Source": "x"}, "Mounts: /m: its source 'x'"),
    ],
)
def test_invalid_own_mounts(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        built(settings=own_mount(**fields))


def test_missing_source() -> None:
    with pytest.raises(NotFound, match="Mounts: m: its source /nowhere does not exist"):
        built(settings=own_mount(Source="/nowhere"))


def test_devices() -> None:
    linux = built(settings={"Devices": [{"Name": "full", "Path": "/dev/full"}]})["linux"]
    assert [(each["path"], each["major"], each["minor"]) for each in linux["devices"]] == [("/dev/full", 1, 7)]
    assert linux["resources"]["devices"][0] == {"allow": False, "access": "rwm"}
    assert linux["resources"]["devices"][-1] == {"allow": True, "type": "c", "major": 1, "minor": 7, "access": "rwm"}
    assert built(Linux={"AllowAllDevices": True})["linux"]["resources"]["devices"] == [{"allow": True, "access": "rwm"}]
    with pytest.raises(NotFound, match="/dev/nowhere"):
        built(settings={"Devices": [{"Name": "d", "Path": "/dev/nowhere"}]})
    with pytest.raises(InvalidParameter, match=r"device 'd' has no path: set d\.path"):
        built(settings={"Devices": [{"Name": "d", "Path": ""}]})


def test_entrypoint_and_scheme() -> None:
    with pytest.raises(InvalidParameter, match="Entrypoint: it is empty"):
        built(Entrypoint=[])
    interface = {"Types": [], "Socket": "p.sock", "ProtocolScheme": "moby.plugins.grpc/v1"}
    with pytest.raises(InvalidParameter, match=r"Interface\.ProtocolScheme: 'moby.plugins.grpc/v1' is not supported"):
        built(Interface=interface)
    built(Interface=interface | {"ProtocolScheme": "moby.plugins.http/v1"})


@given(st.text())
def test_a_sockets_name_stays_in_its_directory(name: str) -> None:
    try:
        found = spec.socket_name(record(Interface={"Types": [], "Socket": name}))
    except InvalidParameter:
        assert name in ("", ".", "..") or "/" in name or "\0" in name
    else:
        assert os.path.normpath(os.path.join("/d", found)) == f"/d/{found}"


@given(
    st.builds(
        PluginMount,
        name=st.text(max_size=5),
        source=st.none() | st.text(max_size=10) | st.sampled_from(("/", "/dev", "/etc/../proc")),
        destination=st.text(max_size=10) | st.text("/.ab", max_size=10) | st.sampled_from(("/proc", "/sys/x", "/m")),
        type=st.sampled_from(("bind", "tmpfs", "none", "", "proc")),
        options=st.none() | st.lists(st.sampled_from(("ro", "rshared", "bind", "size=1m", "x")) | st.text(max_size=4)),
    )
)
def test_any_mount_is_valid_or_refused(mount: PluginMount) -> None:
    """Nothing but an EngineError, and no mount over /proc or the root."""
    with_mount = record()
    with_mount = msgspec.structs.replace(with_mount, settings=PluginSettings(mounts=[mount]))
    try:
        found = spec.mounts(with_mount, place())
    except EngineError as error:
        assert error.message.startswith("Mounts: ")
        return
    made = found[-1] if found[-1].destination != spec.SOCKETS else found[-2]
    assert made.destination.startswith("/")
    assert made.destination != "/"
    assert not made.destination.startswith("/proc/s")
    assert not any("=" in option for option in made.options) or made.type == "tmpfs"
