"""Addresses of containers on the swarm's networks: asked for, kept over restarts, given back."""

from __future__ import annotations

import asyncio
from ipaddress import IPv4Address
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cluster import attaching as module
from engine.cluster.attaching import Attaching
from engine.cluster.views import NodeNetworks
from engine.errors import EngineError, Forbidden, ServerError
from engine.manager.messages import Assigned, Attach, Attached, Detach, Done, NetworkView, View, Views
from engine.networks.attachments import Lent
from engine.wire.containers import EndpointIPAMConfig, EndpointSettings
from tests.fakes.overlays import MemoryRecords, fake_networks

NET = NetworkView(name="net", vni=4097, subnets=(("10.0.0.0/20", "10.0.0.1"),), attachable=True)
VIEWS = Views(of=(View(network="n1", definition=NET, nodes={"me": "192.168.7.1"}),))
ANY = EndpointSettings()


class Manager:
    """The session's manager, and what it has."""

    def __init__(self, networks: NodeNetworks) -> None:
        self.networks = networks
        self.attachments: dict[str, Attach] = {}
        self.asked = 0
        self.refusal: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.sends_view = True

    async def ask(self, message: Any, *, timeout: float) -> Any:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        if isinstance(message, Detach):
            self.attachments.pop(message.attachment, None)
            return Done()
        assert isinstance(message, Attach) and message.network in ("n1", "net")
        await self.gate.wait()
        self.asked += 1
        key = f"a{self.asked}"
        self.attachments[key] = message
        if self.sends_view:
            await self.networks.take(VIEWS)
        return Attached(attachment=key, network="n1", address=message.address or f"10.0.0.{self.asked + 1}")


class Site:
    def __init__(self, records: MemoryRecords | None = None) -> None:
        self.records = records or MemoryRecords()
        self.containers: dict[str, Any] = {}
        parts: Any = SimpleNamespace(
            networks=fake_networks(), records=self.records, containers=SimpleNamespace(find=self.containers.get)
        )
        self.networks = NodeNetworks(parts)
        self.networks.open("me", "192.168.7.1")
        self.attaching = Attaching(parts, self.networks)
        self.attaching.restore()
        self.manager = Manager(self.networks)

    def online(self) -> None:
        connection: Any = self.manager
        self.attaching.begin(connection)

    async def lend(self, container: str = "c1", settings: EndpointSettings = ANY, key: str = "net") -> Lent:
        return await self.attaching.lend(container, "web", key, settings)

    async def close(self) -> None:
        await self.attaching.close()
        await self.networks.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER", 0.02)
    monkeypatch.setattr(module, "BOOT_LINGER", 0.02)
    monkeypatch.setattr(module, "AGAIN", 0.01)
    monkeypatch.setattr(module, "ATTACH_LIMIT", 0.2)
    monkeypatch.setattr(module, "VIEW_LIMIT", 0.05)


async def test_a_container_gets_its_address_and_the_network() -> None:
    here = Site()
    here.online()
    lent = await here.lend(settings=EndpointSettings(aliases=["www"]))
    assert lent.addresses == {4: IPv4Address("10.0.0.2")} and lent.found.record.id == "n1"
    (asked,) = here.manager.attachments.values()
    assert (asked.container, asked.name, asked.aliases) == ("c1", "web", ("www", "c1"))
    assert here.attaching.in_use() == ("a1",)
    await here.close()


async def test_a_restart_keeps_the_address_also_without_managers() -> None:
    here = Site()
    here.online()
    await here.lend()
    here.containers["c1"] = SimpleNamespace(starts=True)
    await here.attaching.give_back("c1", "n1")
    here.attaching.lost()
    await asyncio.sleep(0.05)
    assert (await here.lend()).addresses == {4: IPv4Address("10.0.0.2")}
    here.online()
    await asyncio.sleep(0.05)
    assert [*here.manager.attachments] == ["a1"] and here.manager.asked == 1
    await here.close()


async def test_an_attachment_is_given_back_when_its_container_has_left() -> None:
    here = Site()
    here.online()
    await here.lend()
    await here.attaching.give_back("c1", "n1")
    assert not here.manager.attachments and here.attaching.in_use() == ()
    await here.lend()
    here.manager.refusal = ConnectionError("cut")
    await here.attaching.give_back("c1", "n1")
    assert here.attaching.in_use() == ()
    here.manager.refusal = None
    async with asyncio.timeout(5):
        while here.manager.attachments:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert not [each for each in here.records.all if each[0] == "swarm-attachment"]
    await here.close()


async def test_another_address_is_another_attachment() -> None:
    here = Site()
    here.online()
    await here.lend()
    wanted = EndpointSettings(ipam_config=EndpointIPAMConfig(ipv4_address="10.0.0.77"))
    assert (await here.lend(settings=wanted)).addresses == {4: IPv4Address("10.0.0.77")}
    assert [*here.manager.attachments] == ["a2"]
    assert (await here.lend(settings=wanted)).addresses == {4: IPv4Address("10.0.0.77")}
    assert here.manager.asked == 2
    await here.close()


@pytest.mark.parametrize("refusal", [Forbidden("network net not manually attachable"), ServerError("no free address")])
async def test_a_refusal_leaves_nothing(refusal: EngineError) -> None:
    here = Site()
    here.online()
    here.manager.refusal = refusal
    with pytest.raises(type(refusal), match=refusal.message):
        await here.lend()
    assert here.attaching.in_use() == () and not here.records.all
    await here.close()


async def test_no_manager_answers() -> None:
    here = Site()
    with pytest.raises(ServerError, match="no manager"):
        await here.lend()
    here.online()
    here.manager.gate.clear()
    with pytest.raises(ServerError):
        async with asyncio.timeout(5):
            await here.lend()
    here.manager.gate.set()
    await here.close()


async def test_the_view_does_not_come() -> None:
    here = Site()
    here.online()
    here.manager.sends_view = False
    with pytest.raises(ServerError, match="view"):
        await here.lend()
    await asyncio.sleep(0.05)
    assert not here.manager.attachments
    await here.close()


async def test_a_start_that_is_cancelled_gives_back_what_comes_too_late() -> None:
    here = Site()
    here.online()
    here.manager.gate.clear()
    starting = asyncio.ensure_future(here.lend())
    await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    here.manager.gate.set()
    await asyncio.sleep(0.05)
    assert here.manager.asked == 1 and not here.manager.attachments and not here.attaching.in_use()
    await here.close()


async def test_the_next_daemon_gives_back_what_no_container_uses() -> None:
    here = Site()
    here.online()
    for container in ("runs", "stopped", "gone"):
        await here.lend(container)
    await here.close()
    after = Site(here.records)
    after.manager.attachments = dict(here.manager.attachments)
    await after.networks.take(VIEWS)
    after.containers["runs"] = SimpleNamespace(running=True)
    after.containers["stopped"] = SimpleNamespace(running=False)
    after.attaching.settle()
    assert after.attaching.in_use() == ("a1", "a2")
    after.online()
    await asyncio.sleep(0.06)
    assert [*after.manager.attachments] == ["a1"] and after.attaching.in_use() == ("a1",)
    await after.close()


async def test_a_task_has_the_address_that_came_with_it() -> None:
    here = Site()
    await here.networks.take(VIEWS)
    task = Assigned(id="t1", service="s", name="web.1.t1", spec="s/1", desired=512, addresses={"n1": "10.0.0.9"})
    here.attaching.task_of = {"c1": task}.get
    lent = await here.lend()
    assert lent.addresses == {4: IPv4Address("10.0.0.9")} and not here.manager.asked
    await here.attaching.give_back("c1", "n1")
    await here.close()


async def test_a_leave_gives_all_back(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Site()
    here.online()
    await here.lend()
    left: list[tuple[object, str]] = []

    async def disconnect(container: object, network: str) -> None:
        left.append((container, network))

    monkeypatch.setattr(module.of_containers, "disconnect", disconnect)
    container = here.containers["c1"] = SimpleNamespace(
        record=SimpleNamespace(networks={"net": EndpointSettings(network_id="n1")})
    )
    await here.attaching.clear()
    assert left == [(container, "n1")] and not here.manager.attachments
    assert not [each for each in here.records.all if each[0] == "swarm-attachment"]
    await here.close()
