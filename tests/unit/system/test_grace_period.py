from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.system import grace_period
from engine.system.grace_period import GracePeriod, begin, mounted, own
from engine.system.mounts import Mount, mounts
from tests.support import PATIENCE

V1 = {"cpu": ("/c/cpu", "/"), "memory": ("/c/memory", "/"), "name=systemd": ("/c/systemd", "/")}


def mount(target: str, kind: str, options: str, root: str = "/") -> Mount:
    return Mount(1, 0, "0:1", root, target, "rw", "", kind, kind, options)


def test_where_hierarchies_are_mounted() -> None:
    found = mounted(
        [
            mount("/", "ext4", "rw,memory"),
            mount("/c/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
            mount("/c/memory", "cgroup", "rw,memory", "/docker/x"),
            mount("/c/unified", "cgroup2", "rw,nsdelegate"),
            mount("/other", "cgroup2", "rw"),
        ]
    )
    assert found["cpu"] == found["cpuacct"] == ("/c/cpu,cpuacct", "/")
    assert found["memory"] == ("/c/memory", "/docker/x")
    assert found[""] == ("/c/unified", "/")


@pytest.mark.parametrize(
    ("hierarchies", "membership", "files"),
    [
        (V1, "4:cpu,cpuacct:/\n3:memory:/a:b\n", ["/c/cpu/tasks", "/c/memory/a:b/tasks"]),
        (V1, "9:net_cls:/\n8:name=systemd:/u\n0::/\n", ["/c/systemd/u/tasks"]),
        (V1 | {"": ("/c/unified", "/")}, "3:memory:/x\n0::/y\n", ["/c/memory/x/tasks", "/c/unified/y/cgroup.threads"]),
        ({"": ("/c", "/")}, "0::/system.slice/a.service\n", ["/c/system.slice/a.service/cgroup.threads"]),
        ({"": ("/c", "/")}, "0::/\n", ["/c/cgroup.threads"]),
        # A container that sees its own part: with paths of the host, and of its cgroup namespace.
        ({"memory": ("/c", "/docker/x")}, "3:memory:/docker/x\n", ["/c/tasks"]),
        ({"memory": ("/c", "/docker/x")}, "3:memory:/docker/x/y\n", ["/c/y/tasks"]),
        ({"memory": ("/c", "/docker/x")}, "3:memory:/docker/xy\n", []),
        ({"memory": ("/c", "/docker/x")}, "3:memory:/\n", []),
        # The host's mounts in a cgroup namespace, and a process that is out of it.
        ({"memory": ("/c", "/../..")}, "3:memory:/\n", []),
        (V1, "3:memory:/../x\n", []),
        ({}, "1:memory:/\n0::/\n", []),
    ],
)
def test_the_files_of_the_cgroups_it_is_in(
    hierarchies: Mapping[str, tuple[str, str]], membership: str, files: list[str]
) -> None:
    assert [*own(hierarchies, membership)] == files


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_thread_stays_where_it_is() -> None:
    """Tested with the kernel's own files: the move succeeds and changes no membership."""
    place = Path("/proc/thread-self/cgroup")
    before = place.read_bytes()
    assert begin(mounted(mounts()))
    assert place.read_bytes() == before


IN_A_NAMESPACE = """
    import sys
    from pathlib import Path
    from engine.system.grace_period import begin, mounted
    from engine.system.mounts import mounts
    before = Path("/proc/thread-self/cgroup").read_bytes()
    assert not begin({sys.argv[1]: mounted(mounts())[sys.argv[1]]}), "something was written"
    assert Path("/proc/thread-self/cgroup").read_bytes() == before, "it was moved"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_thread_stays_in_the_cgroup_namespace_of_a_container_with_the_hosts_mounts() -> None:
    """In such a container, `/` of the cgroup namespace is not `/` of the mount."""
    name, top = next((name, top) for name, (top, root) in mounted(mounts()).items() if root == "/" and name != "rw")
    inside = Path(top, f"engined-test-{os.getpid()}")
    inside.mkdir()
    try:
        enter = f'echo $$ > {inside}/cgroup.procs && exec unshare --cgroup "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, "-c", textwrap.dedent(IN_A_NAMESPACE), name]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        inside.rmdir()


def test_what_is_out_of_sight_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "membership").write_bytes(b"2:memory:/nowhere\n1:cpu:/h\xffre\n")
    here = tmp_path / os.fsdecode(b"cpu/h\xffre")
    here.mkdir(parents=True)
    seen = {name: (str(tmp_path / name), "/") for name in ("memory", "cpu")}
    assert not begin(seen, tmp_path / "membership")
    (here / "tasks").touch()
    assert begin(seen, tmp_path / "membership")
    assert (here / "tasks").read_text() == str(threading.get_native_id())
    assert not begin(seen, tmp_path / "none")


def test_a_process_that_is_moved_meanwhile_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "tasks").touch()
    said = iter([b"1:cpu:/a\n", b"1:cpu:/b\n", b"1:cpu:/b\n"])
    monkeypatch.setattr(Path, "read_bytes", lambda path: next(said))
    assert begin({"cpu": (str(tmp_path), "/")})
    assert (tmp_path / "b/tasks").read_text() == str(threading.get_native_id())
    assert not [*said]


def test_without_descriptors_it_is_tried_again_later() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert begin(V1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_is_begun_only_where_the_wait_would_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    count = 0

    def begin(hierarchies: object) -> bool:
        nonlocal count
        count += 1
        begun.release()
        assert go_on.acquire(timeout=10 * PATIENCE)
        return True

    monkeypatch.setattr(grace_period, "begin", begin)
    monkeypatch.setattr(grace_period, "_FRESH", 0)

    async def run() -> None:
        expecting = GracePeriod(())
        expecting.expect()
        await asyncio.to_thread(begun.acquire)
        expecting.expect()  # under way
        go_on.release(10)
        await expecting.settled()
        assert count == 1
        with expecting.going_on():
            await expecting.settled()
            assert count == 2  # for the runtime itself
            expecting.expect()  # it is there
            with expecting.going_on():
                await expecting.settled()
        assert count == 2
        expecting.expect()
        await expecting.settled()
        assert count == 3
        monkeypatch.setattr(grace_period, "_FRESH", 3600)
        expecting.expect()  # a moment ago
        await expecting.settled()
        assert count == 3

    asyncio.run(run())


def test_where_it_cannot_help_it_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    monkeypatch.setattr(grace_period, "begin", lambda hierarchies: bool(tried.append(hierarchies)))
    monkeypatch.setattr(grace_period, "_FRESH", 0)

    async def run() -> None:
        expecting = GracePeriod(())
        for _ in range(3):
            expecting.expect()
            await expecting.settled()

    asyncio.run(run())
    assert len(tried) == 1


def test_a_failure_is_logged_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(hierarchies: object) -> bool:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        expecting = GracePeriod(())
        expecting.expect()
        await expecting.settled()
        await asyncio.sleep(0)

    monkeypatch.setattr(grace_period, "begin", fail)
    asyncio.run(run())
    assert "beginning a grace period: failed: can't start new thread" in caplog.text
