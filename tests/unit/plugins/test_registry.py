"""Clients by name: kept over a change of kinds, and hurried when the engine stops."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engine.errors import NotFound, ServerError
from engine.plugins.discovery import Discovery
from engine.plugins.registry import Plugins
from engine.wire.plugins import PluginAnswer
from tests.support import PATIENCE
from tests.support.plugins.protocol import VolumePlugin


def with_plugin(work: Callable[[Plugins, VolumePlugin], Awaitable[None]]) -> None:
    """Run `work` with the plugin `p`, whose calls may take a minute."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:  # short: sun_path has 108 bytes
        fake = VolumePlugin(Path(made) / "volumes")
        fake.listen(Path(made) / "p.sock")

        async def main() -> None:
            plugins = Plugins(Discovery([Path(made)], []), 60)
            await work(plugins, fake)
            await plugins.close()

        try:
            asyncio.run(main())
        finally:
            fake.close()


def test_a_plugin_that_becomes_another_kind_keeps_its_client() -> None:
    async def work(plugins: Plugins, fake: VolumePlugin) -> None:
        found = await plugins.get("p", "VolumeDriver")
        assert await plugins.names("LogDriver") == []
        with pytest.raises(NotFound, match="does not implement"):
            await plugins.get("p", "LogDriver")
        fake.implements = ["LogDriver"]
        assert await plugins.get("p", "LogDriver") is found
        assert await plugins.names("LogDriver") == ["p"] and await plugins.names("VolumeDriver") == []

    with_plugin(work)


def test_calls_are_short_when_the_engine_stops() -> None:
    async def work(plugins: Plugins, fake: VolumePlugin) -> None:
        found = await plugins.get("p", "VolumeDriver")
        plugins.hurry(0.2)
        plugins.hurry(30)
        fake.delays["VolumeDriver.Get"] = fake.delays["Plugin.Activate"] = 60
        with pytest.raises(ServerError, match=r"did not answer within 0\.2 seconds"):
            await found.call("VolumeDriver.Get", PluginAnswer)
        fake.delays.clear()
        for _ in range(2):  # a client that was there, and one that is made again
            with pytest.raises(ServerError, match="has not answered since the engine began to stop"):
                await (await plugins.get("p", "VolumeDriver")).call("VolumeDriver.Get", PluginAnswer)
            await plugins.forget("p")

    with_plugin(work)


def test_calls_under_way_end_soon_when_the_engine_stops() -> None:
    async def work(plugins: Plugins, fake: VolumePlugin) -> None:
        found = await plugins.get("p", "VolumeDriver")
        fake.delays["VolumeDriver.Get"] = 60
        call = asyncio.ensure_future(found.call("VolumeDriver.Get", PluginAnswer))
        await asyncio.sleep(0)
        plugins.hurry(0.2)
        async with asyncio.timeout(2 * PATIENCE):
            with pytest.raises(ServerError, match="did not answer before the engine stopped"):
                await call

    with_plugin(work)


def test_an_activation_is_short_when_the_engine_stops() -> None:
    async def work(plugins: Plugins, fake: VolumePlugin) -> None:
        plugins.hurry(0.2)
        fake.delays["Plugin.Activate"] = 60
        with pytest.raises(ServerError, match=r"did not answer within 0\.2 seconds"):
            await plugins.get("p", "VolumeDriver")
        with pytest.raises(ServerError, match="has not answered since the engine began to stop"):
            await plugins.get("p", "VolumeDriver")

    with_plugin(work)
