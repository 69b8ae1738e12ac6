from __future__ import annotations

import os
import resource
from types import SimpleNamespace

import pytest

from engine.errors import ServerError
from engine.system import limits


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    return 1024


def test_room(limit: int) -> None:
    limits.ensure_descriptors(limits.PER_START)
    with pytest.raises(ServerError, match="too many open files"):
        limits.ensure_descriptors(limit)


@pytest.mark.parametrize("counted_by_stat", [True, False])
def test_the_reserve_is_kept(limit: int, counted_by_stat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Linux 6.2 st_size is the number of descriptors. Before, the size of the table is an
    upper bound, and the directory is listed if that does not suffice.
    """
    used, real = limit - limits.reserve(limit) - 10, os.stat
    monkeypatch.setattr(
        os,
        "stat",
        lambda path, **_: (
            SimpleNamespace(st_size=used if counted_by_stat else 0) if path == "/proc/self/fd" else real(path)
        ),
    )
    monkeypatch.setattr(os, "listdir", lambda _: [*range(used)])
    monkeypatch.setattr(limits, "_table_size", lambda: 2048)
    limits.ensure_descriptors(10)
    with pytest.raises(
        ServerError, match=rf"too many open files: {used} of 1024 descriptors \(RLIMIT_NOFILE\).*LimitNOFILE"
    ):
        limits.ensure_descriptors(11)


def test_an_older_kernel_lists_nothing_while_the_table_has_room(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat
    monkeypatch.setattr(
        os, "stat", lambda path, **_: SimpleNamespace(st_size=0) if path == "/proc/self/fd" else real(path)
    )
    monkeypatch.setattr(os, "listdir", lambda _: pytest.fail("listed"))
    monkeypatch.setattr(limits, "_table_size", lambda: 256)
    limits.ensure_descriptors(10)


def test_counts_are_of_this_process() -> None:
    before = limits.open_descriptors()
    reader, writer = os.pipe()
    try:
        assert limits.open_descriptors() == before + 2
        assert limits._table_size() >= before + 2
    finally:
        os.close(reader)
        os.close(writer)


def test_a_reserve_of_small_and_large_limits() -> None:
    assert [limits.reserve(each) for each in (64, 256, 1024, 1 << 20)] == [32, 64, 256, 512]
