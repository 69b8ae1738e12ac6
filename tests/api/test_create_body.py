"""The create body, field by field: its effect inside the container, in its cgroup or in /proc, its
refusals and its warnings.

The echo of a request in inspect proves nothing and is not checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.containers import security
from tests.support.engine import cgroups, client
from tests.support.engine.cgroups import Group
from tests.support.engine.harness import BREATH, TempEngine, links, until

RUN = ("run", "--rm", "--network", "none")


def output(engine: TempEngine, *arguments: str) -> str:
    """The output of a container without network. The arguments are options of docker run; the last
    one is a shell script.
    """
    *options, script = arguments
    return engine.docker(*RUN, *options, "busybox", "sh", "-c", script).out


def created(engine: TempEngine, body: dict[str, Any], name: str = "") -> client.Answer:
    query = f"?name={name}" if name else ""
    return engine.request("POST", f"/v1.24/containers/create{query}", {"Image": "busybox", "Cmd": ["true"]} | body)


def refused(engine: TempEngine, body: dict[str, Any], *words: str) -> None:
    answer = created(engine, body)
    assert answer.status == 400, answer
    for word in words:
        assert word in answer.message, answer.message
    assert engine.containers() == []


def group(engine: TempEngine, identifier: str) -> Group:
    """The container's cgroup, as the host sees it for its first process."""
    return Group(engine.inspect(identifier)["State"]["Pid"])


# --- limits ---------------------------------------------------------------------------------------


def test_memory_and_swap(engine: TempEngine) -> None:
    for host, expected in (
        ({"Memory": 64 << 20}, (64 << 20, 128 << 20)),
        ({"Memory": 64 << 20, "MemorySwap": 64 << 20}, (64 << 20, 64 << 20)),
        ({"Memory": 64 << 20, "MemorySwap": 100 << 20}, (64 << 20, 100 << 20)),
        ({"Memory": 64 << 20, "MemorySwap": -1}, (64 << 20, cgroups.NONE)),
    ):
        found = group(engine, engine.started("sleep", "600", host=host))
        assert (found.memory, found.swap) == expected


def test_the_other_limits_of_memory(engine: TempEngine) -> None:
    identifier = engine.started(
        *("sleep", "600"),
        host={"Memory": 64 << 20, "MemoryReservation": 32 << 20, "MemorySwappiness": 7, "OomKillDisable": True},
    )
    found = group(engine, identifier)
    assert found.reservation == 32 << 20
    if not cgroups.V2:  # which has neither: test_warnings_in_dockers_words
        assert found.file("memory", "memory.swappiness") == "7"
        assert "oom_kill_disable 1" in found.file("memory", "memory.oom_control")


def test_processor_limits(engine: TempEngine) -> None:
    identifier = engine.started(
        *("sleep", "600"),
        host={"CpuShares": 300, "CpuPeriod": 50000, "CpuQuota": 25000, "CpusetCpus": "0", "CpusetMems": "0"},
    )
    found = group(engine, identifier)
    assert found.has_shares(300)
    assert (found.period, found.quota, found.cpus, found.mems) == (50000, 25000, "0", "0")
    assert "Cpus_allowed_list:\t0\n" in engine.docker("exec", identifier, "cat", "/proc/self/status").out


def test_pids_limit_holds(engine: TempEngine) -> None:
    script = "for i in 1 2 3 4 5 6 7 8 9; do sleep 60 & done; wait"
    result = engine.docker(*RUN, "--pids-limit", "5", "busybox", "sh", "-c", script, status=None)
    assert "can't fork" in result.err


def test_pids_limit_of_minus_one_is_none(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", host={"PidsLimit": -1})
    assert group(engine, identifier).pids == cgroups.NONE


def test_block_device_throttles(engine: TempEngine) -> None:
    device = next((name for name in ("vda", "sda", "nvme0n1", "loop0") if os.path.exists(f"/sys/block/{name}")), None)
    if device is None:
        pytest.skip("no block device here")
    number = Path(f"/sys/block/{device}/dev").read_text().strip()
    path = f"/dev/{device}"
    identifier = engine.started(
        *("sleep", "600"),
        host={
            "BlkioDeviceReadBps": [{"Path": path, "Rate": 1048576}],
            "BlkioDeviceWriteBps": [{"Path": path, "Rate": 2097152}],
            "BlkioDeviceReadIOps": [{"Path": path, "Rate": 50}],
            "BlkioDeviceWriteIOps": [{"Path": path, "Rate": 60}],
        },
    )
    found = group(engine, identifier)
    for name, rate in (("read_bps", 1048576), ("write_bps", 2097152), ("read_iops", 50), ("write_iops", 60)):
        assert found.throttle(name, number) == rate


def test_cgroup_parent(engine: TempEngine) -> None:
    """Paths are for the driver cgroupfs, which is not the default of each host."""
    with TempEngine("--exec-opt", "native.cgroupdriver=cgroupfs") as own:
        own.load_busybox()
        try:
            for given in ("/engtest/below", "engtest/below"):
                identifier = own.started("sleep", "600", host={"CgroupParent": given})
                assert group(own, identifier).path("memory") == f"/engtest/below/{identifier}"
            own.remove_all()
        finally:
            for path in cgroups.directories("engtest"):
                (path / "below").rmdir()
                path.rmdir()
    refused(engine, {"HostConfig": {"CgroupParent": "/a/../../.."}}, "CgroupParent")


def test_oom_score(engine: TempEngine) -> None:
    assert output(engine, "--oom-score-adj", "321", "cat /proc/self/oom_score_adj") == "321\n"


def test_ulimits(engine: TempEngine) -> None:
    script = "ulimit -n; ulimit -Hn; ulimit -c"
    assert output(engine, "--ulimit", "nofile=100:200", "--ulimit", "core=0", script) == "100\n200\n0\n"


def test_ulimits_reach_an_exec(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", host={"Ulimits": [{"Name": "nofile", "Soft": 99, "Hard": 100}]})
    assert engine.docker("exec", identifier, "sh", "-c", "ulimit -n").out == "99\n"


def test_warnings_in_dockers_words(engine: TempEngine) -> None:
    """Limits that this kernel lacks are dropped with a warning; supported ones cause none."""

    def warnings(**host: Any) -> list[str]:
        answer = created(engine, {"HostConfig": host})
        assert answer.status == 201, answer
        identifier = answer.json()["Id"]
        engine.post(f"/containers/{identifier}/start")
        assert engine.wait(identifier) == 0
        return list(answer.json()["Warnings"])

    assert warnings(Memory=64 << 20, CpuShares=5, PidsLimit=50) == []
    assert warnings(NetworkMode="host", PortBindings={"80/tcp": [{"HostPort": "80"}]}) == [
        "Published ports are discarded when using host network mode"
    ]
    unsupported = "Your kernel does not support {} or the cgroup is not mounted. {}"
    root = cgroups.ROOT
    device = next(path for path in ("/dev/vda", "/dev/sda", "/dev/loop0", "/dev/null") if os.path.exists(path))
    weights = {"BlkioWeight": 300, "BlkioWeightDevice": [{"Path": device, "Weight": 200}]}
    without = unsupported.format("Block I/O weight_device", "Weight-device discarded.")
    if (root / "blkio").exists():
        lacking = unsupported.format("Block I/O weight", "Weight discarded.")
        weight = bool(list((root / "blkio").glob("*/blkio*.weight")))
        if not list((root / "blkio").glob("*/blkio.weight_device")):
            assert warnings(**weights) == ([] if weight else [lacking]) + [without]
    elif cgroups.V2 and not list(root.glob("*/io.bfq.weight")):
        assert without in warnings(**weights)
    version = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    if cgroups.V2 or version >= (5, 16):
        assert warnings(KernelMemory=50 << 20) == [
            unsupported.format("kernel memory limit capabilities", "Limitation discarded.")
        ]
    if cgroups.V2:
        assert warnings(MemorySwappiness=7, OomKillDisable=True) == [
            unsupported.format("memory swappiness capabilities", "Memory swappiness discarded."),
            "Your kernel does not support OomKillDisable. OomKillDisable discarded.",
        ]
    elif (root / "memory").exists():
        assert warnings(OomKillDisable=True) == [
            "OOM killer is disabled for the container, but no memory limit is set, "
            "this can result in the system running out of resources."
        ]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({"CpusetCpus": "0-2147483647"}, "CpusetCpus"),
        ({"CpusetCpus": "0-8191"}, "not available - requested 0-8191"),
        ({"CpusetCpus": ",".join(["0-8191"] * 500)}, "not available"),
        ({"CpusetCpus": "1-0"}, "CpusetCpus: Invalid value 1-0"),
        ({"CpusetCpus": "a"}, "Invalid value a for cpuset cpus"),
        ({"CpusetMems": "63"}, "Requested memory nodes are not available"),
        ({"Ulimits": [{"Name": "files", "Soft": 1, "Hard": 1}]}, "invalid ulimit type: files"),
        ({"Ulimits": [{"Name": "nofile", "Soft": 1, "Hard": 1 << 40}]}, "nofile"),
        ({"CapAdd": ["NOPE"]}, "CapAdd"),
        ({"CapDrop": ["NOPE"]}, "CapDrop"),
        ({"SecurityOpt": ["what=ever"]}, "SecurityOpt"),
        ({"SecurityOpt": ["seccomp={"]}, "Decoding seccomp profile failed"),
        ({"SecurityOpt": ['seccomp={"defaultAction":"SCMP_ACT_WHAT"}']}, "SCMP_ACT_WHAT"),
        ({"Sysctls": {"kernel.core_pattern": "|/x"}}, "kernel.core_pattern"),
        ({"Sysctls": {"vm.swappiness": "1"}}, "vm.swappiness"),
        ({"Sysctls": {"net/../kernel/core_pattern": "|/x"}}, "Sysctls"),
        ({"Sysctls": {"net.ipv4.ip_forward": "1"}, "NetworkMode": "host"}, "net.ipv4.ip_forward"),
        ({"Sysctls": {"kernel.shmmax": "1"}, "IpcMode": "host"}, "kernel.shmmax"),
        ({"Tmpfs": {"/t": "bogus"}}, 'Invalid tmpfs option "bogus"'),
        ({"Tmpfs": {"relative": ""}}, "relative"),
        ({"Tmpfs": {"/t": "size=x"}}, "size=x"),
        ({"Binds": ["/tmp:/t"], "Tmpfs": {"/t": ""}}, "Duplicate mount point: /t"),
        ({"Devices": [{"PathOnHost": "/dev/null", "CgroupPermissions": "x"}]}, "CgroupPermissions"),
        ({"Devices": [{"PathOnHost": "dev/null"}]}, "Devices"),
        ({"StorageOpt": {"size": "10G"}}, "pquota"),
        ({"StorageOpt": {"dm.x": "1"}}, "dm.x"),
        ({"PidMode": "other"}, "PidMode"),
        ({"IpcMode": "other"}, "IpcMode"),
        ({"UTSMode": "other"}, "UTSMode"),
        ({"NetworkMode": "container:"}, "container:<name|id>"),
        ({"Links": ["a:b:c"]}, "Links"),
        ({"Links": ["nobody:b"]}, "nobody"),
        ({"VolumesFrom": ["nobody"]}, "No such container: nobody"),
        ({"PidMode": "container:nobody"}, "PidMode: No such container: nobody"),
        ({"IpcMode": "container:nobody"}, "IpcMode: No such container: nobody"),
        ({"VolumesFrom": ["x:wo"]}, "VolumesFrom"),
        ({"CpuPercent": 5}, "CpuPercent"),
        ({"IOMaximumBandwidth": 5}, "IOMaximumBandwidth"),
        ({"LogConfig": {"Type": "whatever"}}, "whatever"),
        ({"LogConfig": {"Type": "gelf"}}, "gelf-address is a required parameter"),
        ({"LogConfig": {"Type": "syslog", "Config": {"x": "y"}}}, "unknown log opt 'x' for syslog log driver"),
        ({"LogConfig": {"Config": {"tag": "{{.Wrong}}"}}}, "'tag' for json-file log driver"),
        ({"LogConfig": {"Type": "fluentd", "Config": {"fluentd-retry-wait": "5"}}}, "'fluentd-retry-wait'"),
        ({"Runtime": "kata"}, "Unknown runtime specified kata"),
        ({"DnsSearch": ["a\nb"]}, "DnsSearch"),
        ({"ExtraHosts": ["a b:1.2.3.4"]}, "ExtraHosts"),
        ({"Links": ["a:b"], "NetworkMode": "host"}, "conflicting options"),
        ({"Dns": ["1.1.1.1"], "NetworkMode": "container:x"}, "dns and the network mode"),
        ({"PublishAllPorts": True, "NetworkMode": "container:x"}, "port publishing"),
    ],
    ids=lambda value: str(value)[:48],
)
@pytest.mark.own
def test_refused_with_field_and_rule(engine: TempEngine, host: dict[str, Any], words: str) -> None:
    refused(engine, {"HostConfig": host}, words)


@pytest.mark.own
def test_refused_in_config(engine: TempEngine) -> None:
    refused(engine, {"MacAddress": "01:00:00:00:00:01"}, "MacAddress")
    refused(engine, {"Domainname": "a b"}, "domainname")
    refused(engine, {"Hostname": "x", "HostConfig": {"UTSMode": "host"}}, "hostname and the UTS mode")
    refused(engine, {"Hostname": "x", "HostConfig": {"NetworkMode": "container:y"}}, "hostname and the network mode")
    if "CAP_SYS_RESOURCE" not in _own_capabilities():
        refused(engine, {"HostConfig": {"OomScoreAdj": -900}}, "OomScoreAdj")
        refused(engine, {"HostConfig": {"CapAdd": ["SYS_RESOURCE"]}}, "CAP_SYS_RESOURCE")


def _own_capabilities() -> list[str]:
    """CAP_SYS_RESOURCE when this process can pass it on."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapBnd"))
    return ["CAP_SYS_RESOURCE"] if int(line.split()[1], 16) >> 24 & 1 else []


# --- permissions ----------------------------------------------------------------------------------


def _effective(text: str) -> int:
    return int(re.findall(r"CapEff:\s+(\S+)", text)[0], 16)


def test_capabilities(engine: TempEngine) -> None:
    status = "cat /proc/self/status"
    assert _effective(output(engine, "--cap-drop", "ALL", status)) == 0
    assert _effective(output(engine, "--cap-drop", "ALL", "--cap-add", "chown", status)) == 1
    assert _effective(output(engine, "--cap-add", "SYS_PTRACE", status)) == _effective(output(engine, status)) | 1 << 19
    everything = _effective(output(engine, "--privileged", status))
    assert everything == _effective(output(engine, "--cap-add", "ALL", status))


def test_seccomp_profiles(engine: TempEngine, tmp_path: Path) -> None:
    """Docker's format: rules that depend on capabilities and architectures, errno values, the
    old single `name`.
    """
    profile = tmp_path / "profile.json"
    profile.write_text(
        json.dumps(
            {
                "defaultAction": "SCMP_ACT_ALLOW",
                "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}],
                "syscalls": [
                    {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 28, "args": []},
                    {"name": "symlink", "action": "SCMP_ACT_ERRNO", "excludes": {"caps": ["CAP_SYS_PTRACE"]}},
                    {"names": ["symlinkat"], "action": "SCMP_ACT_ERRNO", "excludes": {"caps": ["CAP_SYS_PTRACE"]}},
                    {"names": ["unlink", "unlinkat"], "action": "SCMP_ACT_ERRNO", "includes": {"arches": ["vax"]}},
                ],
            }
        )
    )
    script = "mkdir /x; ln -s a /l && echo linked; touch /f; rm /f && echo removed"
    option = ("--security-opt", f"seccomp={profile}")
    plain = engine.docker(*RUN, *option, "busybox", "sh", "-c", script)
    assert plain.out == "removed\n" and "No space left on device" in plain.err
    capable = engine.docker(*RUN, *option, "--cap-add", "SYS_PTRACE", "busybox", "sh", "-c", script)
    assert capable.out == "linked\nremoved\n"


def test_seccomp_modes(engine: TempEngine) -> None:
    status = "grep Seccomp: /proc/self/status"
    assert output(engine, status).split()[1] == "2"
    assert output(engine, "--security-opt", "seccomp=unconfined", status).split()[1] == "0"


def test_other_security_options(engine: TempEngine) -> None:
    status = "grep NoNewPrivs /proc/self/status"
    assert output(engine, status).split()[1] == "0"
    for option in ("no-new-privileges", "no-new-privileges:true", "no-new-privileges=true"):
        assert output(engine, "--security-opt", option, status).split()[1] == "1"
    kept = (
        "--security-opt",
        "label=disable",
        "--security-opt",
        "label:type:x_t",
        "--security-opt",
        "apparmor=unconfined",
    )
    assert output(engine, *kept, "echo on") == "on\n"


def test_devices(engine: TempEngine) -> None:
    script = "stat -c %t:%T /dev/mine; head -c 1 /dev/mine | wc -c; echo x > /dev/mine"
    result = engine.docker(*RUN, "--device", "/dev/zero:/dev/mine:r", "busybox", "sh", "-c", script, status=None)
    assert result.out == "1:5\n1\n"
    # zero is among the default devices, whose rules stay; this one is not:
    kmsg = engine.docker(
        *RUN, "--device", "/dev/fuse:/dev/f:w", "busybox", "sh", "-c", ": > /dev/f && : < /dev/f", status=None
    )
    if os.path.exists("/dev/fuse"):
        assert kmsg.err.count("Operation not permitted") == 1 and "can't open" in kmsg.err


@pytest.mark.parametrize("network", ["none", "bridge"])
def test_sysctls(engine: TempEngine, network: str) -> None:
    """A runtime would write those of a network through the host's /proc, which gets slower with
    each namespace that the host has had.
    """
    options = ("--sysctl", "kernel.shmmax=65536", "--sysctl", "net.ipv4.ip_local_port_range=2000 3000")
    script = "cd /proc/sys; cat kernel/shmmax net/ipv4/ip_local_port_range net/ipv4/ip_unprivileged_port_start"
    command = ("busybox", "sh", "-c", f"{script}; ip -o link | wc -l; ip -o addr show lo; sleep 600")
    identifier = engine.docker("run", "-d", "--network", network, *options, *command).line
    until("it has written", lambda: b"127.0.0.1" in engine.logs(identifier))
    said = engine.logs(identifier).decode().split()
    assert said[:5] == ["65536", "2000", "3000", "0", "1" if network == "none" else "2"]
    config = json.loads((engine.root / "containers" / identifier / "config.json").read_bytes())
    assert list(config["linux"]["sysctl"]) == ["kernel.shmmax"]
    (namespace,) = [each for each in config["linux"]["namespaces"] if each["type"] == "network"]
    assert namespace["path"]
    held = set()
    for each in Path(f"/proc/{engine.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            held.add(os.readlink(each))
    mine = os.readlink(f"/proc/{engine.inspect(identifier)['State']['Pid']}/ns/net")
    assert (mine in held) == (network == "bridge")


def test_masked_directories(engine: TempEngine) -> None:
    """They are empty and read-only, and a container has no file systems of its own for them, but
    for /, /dev, /dev/pts, /dev/shm, /dev/mqueue, /proc, /sys, and v1's hierarchies.
    """
    directories = [path for path in security.MASKED_PATHS if os.path.isdir(path)]
    assert "/sys/firmware" in directories
    seen = 'test -z "$(ls -A $each)" && ! touch $each/new 2>/dev/null && echo "= $each"'
    script = f"cat /proc/self/mountinfo; for each in {' '.join(directories)}; do {seen}; done"
    lines = output(engine, script).splitlines()
    assert [line[2:] for line in lines if line.startswith("= ")] == directories

    def devices(mounts: Iterable[str]) -> set[str]:
        return {line.split()[2] for line in mounts if " - " in line}

    own = devices(lines) - devices(Path("/proc/self/mountinfo").read_text().splitlines())
    assert len(own) <= 7 + (not Path("/sys/fs/cgroup/cgroup.controllers").exists())


def test_user_and_groups(engine: TempEngine) -> None:
    assert output(engine, "--user", "12:34", "--group-add", "55", "id").startswith("uid=12 gid=34 groups=34")
    assert "55" in output(engine, "--group-add", "55", "id -G")


def test_stop_signal(engine: TempEngine) -> None:
    script = "trap 'echo got it; exit 3' USR1; echo ready; while :; do sleep 0.1; done"
    identifier = engine.docker(
        "run", "-d", "--network", "none", "--stop-signal", "USR1", "busybox", "sh", "-c", script
    ).line
    until("it is ready", lambda: engine.logs(identifier) == b"ready\n")
    engine.docker("stop", "-t", "30", identifier)
    assert engine.logs(identifier) == b"ready\ngot it\n" and engine.wait(identifier) == 3


def test_stdin_once(engine: TempEngine) -> None:
    """The end of the only client's input is end of file for the container."""
    result = engine.docker(*RUN, "-i", "busybox", "cat", input="all of it")
    assert result.out == "all of it"


# --- files and names inside -----------------------------------------------------------------------


def test_names(engine: TempEngine) -> None:
    script = "hostname; cat /proc/sys/kernel/domainname /etc/hostname; echo $HOSTNAME"
    assert output(engine, "--hostname", "box", "--domainname", "ex.org", script) == "box\nex.org\nbox\nbox\n"
    own = os.uname().nodename
    assert output(engine, "--uts", "host", "hostname; echo $HOSTNAME; readlink /proc/self/ns/uts").split() == [
        *(own, own),
        os.readlink("/proc/self/ns/uts"),
    ]


def test_hosts_and_resolvers(engine: TempEngine) -> None:
    options = ("--add-host", "db:10.9.8.7", "--dns", "9.9.9.9", "--dns-search", "a.b", "--dns-option", "ndots:3")
    text = output(engine, *options, "cat /etc/hosts /etc/resolv.conf")
    assert "10.9.8.7\tdb\n" in text
    assert text.endswith("nameserver 9.9.9.9\nsearch a.b\noptions ndots:3\n")


def test_mac_address(engine: TempEngine) -> None:
    identifier = engine.started("cat", "/sys/class/net/eth0/address", network="bridge", MacAddress="02:42:AC:11:00:99")
    engine.wait(identifier)
    assert engine.logs(identifier) == b"02:42:ac:11:00:99\n"


def test_network_disabled(engine: TempEngine) -> None:
    identifier = engine.started("ls", "/sys/class/net", network="default", NetworkDisabled=True)
    engine.wait(identifier)
    assert engine.logs(identifier) == b"lo\n"


def test_read_only_root(engine: TempEngine) -> None:
    script = "touch /x; touch /etc/hosts || echo ro; touch /t/y && echo rw"
    result = engine.docker(*RUN, "--read-only", "--tmpfs", "/t", "busybox", "sh", "-c", script)
    assert result.out == "ro\nrw\n"
    assert "Read-only file system" in result.err


def test_tmpfs(engine: TempEngine) -> None:
    script = "grep ' /t ' /proc/mounts; stat -c %a:%u:%g /t"
    mounted = output(engine, "--tmpfs", "/t:size=1m,mode=700,uid=3,gid=4,exec", script)
    assert "size=1024k" in mounted and mounted.endswith("700:3:4\n")
    options = mounted.split()[3].split(",")
    assert {"nosuid", "nodev"} <= set(options) and "noexec" not in options
    assert "noexec" in output(engine, "--tmpfs", "/t", script).split()[3].split(",")


def test_shm_size(engine: TempEngine) -> None:
    assert output(engine, "--shm-size", "3m", "df -k /dev/shm").split()[-5] == "3072"
    assert output(engine, "df -k /dev/shm").split()[-5] == "65536"


def test_working_directory_is_made(engine: TempEngine) -> None:
    assert output(engine, "-w", "/new/dir", "pwd") == "/new/dir\n"


def test_env_file_and_labels(engine: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "env").write_text("A=from the file\nB=2\n")
    assert (
        output(engine, "--env-file", str(tmp_path / "env"), "-e", "B=3", "-l", "x=y", "echo $A $B")
        == "from the file 3\n"
    )


# --- namespaces of other containers ---------------------------------------------------------------


def test_host_namespaces(engine: TempEngine) -> None:
    for option, kind in (("--pid", "pid"), ("--ipc", "ipc"), ("--uts", "uts"), ("--userns", "user")):
        assert output(engine, option, "host", f"readlink /proc/self/ns/{kind}").strip() == os.readlink(
            f"/proc/self/ns/{kind}"
        )
    result = engine.docker("run", "--rm", "--network", "host", "busybox", "readlink", "/proc/self/ns/net")
    assert result.line == os.readlink("/proc/self/ns/net")


def test_network_of_another_container(engine: TempEngine) -> None:
    owner = engine.docker("run", "-d", "--name", "owner", "--hostname", "ownername", "busybox", "sleep", "600").line
    address = engine.inspect(owner)["NetworkSettings"]["IPAddress"]
    script = "hostname; ip -4 -o addr show eth0; cat /etc/hosts; readlink /proc/self/ns/net"
    for name in ("owner", owner, owner[:12]):
        result = engine.docker("run", "--rm", "--network", f"container:{name}", "busybox", "sh", "-c", script)
        pid = engine.inspect(owner)["State"]["Pid"]
        assert result.out.startswith("ownername\n") and f"inet {address}/" in result.out
        assert f"{address}\townername" in result.out
        assert result.out.endswith(os.readlink(f"/proc/{pid}/ns/net") + "\n")
    middle = engine.started("sleep", "600", network="container:owner")
    chained = engine.docker("run", "--rm", "--network", f"container:{middle}", "busybox", "sh", "-c", script)
    assert chained.out.startswith("ownername\n") and f"{address}\townername" in chained.out
    engine.docker("kill", "owner")
    late = engine.docker("run", "--network", "container:owner", "busybox", "true", status=125)
    assert "non running container" in late.err
    missing = engine.docker("run", "--network", "container:nobody", "busybox", "true", status=125)
    assert "No such container: nobody" in missing.err
    own = engine.create("true", name="own", network="container:own")
    assert engine.request("POST", f"/v1.24/containers/{own}/start").status == 400


def test_processes_of_another_container(engine: TempEngine) -> None:
    owner = engine.docker("run", "-d", "--network", "none", "busybox", "sleep", "612").line
    assert "sleep 612" in output(engine, "--pid", f"container:{owner}", "ps")
    running = engine.started("sleep", "613", host={"PidMode": f"container:{owner}"})
    assert "sleep 613" in engine.docker("exec", owner, "ps").out
    # the kernel ends every process of a PID namespace with its first one
    engine.docker("kill", owner)
    assert engine.wait(running) == 137


def test_ipc_of_another_container(engine: TempEngine) -> None:
    owner = engine.docker("run", "-d", "--network", "none", "--shm-size", "5m", "busybox", "sleep", "600").line
    engine.docker("exec", owner, "sh", "-c", "echo shared > /dev/shm/word; ")
    before = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(engine.run) in line]
    script = "cat /dev/shm/word; df -k /dev/shm | tail -n 1; echo back > /dev/shm/answer; readlink /proc/self/ns/ipc"
    text = output(engine, "--ipc", f"container:{owner}", script)
    pid = engine.inspect(owner)["State"]["Pid"]
    assert text.startswith("shared\n") and " 5120 " in text
    assert text.endswith(os.readlink(f"/proc/{pid}/ns/ipc") + "\n")
    assert engine.docker("exec", owner, "cat", "/dev/shm/answer").out == "back\n"
    after = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(engine.run) in line]
    assert after == before
    assert output(engine, "--ipc", "host", "readlink /proc/self/ns/ipc").strip() == os.readlink("/proc/self/ns/ipc")


def test_volumes_from(engine: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content\n")
    (tmp_path / "other").mkdir()
    source = ("-v", f"{tmp_path}:/data", "-v", "engtestvolume:/named", "-v", f"{tmp_path}:/ro:ro")
    engine.docker("run", "--name", "source", "--network", "none", *source, "busybox", "sh", "-c", "echo v > /named/f")
    script = "cat /data/file /named/f; touch /data/new && echo rw; touch /ro/x || echo ro"
    assert output(engine, "--volumes-from", "source", script) == "content\nv\nrw\nro\n"
    assert output(engine, "--volumes-from", "source:ro", "touch /data/x || touch /named/x || echo ro") == "ro\n"
    replaced = ("--volumes-from", "source", "-v", f"{tmp_path}/other:/data")
    assert output(engine, *replaced, "ls /data | wc -l; cat /named/f") == "0\nv\n"


def test_links(engine: TempEngine) -> None:
    options = ("--name", "child", "--hostname", "childhost", "-e", "SECRET=s p", "--expose", "80", "--expose", "53/udp")
    child = engine.docker("run", "-d", *options, "busybox", "sleep", "600").line
    address = engine.inspect(child)["NetworkSettings"]["IPAddress"]
    parent = engine.docker("run", "-d", "--name", "parent", "--link", "child:the-db", "busybox", "sleep", "600").line
    environment = engine.docker("exec", parent, "env").out.splitlines()
    for expected in (
        f"THE_DB_PORT=tcp://{address}:80",
        f"THE_DB_PORT_80_TCP=tcp://{address}:80",
        f"THE_DB_PORT_80_TCP_ADDR={address}",
        "THE_DB_PORT_80_TCP_PORT=80",
        "THE_DB_PORT_80_TCP_PROTO=tcp",
        "THE_DB_PORT_53_UDP_PORT=53",
        "THE_DB_NAME=/parent/the-db",
        "THE_DB_ENV_SECRET=s p",
    ):
        assert expected in environment
    assert f"{address}\tthe-db childhost child\n" in engine.docker("exec", parent, "cat", "/etc/hosts").out
    assert "1 packets received" in engine.docker("exec", parent, "ping", "-c", "1", "the-db").out
    # the child restarts with another address: the parent's hosts file is updated
    engine.docker("kill", "child")
    engine.docker("run", "-d", "--name", "thief", "busybox", "sleep", "600")
    engine.docker("start", "child")
    renewed = engine.inspect(child)["NetworkSettings"]["IPAddress"]
    until("the new address", lambda: f"{renewed}\tthe-db" in engine.docker("exec", parent, "cat", "/etc/hosts").out)
    engine.docker("rm", "-f", "child")
    engine.docker("kill", "parent")
    late = engine.docker("start", "parent", status=1)
    assert "Cannot link to" in late.err


# --- starts that fail -----------------------------------------------------------------------------


def test_programs_that_the_kernel_does_not_run(engine: TempEngine, tmp_path: Path) -> None:
    """Exit code 126 or 127 and the reason; the container stays created. crun alone would start it
    and exit with 1."""
    files = {
        "garbage": b"not a program\n",
        "foreign": b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + b"\x16\x00" + bytes(108),
        "windows": b"#!/bin/sh\r\necho hello\r\n",
        "nobody": b"#!/no/such/interpreter\n",
        "fine": b"#!/bin/sh\necho fine\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o755)
    shutil.copy("/bin/ls", tmp_path / "dynamic")  # its ELF interpreter is not in the image
    for name, status, words in (
        ("garbage", 126, "exec format error"),
        ("foreign", 126, "exec format error"),
        ("windows", 127, "no such file or directory"),
        ("nobody", 127, "no such file or directory"),
        ("dynamic", 127, "no such file or directory"),
    ):
        result = engine.docker(
            *("run", "--name", name, "--network", "none", "-v", f"{tmp_path}:/p", "busybox", f"/p/{name}"),
            status=status,
        )
        assert words in result.err
        state = engine.inspect(name)["State"]
        assert (state["Status"], state["ExitCode"]) == ("created", status) and words in state["Error"]
    assert engine.docker(*RUN, "-v", f"{tmp_path}:/p", "busybox", "/p/fine").out == "fine\n"
    path = ("-e", "PATH=/nowhere:/p:/bin", "-v", f"{tmp_path}:/p")
    assert "exec format error" in engine.docker(*RUN, *path, "busybox", "foreign", status=126).err


FAILURES: tuple[dict[str, Any], ...] = (
    {"Cmd": ["no-such-program"]},
    {"Cmd": ["/etc"]},
    {"User": "nobody-here"},
    {"HostConfig": {"Devices": [{"PathOnHost": "/dev/not-there"}]}},
    {"HostConfig": {"Binds": ["/proc/version/x:/x"]}},
    {"HostConfig": {"Binds": ["/etc/passwd:/etc"]}},
    {"HostConfig": {"BlkioDeviceReadBps": [{"Path": "/dev/not-there", "Rate": 1}]}},
    {"HostConfig": {"NetworkMode": "not-there"}},
    {"HostConfig": {"NetworkMode": "container:not-there"}},
    {"HostConfig": {"Sysctls": {"net.ipv4.no_such_thing": "1"}}},
)


@pytest.mark.own
def test_failed_starts_give_everything_back(engine: TempEngine) -> None:
    """Two hundred failed starts of ten kinds: no address, veth, namespace, cgroup, mount,
    descriptor or process is left."""

    def ports() -> int:
        return sum("master" in link for link in links().values())

    def fail(body: dict[str, Any]) -> None:
        answer = created(engine, body)
        assert answer.status == 201, answer
        identifier = answer.json()["Id"]
        start = engine.request("POST", f"/v1.24/containers/{identifier}/start")
        assert start.status in (400, 404, 409, 500) and start.message, start
        state = engine.inspect(identifier)["State"]
        assert state["Status"] == "created" and state["Error"] == start.message
        assert state["ExitCode"] in (126, 127, 128)
        assert engine.inspect(identifier)["NetworkSettings"]["IPAddress"] == ""
        engine.request("DELETE", f"/v1.24/containers/{identifier}")

    for body in FAILURES:
        fail(body)
    before, descriptors = engine.footprint(), engine.descriptors()
    first = ports()
    for _ in range(19):
        for body in FAILURES:
            fail(body)
    engine.assert_settles(before)
    until("descriptors are given back", lambda: engine.descriptors() <= descriptors + BREATH)
    most = max(first, 64) + 8
    until("links are given back", lambda: ports() <= most)
    running = engine.docker("run", "-d", "busybox", "sleep", "600").line
    assert engine.inspect(running)["NetworkSettings"]["IPAddress"]


@pytest.mark.own
def test_what_builds_on_others_comes_up_after_them_at_boot(own_engine: TempEngine) -> None:
    """Links and shared namespaces with a restart policy: the engine starts them concurrently, and
    they wait for each other."""
    again = {"RestartPolicy": {"Name": "always"}}
    own_engine.started("sleep", "600", name="base", network="bridge", host=again)
    made = [
        own_engine.started("sleep", "600", network="bridge", host=again | {"Links": ["base:db"]}),
        own_engine.started("sleep", "600", network="container:base", host=again),
        own_engine.started("sleep", "600", host=again | {"PidMode": "container:base", "IpcMode": "container:base"}),
    ]
    own_engine.reboot()
    until("all run", lambda: all(own_engine.inspect(each)["State"]["Status"] == "running" for each in made))
    base = own_engine.inspect("base")
    pids = [own_engine.inspect(each)["State"]["Pid"] for each in made]
    assert os.readlink(f"/proc/{pids[1]}/ns/net") == os.readlink(f"/proc/{base['State']['Pid']}/ns/net")
    assert os.readlink(f"/proc/{pids[2]}/ns/ipc") == os.readlink(f"/proc/{base['State']['Pid']}/ns/ipc")
    hosts = own_engine.docker("exec", made[0], "cat", "/etc/hosts").out
    assert f"{base['NetworkSettings']['IPAddress']}\tdb" in hosts


def test_docker_py_sets_many_at_once(engine: TempEngine) -> None:
    """The Python client's own names for the fields, all in one container."""
    import docker

    connection = engine.client()
    try:
        container = connection.containers.run(
            "busybox",
            ["sleep", "600"],
            detach=True,
            network_mode="none",
            mem_limit="64m",
            memswap_limit=-1,
            mem_reservation="32m",
            mem_swappiness=11,
            cpu_shares=77,
            cpuset_cpus="0",
            pids_limit=33,
            oom_score_adj=99,
            shm_size="2m",
            tmpfs={"/t": "size=1m"},
            cap_drop=["ALL"],
            cap_add=["KILL"],
            security_opt=["no-new-privileges"],
            sysctls={"net.core.somaxconn": "100"},
            ulimits=[docker.types.Ulimit(name="nofile", soft=50, hard=60)],
            group_add=["77"],
            extra_hosts={"x": "1.2.3.4"},
            dns=["9.9.9.9"],
            read_only=True,
            hostname="pybox",
            domainname="py.test",
            environment={"A": "b"},
            devices=["/dev/null:/dev/mine:r"],
            stop_signal="SIGINT",
        )
        identifier = container.id
        found = group(engine, identifier)
        assert (found.memory, found.reservation, found.cpus, found.pids) == (64 << 20, 32 << 20, "0", 33)
        assert found.has_shares(77)
        assert cgroups.V2 or found.file("memory", "memory.swappiness") == "11"
        pid = engine.inspect(identifier)["State"]["Pid"]
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "99\n"
        status = Path(f"/proc/{pid}/status").read_text()
        assert _effective(status) == 1 << 5 and "NoNewPrivs:\t1" in status
        assert re.search(r"Max open files\s+50\s+60\s", Path(f"/proc/{pid}/limits").read_text())
        script = (
            "hostname; cat /proc/sys/kernel/domainname /proc/sys/net/core/somaxconn; echo $A; id -G; ls /dev/mine;"
            "df -k /dev/shm /t | awk 'NR>1{print $2}'; grep -c 1.2.3.4 /etc/hosts; touch /x 2>/dev/null || echo ro"
        )
        written = container.exec_run(["sh", "-c", script]).output.decode().split()
        assert written[:4] == ["pybox", "py.test", "100", "b"] and "77" in written
        assert written[-5:] == ["/dev/mine", "2048", "1024", "1", "ro"]
    finally:
        connection.close()
