from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.common import seccomp_profiles
from engine.config import Config as EngineConfig
from engine.containers import limits, security, spec
from engine.containers.defaults import Defaults
from engine.containers.sharing import Joined
from engine.containers.start import Placed, Start
from engine.containers.store import ContainerRecord, MountOptions
from engine.errors import InvalidParameter, NotFound
from engine.runtime import capabilities, cdi, seccomp
from engine.runtime.cgroups import Cgroups, Support
from engine.runtime.oci import SECCOMP_PROGRAM, Runtime
from engine.runtime.users import Identity
from engine.system.user_namespaces import IdMap, Range
from engine.wire import oci
from engine.wire.containers import Config, DeviceMapping, HostConfig, MountPoint, ThrottleDevice, Ulimit, WeightDevice
from engine.wire.exec import ExecCreate

ID = "c" * 64
V1 = Cgroups(mode="v1", controllers={"memory": "/nowhere"})
V2 = Cgroups(
    mode="v2",
    controllers={},
    unified="/nowhere",
    unified_controllers=("memory",),
    unified_files=frozenset(("memory.max", "memory.swap.max")),
)


IDENTITY = Identity(5, 6, (6, 7), "/home/x")


def start(**changes: Any) -> Start:
    values: dict[str, Any] = {
        "directory": Path("/d"),
        "bundle": Path("/d"),
        "rootfs": "/r",
        "placed": Placed(root=Path("/r")),
        "network": "",
        "runtime": Runtime(name="crun", path="/crun", version="", reason="", root="/run"),
        "cgroups": V1,
    }
    return Start(**values | changes)


def record(*, config: Config | None = None, mounts: tuple[MountPoint, ...] = (), **host: Any) -> ContainerRecord:
    return ContainerRecord(
        id=ID,
        name="n",
        created=0,
        image_id="",
        parent="",
        path="/bin/x",
        args=("a", "b"),
        config=config or Config(hostname="box"),
        host=HostConfig(**host),
        mounts=mounts,
    )


def built(of: Start | None = None, identity: Identity = IDENTITY, edits: cdi.Edits = cdi.NONE, **fields: Any) -> Any:
    """The document as the runtime reads it."""
    return msgspec.json.decode(oci.encode(spec.build(record(**fields), of or start(), identity, edits)))


def mounts_of(document: Any) -> dict[str, Any]:
    return {mount["destination"]: mount for mount in document["mounts"]}


def namespaces_of(document: Any) -> dict[str, str]:
    return {each["type"]: each.get("path", "") for each in document["linux"]["namespaces"]}


def test_process() -> None:
    document = built(config=Config(hostname="box", tty=True, env=["A=1"], working_dir="/w", user="x"))
    process = document["process"]
    assert process["args"] == ["/bin/x", "a", "b"]
    assert process["cwd"] == "/w"
    assert process["terminal"] is True
    assert process["user"] == {"uid": 5, "gid": 6, "additionalGids": [6, 7]}
    assert process["env"] == [spec.DEFAULT_PATH, "HOSTNAME=box", "TERM=xterm", "A=1", "HOME=/home/x"]
    assert set(process["capabilities"]) == {"bounding", "effective", "permitted"}
    assert document["root"] == {"path": "/r"}
    assert document["hostname"] == "box"
    assert document["linux"]["cgroupsPath"] == f"/engined/{ID}"
    assert "annotations" not in document


def test_root_user_is_written_out() -> None:
    document = built(identity=Identity(0, 0, (0,), "/root"))
    assert document["process"]["user"] == {"uid": 0, "gid": 0, "additionalGids": [0]}
    assert document["process"]["cwd"] == "/"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["PATH", "HOSTNAME=h", "HOME=/x"]),
        (["HOME=/own", "PATH=/p"], ["PATH=/p", "HOSTNAME=h", "HOME=/own"]),
        (["HOME="], ["PATH", "HOSTNAME=h", "HOME=/x"]),
        (["HOSTNAME", "B=1", "B=2"], ["PATH", "B=2", "HOME=/x"]),
        (["EMPTY=", "X=a=b"], ["PATH", "HOSTNAME=h", "EMPTY=", "X=a=b", "HOME=/x"]),
    ],
)
def test_environment(given: list[str], expected: list[str]) -> None:
    full = [spec.DEFAULT_PATH if each == "PATH" else each for each in expected]
    assert spec.environment(given, "h", tty=False, home="/x") == full


def test_confinement() -> None:
    linux = built()["linux"]
    assert linux["seccomp"]["defaultAction"] == "SCMP_ACT_ERRNO"
    assert "/proc/kcore" in linux["maskedPaths"]
    assert "/proc/sys" in linux["readonlyPaths"]
    assert linux["resources"]["devices"][0] == {"allow": False, "access": "rwm"}
    assert {"allow": True, "type": "c", "major": 136, "access": "rwm"} in linux["resources"]["devices"]
    assert "noNewPrivileges" not in built()["process"]


def test_compiled_filter_goes_beside_the_section() -> None:
    runtime = Runtime(name="crun", path="/crun", version="", reason="", root="/run", takes_program=True)
    document = built(start(runtime=runtime))
    assert document["linux"]["seccomp"]
    program = seccomp.profile(capabilities.granted()).program
    assert document.get("annotations", {}) == ({SECCOMP_PROGRAM: program} if program else {})
    assert "annotations" not in built(start(runtime=runtime), privileged=True)


@pytest.mark.parametrize(
    ("options", "no_new_privileges", "confined"),
    [
        ([], False, True),
        (["seccomp=unconfined"], False, False),
        (["seccomp:unconfined"], False, False),
        (["no-new-privileges"], True, True),
        (["no-new-privileges:true", "label=disable", "apparmor=unconfined"], True, True),
        (["no-new-privileges=false"], False, True),
    ],
)
def test_security_options(options: list[str], no_new_privileges: bool, confined: bool) -> None:
    document = built(security_opt=options)
    assert document["process"].get("noNewPrivileges", False) is no_new_privileges
    assert ("seccomp" in document["linux"]) is confined


@pytest.mark.parametrize(
    ("given", "default", "expected"),
    [(True, False, True), (None, False, False), (None, True, True), (False, True, False)],
)
def test_init(given: bool | None, default: bool, expected: bool) -> None:
    at = start(config=EngineConfig(init=default, init_path="/bin/true"))
    document = built(at, init=given)
    assert (document["process"]["args"][:2] == ["/sbin/docker-init", "--"]) is expected
    assert ("/sbin/docker-init" in mounts_of(document)) is expected
    if expected:
        bound = mounts_of(document)["/sbin/docker-init"]
        assert bound["source"] == "/bin/true" and "ro" in bound["options"]
    assert built(at, init=given, pid_mode="host")["process"]["args"][0] != "/sbin/docker-init"


def test_writable_control_groups() -> None:
    for option, privileged, access in (
        ([], False, "ro"),
        (["writable-cgroups"], False, "rw"),
        (["writable-cgroups=true"], False, "rw"),
        (["writable-cgroups=false"], True, "ro"),
        ([], True, "rw"),
    ):
        found = mounts_of(built(start(cgroups=V2), security_opt=option, privileged=privileged))["/sys/fs/cgroup"]
        assert found["options"][-1] == access


DENY_CHOWN = '{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["chown"],"action":"SCMP_ACT_ERRNO"}]}'


@pytest.mark.parametrize(
    ("options", "default_action"),
    [
        ([], None),
        (["seccomp="], None),
        (["seccomp=unconfined"], None),
        (["seccomp=builtin"], "SCMP_ACT_ERRNO"),
        ([f"seccomp={DENY_CHOWN}"], "SCMP_ACT_ALLOW"),
        ([f"seccomp={DENY_CHOWN}", "seccomp=unconfined"], None),
    ],
)
def test_a_privileged_container_has_the_filter_that_it_names(options: list[str], default_action: str | None) -> None:
    found = built(privileged=True, security_opt=options)["linux"].get("seccomp", {})
    assert found.get("defaultAction") == default_action


def test_what_privileged_overrides() -> None:
    """As in dockerd 28.5.2. The create warns of each."""
    options = ["no-new-privileges", "writable-cgroups=false"]
    document = built(
        privileged=True,
        security_opt=options,
        cap_drop=["ALL"],
        masked_paths=["/proc/kcore"],
        readonly_paths=["/proc/sys"],
        devices=[
            DeviceMapping(path_on_host="/dev/zero", path_in_container="/dev/other", cgroup_permissions="r"),
            DeviceMapping(path_on_host="/dev/null", path_in_container="/dev/zero"),
            DeviceMapping(path_on_host="/dev/not-here"),
        ],
    )
    linux = document["linux"]
    assert document["process"]["noNewPrivileges"] is True
    assert set(document["process"]["capabilities"]["effective"]) == capabilities.bounding()
    assert "maskedPaths" not in linux
    assert not any(path.startswith("/proc") for path in linux["readonlyPaths"])
    assert linux["resources"]["devices"] == [{"allow": True, "access": "rwm"}]
    minors = {device["path"]: device["minor"] for device in linux["devices"]}
    assert len(minors) == len(linux["devices"]), "a path has one node"
    assert (minors["/dev/other"], minors["/dev/zero"], minors["/dev/full"]) == (5, 3, 7)


def test_a_privileged_exec_has_the_confinement_of_its_container() -> None:
    of = record(security_opt=["no-new-privileges"])
    process = spec.exec_process(of, ExecCreate(cmd=["x"], privileged=True), Identity(0, 0, (0,), "/root"))
    assert process.no_new_privileges
    assert process.capabilities is not None and set(process.capabilities.effective) == capabilities.bounding()


@pytest.mark.parametrize("option", ["seccomp={}", "seccomp=/file", "no-new-privileges=maybe"])
def test_wrong_security_options(option: str) -> None:
    with pytest.raises(InvalidParameter, match="SecurityOpt"):
        built(security_opt=[option])


def test_privileged() -> None:
    document = built(privileged=True)
    linux = document["linux"]
    assert not {"seccomp", "maskedPaths", "readonlyPaths"} & linux.keys()
    assert linux["resources"]["devices"] == [{"allow": True, "access": "rwm"}]
    assert set(document["process"]["capabilities"]["effective"]) == capabilities.bounding()
    mounts = mounts_of(document)
    assert "rw" in mounts["/sys"]["options"]
    assert "rw" in mounts["/sys/fs/cgroup"]["options"]
    paths = {device["path"] for device in linux["devices"]}
    assert "/dev/null" in paths
    assert not any(path.startswith(("/dev/pts", "/dev/shm")) for path in paths)


def test_standard_mounts_in_order() -> None:
    targets = [mount["destination"] for mount in built()["mounts"]]
    assert targets[:7] == ["/proc", "/dev", "/dev/pts", "/sys", "/sys/fs/cgroup", "/dev/mqueue", "/dev/shm"]
    assert set(targets[7:]) == {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}
    mounts = mounts_of(built())
    assert "ro" in mounts["/sys"]["options"]
    assert "size=67108864" in mounts["/dev/shm"]["options"]
    assert mounts["/etc/hosts"] == {
        "destination": "/etc/hosts",
        "type": "bind",
        "source": "/d/hosts",
        "options": ["rbind", "rprivate", "rw"],
    }


def point(destination: str, **fields: Any) -> MountPoint:
    return MountPoint(source="/s", destination=destination, **fields)


def test_given_mounts_by_depth_and_in_place_of_the_standard_ones() -> None:
    document = built(
        mounts=(point("/a/b/c", rw=False), point("/a", propagation="rslave"), point("/etc/hosts")),
        tmpfs={"/a/b": "size=1k,exec"},
    )
    targets = [mount["destination"] for mount in document["mounts"]]
    assert targets.index("/a") < targets.index("/a/b") < targets.index("/a/b/c")
    mounts = mounts_of(document)
    assert mounts["/a"]["options"] == ["rbind", "rslave", "rw"]
    assert mounts["/a/b/c"]["options"] == ["rbind", "rprivate", "ro"]
    assert mounts["/a/b"]["options"] == ["nosuid", "nodev", "exec", "size=1k"]
    assert mounts["/etc/hosts"]["source"] == "/s"
    assert document["linux"]["rootfsPropagation"] == "rslave"
    whole = built(mounts=(point("/dev"), point("/sys/fs/cgroup"), point("/x", propagation="shared")))
    targets = [mount["destination"] for mount in whole["mounts"]]
    assert not any(target.startswith("/dev/") for target in targets)
    assert targets.count("/sys/fs/cgroup") == targets.count("/dev") == 1
    assert whole["linux"]["rootfsPropagation"] == "shared"


def test_a_shared_tmpfs_needs_a_shared_root_with_crun() -> None:
    """Otherwise crun makes all mounts private in the end."""
    runc = Runtime(name="runc", path="/runc", version="", reason="", root="/run")
    for options, crun in (
        ("rshared", "shared"),
        ("size=1m,shared", "shared"),
        ("slave", None),
        ("shared,private", None),
    ):
        linux = built(tmpfs={"/t": options})["linux"]
        assert linux.get("rootfsPropagation") == crun, options
        assert "rootfsPropagation" not in built(start(runtime=runc), tmpfs={"/t": options})["linux"]


def test_read_only_root() -> None:
    document = built(readonly_rootfs=True)
    assert document["root"]["readonly"] is True
    assert "ro" in mounts_of(document)["/etc/hosts"]["options"]


def test_namespaces() -> None:
    assert namespaces_of(built()) == dict.fromkeys(("mount", "network", "uts", "pid", "ipc"), "")
    assert namespaces_of(built(start(network="/proc/1/fd/9")))["network"] == "/proc/1/fd/9"
    assert "network" not in namespaces_of(built(start(network=None), network_mode="host"))
    shared = built(start(network=None), pid_mode="host", ipc_mode="host", uts_mode="host", network_mode="host")
    assert namespaces_of(shared) == {"mount": ""}
    assert "hostname" not in shared
    assert mounts_of(shared)["/dev/shm"]["source"] == "/dev/shm"
    joined = namespaces_of(built(start(joined=Joined(pid="/proc/7/ns/pid", ipc="/proc/7/ns/ipc"))))
    assert (joined["pid"], joined["ipc"]) == ("/proc/7/ns/pid", "/proc/7/ns/ipc")
    for privileged in (False, True):
        assert "cgroup" in namespaces_of(built(start(cgroups=V2), privileged=privileged))


def test_sysctls() -> None:
    assert built()["linux"]["sysctl"]["net.ipv4.ip_unprivileged_port_start"] == "0"
    assert "sysctl" not in built(start(network=None), network_mode="host")["linux"]
    assert "sysctl" not in built(start(network="/proc/1/fd/9"))["linux"], "who made the namespace has set them"
    document = built(
        config=Config(hostname="h", domainname="example.org"), sysctls={"net.ipv4.ip_unprivileged_port_start": "7"}
    )
    assert document["linux"]["sysctl"]["net.ipv4.ip_unprivileged_port_start"] == "7"
    assert document["linux"]["sysctl"]["kernel.domainname"] == "example.org"
    given = {"net.core.somaxconn": "7", "net/ipv4/ip_forward": "1", "kernel.sem": "1 2 3 4"}
    made = start(network="/proc/1/fd/9")
    assert built(made, sysctls=given)["linux"]["sysctl"] == {"kernel.sem": "1 2 3 4"}
    assert remapped(made, sysctls=given)["linux"]["sysctl"] == given, "its root has other ids"


def test_resources() -> None:
    found = built(
        start(cgroups=V2),
        memory=100,
        memory_reservation=50,
        memory_swappiness=0,
        oom_kill_disable=True,
        cpu_shares=2,
        cpu_quota=1500,
        cpu_period=3000,
        cpuset_cpus="0-1",
        cpuset_mems="0",
        pids_limit=9,
    )["linux"]["resources"]
    assert found["memory"] == {
        "limit": 100,
        "reservation": 50,
        "swap": 200,
        "swappiness": 0,
        "disableOOMKiller": True,
    }
    assert found["cpu"] == {"shares": 2, "quota": 1500, "period": 3000, "cpus": "0-1", "mems": "0"}
    assert found["pids"] == {"limit": 9}
    assert set(built(pids_limit=None)["linux"]["resources"]) == {"devices"}


def test_what_the_kernel_lacks_is_kept_in_the_record_and_not_given_to_the_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for supported in (True, False):
        support = Support(kernel_memory=supported, weight=supported)
        monkeypatch.setattr(Cgroups, "support", lambda self, support=support: support)
        found = built(kernel_memory=9, blkio_weight=300)["linux"]["resources"]
        assert ("memory" in found, "blockIO" in found) == (supported, supported)
    assert (
        "blockIO"
        not in built(
            start(cgroups=Cgroups(mode="v1", controllers={}, block_files=frozenset(("blkio.bfq.weight",)))),
            blkio_weight=300,
        )["linux"]["resources"]
    ), "crun cannot set it: the engine does"


def test_nano_cpus_are_a_quota() -> None:
    assert built(nano_cpus=1_500_000_000)["linux"]["resources"]["cpu"] == {"quota": 150_000, "period": 100_000}


def test_more_than_execve_takes_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="argument list too long"):
        built(config=Config(env=["A=" + "x" * 200_000]))
    with pytest.raises(InvalidParameter, match="argument list too long"):
        built(
            config=Config(env=["A=" + "x" * 100_000] * 1 + [f"B{n}=" + "x" * 60_000 for n in range(3)]),
            ulimits=[Ulimit(name="stack", soft=512 << 10, hard=512 << 10)],
        )


@pytest.mark.parametrize("path", ["/proc", "/proc/sys", "/proc/self/attr", "/sys"])
def test_mounts_over_proc_and_sys_are_refused(path: str) -> None:
    with pytest.raises(InvalidParameter, match="invalid mount destination"):
        built(mounts=(point(path),))
    with pytest.raises(InvalidParameter, match="invalid mount destination"):
        built(tmpfs={path: ""})


def test_no_quota_is_not_written() -> None:
    assert built(cpu_quota=-1, cpu_period=3000)["linux"]["resources"]["cpu"] == {"period": 3000}


def test_swap() -> None:
    def swap(at: Cgroups, **fields: Any) -> object:
        return built(start(cgroups=at), **fields)["linux"]["resources"]["memory"].get("swap")

    assert swap(V1, memory=10) is None, "no swap accounting: nothing is asked of it"
    assert swap(V1, memory=10, memory_swap=10) is None, "nor when it was asked for: the create has warned"
    assert swap(V2, memory=10, memory_swap=-1) == -1


def test_ulimits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 1000))
    assert limits.rlimit(Ulimit(name="nofile", soft=5, hard=1000), raisable=False) == oci.Rlimit(
        type="RLIMIT_NOFILE", hard=1000, soft=5
    )
    for hard in (1001, -1):
        with pytest.raises(InvalidParameter, match=r"nofile.*above this engine's own of 1000.*CAP_SYS_RESOURCE"):
            limits.rlimit(Ulimit(name="nofile", soft=5, hard=hard), raisable=False)
    assert limits.rlimit(Ulimit(name="memlock", soft=-1, hard=-1), raisable=True).hard == 2**64 - 1
    with pytest.raises(InvalidParameter, match="invalid ulimit type: files"):
        limits.rlimit(Ulimit(name="files"), raisable=True)
    monkeypatch.undo()
    for name in limits.RLIMITS:
        limits.rlimit(Ulimit(name=name, soft=0, hard=0), raisable=False)
    rlimits = built(ulimits=[Ulimit(name="core")])["process"]["rlimits"]
    assert rlimits == [{"type": "RLIMIT_CORE", "hard": 0, "soft": 0}]


def test_devices(tmp_path: Path) -> None:
    linux = built(
        devices=[DeviceMapping(path_on_host="/dev/null", path_in_container="/dev/mine", cgroup_permissions="r")]
    )["linux"]
    (device,) = linux["devices"]
    assert (device["path"], device["type"], device["major"], device["minor"]) == ("/dev/mine", "c", 1, 3)
    assert linux["resources"]["devices"][-1] == {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "r"}
    (tmp_path / "file").touch()
    for path, kind, words in (
        (tmp_path / "none", NotFound, "no such file"),
        (tmp_path / "file", NotFound, "not a device node"),
    ):
        with pytest.raises(kind, match=words):
            built(devices=[DeviceMapping(path_on_host=str(path))])
    with pytest.raises(InvalidParameter, match="CgroupPermissions"):
        built(devices=[DeviceMapping(path_on_host="/dev/null", cgroup_permissions="x")])
    with pytest.raises(InvalidParameter, match="not a block device"):
        built(blkio_weight_device=[WeightDevice(path="/dev/null", weight=10)])
    with pytest.raises(NotFound, match=r"BlkioDeviceReadIOps.*no such file"):
        built(blkio_device_read_iops=[ThrottleDevice(path="/dev/not-here", rate=1)])


def test_device_cgroup_rules() -> None:
    rules = built(device_cgroup_rules=["c 1:2 r", "a *:* rwm"])["linux"]["resources"]["devices"]
    assert rules[-2:] == [
        {"allow": True, "type": "c", "major": 1, "minor": 2, "access": "r"},
        {"allow": True, "type": "a", "access": "rwm"},
    ]


@pytest.mark.parametrize(
    ("options", "writable", "version", "expected"),
    [
        (MountOptions(), True, "1.8", ("rbind", "rprivate", "rw")),
        (MountOptions(), False, "1.8", ("rbind", "rprivate", "ro")),
        (MountOptions(read_only="recursive"), False, "1.8", ("rbind", "rprivate", "ro", "rro")),
        (MountOptions(read_only="recursive"), False, "1.3", ("rbind", "rprivate", "ro")),
        (MountOptions(read_only="recursive"), True, "1.8", ("rbind", "rprivate", "rw")),
        (MountOptions(read_only="forced"), False, "1.8", ("rbind", "rprivate", "ro", "rro")),
        (MountOptions(read_only="forced"), False, "1.3", None),
        (MountOptions(read_only="recursive", shallow=True), False, "1.3", ("bind", "private", "ro")),
    ],
)
def test_options_of_a_bind(
    tmp_path: Path, options: MountOptions, writable: bool, version: str, expected: tuple[str, ...] | None
) -> None:
    """Of a directory. The flags of its own mount come after these words."""
    runtime = Runtime(name="crun", path="/nowhere/crun", version=version, reason="", root="/run")
    source = str(tmp_path)
    if expected is None:
        with pytest.raises(InvalidParameter, match="/d: the runtime cannot make the mounts below it read-only"):
            spec.bind(source, "/d", writable, "", options=options, runtime=runtime)
        return
    found = spec.bind(source, "/d", writable, "", options=options, runtime=runtime).options
    assert (found[: len(expected)], "rro" in found) == (expected, "rro" in expected)


@pytest.mark.parametrize("version", ["1.8", "1.3"])
@pytest.mark.parametrize("read_only", ["recursive", "forced"])
def test_a_read_only_file_has_nothing_below(tmp_path: Path, read_only: Any, version: str) -> None:
    """crun takes `rro` only for directories."""
    runtime = Runtime(name="crun", path="/nowhere/crun", version=version, reason="", root="/run")
    (tmp_path / "file").touch()
    options = MountOptions(read_only=read_only)
    found = spec.bind(str(tmp_path / "file"), "/f", False, "", options=options, runtime=runtime).options
    assert "ro" in found and "rro" not in found


def test_masked_and_read_only_paths() -> None:
    """A list replaces the default, also an empty one: `--security-opt systempaths=unconfined`."""
    linux = built(start(cgroups=V2), masked_paths=["/proc/kcore"], readonly_paths=[])["linux"]
    assert linux["maskedPaths"] == ["/proc/kcore"] and "readonlyPaths" not in linux
    under_v1 = built(readonly_paths=[])["linux"]["readonlyPaths"]
    assert under_v1[0] == "/sys/fs/cgroup", "the tmpfs of v1 stays read-only"
    assert "/sys/fs/cgroup/nowhere" in under_v1, "and so do the hierarchies below it"
    assert built(masked_paths=None)["linux"]["maskedPaths"] == list(security.MASKED_PATHS)


def test_masked_directories_that_are_mounts(tmp_path: Path) -> None:
    """Old versions of crun mount a file system of its own over each."""
    directories = [path for path in security.MASKED_PATHS if os.path.isdir(path)]
    assert "/sys/firmware" in directories

    def masks(change: Start | None = None, **host: Any) -> tuple[list[str], list[str]]:
        """The directories that are covered, and those left to the runtime."""
        document = built(change or made("crun", "1.8.1"), **host)
        covers = [each for each in document["mounts"] if each["source"] == str(tmp_path / "empty")]
        assert all("ro" in each["options"] for each in covers)
        left = document["linux"].get("maskedPaths", [])
        return [each["destination"] for each in covers], [path for path in left if path in directories]

    def made(name: str, version: str) -> Start:
        runtime = Runtime(name=name, path=f"/{name}", version=version, reason="", root="/run")
        return start(runtime=runtime, config=EngineConfig(run=tmp_path))

    assert masks() == ([], directories), "RUN has lost the directory"
    (tmp_path / "empty").mkdir()
    for version, covered in (("1.8.1", True), ("1.23", True), ("1.24", False), ("1.7", False), ("main", False)):
        assert masks(made("crun", version)) == ((directories, []) if covered else ([], directories)), version
    assert masks(made("runc", "1.1.5")) == ([], directories), "it permits no mount in /proc"
    assert masks(masked_paths=["/sys/firmware", "/own"]) == (["/sys/firmware"], [])
    assert masks(masked_paths=[]) == masks(privileged=True) == ([], [])
    for destination in ("/sys/firmware", "/sys/firmware/a", "/sys"):
        covered, left = masks(mounts=(MountPoint(type="bind", source="/sys", destination=destination, rw=True),))
        assert "/sys/firmware" in left and "/sys/firmware" not in covered
    at = made("crun", "1.8.1")
    assert not [each for each in remapped(at)["mounts"] if each["source"] == str(tmp_path / "empty")]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["/proc/sys", "/proc/bus"], ["/proc/sys", "/proc/bus"]),
        (["/proc/sys", "/proc"], ["/proc", "/proc/sys"]),
        (["/a/b", "/proc/bus", "/a"], ["/a", "/a/b", "/a/x", "/c/d/x", "/proc/bus"]),
        (["/sys/fs"], ["/sys/fs", "/sys/fs/cgroup", "/sys/fs/cgroup/x"]),
        (["/sys//fs/./"], ["/sys//fs/./", "/sys/fs/cgroup", "/sys/fs/cgroup/x"]),
    ],
)
def test_order_of_read_only_paths(paths: list[str], expected: list[str]) -> None:
    """Each mount that is read-only comes after the last path that may contain it."""
    points = ("/c/d/x", "/a/x", "/sys/fs/cgroup/x")
    seen = [spec.bind("/", path, False, "") for path in points]
    seen += [spec.bind("/", "/a/w", True, ""), *spec.standard("ro", "ro", None)]
    assert list(spec.readonly_paths(paths, V2, seen)) == expected


def test_own_mounts_in_place_of_hierarchies() -> None:
    seen = [*spec.standard("ro", "ro", None), spec.bind("/", "/sys/fs/cgroup/nowhere", True, "")]
    assert "/sys/fs/cgroup/nowhere" not in spec.readonly_paths((), V1, seen), "it stays writable"


@pytest.mark.parametrize("path", ["/", "//", "/a/.."])
def test_the_root_as_a_read_only_path(path: str) -> None:
    document = built(start(cgroups=V2), readonly_paths=[path, "/proc/sys"])
    assert document["root"]["readonly"] and document["linux"]["readonlyPaths"] == ["/proc/sys"]
    assert "readonly" not in built(readonly_paths=[path], privileged=True)["root"]


def test_cgroup_namespaces() -> None:
    for cgroups, mode, private in ((V1, "", False), (V1, "private", True), (V2, "", True), (V2, "host", False)):
        assert ("cgroup" in namespaces_of(built(start(cgroups=cgroups), cgroupns_mode=mode))) is private


def test_a_directory_without_device_nodes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    for path in (tmp_path, tmp_path / "directory", tmp_path / "file"):
        with pytest.raises(NotFound, match=f'custom device "{path}": not a device node'):
            built(devices=[DeviceMapping(path_on_host=str(path))])


def test_capabilities() -> None:
    document = built(cap_add=["SYS_PTRACE"], cap_drop=["ALL"])
    expected = [name for name in ("CAP_SYS_PTRACE",) if name in capabilities.bounding()]
    assert document["process"]["capabilities"].get("effective", []) == expected
    with pytest.raises(InvalidParameter, match=r'CapAdd: unknown capability: "CAP_NOPE"'):
        built(cap_add=["NOPE"])


@pytest.mark.parametrize(
    ("given", "path"),
    [("", "/"), ("/a", "/a"), ("/x/./z//../y", "/x/y"), ("/..", "/"), ("//a", "/a"), ("/a/", "/a")],
)
def test_a_working_directory_is_cleaned_for_the_runtime(given: str, path: str) -> None:
    assert spec.directory(given) == path


def test_the_operators_no_new_privileges_holds_unless_the_create_says_otherwise() -> None:
    chosen = Defaults(no_new_privileges=True)
    for options, expected in ((None, True), (["no-new-privileges=false"], False), (["no-new-privileges"], True)):
        of = record(security_opt=options)
        started = spec.build(of, start(defaults=chosen), IDENTITY).process
        further = spec.exec_process(of, ExecCreate(cmd=["x"]), IDENTITY, chosen)
        assert [each.no_new_privileges for each in (started, further)] == [expected, expected]


def test_the_operators_seccomp_profile_holds_unless_the_create_says_otherwise() -> None:
    document = seccomp_profiles.Document(default_action="SCMP_ACT_LOG")
    unconfined, logs = Defaults(filters=None), Defaults(filters=seccomp.Filters(document))

    def action(chosen: Defaults, **host: Any) -> str | None:
        found = spec.build(record(**host), start(defaults=chosen), IDENTITY).linux.seccomp
        return None if found is None else str(msgspec.json.decode(found)["defaultAction"])

    assert action(logs) == "SCMP_ACT_LOG" and action(unconfined) is None
    assert action(logs, privileged=True) is None
    assert action(logs, security_opt=["seccomp=unconfined"]) is None
    for chosen in (logs, unconfined):
        assert action(chosen, security_opt=["seccomp=builtin"]) == "SCMP_ACT_ERRNO"
        assert action(chosen, security_opt=['seccomp={"defaultAction": "SCMP_ACT_TRAP"}']) == "SCMP_ACT_TRAP"


def test_the_parent_of_the_cgroup() -> None:
    operators = msgspec.structs.replace(record(), cgroup_parent="by/default")
    own = msgspec.structs.replace(record(cgroup_parent="/own/"), cgroup_parent="by/default")
    assert spec.build(record(), start(), IDENTITY).linux.cgroups_path == f"/engined/{ID}"
    assert spec.build(operators, start(), IDENTITY).linux.cgroups_path == f"/by/default/{ID}"
    assert spec.build(own, start(), IDENTITY).linux.cgroups_path == f"/own/{ID}"


IDS = IdMap(uids=(Range(0, 100_000, 1000), Range(1000, 300_000, 5)), gids=(Range(0, 200_000, 1000),))


def remapped(of: Start, identity: Identity = IDENTITY, **host: Any) -> Any:
    mapped = msgspec.structs.replace(record(**host), ids=IDS)
    return msgspec.json.decode(oci.encode(spec.build(mapped, of, identity)))


def test_a_user_namespace() -> None:
    document = remapped(start(network="/net", user="/user"))
    assert namespaces_of(document)["user"] == "/user"
    assert document["linux"]["uidMappings"] == [
        {"containerID": 0, "hostID": 100_000, "size": 1000},
        {"containerID": 1000, "hostID": 300_000, "size": 5},
    ]
    assert document["linux"]["gidMappings"] == [{"containerID": 0, "hostID": 200_000, "size": 1000}]
    assert namespaces_of(remapped(start()))["user"] == ""
    plain = built()
    assert "user" not in namespaces_of(plain)
    assert "uidMappings" not in plain["linux"]


def test_what_the_root_of_a_user_namespace_may_not_set() -> None:
    """Groups that it does not have, and the queues of an IPC namespace of others."""
    assert "net.ipv4.ping_group_range" in built()["linux"]["sysctl"]
    settings = remapped(start())["linux"]["sysctl"]
    assert "net.ipv4.ping_group_range" not in settings
    assert settings["net.ipv4.ip_unprivileged_port_start"] == "0"
    queues = mounts_of(remapped(start(), ipc_mode="host")).get("/dev/mqueue")
    assert queues is None or queues["type"] == "bind"
    assert mounts_of(remapped(start()))["/dev/mqueue"]["type"] == "mqueue"


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        (Identity(1005, 0, (0,), "/"), "uid 1005 cannot be mapped to a host ID"),
        (Identity(0, 1000, (1000,), "/"), "gid 1000 cannot be mapped to a host ID"),
        (Identity(0, 0, (0, 4000), "/"), "gid 4000 cannot be mapped to a host ID"),
    ],
)
def test_a_user_beyond_the_ids_of_its_namespace(identity: Identity, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        remapped(start(), identity)
    with pytest.raises(InvalidParameter, match=words):
        spec.exec_process(msgspec.structs.replace(record(), ids=IDS), ExecCreate(cmd=["x"]), identity)


def test_a_sandbox() -> None:
    """It has no hostname of the engine's but the kernel's, and cannot write the other files."""
    found, usual = built(start(placed=Placed(root=Path("/r"), sandbox=True))), built()
    assert found["hostname"] == "box"
    assert "HOSTNAME=box" in usual["process"]["env"]
    assert not any(each.startswith("HOSTNAME=") for each in found["process"]["env"])
    own = {path: mount["options"] for path, mount in mounts_of(found).items() if path.startswith("/etc/")}
    assert {path: "ro" in options for path, options in own.items()} == {"/etc/hosts": True, "/etc/resolv.conf": True}
    assert mounts_of(usual).keys() - mounts_of(found).keys() == {"/etc/hostname"}
