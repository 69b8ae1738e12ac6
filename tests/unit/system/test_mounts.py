"""mountinfo, and mounting where the test may."""

from __future__ import annotations

import os
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


def test_errors_name_the_place(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=rf"nosuchfs on {tmp_path}"):
        mounts.mount("x", tmp_path, "nosuchfs")
    with pytest.raises(ServerError, match="4200 bytes"):
        mounts.mount("x", tmp_path, "tmpfs", options="x" * 4200)
