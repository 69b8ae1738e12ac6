"""What creates, starts and updates of API 1.25 and newer say: what inspect shows of it at each
version, and its effect in the container."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import cgroups
from tests.support.engine.cgroups import NONE, Group
from tests.support.engine.harness import TempEngine

NEWEST = "1.55"


def create(engine: TempEngine, *command: str, version: str = NEWEST, **host: Any) -> str:
    body = {"Image": "busybox", "Cmd": list(command), "HostConfig": {"NetworkMode": "none"} | host}
    answer = engine.request("POST", f"/v{version}/containers/create", body)
    assert answer.status == 201, answer
    found = answer.json()["Id"]
    assert isinstance(found, str)
    return found


def started(engine: TempEngine, *command: str, version: str = NEWEST, **host: Any) -> str:
    identifier = create(engine, *command, version=version, **host)
    answer = engine.request("POST", f"/v{version}/containers/{identifier}/start")
    assert answer.status == 204, answer
    return identifier


def host_config(engine: TempEngine, identifier: str, version: str = NEWEST) -> dict[str, Any]:
    found = engine.request("GET", f"/v{version}/containers/{identifier}/json").json()["HostConfig"]
    assert isinstance(found, dict)
    return found


def update(engine: TempEngine, identifier: str, status: int = 200, version: str = NEWEST, **body: Any) -> Any:
    answer = engine.request("POST", f"/v{version}/containers/{identifier}/update", body)
    assert answer.status == status, answer
    return answer.json()


def group(engine: TempEngine, identifier: str) -> Group:
    return Group(engine.inspect(identifier)["State"]["Pid"])


# --- names of the host ----------------------------------------------------------------------------


@pytest.mark.parametrize("hostname", ["my_app", "a..b", "-x", "x.", "a" * 64, "a b"])
def test_hostnames(engine: TempEngine, hostname: str) -> None:
    """Anything that sethostname(2) accepts, from 1.25 on."""
    body = {"Image": "busybox", "Cmd": ["sh", "-c", "hostname; cat /etc/hostname; tail -n 1 /etc/hosts"]}
    body |= {"Hostname": hostname}
    assert engine.request("POST", "/v1.24/containers/create", body).status == 400
    answer = engine.request("POST", "/v1.25/containers/create", body)
    assert answer.status == 201, answer
    identifier = answer.json()["Id"]
    engine.post(f"/containers/{identifier}/start")
    assert engine.wait(identifier) == 0
    name, of_file, of_hosts = engine.logs(identifier).decode().splitlines()
    assert name == of_file == hostname
    assert of_hosts.partition("\t")[2].startswith(hostname)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"Hostname": "a\n6.6.6.6 b"}, "invalid hostname format: 'a\\n6.6.6.6 b'"),
        ({"Hostname": "a" * 65}, "at most 64 bytes"),
        ({"HostConfig": {"Dns": ["fe80::1%x\nnameserver 6.6.6.6"]}}, "Dns: invalid IP address"),
        ({"HostConfig": {"ExtraHosts": ["a:fe80::1%x\n6.6.6.6 b"]}}, "ExtraHosts: invalid IP address"),
    ],
)
@pytest.mark.parametrize("version", ["1.24", NEWEST])
def test_no_text_adds_a_line(engine: TempEngine, version: str, body: dict[str, Any], words: str) -> None:
    before = engine.containers()
    answer = engine.request("POST", f"/v{version}/containers/create", {"Image": "busybox", **body})
    assert answer.status == 400 and (words in answer.message or "RFC 1123" in answer.message), answer
    assert engine.containers() == before


# --- shown by inspect -----------------------------------------------------------------------------


def test_the_defaults_that_were_taken_are_shown(engine: TempEngine) -> None:
    shown = host_config(engine, create(engine, "true", PidsLimit=0, MemorySwappiness=-1, CpuPercent=0))
    assert (shown["PidsLimit"], shown["MemorySwappiness"], shown["IpcMode"]) == (None, None, "private")
    assert shown["OomKillDisable"] is (None if cgroups.V2 else False)
    assert shown["CgroupnsMode"] == ("private" if cgroups.V2 else "host")
    assert (shown["AutoRemove"], shown["NanoCpus"], shown["DeviceRequests"]) == (False, 0, None)
    assert (shown["RestartPolicy"], shown["ShmSize"]) == ({"Name": "no", "MaximumRetryCount": 0}, 64 << 20)
    assert "/proc/kcore" in shown["MaskedPaths"] and "/proc/sys" in shown["ReadonlyPaths"]
    assert "KernelMemory" not in shown and "Annotations" not in shown
    privileged = host_config(engine, create(engine, "true", Privileged=True))
    assert (privileged["MaskedPaths"], privileged["ReadonlyPaths"]) == ([], [])


def test_the_same_container_at_older_versions(engine: TempEngine) -> None:
    identifier = create(engine, "true", NanoCpus=500_000_000)
    at_1_41, at_1_24 = (host_config(engine, identifier, version) for version in ("1.41", "1.24"))
    assert (at_1_41["KernelMemory"], at_1_41["PidsLimit"], at_1_41["IpcMode"]) == (0, None, "private")
    assert (at_1_24["PidsLimit"], at_1_24["MemorySwappiness"], at_1_24["OomKillDisable"]) == (0, -1, False)
    assert at_1_24["NanoCpus"] == 500_000_000
    assert not {"AutoRemove", "MaskedPaths", "ReadonlyPaths", "CgroupnsMode", "Runtime"} & at_1_24.keys()


def test_empty_bindings(engine: TempEngine) -> None:
    for version, warned in ((NEWEST, True), ("1.51", False)):
        body = {"Image": "busybox", "Cmd": ["sleep", "600"], "HostConfig": {"PortBindings": {"80/tcp": []}}}
        answer = engine.request("POST", f"/v{version}/containers/create", body).json()
        assert bool(answer["Warnings"]) is warned
        engine.post(f"/containers/{answer['Id']}/start")
        (binding,) = {each["HostPort"] for each in engine.inspect(answer["Id"])["NetworkSettings"]["Ports"]["80/tcp"]}
        assert int(binding) > 0


# --- namespaces -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "given", "shared"),
    [
        ("1.40", "", False),
        ("1.39", "", True),
        (NEWEST, "shareable", True),
        (NEWEST, "private", False),
        (NEWEST, "none", False),
        ("1.24", "private", False),
    ],
)
def test_ipc_namespaces_that_others_join(engine: TempEngine, version: str, given: str, shared: bool) -> None:
    donor = started(engine, "sleep", "600", version=version, IpcMode=given)
    guest = create(engine, "sh", "-c", "echo there >/dev/shm/word", IpcMode=f"container:{donor}")
    answer = engine.request("POST", f"/v{NEWEST}/containers/{guest}/start")
    if shared:
        assert answer.status == 204 and engine.wait(guest) == 0
        assert engine.docker("exec", donor, "cat", "/dev/shm/word").line == "there"
    else:
        hint = f"container {donor}: non-shareable IPC (hint: use IpcMode:shareable for the donor container)"
        assert (answer.status, answer.message) == (400, hint)


def test_without_ipc_there_is_no_shared_memory(engine: TempEngine) -> None:
    identifier = started(engine, "sh", "-c", "! grep -q /dev/shm /proc/mounts", IpcMode="none")
    assert engine.wait(identifier) == 0
    own = engine.docker("run", "--rm", "--ipc", "none", "busybox", "readlink", "/proc/self/ns/ipc").line
    assert own != os.readlink("/proc/self/ns/ipc")


# --- requests of older versions -------------------------------------------------------------------


def test_annotations_reach_the_runtime_from_1_43_on(engine: TempEngine) -> None:
    given = {"com.example.word": "there", "empty": ""}
    for version, kept in ((NEWEST, given), ("1.43", given), ("1.42", None)):
        identifier = started(engine, "sleep", "600", version=version, Annotations=given)
        assert host_config(engine, identifier).get("Annotations") == kept
        bundle = engine.root / "containers" / identifier / "config.json"
        assert ('"com.example.word":"there"' in bundle.read_text()) is bool(kept)
    answer = engine.request(
        "POST", f"/v{NEWEST}/containers/create", {"Image": "busybox", "HostConfig": {"Annotations": {"": "x"}}}
    )
    assert answer.status == 400 and "annotation key" in answer.message


def test_annotations_do_not_replace_the_seccomp_filter(engine: TempEngine) -> None:
    """The filter is given to crun in an annotation too. This one would allow everything."""
    everything = {"run.oci.seccomp_bpf_data": "BgAAAAAA/38="}
    identifier = started(engine, "grep", "Seccomp:", "/proc/self/status", Annotations=everything)
    assert engine.wait(identifier) == 0
    refused = started(engine, "unshare", "-U", "true", Annotations=everything)
    assert engine.wait(refused) != 0


def test_the_size_of_the_console_from_1_42_on(engine: TempEngine) -> None:
    for version, size in (("1.42", [12, 34]), ("1.41", [0, 0])):
        body = {
            "Image": "busybox",
            "Cmd": ["stty", "size"],
            "Tty": True,
            "HostConfig": {"NetworkMode": "none", "ConsoleSize": [12, 34]},
        }
        identifier = engine.request("POST", f"/v{version}/containers/create", body).json()["Id"]
        assert host_config(engine, identifier)["ConsoleSize"] == size
        if any(size):
            engine.post(f"/containers/{identifier}/start")
            assert engine.wait(identifier) == 0
            assert engine.docker("logs", identifier).line == "12 34"


def test_the_platform_of_a_create_from_1_41_on(engine: TempEngine) -> None:
    body = {"Image": "busybox", "Cmd": ["true"]}
    for version, status in ((NEWEST, 404), ("1.41", 404), ("1.40", 201)):
        answer = engine.request("POST", f"/v{version}/containers/create?platform=plan9%2Fmips", body)
        assert answer.status == status, answer


def test_an_image_of_another_platform(engine: TempEngine) -> None:
    """Without `platform` it is a warning: the image may run by emulation."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    imported = f"/v{NEWEST}/images/create?fromSrc=-&repo=foreign&platform=linux%2Fs390x"
    assert engine.request("POST", imported, archive.getvalue()).status == 200
    body = {"Image": "foreign", "Cmd": ["true"]}
    created = engine.request("POST", f"/v{NEWEST}/containers/create", body).json()
    (warning,) = created["Warnings"]
    assert warning.startswith("The requested image's platform (linux/s390x) does not match the detected host platform")
    asked = engine.request("POST", f"/v{NEWEST}/containers/create?platform=linux%2Fs390x", body).json()
    assert asked["Warnings"] == []
    engine.remove_all()
    assert engine.request("DELETE", f"/v{NEWEST}/images/foreign").status == 200


def test_the_gateway_of_the_host(engine: TempEngine) -> None:
    """On the default bridge, on a user's network and without a network. `extra_hosts` of compose
    and all Testcontainers use it.
    """
    gateway = engine.request("GET", "/v1.24/networks/bridge").json()["IPAM"]["Config"][0]["Gateway"]
    assert engine.request("POST", "/v1.24/networks/create", {"Name": "gateways"}).status == 201
    for mode in ("bridge", "gateways", "none", "host"):
        identifier = started(
            *(engine, "cat", "/etc/hosts"), NetworkMode=mode, ExtraHosts=["outside:host-gateway", "six:[fd00::1]"]
        )
        assert engine.wait(identifier) == 0
        lines = engine.logs(identifier).decode().splitlines()
        assert f"{gateway}\toutside" in lines and "fd00::1\tsix" in lines
        assert host_config(engine, identifier)["ExtraHosts"][0] == "outside:host-gateway"


def test_capabilities_in_any_spelling(engine: TempEngine) -> None:
    body = {"Image": "busybox", "HostConfig": {"CapAdd": ["CAP_NET_ADMIN", "net_raw"], "CapDrop": ["cap_chown"]}}
    assert engine.request("POST", f"/v{NEWEST}/containers/create", body).status == 201
    for field in ("CapAdd", "CapDrop"):
        refused = {"Image": "busybox", "HostConfig": {field: ["x"]}}
        answer = engine.request("POST", f"/v{NEWEST}/containers/create", refused)
        assert (answer.status, answer.message) == (400, f'invalid {field}: unknown capability: "CAP_X"')


def test_control_groups_are_writable_only_where_they_are_its_own(engine: TempEngine) -> None:
    for mode in ("host", "private"):
        host = {"SecurityOpt": ["writable-cgroups"], "CgroupnsMode": mode}
        answer = engine.request("POST", f"/v{NEWEST}/containers/create", {"Image": "busybox", "HostConfig": host})
        if cgroups.V2 and mode == "private":
            identifier = started(engine, "mkdir", "/sys/fs/cgroup/below", **host)
            assert engine.wait(identifier) == 0
        else:
            assert answer.status == 400 and "writable-cgroups needs cgroup v2" in answer.message


# --- update ---------------------------------------------------------------------------------------


def test_number_of_processes(engine: TempEngine) -> None:
    identifier = started(engine, "sleep", "600")
    for limit, found, shown in ((50, 50, 50), (None, 50, 50), (0, NONE, None), (60, 60, 60), (-1, NONE, None)):
        assert update(engine, identifier, PidsLimit=limit) == {"Warnings": []}
        assert group(engine, identifier).pids == found
        assert host_config(engine, identifier)["PidsLimit"] == shown
    update(engine, identifier, version="1.39", PidsLimit=70)
    assert group(engine, identifier).pids == NONE


def test_nano_cpus(engine: TempEngine) -> None:
    identifier = started(engine, "sleep", "600", NanoCpus=200_000_000)
    assert group(engine, identifier).quota == 20_000
    update(engine, identifier, NanoCpus=500_000_000)
    assert (group(engine, identifier).quota, group(engine, identifier).period) == (50_000, 100_000)
    refused = update(engine, identifier, 409, CpuQuota=30_000)
    assert refused["message"] == "Conflicting options: CPU Quota cannot be updated as NanoCPUs has already been set"
    assert group(engine, identifier).quota == 50_000


def test_limits_of_block_devices(engine: TempEngine) -> None:
    device = next((name for name in ("vda", "sda", "nvme0n1", "loop0") if os.path.exists(f"/sys/block/{name}")), None)
    assert device is not None, "this test needs a block device"
    path, kind = f"/dev/{device}", Path(f"/sys/block/{device}/dev").read_text().strip()
    identifier = started(engine, "sleep", "600")

    def limit() -> str:
        if cgroups.V2:
            return group(engine, identifier).file("io", "io.max")
        return group(engine, identifier).file("blkio", "blkio.throttle.read_bps_device")

    def rates(rate: int) -> dict[str, Any]:
        return {"BlkioDeviceReadBps": [{"Path": path, "Rate": rate}]}

    update(engine, identifier, **rates(1 << 20))
    assert limit().startswith(kind) and "1048576" in limit()
    update(engine, identifier, version="1.54", BlkioDeviceReadBps=[])
    update(engine, identifier, BlkioDeviceReadBps=None)
    assert "1048576" in limit()
    update(engine, identifier, **rates(2 << 20))
    assert "2097152" in limit() and "1048576" not in limit()
    update(engine, identifier, BlkioDeviceReadBps=[])
    assert limit() == ""
    assert host_config(engine, identifier)["BlkioDeviceReadBps"] is None
