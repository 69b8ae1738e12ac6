"""mountinfo, and mounts if the test may make them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from engine.errors import ServerError
from engine.system import mounts

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_mountinfo_lines() -> None:
    plain = mounts._parse("36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue")
    assert plain == (
        36,
        35,
        "98:0",
        "/mnt1",
        "/mnt2",
        "rw,noatime",
        "master:1 shared:2",
        "ext3",
        "/dev/root",
        "rw,errors=continue",
    )
    odd = mounts._parse(r"1 2 0:1 / /a\040b\134c rw - tmpfs none\011x rw")
    assert (odd.target, odd.source, odd.propagation) == ("/a b\\c", "none\tx", "")
    assert any(entry.target == "/proc" for entry in mounts.mounts())


@needs_root
def test_mount_and_unmount(tmp_path: Path) -> None:
    target = tmp_path / "with space"
    target.mkdir()
    assert not mounts.unmount(target) and not mounts.unmount(tmp_path / "none")
    mounts.mount("tmpfs", target, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "size=64k")
    mounts.mount("tmpfs", target, "tmpfs")
    try:
        assert [entry.target for entry in mounts.mounts(tmp_path)] == [str(target)] * 2
    finally:
        assert mounts.unmount(target), "all that is stacked there goes"
    assert mounts.mounts(tmp_path) == []


@needs_root
def test_a_busy_mount_goes_in_the_end(tmp_path: Path) -> None:
    mounts.mount("tmpfs", tmp_path, "tmpfs")
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        assert mounts.unmount(tmp_path)
        assert mounts.mounts(tmp_path) == []
    finally:
        os.close(held)


@needs_root
def test_options_of_a_whole_page_reach_the_kernel(tmp_path: Path) -> None:
    """The last one takes effect."""
    last = ",mode=711"
    options = "size=64k," * (mounts.PAGE // 9)
    options = options[: mounts.PAGE - 1 - len(last)].rpartition(",")[0] + last
    mounts.mount("tmpfs", tmp_path, "tmpfs", options=options.rjust(mounts.PAGE - 1, ","))
    try:
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o711
    finally:
        assert mounts.unmount(tmp_path)


def test_errors_name_the_place(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=rf"nosuchfs on {tmp_path}"):
        mounts.mount("x", tmp_path, "nosuchfs")
    with pytest.raises(ServerError, match=f"{mounts.PAGE} bytes, the kernel takes {mounts.PAGE - 1}"):
        mounts.mount("x", tmp_path, "tmpfs", options="x" * mounts.PAGE)


def line(number: int, target: str) -> str:
    return f"{number} 1 0:1 / {target} rw - tmpfs none rw"


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/", 1),
        ("/a", 2),
        ("/a/x", 2),
        ("/ab", 1),
        ("/a/b", 4),
        ("/a/b/c", 4),
        ("/a/bc", 2),
        ("/a/c d/e", 5),
    ],
)
def test_the_mount_that_contains_a_path(path: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest above, whatever the order of mounting; of those on one place the last."""
    targets = {1: "/", 3: "/a/b", 2: "/a", 4: "/a/b", 5: r"/a/c\040d"}
    found = [mounts._parse(line(each, target)) for each, target in targets.items()]
    monkeypatch.setattr(mounts, "mounts", lambda: found)
    assert mounts.containing(path).id == number


def test_a_path_on_no_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "mounts", lambda: [mounts._parse(line(1, "/a"))])
    with pytest.raises(ServerError, match="/b: it is on no mount"):
        mounts.containing("/b")


def test_descriptors_know_their_mount() -> None:
    for path in ("/proc/version", "/proc", "/"):
        descriptor = os.open(path, os.O_PATH)
        try:
            assert mounts.mount_id(descriptor) == mounts.containing(path).id
        finally:
            os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        mounts.mount_id(-1)


@needs_root
def test_a_mount_over_a_directory_has_another_id(tmp_path: Path) -> None:
    below = os.open(tmp_path, os.O_PATH)
    mounts.mount("tmpfs", tmp_path, "tmpfs")
    above = os.open(tmp_path, os.O_PATH)
    try:
        assert mounts.containing(str(tmp_path)).id == mounts.mount_id(above) != mounts.mount_id(below)
        (tmp_path / "file").touch()
        assert mounts.containing(str(tmp_path / "file")).type == "tmpfs"
    finally:
        os.close(above)
        os.close(below)
        mounts.unmount(tmp_path)
