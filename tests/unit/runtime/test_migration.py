from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from engine.runtime import migration
from engine.runtime.cgroups import Cgroups
from engine.runtime.migration import Migration, begin

V1 = Cgroups("v1", {"cpu": "/c/cpu", "memory": "/c/memory", "name=systemd": "/c/systemd"})
HYBRID = Cgroups("hybrid", {"memory": "/c/memory"}, "/c/unified")
V2 = Cgroups("v2", {}, "/c")
NONE = Cgroups("none", {})


@pytest.mark.parametrize(
    ("hierarchies", "membership", "files"),
    [
        (V1, "4:cpu,cpuacct:/\n3:memory:/a:b\n", ["/c/cpu//tasks", "/c/memory/a:b/tasks"]),
        (V1, "9:net_cls:/\n8:name=systemd:/u\n0::/\n", ["/c/systemd/u/tasks"]),
        (HYBRID, "2:memory:/../x\n0::/y\n", ["/c/memory/../x/tasks", "/c/unified/y/cgroup.threads"]),
        (V2, "0::/system.slice/engined.service\n", ["/c/system.slice/engined.service/cgroup.threads"]),
        (NONE, "1:memory:/\n0::/\n", []),
    ],
)
def test_the_files_of_the_cgroups_it_is_in(hierarchies: Cgroups, membership: str, files: list[str]) -> None:
    assert [*migration.own(hierarchies, membership)] == files


def test_a_thread_stays_where_it_is() -> None:
    """With the kernel's own files: it takes the move, and nothing is somewhere else for it."""
    place = Path("/proc/thread-self/cgroup")
    before = place.read_text()
    assert begin(Cgroups.detect())
    assert place.read_text() == before


def test_what_is_out_of_sight_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("2:memory:/../nowhere\n1:cpu:/here\n")
    (tmp_path / "cpu/here").mkdir(parents=True)
    seen = Cgroups("v1", {"memory": str(tmp_path / "memory"), "cpu": str(tmp_path / "cpu")})
    assert not begin(seen, tmp_path / "membership")
    (tmp_path / "cpu/here/tasks").touch()
    assert begin(seen, tmp_path / "membership")
    assert (tmp_path / "cpu/here/tasks").read_text() == str(threading.get_native_id())
    assert not begin(seen, tmp_path / "none")


def test_what_is_expected_meanwhile_is_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    count = 0

    def begin(hierarchies: Cgroups) -> bool:
        nonlocal count
        count += 1
        begun.release()
        assert go_on.acquire(timeout=10)
        return True

    monkeypatch.setattr(migration, "begin", begin)

    async def run() -> None:
        expecting = Migration(NONE)
        expecting.expect()
        await asyncio.to_thread(begun.acquire)
        for _ in range(5):
            expecting.expect()
        go_on.release(2)
        await expecting.settled()
        assert count == 2
        go_on.release()
        expecting.expect()
        await expecting.settled()
        assert count == 3

    asyncio.run(run())


def test_where_it_cannot_help_it_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Cgroups] = []
    monkeypatch.setattr(migration, "begin", lambda hierarchies: bool(tried.append(hierarchies)))

    async def run() -> None:
        expecting = Migration(V2)
        for _ in range(3):
            expecting.expect()
            await expecting.settled()

    asyncio.run(run())
    assert tried == [V2]
