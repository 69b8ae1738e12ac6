"""When a registry is asked for a task's image, and what becomes of its failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from engine.cluster import pulling
from engine.cluster.pulling import Pulls
from engine.errors import NotFound, ServerError
from engine.images.credentials import Credentials

DIGEST = "sha256:" + "a" * 64


class World:
    """The images of a node, and a registry."""

    def __init__(self, *here: str) -> None:
        self.here = set(here)
        self.asked: list[tuple[str, str]] = []
        self.failure: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.cancelled = 0
        self.loaded = True
        self.pulls = Pulls(self, self)  # type: ignore[arg-type]

    def get(self, name: str) -> None:
        if name not in self.here:
            raise NotFound(f"No such image: {name}")

    async def pull(self, image: str, tag: str, credentials: Credentials) -> Any:
        self.asked.append((image, credentials.username))
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        return self

    async def run(self) -> AsyncGenerator[int, None]:
        yield 1
        self.here |= {"busybox", f"busybox@{DIGEST}"}


async def test_an_image_is_pulled_once_for_many() -> None:
    world = World()
    await asyncio.gather(*(world.pulls.bring("busybox", "") for _ in range(20)))
    assert world.asked == [("docker.io/library/busybox:latest", "")]
    await world.pulls.bring("busybox", "")
    assert len(world.asked) == 1, "the outcome is good for a moment"
    await world.pulls.bring("busybox", "eyJ1c2VybmFtZSI6ICJ1In0=")
    assert world.asked[1] == ("docker.io/library/busybox:latest", "u"), "another's credentials"


async def test_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "FRESH", 0.0)
    world = World("busybox")
    await world.pulls.bring("busybox", "")
    await world.pulls.bring("busybox", "")
    assert len(world.asked) == 2


@pytest.mark.parametrize("name", [f"busybox@{DIGEST}", DIGEST])
async def test_a_digest_that_is_here_is_not_asked_for(name: str) -> None:
    world = World(name)
    await world.pulls.bring(name, "")
    assert not world.asked


async def test_an_id_that_is_not_here() -> None:
    world = World()
    with pytest.raises(NotFound, match=f"No such image: {DIGEST}"):
        await world.pulls.bring(DIGEST, "")
    assert not world.asked


async def test_a_failure_when_it_is_here_and_when_not() -> None:
    world = World("busybox")
    world.failure = ServerError("no such host")
    await world.pulls.bring("busybox", "")
    await world.pulls.bring("busybox", "")
    assert len(world.asked) == 1, "the registry is left alone for some time"
    with pytest.raises(NotFound, match="No such image: other: no such host"):
        await world.pulls.bring("other", "")
    with pytest.raises(NotFound):
        await world.pulls.bring("other", "")
    assert len(world.asked) == 3


@pytest.mark.parametrize("image", ["UPPER", "", "a b", "x@sha256:1"])
async def test_names_that_are_none(image: str) -> None:
    with pytest.raises(NotFound, match="No such image"):
        await World().pulls.bring(image, "")


async def test_a_registry_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "ANSWER", 0.02)
    world = World("busybox")
    world.answers.clear()
    await world.pulls.bring("busybox", "")
    waiting = asyncio.ensure_future(world.pulls.bring("missing", ""))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "without the image there is nothing else to do"
    await world.pulls.close()
    assert world.cancelled == 2


async def test_a_pull_that_is_not_waited_for_any_more_is_cancelled() -> None:
    world = World()
    world.answers.clear()
    first, second = (asyncio.ensure_future(world.pulls.bring("busybox", "")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0.01)
    assert not world.cancelled
    second.cancel()
    await asyncio.sleep(0.01)
    assert world.cancelled == 1
    world.answers.set()
    await world.pulls.bring("busybox", "")


async def test_credentials_that_are_none() -> None:
    world = World("busybox")
    await world.pulls.bring("busybox", "not base64!")
    assert not world.asked


@pytest.mark.parametrize(
    ("image", "mirrors", "asked"),
    [("busybox", False, 0), ("busybox", True, 1), ("127.0.0.1:5000/x", False, 1), ("[::1]:5000/x", False, 1)],
)
async def test_the_client_is_not_loaded_for_a_host_that_has_no_address(
    image: str, mirrors: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "_HUB", "registry.invalid")
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    world = World(image)
    world.loaded = False
    world.pulls = Pulls(world, world, mirrors=lambda: mirrors)  # type: ignore[arg-type]
    await world.pulls.bring(image, "")
    assert len(world.asked) == asked
    if not asked:
        monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
        world.pulls = Pulls(world, world)  # type: ignore[arg-type]
        await world.pulls.bring(image, "")
        assert len(world.asked) == 1, "a proxy may know it"
