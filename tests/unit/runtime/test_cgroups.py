from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from engine.runtime import cgroups
from engine.runtime.cgroups import Cgroups, numbers
from tests.unit.fast.test_cgroup import LiveCgroup, live

__all__ = ["live"]  # the fixture


def host(directory: Path, *mounts: tuple[str, str, str], kept: str | None = None) -> Cgroups:
    """(mount point, type, super options); `kept` is the v2 mount's cgroup.controllers."""
    lines = []
    for number, (target, kind, options) in enumerate(mounts):
        (directory / target).mkdir(exist_ok=True)
        lines.append(f"{number} 1 0:{number} / {directory / target} rw,nosuid - {kind} {kind} rw,{options}")
    lines.append("99 1 0:99 / /data rw - ext4 /dev/sda rw,memory")
    if kept is not None:
        (directory / "unified" / "cgroup.controllers").write_text(kept + "\n")
    (directory / "mountinfo").write_text("\n".join(lines) + "\n")
    return Cgroups.detect(directory / "mountinfo")


V1 = (("cpu", "cgroup", "cpu,cpuacct"), ("memory", "cgroup", "xattr,memory"), ("systemd", "cgroup", "name=systemd"))
V2 = ("unified", "cgroup2", "nsdelegate")


def test_names_in_containers(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("5:net_prio,net_cls:/a\n4:cpuacct,cpu:/a:b\n3:memory:/\n2:misc:/\n1:name=systemd:/\n0::/x\n")
    names = set(host(tmp_path, *V1).names(membership))
    assert names == {
        *("net_prio,net_cls", "net_cls,net_prio", "cpuacct,cpu", "cpu,cpuacct"),
        *("memory", "misc", "systemd", "cpu"),
    }


def test_modes(tmp_path: Path) -> None:
    assert host(tmp_path).mode == "none"
    v1 = host(tmp_path, *V1)
    assert (v1.mode, v1.split) == ("v1", False)
    assert set(v1.controllers) == {"cpu", "cpuacct", "memory", "name=systemd"}
    assert v1.missing == ("cpuset", "blkio", "pids", "devices", "freezer")
    hybrid = host(tmp_path, *V1, V2, kept="")
    assert (hybrid.mode, hybrid.split) == ("hybrid", False)
    split = host(tmp_path, *V1, V2, kept="hugetlb rdma")
    assert (split.mode, split.split, split.unified_controllers) == ("hybrid", True, ("hugetlb", "rdma"))
    v2 = host(tmp_path, V2, kept="cpuset cpu io memory pids")
    assert (v2.mode, v2.split) == ("v2", False)
    named = host(tmp_path, V1[2], V2, kept="memory")
    assert named.mode == "v2", "systemd's own named hierarchy is no v1 controller"
    assert sorted(path.name for path in (tmp_path / "unified").iterdir() if path.is_dir()) == [], "the trial is removed"


def unified(*files: str, controllers: tuple[str, ...] = ("memory", "cpu")) -> Cgroups:
    return Cgroups(
        mode="v2", controllers={}, unified="/x", unified_controllers=controllers, unified_files=frozenset(files)
    )


def test_what_v2_does_not_hand_down_is_missing() -> None:
    given = ("memory.max", "cpu.max", "cpuset.cpus", "io.max", "pids.max")
    assert (unified(*given).missing, unified(*given).withheld) == ((), False)
    partly = unified("memory.max", controllers=("memory",))
    assert (partly.missing, partly.withheld) == (("io", "cpu", "cpuset", "pids"), False)
    inside = unified("memory.max", "cpuset.cpus", "io.max", "pids.max")
    assert (inside.missing, inside.withheld) == (("cpu",), True)


def test_paths() -> None:
    assert cgroups.path("abc") == "/engined/abc"
    assert cgroups.path("abc", "deep/er/") == "/deep/er/abc"
    assert cgroups.path("abc", "/abs") == "/abs/abc"
    assert cgroups.path("abc", "/") == "/engined/abc"


def test_oom(tmp_path: Path) -> None:
    v1 = host(tmp_path, *V1)
    assert not v1.oom_killed("/engined/gone")
    directory = tmp_path / "memory/engined/abc"
    directory.mkdir(parents=True)
    for text, killed in (
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", False),
        ("oom_kill_disable 1\noom_kill 3\n", True),
    ):
        (directory / "memory.oom_control").write_text(text)
        assert v1.oom_killed("/engined/abc") is killed
    v2 = host(tmp_path, V2, kept="memory")
    other = tmp_path / "unified/parent/abc"
    other.mkdir(parents=True)
    (other / "memory.events").write_text("low 0\nhigh 0\nmax 5\noom 1\noom_kill 1\noom_group_kill 0\n")
    assert v2.oom_killed("/parent/abc")


def test_the_last_engine_removes_the_parent(tmp_path: Path) -> None:
    hierarchies = host(tmp_path, *V1)
    places = [tmp_path / name / "engined" for name in ("cpu", "memory", "systemd")]
    first, second = hierarchies.hold(), hierarchies.hold()
    first.release()
    first.release()
    assert all(place.is_dir() for place in places)
    (places[1] / "abc").mkdir()
    second.release()
    assert [place.is_dir() for place in places] == [False, True, False], "a container is in one"
    (places[1] / "abc").rmdir()
    with hierarchies.hold():
        assert all(place.is_dir() for place in places)
    assert not any(place.exists() for place in places)


def test_a_parent_that_cannot_be_made_is_not_held(tmp_path: Path) -> None:
    host(tmp_path).hold().release()
    hierarchies = host(tmp_path, *V1)
    (tmp_path / "memory/engined").write_text("a file")
    hierarchies.hold().release()
    assert (tmp_path / "memory/engined").is_file()


def test_engines_that_come_and_go_never_miss_the_parent(tmp_path: Path) -> None:
    hierarchies = host(tmp_path, *V1)

    def life(number: int) -> None:
        for turn in range(50):
            with hierarchies.hold():
                for name in ("cpu", "memory", "systemd"):  # as the runtime: without the parents
                    (tmp_path / name / f"engined/{number}-{turn}").mkdir()
                for name in ("cpu", "memory", "systemd"):
                    (tmp_path / name / f"engined/{number}-{turn}").rmdir()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(life, range(4)))
    assert not any((tmp_path / name / "engined").exists() for name in ("cpu", "memory", "systemd"))


def test_the_parent_with_the_lock_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that begins while another one ends would otherwise have a lock on a new directory,
    and lose the other ones.
    """
    hierarchies = host(tmp_path, *V1)
    at = [f"{root}/engined" for root in hierarchies.roots()]
    hold = hierarchies.hold()
    rmdir, left = os.rmdir, []

    def remove(path: str) -> None:
        rmdir(path)
        left.append(os.path.exists(at[0]) or not any(map(os.path.exists, at)))

    monkeypatch.setattr(os, "rmdir", remove)
    hold.release()
    assert left == [True] * len(at)


def test_remove_goes_down_and_tolerates_absence(tmp_path: Path) -> None:
    hierarchies = host(tmp_path, *V1)
    (tmp_path / "memory/engined/abc/inner/most").mkdir(parents=True)
    (tmp_path / "cpu/engined/def").mkdir(parents=True)
    assert hierarchies.children() == {"abc", "def"}
    hierarchies.remove("/engined/abc")
    hierarchies.remove("/engined/abc")
    assert hierarchies.children() == {"def"}
    (tmp_path / "cpu/engined/def/file").write_text("busy")
    with pytest.raises(OSError, match="not empty"):
        hierarchies.remove("/engined/def")


def test_all_processes_are_killed(tmp_path: Path) -> None:
    """The lists are files of the test's here, so they never become shorter."""
    at = host(tmp_path, *V1)
    for name in ("memory/c", "memory/c/below"):
        (tmp_path / name).mkdir()
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    for name, sleeper in zip(("memory/c", "memory/c/below"), sleepers, strict=True):
        (tmp_path / name / "cgroup.procs").write_text(f"{sleeper.pid}\n0\n4194303\n")
    at.kill("/c")
    assert [sleeper.wait() for sleeper in sleepers] == [-9, -9]
    at.kill("/c")
    at.kill("/gone")

    v2 = host(tmp_path, V2, kept="memory")
    (tmp_path / "unified/c").mkdir()
    (tmp_path / "unified/c/cgroup.kill").write_text("")
    v2.kill("/c")
    assert (tmp_path / "unified/c/cgroup.kill").read_text() == "1"
    v2.kill("/gone")


@pytest.mark.parametrize(("number", "raised"), [(errno.ENODEV, False), (errno.EACCES, True)])
def test_a_control_group_may_be_removed_while_it_is_killed(
    number: int, raised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v2 = host(tmp_path, V2, kept="memory")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(OSError, match=os.strerror(number)) if raised else contextlib.nullcontext():
        v2.kill("/c")


def test_lists_of_numbers() -> None:
    assert numbers("0-3,5\n") == {0, 1, 2, 3, 5}
    assert numbers("") == frozenset()
    for wrong in ("0-", "a", "3-1", "0-8192", "0-99999999999", "1,,2", "0-3:1/2"):
        with pytest.raises(ValueError, match=r".+"):
            numbers(wrong)


def test_the_weight_of_bfq_is_the_engines_to_set(tmp_path: Path) -> None:
    (tmp_path / "engined" / "id").mkdir(parents=True)
    bfq = Cgroups(mode="v1", controllers={"blkio": str(tmp_path)}, block_files=frozenset(("blkio.bfq.weight",)))
    assert bfq.weighs_by_bfq and bfq.support().weight and bfq.support().usual_weight == 100
    assert not bfq.support().weight_device
    bfq.set_weight("/engined/id", 300)
    assert (tmp_path / "engined/id/blkio.bfq.weight").read_text() == "300"
    cfq = msgspec.structs.replace(bfq, block_files=frozenset(("blkio.weight",)))
    assert not cfq.weighs_by_bfq and cfq.support().usual_weight == 500


def test_what_v1_offers_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = (*V1, ("cpuset", "cgroup", "cpuset"), ("blkio", "cgroup", "blkio"), ("pids", "cgroup", "pids"))
    found = host(tmp_path, *mounts)
    bare = found.support()
    assert (bare.memory, bare.pids, bare.cpuset) == (True, True, True)
    assert not (bare.swap or bare.reservation or bare.kernel_memory or bare.swappiness or bare.oom_kill_disable)
    assert not (bare.shares or bare.quota or bare.weight or bare.weight_device or bare.throttle)
    for path in (
        *("memory/memory.memsw.limit_in_bytes", "memory/memory.soft_limit_in_bytes", "memory/memory.swappiness"),
        *("memory/memory.kmem.limit_in_bytes", "memory/memory.oom_control", "cpu/cpu.shares", "cpu/cpu.cfs_quota_us"),
        "blkio/blkio.throttle.read_bps_device",
    ):
        (tmp_path / path).touch()
    (tmp_path / "cpuset" / "cpuset.effective_cpus").write_text("0-5\n")
    (tmp_path / "cpuset" / "cpuset.effective_mems").write_text("0\n")
    monkeypatch.setattr("platform.release", lambda: "5.10.0-1")
    found = msgspec.structs.replace(found, block_files=frozenset(("blkio.weight", "blkio.weight_device")))
    full = found.support()
    assert full.swap and full.reservation and full.kernel_memory and full.swappiness and full.oom_kill_disable
    assert full.shares and full.quota and full.weight and full.weight_device and full.throttle
    assert (full.cpus, full.mems) == ("0-5", "0")
    monkeypatch.setattr("platform.release", lambda: "6.1.0-1")
    assert not found.support().kernel_memory, "the file is there, but limits nothing any more"


def test_what_v2_offers(tmp_path: Path) -> None:
    found = unified("memory.max", "memory.swap.max", "memory.low", "cpu.weight", "cpu.max", "cpuset.cpus", "pids.max")
    support = found.support()
    assert support.memory and support.swap and support.reservation and support.shares and support.quota
    assert support.cpuset and support.pids
    assert not (support.weight or support.weight_device or support.throttle)
    assert not (support.kernel_memory or support.swappiness or support.oom_kill_disable), "v2 has none of these"
    io = unified("io.max", "io.weight").support()
    assert io.throttle and io.weight and not io.weight_device, "crun refuses a device's weight there, runc forgets it"
    bfq = unified("io.max", "io.bfq.weight").support()
    assert bfq.weight and bfq.weight_device
    bare = unified("cpu.max", "memory.max").support()
    assert bare.quota and bare.memory and not (bare.swap or bare.pids or bare.cpuset)
    real = host(tmp_path, V2, kept="cpuset")
    (tmp_path / "unified" / "cpuset.cpus.effective").write_text("0-1\n")
    assert real.support().cpus == "0-1"


def test_limits_are_taken_away(tmp_path: Path) -> None:
    for name, controllers, file, text in (
        ("v1", {"cpu": str(tmp_path / "v1")}, "cpu.cfs_quota_us", "-1"),
        ("v2", {}, "cpu.max", "max"),
    ):
        directory = tmp_path / name / "parent" / "id"
        directory.mkdir(parents=True)
        unified = Cgroups(mode="v2", controllers={}, unified=str(tmp_path / "v2"), unified_controllers=("cpu",))
        found = Cgroups(mode="v1", controllers=controllers) if controllers else unified
        found.lift("/parent/id", "cpu")
        assert (directory / file).read_text() == text
    Cgroups(mode="none", controllers={}).lift("/parent/id", "cpu")
    for name, controllers, kept, file, text in (
        ("v1", {"blkio": str(tmp_path / "v1")}, (), "blkio.throttle.write_iops_device", "8:1 0"),
        ("v2", {}, ("io",), "io.max", "8:1 wiops=max"),
    ):
        found = Cgroups(
            mode="v1" if controllers else "v2",
            controllers=controllers,
            unified=str(tmp_path / "v2"),
            unified_controllers=kept,
        )
        found.lift_device("/parent/id", "blkio_device_write_iops", 8, 1)
        assert (tmp_path / name / "parent" / "id" / file).read_text() == text


def test_cgroups_above_go_when_the_engine_had_them_made(live: LiveCgroup) -> None:
    """Cgroups that existed before stay, and so do cgroups with other children."""
    top = f"{live.path}-above"
    cgroup = f"{top}/inner/id"
    for root in live.host.roots():
        os.mkdir(root + top)
    try:
        made = live.host.missing_above(cgroup)
        assert made == [f"{root}{top}/inner" for root in live.host.roots()]
        for root in live.host.roots():
            os.makedirs(root + cgroup)
        live.host.claim(made)
        for root in live.host.roots():
            os.mkdir(f"{root}{top}/inner/other")
        live.host.remove(cgroup)
        assert all(os.path.isdir(each) for each in made), "another one is in it"
        live.host.remove(f"{top}/inner/other")
        assert not any(os.path.isdir(each) for each in made)
        assert all(os.path.isdir(root + top) for root in live.host.roots()), "it was there before"
    finally:
        live.host.remove(top)
