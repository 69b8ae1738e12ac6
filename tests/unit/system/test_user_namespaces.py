"""Maps of ids. Namespaces that have them: tests/system/test_user_namespaces.py."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.system import user_namespaces
from engine.system.user_namespaces import OVERFLOW, IdMap, Range

PR_GET_DUMPABLE = 3

MAP = IdMap(uids=(Range(0, 100_000, 10), Range(10, 500_000, 5)), gids=(Range(0, 200_000, 3),))


def test_ids_and_their_counterparts() -> None:
    assert MAP.root == (100_000, 200_000)
    assert MAP.outside(9, 2) == (100_009, 200_002)
    assert MAP.outside(10, 3) == (500_000, OVERFLOW)
    assert MAP.outside(15, 0) == (OVERFLOW, 200_000)


@given(st.integers(0, 20), st.integers(0, 20))
def test_both_directions_are_each_others_reverse(uid: int, gid: int) -> None:
    for inner, outer in zip(MAP.inward, MAP.outward, strict=True):
        assert [(there, here, count) for here, there, count in inner] == list(outer)
    out = MAP.outside(uid, gid)
    for number, found, ranges in ((uid, out[0], MAP.inward[0]), (gid, out[1], MAP.inward[1])):
        back = [inside + found - begin for begin, inside, count in ranges if begin <= found < begin + count]
        assert back == ([number] if found != OVERFLOW else [])


def test_ids_without_a_counterpart_are_refused() -> None:
    MAP.check((0, 14), (0, 2))
    with pytest.raises(InvalidParameter, match="uid 15 cannot be mapped to a host ID: user namespaces have 15 uids"):
        MAP.check((0, 15), ())
    with pytest.raises(InvalidParameter, match="gid 3 cannot be mapped to a host ID: user namespaces have 3 gids"):
        MAP.check((), (0, 3))


def test_files_of_other_ids_leave_the_process_as_it_was(tmp_path: Path) -> None:
    def state() -> tuple[list[str], int]:
        status = Path("/proc/thread-self/status").read_text().splitlines()
        return [line for line in status if line.startswith(("Uid", "Gid", "Cap"))], libc.prctl(PR_GET_DUMPABLE, 0, 0, 0)

    libc = ctypes.CDLL(None)
    before = state()
    assert before[1] == 1
    with user_namespaces.files_of(100_000, 200_000):
        (tmp_path / "file").touch()
        with user_namespaces.files_of(100_001, 200_001):
            (tmp_path / "another").touch()
    assert state() == before
    owners = [((tmp_path / name).stat().st_uid, (tmp_path / name).stat().st_gid) for name in ("file", "another")]
    assert owners == [(100_000, 200_000), (100_001, 200_001)]


def test_files_of_large_ids(tmp_path: Path) -> None:
    """Directories of users, such as FreeIPA, give subordinate ids from 2^31 on."""
    uid, gid = 1 << 31, (1 << 32) - 2
    with user_namespaces.files_of(uid, gid):
        (tmp_path / "file").touch()
        with user_namespaces.files_of(5, 6):
            (tmp_path / "inner").touch()
        (tmp_path / "after").touch()
    (tmp_path / "own").touch()
    owners = [((found := (tmp_path / name).stat()).st_uid, found.st_gid) for name in ("file", "inner", "after", "own")]
    assert owners == [(uid, gid), (5, 6), (uid, gid), (os.geteuid(), os.getegid())]


def test_ids_that_the_kernel_refuses(tmp_path: Path) -> None:
    """4294967295 stands for no id."""
    before = Path("/proc/thread-self/status").read_text().splitlines()[8:10]
    with pytest.raises(PermissionError, match="making files as user 5"), user_namespaces.files_of(5, (1 << 32) - 1):
        raise AssertionError("not reached")
    assert Path("/proc/thread-self/status").read_text().splitlines()[8:10] == before
