"""Volumes on the host: mounts and directories through kills, restarts and reboots, and attacks by
containers."""

from __future__ import annotations

import itertools
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Image, Node, busybox_layer, directory, docker_archive, hard_link, symlink, tar
from tests.support.images.trees import snapshot


def make(engine: TempEngine, name: str, **options: str) -> Path:
    body = {"Name": name, "DriverOpts": options}
    answer = engine.request("POST", "/v1.24/volumes/create", body)
    assert answer.status == 201, answer
    return Path(answer.json()["Mountpoint"])


def remove(engine: TempEngine, name: str) -> None:
    answer = engine.request("DELETE", f"/v1.24/volumes/{name}")
    assert answer.status == 204, answer


def mounted(engine: TempEngine) -> list[str]:
    """Mounts below the engine's volumes."""
    return _mounted(f"{engine.root}/volumes/")


def placed(engine: TempEngine) -> list[str]:
    """Mounts made for container starts, which are removed soon after."""
    return _mounted(f"{engine.run}/volumes/")


def _mounted(below: str) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(below)]


def running(engine: TempEngine, script: str = "sleep 1000", **host: Any) -> str:
    return engine.started("sh", "-c", script, host=host)


def gone(engine: TempEngine, container: str) -> None:
    assert engine.request("DELETE", f"/v1.24/containers/{container}?force=1&v=1").status == 204


@pytest.fixture
def engine(file_engine: TempEngine) -> Iterator[TempEngine]:
    """Checks at its end that nothing is mounted for volumes, and that only recorded ones have
    directories."""
    yield file_engine
    file_engine.remove_all()
    assert mounted(file_engine) == []
    until("starts left nothing", lambda: placed(file_engine) == [])
    recorded = {each["Name"] for each in file_engine.request("GET", "/v1.24/volumes").json()["Volumes"]}
    assert set(os.listdir(file_engine.root / "volumes")) == recorded
    file_engine.remove_volumes()


# --- file systems of volumes ----------------------------------------------------------------------


def test_a_file_system_is_mounted_from_first_to_last_use(engine: TempEngine) -> None:
    place = make(engine, "small", type="tmpfs", device="tmpfs", o="size=2m,mode=1770,uid=7,nosuid")
    assert mounted(engine) == []
    first = running(engine, "echo first >/v/f; sleep 1000", Binds=["small:/v"])
    until("it wrote", lambda: (place / "f").exists() and (place / "f").read_text() == "first\n")
    assert mounted(engine) == [str(place)]
    status = place.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o1770, 7)
    second = running(engine, Binds=["small:/v:ro"])
    gone(engine, first)
    assert mounted(engine) == [str(place)] and (place / "f").read_text() == "first\n"
    gone(engine, second)
    assert mounted(engine) == [] and os.listdir(place) == []


def test_kill_9_and_restart_with_mounted_volumes(engine: TempEngine) -> None:
    place = make(engine, "small", type="tmpfs", device="tmpfs", o="size=2m")
    make(engine, "other", type="tmpfs", device="tmpfs", o="size=2m")
    stays = running(engine, "echo kept >/v/f; sleep 1000", Binds=["small:/v"])
    ends = running(engine, "until [ -e /v/go ]; do usleep 10000; done", Binds=["small:/v", "other:/o"])
    until("it wrote", lambda: (place / "f").exists() and (place / "f").read_text() == "kept\n")
    engine.restart()
    assert len(mounted(engine)) == 2 and (place / "f").read_text() == "kept\n"
    engine.kill9()
    (place / "go").write_text("")
    engine.start()
    until("what ended while no daemon was there is unmounted", lambda: mounted(engine) == [str(place)])
    assert engine.wait(ends) == 0
    again = running(engine, "cat /v/f; sleep 1000", Binds=["small:/v"])
    until("it sees what was there", lambda: engine.logs(again) == b"kept\n")
    engine.restart()
    for container in (stays, again):
        gone(engine, container)
    assert mounted(engine) == []
    gone(engine, ends)
    for name in ("small", "other"):
        remove(engine, name)


def test_a_reboot(engine: TempEngine) -> None:
    place = make(engine, "small", type="tmpfs", device="tmpfs")
    plain = make(engine, "plain")
    container = running(engine, "echo x >/p/f; sleep 1000", Binds=["small:/v", "plain:/p"])
    until("it wrote", lambda: (plain / "f").exists() and (plain / "f").read_text() == "x\n")
    engine.reboot()
    assert mounted(engine) == [] and (plain / "f").read_text() == "x\n"
    engine.post(f"/containers/{container}/start")
    assert mounted(engine) == [str(place)]


def test_engined_stop_leaves_no_mount(own_engine: TempEngine) -> None:
    make(own_engine, "small", type="tmpfs", device="tmpfs")
    running(own_engine, Binds=["small:/v"])
    own_engine.stop()
    own_engine.assert_gone()


def test_a_bind_volume_and_its_removal(engine: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "precious").write_text("x")
    make(engine, "bound", type="none", device=str(tmp_path), o="bind,ro")
    reads = running(engine, "cat /v/below/precious; touch /v/no || echo refused; sleep 1000", Binds=["bound:/v"])
    until("it ran", lambda: b"refused" in engine.logs(reads))
    assert engine.logs(reads, "stdout=1") == b"xrefused\n"
    gone(engine, reads)
    remove(engine, "bound")
    assert (tmp_path / "below" / "precious").read_text() == "x"
    # A foreign mount is unmounted, never entered, when the volume is removed.
    place = make(engine, "plain")
    subprocess.run(["mount", "--bind", tmp_path, place], check=True)
    remove(engine, "plain")
    assert (tmp_path / "below" / "precious").read_text() == "x"


def test_mounts_that_fail_say_why(engine: TempEngine, tmp_path: Path) -> None:
    before = engine.footprint()
    for name, options, reason in (
        ("missing", {"type": "none", "device": f"{tmp_path}/absent", "o": "bind"}, "no such file or directory"),
        ("unknown", {"type": "nosuchfs", "device": "x"}, "no such device"),
        ("wrong", {"type": "tmpfs", "device": "x", "o": "nonsense=1"}, "invalid argument"),
    ):
        place = make(engine, name, **options)
        container = engine.create("true", host={"Binds": [f"{name}:/nothing", "fine:/f"]})
        answer = engine.request("POST", f"/v1.24/containers/{container}/start")
        expected = (
            f"error while mounting volume '{place}': failed to mount local volume: mount {options['device']}:{place}"
        )
        assert answer.status == 500 and answer.message.startswith(expected), answer
        assert answer.message.endswith(reason), answer
        gone(engine, container)
        remove(engine, name)
    engine.assert_settles(before)


def test_nfs_options_reach_the_kernel_resolved(engine: TempEngine) -> None:
    """There is no server and perhaps no nfs module. The mount is tried, fails, and leaves nothing
    behind."""
    make(engine, "far", type="nfs", device=":/export", o="addr=no-such-host.invalid,soft")
    container = engine.create("true", host={"Binds": ["far:/v"]})
    answer = engine.request("POST", f"/v1.24/containers/{container}/start")
    assert answer.status == 500 and "data: addr=no-such-host.invalid,soft" in answer.message


# --- leftovers of crashes -------------------------------------------------------------------------


def test_half_made_and_half_removed_volumes(engine: TempEngine) -> None:
    kept = make(engine, "kept")
    (kept / "file").write_text("x")
    lost = make(engine, "lost")
    volumes = engine.root / "volumes"
    engine.kill9()
    (volumes / "kept").rename(volumes / ".volume-kept")  # its record was not deleted
    # its record was never written
    (volumes / ".volume-never" / "_data" / "deep").mkdir(parents=True)
    (volumes / ".snapshots").mkdir()  # another program's
    subprocess.run(["rm", "-rf", volumes / "lost"], check=True)
    (engine.run / "volumes" / "x" / "0").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "x", engine.run / "volumes" / "x" / "0"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "x", kept.parent.parent / ".volume-kept" / "_data"], check=True)
    engine.start()
    assert mounted(engine) == placed(engine) == []
    assert sorted(os.listdir(volumes)) == [".snapshots", "kept", "lost"]
    (volumes / ".snapshots").rmdir()
    assert (kept / "file").read_text() == "x" and lost.is_dir()
    assert not (engine.run / "volumes").exists()


def test_kill_9_between_the_steps_of_creates_and_removals(engine: TempEngine) -> None:
    """An answered create survives, an answered removal is final, and directories equal records,
    wherever the kill falls. Half of the volumes have content.
    """
    volumes = engine.root / "volumes"
    present: set[str] = set()
    for turn in range(2):
        unanswered: list[str] = []
        enough, stopped = threading.Event(), threading.Event()

        def change(turn: int, unanswered: list[str], enough: threading.Event, stopped: threading.Event) -> None:
            try:
                for number in itertools.count():
                    unanswered[:] = [name := f"v{turn}-{number}"]
                    place = make(engine, name)
                    present.add(name)
                    if number % 2:
                        (place / "file").write_text("x")
                    if number >= 2:
                        unanswered[:] = [name := f"v{turn}-{number - 2}"]
                        remove(engine, name)
                        present.discard(name)
                    if number == 10 + turn:
                        enough.set()
            except OSError:  # the engine was killed
                stopped.set()

        thread = threading.Thread(target=change, args=(turn, unanswered, enough, stopped))
        thread.start()
        assert enough.wait(30 * PATIENCE)
        engine.kill9()
        thread.join(30 * PATIENCE)
        assert stopped.is_set()
        engine.start()
        recorded = {each["Name"] for each in engine.request("GET", "/v1.24/volumes").json()["Volumes"]}
        assert recorded - {*unanswered} == present - {*unanswered}
        assert {*os.listdir(volumes)} == recorded
        assert all((volumes / name / "_data").is_dir() for name in recorded)
        present.intersection_update(recorded)
        present.update(recorded)
    for name in present:
        remove(engine, name)


def test_an_operators_mount_stays(engine: TempEngine) -> None:
    """A disk that an operator mounted over a plain volume's data is not removed as a leftover."""
    place = make(engine, "disk")
    subprocess.run(["mount", "-t", "tmpfs", "disk", place], check=True)
    (place / "file").write_text("x\n")
    container = running(engine, "cat /v/file; sleep 1000", Binds=["disk:/v"])
    until("it sees the disk", lambda: engine.logs(container) == b"x\n")
    engine.restart()
    gone(engine, container)
    engine.restart()
    assert mounted(engine) == [str(place)] and (place / "file").read_text() == "x\n"
    remove(engine, "disk")


# --- the image's content --------------------------------------------------------------------------


def test_copy_up_is_the_same_tree(engine: TempEngine) -> None:
    entries = [
        directory("data/", 0o2751, uid=11, gid=12, mtime=1_500_000_001),
        Node("data/big", os.urandom(200_000), uid=1, gid=2, mtime=1_500_000_002),
        hard_link("data/again", "data/big"),
        directory("data/sub/", 0o1777, uid=3, mtime=1_500_000_003),
        Node("data/sub/setuid", b"x", mode=0o4711, mtime=1_500_000_004),
        symlink("data/sub/link", "../big", uid=4, mtime=1_500_000_005),
        Node("data/marked", b"y", pax=(("SCHILY.xattr.user.note", "hello"),), mtime=1_500_000_006),
    ]
    image = Image([busybox_layer(), tar(entries), tar([Node("other", b"")])], ("tree:latest",), {"Cmd": ["sh"]})
    loaded = engine.request(
        "POST", "/v1.24/images/load?quiet=1", docker_archive(image), {"Content-Type": "application/x-tar"}
    )
    assert loaded.status == 200 and b"error" not in loaded.body
    layers = engine.root / "layers"
    source = next(each for each in layers.iterdir() if (each / "diff" / "data" / "big").exists())
    container = engine.create("true", Image="tree", Volumes={"/data": {}})
    target = engine.inspect(container)["Mounts"][0]["Source"]
    expected = snapshot(source / "diff" / "data")
    assert snapshot(target) == expected and len(expected) == 7
    assert [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "/layers/" in line.split()[4]
    ] == []


# --- binds ----------------------------------------------------------------------------------------


@pytest.fixture
def own_mount(tmp_path: Path) -> Iterator[Path]:
    """A private tmpfs for the test."""
    place = tmp_path / "mount"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nosuid,nodev", "own", place], check=True)
    subprocess.run(["mount", "--make-private", place], check=True)
    yield place
    subprocess.run(["umount", "-R", "-l", place], check=True)


def test_propagation(engine: TempEngine, own_mount: Path) -> None:
    (own_mount / "dir").mkdir()
    for mode, words in (("rshared", "a shared mount"), ("slave", "a shared or slave mount")):
        container = engine.create("true", host={"Binds": [f"{own_mount}/dir:/x:{mode}"]})
        answer = engine.request("POST", f"/v1.24/containers/{container}/start")
        expected = f"path {own_mount}/dir is mounted on {own_mount} but it is not {words}"
        assert (answer.status, answer.message) == (500, expected)
    subprocess.run(["mount", "--make-shared", own_mount], check=True)
    (own_mount / "in").mkdir()
    (own_mount / "out").mkdir()
    script = "mount -t tmpfs inner /x/out && touch /x/out/made; until [ -e /x/in/go ]; do usleep 10000; done"
    shared = engine.started("sh", "-c", script, host={"Binds": [f"{own_mount}:/x:shared"], "Privileged": True})
    until("the container's mount is seen here", (own_mount / "out" / "made").exists)
    slave = running(engine, "until [ -e /x/in/go ]; do usleep 10000; done", Binds=[f"{own_mount}:/x:rslave"])
    private = running(engine, "ls /x/in; sleep 1000", Binds=[f"{own_mount}:/x"])
    subprocess.run(["mount", "-t", "tmpfs", "later", own_mount / "in"], check=True)
    (own_mount / "in" / "go").write_text("")
    assert engine.wait(shared) == 0 and engine.wait(slave) == 0
    assert engine.docker("exec", private, "ls", "/x/in").out == ""


def test_read_only_over_restricted_mounts(engine: TempEngine, own_mount: Path) -> None:
    (own_mount / "file").write_text("x")
    script = "cat /x/file; touch /x/no; grep ' /x ' /proc/mounts"
    container = running(engine, script, Binds=[f"{own_mount}:/x:ro"])
    engine.wait(container)
    out = engine.logs(container, "stdout=1").decode()
    assert out.startswith("x") and {"ro", "nosuid", "nodev"} <= set(out.split()[-3].split(","))
    assert not (own_mount / "no").exists()


def test_mounts_in_mounts_come_by_depth(engine: TempEngine) -> None:
    container = running(
        engine, "echo a >/x/f; echo b >/x/y/f; echo c >/x/y/z/f", Binds=["c1:/x/y/z", "a1:/x", "b1:/x/y/"]
    )
    assert engine.wait(container) == 0
    volumes = engine.root / "volumes"
    assert [(volumes / name / "_data" / "f").read_text() for name in ("a1", "b1", "c1")] == ["a\n", "b\n", "c\n"]


# --- hostile containers ---------------------------------------------------------------------------


def test_a_link_in_the_place_of_a_volumes_data(engine: TempEngine, tmp_path: Path) -> None:
    place = make(engine, "victim")
    with_options = make(engine, "mounted", type="tmpfs", device="tmpfs")
    binds = [f"{place.parent}:/p", f"{with_options.parent}:/q"]
    script = f"mv /p/_data /p/old; ln -s {tmp_path} /p/_data; mv /q/_data /q/old; ln -s {tmp_path} /q/_data"
    assert engine.wait(running(engine, script, Binds=binds)) == 0
    before = engine.footprint()
    for name in ("victim", "mounted"):
        container = engine.create("touch", "/v/mark", host={"Binds": [f"{name}:/v:nocopy"]})
        answer = engine.request("POST", f"/v1.24/containers/{container}/start")
        assert answer.status == 500 and "is not its directory" in answer.message, answer
        copied = {"Image": "busybox", "HostConfig": {"Binds": [f"{name}:/etc"]}}
        answer = engine.request("POST", "/v1.24/containers/create", copied)
        assert answer.status == 500 and "is not its directory" in answer.message, answer
        gone(engine, container)
    engine.assert_settles(before)
    assert os.listdir(tmp_path) == []
    engine.remove_all()
    for name in ("victim", "mounted"):
        remove(engine, name)
    assert tmp_path.is_dir()


def test_a_volumes_data_swapped_while_others_start(engine: TempEngine, tmp_path: Path) -> None:
    place = make(engine, "victim")
    (tmp_path / "outside").mkdir()
    swap = f"while :; do mv /p/_data /p/old; ln -s {tmp_path}/outside /p/_data; rm /p/_data; mv /p/old /p/_data; done"
    running(engine, swap, Binds=[f"{place.parent}:/p"])
    started = 0
    for _ in range(30):
        container = engine.create("touch", "/v/mark", host={"Binds": ["victim:/v:nocopy"]})
        answer = engine.request("POST", f"/v1.24/containers/{container}/start")
        if answer.status == 204:
            started += 1
            assert engine.wait(container) == 0
        else:
            assert answer.status == 500, answer
        gone(engine, container)
    assert os.listdir(tmp_path / "outside") == []


def test_a_destination_swapped_during_starts(engine: TempEngine, tmp_path: Path) -> None:
    """The runtime resolves destinations: no directory is created and no mount lands outside the
    container's root."""
    (tmp_path / "outside").mkdir()
    target = "../" * 30 + f"{tmp_path}/outside".lstrip("/")
    swap = f"mkdir /s/t; while :; do mv /s/t /s/old; ln -s {target} /s/t; rm /s/t; mv /s/old /s/t; done"
    running(engine, swap, Binds=["shared:/s"])
    succeeded = 0
    for _ in range(30):
        container = engine.create("touch", "/s/t/made/mark", host={"Binds": ["shared:/s", "inner:/s/t/made"]})
        answer = engine.request("POST", f"/v1.24/containers/{container}/start")
        assert answer.status in (204, 400, 404, 500), answer
        if answer.status == 204:
            succeeded += engine.wait(container) == 0
        gone(engine, container)
        assert os.listdir(tmp_path / "outside") == []
    assert succeeded or not os.listdir(tmp_path / "outside")


def test_a_destination_that_is_a_link(engine: TempEngine) -> None:
    image = Image(
        [busybox_layer(), tar([symlink("away", "/../../../../../../srv/here"), directory("srv/here/")])],
        ("linked:latest",),
        {"Cmd": ["sh"]},
    )
    engine.request("POST", "/v1.24/images/load?quiet=1", docker_archive(image), {"Content-Type": "application/x-tar"})
    container = engine.started("sh", "-c", "echo x >/srv/here/f", Image="linked", host={"Binds": ["v1:/away"]})
    assert engine.wait(container) == 0
    assert (engine.root / "volumes" / "v1" / "_data" / "f").read_text() == "x\n"
    assert not Path("/srv/here").exists()


def test_nothing_leaks_over_many_starts(engine: TempEngine) -> None:
    make(engine, "small", type="tmpfs", device="tmpfs")
    for container in [running(engine, "true", Binds=["small:/v", "p1:/p"])]:
        engine.wait(container)
        gone(engine, container)
    until("settled", lambda: mounted(engine) == [])
    descriptors = engine.open_files()
    before = engine.footprint()
    for _ in range(10):
        container = engine.started("true", Volumes={"/a": {}, "/etc": {}}, host={"Binds": ["small:/v", "p1:/p:ro"]})
        engine.wait(container)
        gone(engine, container)
    engine.assert_settles(before)
    until("no descriptor is left", lambda: engine.open_files() <= descriptors)
    assert sorted(os.listdir(engine.root / "volumes")) == ["p1", "small"]
