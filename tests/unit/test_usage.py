"""Disk usage: the totals, computations that several requests share, and GET /system/df at several
versions, on parts of fakes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import usage
from engine.api import system
from engine.builder.prune import Entry
from engine.errors import InvalidParameter, ServerError
from engine.usage import Usage, Usages
from engine.wire.containers import ContainerSummary, SummaryHostConfig, SummaryNetworks
from engine.wire.images import ImageSummary
from engine.wire.system import CacheRecord
from engine.wire.volumes import UsageData, Volume
from tests.unit.api.parts import engine, request


def image(size: int, shared: int = 0, containers: int = 0) -> ImageSummary:
    return ImageSummary(
        id="i",
        repo_tags=[],
        repo_digests=[],
        created=0,
        size=size,
        shared_size=shared,
        containers=containers,
        labels={},
    )


def container(state: str, size: int) -> ContainerSummary:
    return ContainerSummary(
        id="c",
        names=["/c"],
        image="busybox",
        image_id="i",
        command="top",
        created=0,
        ports=[],
        size_rw=size,
        size_root_fs=size,
        labels={},
        state=state,
        status="",
        host_config=SummaryHostConfig("none"),
        network_settings=SummaryNetworks({}),
        mounts=[],
    )


def volume(users: int, size: int) -> Volume:
    return Volume(name="v", driver="local", mountpoint="/v", usage_data=UsageData(ref_count=users, size=size))


def record(size: int, in_use: bool = False, shared: bool = False) -> CacheRecord:
    return CacheRecord(
        id="r",
        type="regular",
        description="",
        in_use=in_use,
        shared=shared,
        size=size,
        created_at="2026-01-02T03:04:05Z",
        usage_count=0,
    )


def totals(found: Usage[Any]) -> tuple[int, int, int]:
    return found.active, found.size, found.reclaimable


def test_images() -> None:
    found = usage.image_usage(
        100, [image(60, 20, containers=1), image(40, 20), image(30), image(10, -1, containers=-1)]
    )
    assert totals(found) == (1, 100, 20 + 30 + 10)


def test_containers() -> None:
    states = ("running", "paused", "restarting", "created", "exited", "dead")
    found = usage.container_usage([container(state, 1 << at) for at, state in enumerate(states)])
    assert totals(found) == (3, 0b111111, 0b111000)


def test_volumes() -> None:
    found = usage.volume_usage([volume(2, 10), volume(0, 20), volume(1, -1), volume(0, -1)])
    assert totals(found) == (2, 30, 20)


def test_the_build_cache() -> None:
    found = usage.cache_usage([record(1), record(2, in_use=True), record(4, shared=True), record(8, True, True)])
    assert totals(found) == (2, 15, 1)


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 1 << 40))))
def test_what_can_be_reclaimed_is_part_of_the_whole(given_volumes: list[tuple[int, int]]) -> None:
    found = usage.volume_usage([volume(*each) for each in given_volumes])
    assert 0 <= found.reclaimable <= found.size and 0 <= found.active <= len(given_volumes)


# --- shared computations --------------------------------------------------------------------------


class Volumes:
    """Computes when the test says so."""

    def __init__(self) -> None:
        self.computed = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def usage(self) -> list[Volume]:
        self.computed += 1
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return [volume(0, self.computed)]


def usages(volumes: Any = None, builder: Any = None, images: Any = None) -> Usages:
    absent: Any = None
    return Usages(absent, images, volumes, builder)


def test_requests_at_the_same_time_share_one_computation() -> None:
    async def scenario() -> None:
        volumes = Volumes()
        found = usages(volumes)
        first, second = asyncio.create_task(found.volumes()), asyncio.create_task(found.volumes())
        await asyncio.sleep(0)
        first.cancel()  # its client has left
        await asyncio.sleep(0)
        volumes.go.set()
        assert (await second).size == 1 and first.cancelled()
        assert (await found.volumes()).size == 2 == volumes.computed

    asyncio.run(scenario())


def test_all_of_them_get_its_failure() -> None:
    async def scenario() -> None:
        volumes = Volumes()
        volumes.error = ServerError("the disk")
        found = usages(volumes)
        both = [asyncio.create_task(found.volumes()) for _ in range(2)]
        await asyncio.sleep(0)
        volumes.go.set()
        assert [str(each) for each in await asyncio.gather(*both, return_exceptions=True)] == ["the disk"] * 2
        volumes.error = None
        assert (await found.volumes()).size == 2

    asyncio.run(scenario())


def test_a_failure_without_a_client_is_retrieved() -> None:
    async def scenario() -> None:
        lost: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
        volumes = Volumes()
        volumes.error = ServerError("the disk")
        alone = asyncio.create_task(usages(volumes).volumes())
        await asyncio.sleep(0)
        alone.cancel()
        volumes.go.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not lost

    asyncio.run(scenario())


# --- GET /system/df -------------------------------------------------------------------------------

ENTRIES = [
    Entry("b", "a", "regular", "RUN true", 7, 10**9, 2 * 10**9, 3, False, False),
    Entry("a", "", "regular", "FROM x", 5, 0, 0, 0, True, True),
]


def df(query: str = "", version: str | None = None) -> dict[str, Any]:
    async def run() -> bytes:
        volumes = Volumes()
        volumes.go.set()

        async def entries() -> list[Entry]:
            return ENTRIES

        builder = SimpleNamespace(usage=entries)
        images = SimpleNamespace(usage=lambda: (90, [image(60, 20, 1), image(50, 20)]))
        parts = dataclasses.replace(engine(), usage=usages(volumes, builder, images))
        return (await system.disk_usage(parts, request("/system/df", query=query, version=version))).body

    found: dict[str, Any] = msgspec.json.decode(asyncio.run(run()))
    return found


THREE = "type=image&type=volume&type=build-cache"
OLD = {"LayersSize", "Images", "Volumes", "BuildCache"}
NEW = {"ImageUsage", "VolumeUsage", "BuildCacheUsage"}


def test_df_has_both_forms_at_the_newest_version() -> None:
    """A client that names no version may know the older form alone."""
    found = df(THREE)
    assert found.keys() == OLD | NEW
    assert found["LayersSize"] == 90
    assert found["ImageUsage"] == {"ActiveCount": 1, "TotalCount": 2, "Reclaimable": 30, "TotalSize": 90}
    assert found["VolumeUsage"] == {"TotalCount": 1, "Reclaimable": 1, "TotalSize": 1}
    assert found["BuildCacheUsage"] == {"ActiveCount": 1, "TotalCount": 2, "Reclaimable": 7, "TotalSize": 12}
    assert [(each["SharedSize"], each["Containers"]) for each in found["Images"]] == [(20, 1), (20, 0)]
    assert found["Volumes"][0]["UsageData"] == {"Size": 1, "RefCount": 0}


def test_df_with_verbose() -> None:
    found = df(THREE + "&verbose=1")
    assert found.keys() == NEW
    assert found["BuildCacheUsage"]["Items"] == [
        {
            "ID": "b",
            "Parents": ["a"],
            " Parents": ["a"],
            "Type": "regular",
            "Description": "RUN true",
            "InUse": False,
            "Shared": False,
            "Size": 7,
            "CreatedAt": "1970-01-01T00:00:01Z",
            "LastUsedAt": "1970-01-01T00:00:02Z",
            "UsageCount": 3,
        },
        {
            "ID": "a",
            "Type": "regular",
            "Description": "FROM x",
            "InUse": True,
            "Shared": True,
            "Size": 5,
            "CreatedAt": "0001-01-01T00:00:00Z",
            "LastUsedAt": None,
            "UsageCount": 0,
        },
    ]


def test_df_below_1_52() -> None:
    found = df(THREE + "&verbose=1", version="1.51")
    assert found.keys() == OLD
    assert "VirtualSize" not in found["Images"][0]
    assert df(THREE, version="1.43")["Images"][0]["VirtualSize"] == 60


def test_df_of_some_kinds() -> None:
    assert df("type=volume").keys() == {"Volumes", "VolumeUsage"}
    assert df("type=volume", version="1.42").keys() == {"Volumes"}
    assert df("type=build-cache&type=build-cache", version="1.42").keys() == {"BuildCache"}


def test_an_unknown_kind() -> None:
    for query in ("type=volumes", "type=", "type=image&type=x"):
        with pytest.raises(InvalidParameter, match="unknown object type: "):
            df(query)
