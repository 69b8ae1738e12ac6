"""The layers that a container's image mounts keep."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from engine.containers import image_mounts
from engine.containers.store import ContainerRecord, ImageMount
from engine.errors import NotFound, ServerError
from engine.wire.containers import Config, HostConfig


class Layers:
    """Counts the users of layers; `missing` are gone."""

    def __init__(self, *missing: str) -> None:
        self.missing = missing
        self.users: Counter[str] = Counter()

    def retain(self, chain_id: str) -> None:
        self.users[chain_id] += 1

    async def release(self, chain_id: str) -> list[str]:
        self.users[chain_id] -= 1
        assert self.users[chain_id] >= 0
        return []

    def chain(self, chain_id: str) -> list[Any]:
        if chain_id in self.missing:
            raise ServerError(f"layer {chain_id} is missing")
        return []


RECORD = ContainerRecord(
    id="c",
    name="c",
    created=0,
    image_id="",
    parent="",
    path="",
    args=(),
    config=Config(),
    host=HostConfig(),
    image_mounts=tuple(
        ImageMount(destination=f"/{at}", name="i", image_id="sha256:1", chain_id=chain_id)
        for at, chain_id in enumerate(("a", "b", "a", ""))
    ),
)


def test_they_stay_retained_when_the_container_is_made() -> None:
    async def main() -> None:
        layers: Any = Layers()
        async with image_mounts.retained(RECORD, layers):
            assert layers.users == {"a": 2, "b": 1}
        assert layers.users == {"a": 2, "b": 1}
        await image_mounts.release(RECORD, layers)
        assert not +layers.users

    asyncio.run(main())


@pytest.mark.parametrize("missing", ["a", "b", ""])
def test_a_failure_releases_them(missing: str) -> None:
    async def main() -> None:
        layers: Any = Layers(*([missing] if missing else []))
        with pytest.raises(NotFound if missing else KeyError) as caught:
            async with image_mounts.retained(RECORD, layers):
                raise KeyError
        assert not +layers.users
        assert not missing or str(caught.value) == "No such image: i"

    asyncio.run(main())


def test_a_container_without_them_opens_nothing() -> None:
    async def main() -> None:
        plain: Any = None
        async with image_mounts.opened(
            ContainerRecord(**{**_fields(), "image_mounts": ()}), plain, mapped=False
        ) as found:
            assert found == []

    asyncio.run(main())


def _fields() -> dict[str, Any]:
    return {name: getattr(RECORD, name) for name in RECORD.__struct_fields__}
