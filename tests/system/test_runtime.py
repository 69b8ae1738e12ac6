"""Bundles of containers/spec.py, run by the real crun and runc. The tests check what a process
inside the container sees.

Needs root and a static /bin/busybox. Each test has its own state directory and leaves no cgroup
behind.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.containers import security, spec
from engine.containers.start import Placed, Start
from engine.containers.store import ContainerRecord
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.runtime import capabilities, oci, users
from engine.runtime.cgroups import PARENT, Cgroups
from engine.runtime.oci import Runtime
from engine.system import mounts
from engine.wire import oci as wire
from engine.wire.containers import Config, DeviceMapping, HostConfig, MountPoint, Ulimit
from tests.support import PATIENCE
from tests.support.engine import cgroups
from tests.support.engine.cgroups import Group

BUSYBOX = Path("/bin/busybox")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

HIERARCHIES = Cgroups.detect()


@pytest.fixture(params=["crun", "runc"])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Runtime:
    """One of the runtimes, probed."""
    assert shutil.which(request.param, path=oci.SEARCH), f"{request.param} is not installed (.ci/packages)"
    run = tmp_path / "run"
    run.mkdir()
    try:
        return Runtime.probe(request.param, run)
    except ServerError as error:
        # crun's own refusal of such a host; .ci/cgroups fixes it where it can
        if "hybrid" not in error.message:
            raise
        pytest.skip(error.message)


class Box:
    """A directory in which records are run as containers."""

    def __init__(self, runtime: Runtime, directory: Path) -> None:
        self.runtime = runtime
        self.directory = directory
        self.rootfs = directory / "rootfs"
        self.ids: list[str] = []
        for name in ("bin", "etc", "tmp", "root", "var"):
            (self.rootfs / name).mkdir(parents=True)
        shutil.copy(BUSYBOX, self.rootfs / "bin/busybox")
        for name in subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout.split():
            if name != "busybox":
                (self.rootfs / "bin" / name).symlink_to("busybox")
        (self.rootfs / "etc/passwd").write_text(
            "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001:Ann:/home/ann:/bin/sh\n"
        )
        (self.rootfs / "etc/group").write_text("root:x:0:\nann:x:1001:\naudio:x:29:ann,bob\nvideo:x:44:bob\n")
        for name in ("hosts", "hostname", "resolv.conf"):
            (directory / name).write_text(f"# {name} of the test\n")

    def record(
        self, command: str | list[str], *, mounts: tuple[MountPoint, ...] = (), **fields: Any
    ) -> ContainerRecord:
        """A record of this command; keyword arguments go to Config or HostConfig, whichever has the
        field."""
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        config = {
            "hostname": "box",
            **{name: value for name, value in fields.items() if name in Config.__struct_fields__},
        }
        host = {name: value for name, value in fields.items() if name in HostConfig.__struct_fields__}
        container_id = secrets.token_hex(32)
        self.ids.append(container_id)
        return ContainerRecord(
            id=container_id,
            name="box",
            created=0,
            image_id="",
            parent="",
            path=words[0],
            args=tuple(words[1:]),
            config=Config(**config),
            host=HostConfig(**host),
            mounts=mounts,
        )

    def prepared(self, network: str | None = "") -> Start:
        return Start(
            directory=self.directory,
            bundle=self.directory,
            rootfs=str(self.rootfs),
            placed=Placed(root=self.rootfs),
            network=network,
            runtime=self.runtime,
            cgroups=HIERARCHIES,
        )

    def bundle(self, record: ContainerRecord, network: str | None = "") -> Path:
        identity = users.lookup(self.rootfs, record.config.user, record.host.group_add or ())
        document = spec.build(record, self.prepared(network), identity)
        bundle = self.directory / record.id
        bundle.mkdir()
        (bundle / "config.json").write_bytes(wire.encode(document))
        return bundle

    def run(self, command: str | list[str], *, network: str | None = "", status: int = 0, **fields: Any) -> str:
        """The command's output, after it ended."""
        record = self.record(command, **fields)
        bundle = self.bundle(record, network)
        argv = [arg for arg in self.argv(record, bundle) if arg != "--detach"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr + done.stdout
        return done.stdout.strip()

    def start(self, record: ContainerRecord) -> int:
        """Start the container without output. Returns its process id. Its bundle is the directory
        of its id.
        """
        bundle = self.bundle(record)
        argv, null = self.argv(record, bundle), subprocess.DEVNULL
        subprocess.run(argv, stdin=null, stdout=null, stderr=null, check=True)
        return int((bundle / "pid").read_text())

    def argv(self, record: ContainerRecord, bundle: Path) -> tuple[str, ...]:
        return self.runtime.run_argv(record.id, bundle=bundle, pid_file=bundle / "pid", log=bundle / "log")

    def failure(self, command: list[str], **fields: Any) -> oci.Failure:
        """The error of a start that fails."""
        record = self.record(command, **fields)
        bundle = self.bundle(record)
        done = subprocess.run(
            self.argv(record, bundle), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
        )
        assert done.returncode != 0
        return oci.start_failure((bundle / "log").read_text(), record.path)

    def close(self) -> None:
        for container_id in self.ids:
            argv = [self.runtime.path, "--root", self.runtime.root, "delete", "--force", container_id]
            subprocess.run(argv, capture_output=True, check=False)


@pytest.fixture
def box(runtime: Runtime, tmp_path: Path) -> Iterator[Box]:
    box = Box(runtime, tmp_path)
    hold = HIERARCHIES.hold()
    try:
        yield box
    finally:
        box.close()
        hold.release()
        left = [name for name in HIERARCHIES.children() if name in box.ids or name.startswith(f"probe-{os.getpid()}")]
        assert not left, "cgroups are left behind"


def fields(status: str) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(":") for line in status.splitlines())}


def names(mask: str) -> set[str]:
    return set(capabilities.from_mask(int(mask, 16)))


def test_default_container_is_confined(box: Box) -> None:
    status = fields(box.run("cat /proc/self/status"))
    expected = set(capabilities.DEFAULT) & capabilities.bounding()
    assert names(status["CapBnd"]) == names(status["CapEff"]) == names(status["CapPrm"]) == expected
    assert names(status["CapInh"]) == names(status["CapAmb"]) == set()
    assert status["Seccomp"] == "2"
    assert status["NoNewPrivs"] == "0"


def test_seccomp_filter_decides_as_docker_says(box: Box) -> None:
    script = """
    unshare -m true 2>&1; unshare -U true 2>&1
    mkdir -p /tmp/x && chmod 700 /tmp/x && stat -c %a /tmp/x
    mount -t tmpfs none /tmp/x 2>&1 | head -1
    (sleep 0 & wait) && echo forked
    """
    text = box.run(script)
    assert text.count("Operation not permitted") + text.count("permission denied") == 3
    assert "700" in text
    assert "forked" in text


def test_seccomp_follows_the_capabilities(box: Box) -> None:
    script = "mount -t tmpfs none /tmp && unshare -m true && echo mounted"
    # docker-default denies mounts whatever the capabilities
    assert box.run(script, cap_add=["SYS_ADMIN"], security_opt=["apparmor=unconfined"]) == "mounted"


def test_unconfined_and_no_new_privileges(box: Box) -> None:
    status = fields(box.run("cat /proc/self/status", security_opt=["seccomp=unconfined", "no-new-privileges"]))
    assert status["Seccomp"] == "0"
    assert status["NoNewPrivs"] == "1"


def test_capabilities_added_and_dropped(box: Box) -> None:
    status = fields(box.run("cat /proc/self/status", cap_add=["net_admin"], cap_drop=["CAP_KILL", "chown"]))
    expected = (set(capabilities.DEFAULT) | {"CAP_NET_ADMIN"}) - {"CAP_KILL", "CAP_CHOWN"}
    assert names(status["CapEff"]) == expected & capabilities.bounding()
    assert names(fields(box.run("cat /proc/self/status", cap_drop=["ALL"]))["CapBnd"]) == set()


def test_privileged_has_all_that_the_engine_has(box: Box) -> None:
    script = (
        "cat /proc/self/status; grep ' /sys ' /proc/mounts; "
        "echo 1 > /proc/sys/net/ipv4/ip_forward && test -c /dev/kmsg && echo rw"
    )
    text = box.run(script, privileged=True)
    status = fields(text)
    assert names(status["CapEff"]) == names(status["CapBnd"]) == set(capabilities.bounding())
    assert status["Seccomp"] == "0"
    assert "sysfs /sys sysfs rw" in text
    assert text.endswith("rw")


def test_a_privileged_container_obeys_its_own_filter(box: Box) -> None:
    rules = [{"names": ["chown", "fchownat", "lchown", "fchown"], "action": "SCMP_ACT_ERRNO"}]
    profile = json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})
    script = "chown 1 /tmp 2>&1; cat /proc/self/status"
    text = box.run(script, privileged=True, security_opt=[f"seccomp={profile}"])
    assert "Operation not permitted" in text
    assert fields(text)["Seccomp"] == "2"


def test_user_by_name_has_its_groups_and_no_capability(box: Box) -> None:
    text = box.run("id; echo $HOME; cat /proc/self/status", user="ann", group_add=["video", "77"])
    assert "uid=1000(ann) gid=1001(ann) groups=29(audio),44(video),77,1001(ann)" in text
    assert "/home/ann" in text
    status = fields(text)
    assert names(status["CapEff"]) == names(status["CapPrm"]) == set()
    assert names(status["CapBnd"]) == set(capabilities.DEFAULT) & capabilities.bounding()


@pytest.mark.parametrize(
    ("user", "shown"),
    [
        ("", "uid=0(root) gid=0(root) groups=0(root)"),
        ("4242", "uid=4242 gid=0(root) groups=0(root)"),
        ("ann:video", "uid=1000(ann) gid=44(video) groups=44(video)"),
        ("1000:5", "uid=1000(ann) gid=5 groups=5"),
    ],
)
def test_user_forms(box: Box, user: str, shown: str) -> None:
    assert box.run("id", user=user) == shown


def test_environment_hostname_and_directory(box: Box) -> None:
    text = box.run(
        "env | sort; pwd; hostname", env=["A=1", "HOSTNAME=other", "PATH"], working_dir="/not/there", hostname="deep"
    )
    lines = text.splitlines()
    assert "A=1" in lines
    assert "HOSTNAME=other" in lines
    assert "HOME=/root" in lines
    assert lines[-2:] == ["/not/there", "deep"]


def test_mounts_are_dockers(box: Box) -> None:
    text = box.run(
        "cat /proc/mounts; ls -A /proc/acpi /proc/scsi 2>/dev/null | wc -l; "
        "cat /etc/hosts /etc/hostname /etc/resolv.conf"
    )
    shown = {line.split()[1]: line.split() for line in text.splitlines() if len(line.split()) == 6}
    assert shown["/proc"][2] == "proc"
    assert shown["/dev/pts"][2] == "devpts"
    assert shown["/dev/mqueue"][2] == "mqueue"
    assert "size=65536k" in shown["/dev/shm"][3]
    for target in ("/sys", "/proc/sys", "/proc/irq", "/proc/bus"):
        assert shown[target][3].startswith("ro"), target
    # v1 hangs one file system per controller below a tmpfs, v2 is one mount
    assert any(target.startswith("/sys/fs/cgroup") for target in shown)
    for name in ("hosts", "hostname", "resolv.conf"):
        assert f"# {name} of the test" in text
    assert box.run("wc -c < /proc/keys; wc -c < /proc/timer_list; ls /sys/firmware | wc -l").split() == ["0", "0", "0"]


@pytest.mark.parametrize("host", [{}, {"cap_drop": ["ALL"]}, {"cgroupns_mode": "private"}], ids=["plain", "drop", "ns"])
def test_a_container_cannot_change_its_limits(box: Box, host: dict[str, Any]) -> None:
    text = box.run(cgroups.WRITES, memory=50 << 20, **host)
    # without CAP_DAC_OVERRIDE, the mode of some files forbids writing
    assert [line for line in cgroups.succeeded(text) if "Permission denied" not in line] == ["tried"]


def test_cgroups_are_writable_where_asked(box: Box) -> None:
    script = "cd /sys/fs/cgroup && mkdir ${1:-.}/made && rmdir ${1:-.}/made && echo made"
    command = ["/bin/sh", "-c", script, "sh", "" if HIERARCHIES.mode == "v2" else "memory"]
    assert box.run(command, security_opt=["writable-cgroups=true"], cgroupns_mode="private") == "made"
    text = box.run(cgroups.WRITES, privileged=True, security_opt=["writable-cgroups=false"])
    assert cgroups.succeeded(text) == ["tried"]


def test_mounts_below_read_only_paths(box: Box, tmp_path: Path) -> None:
    """A read-only mount stays read-only, whatever read-only paths are above it or link to it. A
    writable one stays writable.
    """
    (tmp_path / "data").mkdir()
    (box.rootfs / "alias").symlink_to("proc")
    # a directory below the mount of v2 would be a cgroup
    below = "/sys/fs/cgroup/d" if HIERARCHIES.mode != "v2" else "/srv/d"
    points = tuple(
        MountPoint(source=str(tmp_path / "data"), destination=path, rw=path.endswith("rw"), propagation="rprivate")
        for path in ("/srv/a", "/srv/a/rw", "/srv/b/c", below)
    )
    (tmp_path / "data" / "rw").mkdir()
    script = f"""
    for each in /srv /srv/a /srv/a/rw /srv/b /srv/b/c /sys/fs/cgroup {below}; do
        touch $each/x 2>&1 && echo "wrote $each"
    done
    (echo 1 >/proc/sys/vm/drop_caches) 2>&1 || true
    """
    paths = ["/srv", "/alias", "/srv/b", *security.READONLY_PATHS]
    text = box.run(script, mounts=points, readonly_paths=paths)
    assert [line for line in text.splitlines() if "Read-only file system" not in line] == ["wrote /srv/a/rw"]
    assert "drop_caches" in text


def test_read_only_root(box: Box) -> None:
    text = box.run(
        "touch /x 2>&1; echo y > /dev/shm/y && echo shm; echo > /etc/hosts 2>&1", readonly_rootfs=True, status=1
    )
    assert "Read-only file system" in text
    assert "shm" in text


def test_binds_and_tmpfs(box: Box, tmp_path: Path) -> None:
    source = tmp_path / "data"
    source.mkdir()
    (source / "file").write_text("here")
    points = (
        MountPoint(source=str(source), destination="/a/b/rw", rw=True, propagation="rprivate"),
        MountPoint(source=str(source), destination="/ro", rw=False, propagation="rprivate"),
        MountPoint(source=str(source), destination="/a/b", rw=True, propagation="rslave"),
    )
    text = box.run(
        "cat /ro/file; echo new > /a/b/rw/new; touch /ro/z 2>&1; grep -E ' /(t|a/b) ' /proc/mounts; echo ok",
        mounts=points,
        tmpfs={"/t": "size=1m,mode=700"},
    )
    assert text.startswith("here")
    assert (source / "new").read_text() == "new\n"
    assert "Read-only file system" in text
    assert "tmpfs /t tmpfs rw,nosuid,nodev,noexec,relatime,size=1024k,mode=700" in text


def test_shm_size_and_own_mount_in_its_place(box: Box, tmp_path: Path) -> None:
    assert "size=8192k" in box.run("grep /dev/shm /proc/mounts", shm_size=8 << 20)
    (tmp_path / "shm").mkdir()
    mount = MountPoint(source=str(tmp_path / "shm"), destination="/dev/shm", rw=True, propagation="rprivate")
    assert len(box.run("grep /dev/shm /proc/mounts", mounts=(mount,)).splitlines()) == 1


def test_ulimits(box: Box) -> None:
    text = box.run(
        "ulimit -n; ulimit -Hn; ulimit -c", ulimits=[Ulimit(name="nofile", soft=111, hard=222), Ulimit(name="core")]
    )
    assert text.split() == ["111", "222", "0"]


def test_limits_arrive_in_the_cgroup(box: Box) -> None:
    record = box.record(
        ["/bin/sleep", "600"],
        memory=64 << 20,
        memory_reservation=32 << 20,
        cpu_shares=512,
        cpu_quota=50000,
        cpu_period=100000,
        cpuset_cpus="0",
        pids_limit=77,
    )
    found = Group(box.start(record))
    assert (found.memory, found.reservation, found.pids) == (64 << 20, 32 << 20, 77)
    assert (found.quota, found.period, found.cpus) == (50000, 100000, "0")
    assert found.has_shares(512)


@pytest.mark.parametrize("privileged", [False, True])
def test_a_v2_container_sees_its_own_cgroup_as_the_root(box: Box, privileged: bool) -> None:
    text = box.run(
        "cat /proc/self/cgroup; grep -c ' /sys/fs/cgroup cgroup2 ' /proc/mounts || true", privileged=privileged
    )
    if HIERARCHIES.mode == "v2":
        assert text == "0::/\n1"
    else:
        assert "/engined/" in text


def test_cgroup_parent(box: Box) -> None:
    parent = f"/engined-runtime-{os.getpid()}"
    record = box.record(["/bin/sleep", "600"], cgroup_parent=f"{parent}/deep")
    assert Group(box.start(record)).path("memory") == f"{parent}/deep/{record.id}"
    box.close()
    HIERARCHIES.remove(parent)
    assert not any(Path(root + parent).exists() for root in HIERARCHIES.roots())


def test_devices(box: Box) -> None:
    text = box.run("head -c 4 /dev/zero | wc -c; mknod /tmp/kmsg c 1 11; cat /tmp/kmsg 2>&1 | head -1")
    assert text.startswith("4")
    assert "Operation not permitted" in text
    shown = box.run(
        "ls -l /dev/mine; head -c1 /dev/mine | wc -c",
        devices=[DeviceMapping(path_on_host="/dev/zero", path_in_container="/dev/mine")],
    )
    assert "1,   5" in shown or "1, 5" in " ".join(shown.split())
    with pytest.raises(NotFound, match="/dev/none"):
        box.bundle(box.record("true", devices=[DeviceMapping(path_on_host="/dev/none")]))


def test_namespaces(box: Box) -> None:
    inside = box.run("for name in pid net ipc uts mnt; do readlink /proc/self/ns/$name; done").split()
    own = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "ipc", "uts", "mnt")]
    assert not set(inside) & set(own)
    shared = box.run(
        "for name in net ipc uts; do readlink /proc/self/ns/$name; done; hostname",
        network=None,
        ipc_mode="host",
        uts_mode="host",
        network_mode="host",
    ).split()
    assert shared[:3] == [own[1], own[2], own[3]]
    assert shared[3] == platform.node()


def test_network_namespace_by_path(box: Box) -> None:
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        text = box.run("readlink /proc/self/ns/net", network=path, network_mode="container:x")
    finally:
        os.close(descriptor)
    assert text == os.readlink("/proc/self/ns/net")


def test_sysctls_and_domainname(box: Box) -> None:
    text = box.run(
        "cat /proc/sys/net/ipv4/ip_unprivileged_port_start /proc/sys/net/core/somaxconn /proc/sys/kernel/domainname",
        sysctls={"net.core.somaxconn": "1234"},
        domainname="example.org",
    )
    assert text.split() == ["0", "1234", "example.org"]


@pytest.mark.parametrize(
    ("command", "kind", "words", "code"),
    [
        (["nothere"], NotFound, 'exec: "nothere": executable file not found in $PATH', 127),
        (["/bin/nothere"], NotFound, "no such file or directory", 127),
        (["/etc"], InvalidParameter, 'exec: "/etc": ', 126),  # runc 1.1.15 says "is a directory"
        (["/etc/passwd"], InvalidParameter, "permission denied", 126),
        (["/bin/busybox/x"], InvalidParameter, "not a directory", 126),
    ],
)
def test_failures_in_dockers_words(box: Box, command: list[str], kind: type[Exception], words: str, code: int) -> None:
    failure = box.failure(command)
    assert type(failure.error) is kind
    assert words in failure.error.message
    assert failure.exit_code == code == oci.failure_code(failure.error.message)


def test_failure_of_a_mount_names_it(box: Box) -> None:
    mount = MountPoint(source="/not/there", destination="/x", rw=True, propagation="rprivate")
    failure = box.failure(["true"], mounts=(mount,))
    assert "/not/there" in failure.error.message


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30 * PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_verbs(box: Box) -> None:
    import asyncio

    record = box.record(["/bin/sleep", "600"])
    pid = box.start(record)
    bundle = box.directory / record.id

    async def body() -> None:
        runtime = box.runtime
        assert await runtime.state(record.id) == oci.State("running", pid)
        await runtime.pause(record.id)
        assert (await runtime.state(record.id)).status == "paused"
        await runtime.resume(record.id)
        await runtime.update(record.id, wire.Resources(memory=wire.Memory(limit=32 << 20)))
        assert Group(pid).memory == 32 << 20
        process = wire.Process(
            user=wire.User(uid=1000, gid=1001),
            args=["/bin/sh", "-c", "id -u > /tmp/out"],
            env=[],
            cwd="/",
            capabilities=wire.Capabilities(),
        )
        (box.rootfs / "tmp").chmod(0o777)
        (bundle / "process.json").write_bytes(wire.encode(process))
        argv = runtime.exec_argv(
            record.id, process=bundle / "process.json", pid_file=bundle / "exec.pid", log=bundle / "log"
        )
        await asyncio.to_thread(subprocess.run, argv, stdin=subprocess.DEVNULL, check=True)
        until(lambda: (box.rootfs / "tmp/out").exists() and (box.rootfs / "tmp/out").read_text() == "1000\n")
        assert not HIERARCHIES.oom_killed(f"{PARENT}/{record.id}")
        await runtime.kill(record.id, 9)
        until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1])
        await runtime.delete(record.id)
        await runtime.delete(record.id)
        with pytest.raises(NotFound):
            await runtime.state(record.id)

    asyncio.run(body())


def test_oom_is_seen(box: Box) -> None:
    # without swap, because otherwise the excess is swapped out on a host that has any
    record = box.record(
        "dd if=/dev/zero of=/dev/shm/big bs=1M count=60; sleep 600", memory=16 << 20, memory_swap=16 << 20
    )
    box.start(record)
    until(lambda: HIERARCHIES.oom_killed(f"{PARENT}/{record.id}"))


def test_console_goes_into_the_argv(box: Box) -> None:
    argv = box.runtime.run_argv("x", bundle=Path("/b"), pid_file=Path("/p"), log=Path("/l"), tty=True)
    assert argv[argv.index("--console-socket") + 1] == oci.CONSOLE
    assert argv[-1] == "x"


def test_probe_falls_back_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "crun").write_text(
        '#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = --log ] && log=$2; shift; done\n'
        'echo \'{"msg":"cgroups in hybrid mode not supported, drop all controllers from cgroupv2",'
        '"level":"error"}\' > "$log"\nexit 1\n'
    )
    (fake / "crun").chmod(0o755)
    monkeypatch.setenv("PATH", str(fake))
    monkeypatch.setattr(oci, "SEARCH", "/usr/sbin:/usr/bin")
    found = Runtime.probe("", tmp_path)
    assert found.name == "runc"
    assert "hybrid mode not supported" in found.reason
    with pytest.raises(ServerError, match=r"hybrid mode.*apt install"):
        Runtime.probe(str(fake / "crun"), tmp_path)
    with pytest.raises(ServerError, match="/nowhere/crun: not installed"):
        Runtime.probe("/nowhere/crun", tmp_path)


@pytest.mark.parametrize("name", oci.CANDIDATES)
def test_probe_works_where_run_is_mounted_noexec(name: str, tmp_path: Path) -> None:
    mounts.mount("tmpfs", tmp_path, "tmpfs", mounts.MS_NOEXEC | mounts.MS_NOSUID | mounts.MS_NODEV)
    try:
        with HIERARCHIES.hold():
            trial = oci.attempt([shutil.which(name, path=oci.SEARCH) or name], tmp_path)
        assert trial.works, trial.reason
        assert not list(tmp_path.iterdir())
    finally:
        mounts.unmount(tmp_path)


def test_config_is_built_and_encoded_quickly(box: Box) -> None:
    record = box.record("true", memory=64 << 20)
    document = json.loads(wire.encode(spec.build(record, box.prepared(), users.ROOT)))
    assert document["ociVersion"] == "1.0.2"
    assert document["linux"]["seccomp"]["defaultAction"] == "SCMP_ACT_ERRNO"
    assert msgspec.json.decode(wire.encode(spec.build(record, box.prepared(), users.ROOT))) == document
