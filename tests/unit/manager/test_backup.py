"""Backups: the file, what is in it, the hourly ones, and a restore into an empty etcd."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter, ServerError
from engine.manager import backup
from engine.manager.backup import Backups, Header, fill, load, pack, save, take, unpack
from engine.manager.kv import Item, PutKey
from engine.manager.records import CLAIMS, CLUSTER, Claim, Cluster
from engine.manager.restoring import address
from engine.manager.store import Compare, Put, Stale, Store
from engine.wire.swarm import SwarmSpec
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd

HEADER = Header(format=1, swarm="s", revision=7, time=1)
ROOT = Cluster(id="s1", created=1, updated=1, spec=SwarmSpec(), root="", worker_token="w", manager_token="m")


def items(*pairs: tuple[str, bytes]) -> list[Item]:
    return [Item(key, value, 1, 1) for key, value in pairs]


@given(st.lists(st.tuples(st.text(min_size=1).filter(lambda key: key != "/base"), st.binary()), max_size=20))
def test_what_is_packed_is_unpacked(pairs: list[tuple[str, bytes]]) -> None:
    found = unpack(pack(HEADER, items(*pairs)))
    assert found.header == HEADER
    assert found.keys == pairs


@given(st.binary(max_size=300))
def test_any_other_file_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidParameter):
        unpack(data)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_or_cut_file_is_refused(place: int, change: int) -> None:
    whole = bytearray(pack(HEADER, items(("/x/a", b"value" * 20), ("/x/b", b""))))
    with pytest.raises(InvalidParameter):
        unpack(bytes(whole[: place % len(whole)]))
    whole[place % len(whole)] ^= change
    try:
        found = unpack(bytes(whole))
    except InvalidParameter:
        return
    assert found.header == HEADER and len(found.keys) == 2  # a bit without meaning


def test_a_format_of_later_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="format 2"):
        unpack(pack(Header(format=2, swarm="s", revision=7, time=1), []))


def test_records_that_are_missing_are_noticed() -> None:
    body = zstandard.ZstdDecompressor().decompressobj().decompress(pack(HEADER, items(("/x/a", b""), ("/x/b", b""))))
    first = 4 + int.from_bytes(body[:4], "big")
    second = first + 4 + int.from_bytes(body[first : first + 4], "big")
    with pytest.raises(InvalidParameter, match="1 keys of 2"):
        unpack(zstandard.ZstdCompressor().compress(body[:first] + body[second:]))


async def test_keys_under_a_lease_are_left_out(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    with pytest.raises(ServerError, match="no swarm"):
        await take(etcd, clock, "n1")
    lease = await etcd.grant(5)
    await store.commit([Put(CLUSTER, "", ROOT), Put(CLAIMS, "a", Claim("1")), Put(CLAIMS, "b", Claim("1"), lease)])
    header, data = await take(etcd, clock, "n1")
    assert (header.swarm, header.revision, header.node) == ("s1", store.revision, "n1")
    assert [key for key, _ in unpack(data).keys] == ["/swarm", "/x/a"]


async def test_a_restore_goes_on_with_the_revisions(store: Store, clock: FakeClock, tmp_path: Path) -> None:
    for number in range(50):
        await store.commit([Put(CLUSTER, "", ROOT), Put(CLAIMS, "a", Claim(str(number)))])
    before = store.get(CLAIMS, "a")
    assert before is not None
    path = tmp_path / "file"
    await save(store.etcd, clock, "n1", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    empty = FakeEtcd(clock)
    await fill(empty, load(path))
    restored = Store(empty, clock)
    await restored.load()
    after = restored.get(CLAIMS, "a")
    assert after is not None and after.record == before.record
    assert after.revision > before.revision
    with pytest.raises(Stale):
        await restored.commit([Put(CLAIMS, "a", Claim("x"))], [Compare(CLAIMS, "a", before.revision)])
    await restored.commit([Put(CLAIMS, "a", Claim("x"))], [Compare(CLAIMS, "a", after.revision)])
    # once more, of the restored one
    header, data = await take(empty, clock, "n1")
    assert header.revision == restored.revision
    third = FakeEtcd(clock)
    await fill(third, unpack(data))
    again = Store(third, clock)
    await again.load()
    assert again.revision > restored.revision
    with pytest.raises(ServerError, match="another swarm"):
        await fill(third, unpack(data))
    await restored.close()
    await again.close()


async def test_a_large_restore_is_divided(clock: FakeClock) -> None:
    etcd = FakeEtcd(clock)
    keys = [(f"/x/{number}", b"x" * 1000) for number in range(5000)] + [("/swarm", b"value")]
    await fill(etcd, backup.Backup(HEADER, keys))
    assert len(etcd.cluster.items) == 5002
    assert all(len(operations) <= 1024 for _, operations in etcd.commits)
    assert isinstance(etcd.commits[-1][1][0], PutKey) and etcd.commits[-1][1][0].key == "/swarm"


async def test_hourly_backups(store: Store, etcd: FakeEtcd, clock: FakeClock, tmp_path: Path) -> None:
    backups = Backups(tmp_path, etcd, clock, node="n1", keep=lambda: 1)
    await store.commit([Put(CLUSTER, "", ROOT)])
    found: list[str] = []
    for _ in range(4):
        await store.commit([Put(CLAIMS, "a", Claim("1"))])
        path = await backups.write()
        assert path is not None and load(path).header.revision == store.revision
        found.append(path.name)
        assert await backups.write() is None  # nothing has changed
        await clock.advance(3600)
    assert sorted(path.name for path in (tmp_path / "backup").iterdir()) == found[-2:]


async def test_the_hours(store: Store, etcd: FakeEtcd, clock: FakeClock, tmp_path: Path) -> None:
    await store.commit([Put(CLUSTER, "", ROOT)])
    running = asyncio.create_task(Backups(tmp_path, etcd, clock, node="n1", keep=lambda: 5).run())
    for count in range(1, 4):
        for _ in range(100):
            await clock.advance(600)
            await asyncio.sleep(0.01)  # threads write
            if (tmp_path / "backup").is_dir() and len(list((tmp_path / "backup").glob("*.backup"))) == count:
                break
        else:
            raise AssertionError(count)
        await store.commit([Put(CLAIMS, "a", Claim(str(count)))])
    running.cancel()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1", "10.0.0.1:2377"),
        ("10.0.0.1:99", "10.0.0.1:99"),
        ("fd00::1", "[fd00::1]:2377"),
        ("[fd00::1]:99", "[fd00::1]:99"),
        ("[fd00::1]", "[fd00::1]:2377"),
    ],
)
def test_addresses(text: str, found: str) -> None:
    assert address(text) == found


@pytest.mark.parametrize("text", ["", "host", "10.0.0.1:", "10.0.0.1:x", "10.0.0.1:70000", "300.0.0.1", "[::1]:0"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(InvalidParameter, match="address"):
        address(text)
