"""Addresses of containers on the swarm's networks: asked for, kept over restarts, given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ipaddress import IPv4Address
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cluster import attaching as module
from engine.cluster.attaching import Attaching
from engine.cluster.views import NodeNetworks
from engine.errors import EngineError, Forbidden, NotFound, ServerError
from engine.networks.attachments import Lent
from engine.swarm_session.messages import Assigned, Attach, Attached, Detach, Done, NetworkView, View, Views
from engine.wire.containers import EndpointIPAMConfig, EndpointSettings
from tests.support import PATIENCE
from tests.support.fakes.overlays import MemoryRecords, fake_networks

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
        self.refuses: dict[str, Exception] = {}
        """By the container of an attachment, or by the attachment that is removed."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.sends_view = True
        self.removes = asyncio.Event()
        self.removes.set()
        self.removed = asyncio.Event()

    async def ask(self, message: Any, *, timeout: float) -> Any:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        if refusal := self.refuses.get(message.attachment if isinstance(message, Detach) else message.container):
            raise refusal
        if isinstance(message, Detach):
            await self.removes.wait()
            self.attachments.pop(message.attachment, None)
            self.removed.set()
            return Done()
        assert isinstance(message, Attach) and message.network in ("n1", "net")
        await self.gate.wait()
        self.asked += 1
        key = f"a{self.asked}"
        for other, old in [*self.attachments.items()]:
            if old.container == message.container:
                del self.attachments[other]
        self.attachments[key] = message
        if self.sends_view:
            await self.networks.update(VIEWS)
        return Attached(attachment=key, network="n1", address=message.address or f"10.0.0.{self.asked + 1}")

    def attached(self) -> set[str]:
        """The containers."""
        return {each.container for each in self.attachments.values()}


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

    def online(self, *lost: str) -> None:
        connection: Any = self.manager
        self.attaching.begin(connection, lost)

    def run(self, container: str = "c1", *, running: bool = True, on: tuple[str, ...] = ("n1",), **more: Any) -> Any:
        """A container, which is on the networks `on`."""
        kept = {each: EndpointSettings(network_id=each) for each in on}
        record = SimpleNamespace(name="web", networks=kept)
        fields = {"running": running, "starts": False, "record": record} | more
        made = self.containers[container] = SimpleNamespace(id=container, lock=asyncio.Lock(), **fields)
        return made

    async def until(self, probe: Callable[[], object]) -> None:
        async with asyncio.timeout(5 * PATIENCE):
            while not probe():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

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
    assert lent.addresses == {4: IPv4Address("10.0.0.2")} and lent.network.record.id == "n1"
    (asked,) = here.manager.attachments.values()
    assert (asked.container, asked.name, asked.aliases) == ("c1", "web", ("www", "c1"))
    assert here.attaching.in_use() == ("a1",)
    await here.close()


async def test_a_restart_keeps_the_address_also_without_managers() -> None:
    here = Site()
    here.online()
    await here.lend()
    here.run(starts=True)
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
    async with asyncio.timeout(5 * PATIENCE):
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
        async with asyncio.timeout(5 * PATIENCE):
            await here.lend()
    here.manager.gate.set()
    await here.close()


async def test_the_view_does_not_come() -> None:
    here = Site()
    here.online()
    here.manager.sends_view = False
    with pytest.raises(ServerError, match="view"):
        await here.lend()
    await here.until(lambda: not here.manager.attachments)
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
    for container in ("runs", "stopped", "gone", "left"):
        await here.lend(container)
    await here.close()
    after = Site(here.records)
    after.manager.attachments = dict(here.manager.attachments)
    await after.networks.update(VIEWS)
    after.run("runs")
    after.run("stopped", running=False)
    after.run("left", on=())  # and the daemon was killed before its attachment was given back
    after.attaching.settle()
    assert not after.attaching._holds("n2") and after.attaching._holds("n1")
    assert len(after.attaching.in_use()) == 4
    after.online()
    await after.until(lambda: [*after.manager.attachments] == ["a1"])
    assert after.attaching.in_use() == ("a1",)
    await after.close()


async def test_a_task_has_the_address_that_came_with_it() -> None:
    here = Site()
    await here.networks.update(VIEWS)
    task = Assigned(id="t1", service="s", name="web.1.t1", spec="s/1", desired=512, addresses={"n1": "10.0.0.9"})
    here.attaching.open({"c1": task}.get)
    lent = await here.lend()
    assert lent.addresses == {4: IPv4Address("10.0.0.9")} and not here.manager.asked
    await here.attaching.give_back("c1", "n1")
    await here.close()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, str]]:
    """The containers that were disconnected, and from what."""
    found: list[tuple[object, str]] = []

    async def disconnect(container: object, network: str) -> None:
        found.append((container, network))

    monkeypatch.setattr(module.of_containers, "disconnect", disconnect)
    return found


Left = list[tuple[object, str]]


async def test_what_the_managers_have_lost_is_asked_for_again(left: Left) -> None:
    """A running container keeps its address; one that does not run gets another attachment with its
    next start.
    """
    here = Site()
    here.online()
    for each in ("c1", "c2"):
        await here.lend(each)
    here.run("c1")
    here.run("c2", running=False)
    here.attaching.lost()
    here.manager.attachments.clear()
    here.online("a1", "a2")
    await here.until(lambda: here.manager.attachments.keys() == {"a3"})
    assert here.manager.attachments["a3"].address == "10.0.0.2"
    await here.until(lambda: here.attaching.in_use() == ("a3",))
    assert (await here.lend("c1")).addresses == {4: IPv4Address("10.0.0.2")}
    assert (await here.lend("c2")).addresses == {4: IPv4Address("10.0.0.5")}
    assert not left
    await here.close()


async def test_a_lost_one_is_not_used_by_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its container does not run for a moment, as it restarts."""
    monkeypatch.setattr(module, "LINGER", 1000.0)
    here = Site()
    here.online()
    await here.lend()
    here.run(running=False, starts=True)
    await here.attaching.give_back("c1", "n1")
    here.attaching.lost()
    here.manager.attachments.clear()
    here.online("a1")
    await here.until(lambda: not here.attaching._renewals)
    assert (await here.lend()).addresses == {4: IPv4Address("10.0.0.3")}
    await here.until(lambda: here.attaching.in_use() == ("a2",) and [*here.attaching._all] == ["a2"])
    assert [key for kind, key in here.records.all if kind == "swarm-attachment"] == ["a2"]
    await here.close()


async def test_a_container_whose_address_another_one_has_leaves(left: Left) -> None:
    here = Site()
    here.online()
    await here.lend()
    container = here.run()
    here.attaching.lost()
    here.manager.attachments.clear()
    here.manager.refusal = Forbidden("address already in use: 10.0.0.2 on network net")
    here.online("a1")
    await here.until(lambda: left == [(container, "n1")])
    here.manager.refusal = None
    await here.until(lambda: not here.attaching.in_use() and not here.records.all.get(("swarm-attachment", "a1")))
    await here.close()


async def test_a_lost_one_is_asked_for_until_a_manager_answers(left: Left) -> None:
    here = Site()
    here.online()
    await here.lend()
    here.run()
    here.attaching.lost()
    here.manager.attachments.clear()
    here.manager.refusal = ConnectionError("cut")
    here.online("a1")
    await asyncio.sleep(0.03)
    here.attaching.lost()
    here.manager.refusal = None
    here.online("a1")
    await here.until(lambda: here.manager.attachments)
    assert not left
    await here.close()


async def test_one_that_fails_for_ever_holds_up_no_other(left: Left) -> None:
    here = Site()
    here.online()
    for container in ("c1", "c2", "c3"):
        await here.lend(container)
        here.run(container)
    here.attaching.lost()
    here.manager.attachments.clear()
    here.manager.refuses = {"c1": ServerError("no free address")}
    async with here.containers["c2"].lock:  # as while it is stopped
        here.online("a1", "a2", "a3")
        await here.until(lambda: here.manager.attached() == {"c3"})
    await here.until(lambda: here.manager.attached() == {"c2", "c3"})
    here.manager.refuses = {}
    await here.until(lambda: here.manager.attached() == {"c1", "c2", "c3"})
    assert not left
    await here.close()


async def test_one_that_cannot_be_given_back_holds_up_no_other() -> None:
    here = Site()
    here.online()
    for container in ("c1", "c2"):
        await here.lend(container)
    here.attaching.lost()
    here.manager.refuses = {"a1": ServerError("it fails")}
    for container in ("c1", "c2"):
        here.attaching.release(container, "n1")
    await asyncio.sleep(0.05)
    here.online()
    await here.until(lambda: here.manager.attached() == {"c1"})
    here.manager.refuses = {}
    await here.until(lambda: not here.manager.attachments)
    await here.close()


async def test_what_is_being_given_back_is_not_used_again() -> None:
    """The answer to its removal does not come; the managers remove it later."""
    here = Site()
    here.online()
    await here.lend()
    here.run(running=False, on=())
    removed, here.manager.removes = asyncio.Event(), asyncio.Event()
    here.manager.removed = removed
    leaving = asyncio.ensure_future(here.attaching.give_back("c1", "n1"))
    await asyncio.sleep(0.01)
    assert (await here.lend()).addresses == {4: IPv4Address("10.0.0.3")}
    assert here.attaching.in_use() == ("a2",)
    here.manager.removes.set()
    await leaving
    await removed.wait()
    assert here.manager.attachments.keys() == {"a2"} and here.attaching.in_use() == ("a2",)
    await here.close()


async def test_what_no_manager_was_asked_to_remove_is_used_again() -> None:
    here = Site()
    here.online()
    await here.lend()
    here.run(running=False)
    here.attaching.lost()
    await here.attaching.give_back("c1", "n1")
    assert here.attaching.in_use() == ("a1",)  # a session that begins now keeps it
    assert (await here.lend()).addresses == {4: IPv4Address("10.0.0.2")}
    here.online()
    await asyncio.sleep(0.02)
    assert here.manager.attachments.keys() == {"a1"} and here.manager.asked == 1
    await here.close()


async def test_other_nodes_get_to_know_another_name() -> None:
    here = Site()
    here.online()
    await here.lend()
    container = here.run()
    container.record.name = "shop"
    here.attaching.renamed("c1")
    await here.until(lambda: [each.name for each in here.manager.attachments.values()] == ["shop"])
    (asked,) = here.manager.attachments.values()
    assert (asked.address, asked.aliases) == ("10.0.0.2", ("c1",))
    container.record.name = "web"  # the next start has the earlier one
    await here.lend()
    await here.until(lambda: [each.name for each in here.manager.attachments.values()] == ["web"])
    here.attaching.lost()
    container.record.name = "inn"
    here.attaching.renamed("c1")
    assert (await here.lend()).addresses == {4: IPv4Address("10.0.0.2")}  # without a manager
    here.online()
    await here.until(lambda: [each.name for each in here.manager.attachments.values()] == ["inn"])
    await here.close()


async def test_no_container_joins_a_network_outside_of_a_swarm(left: Left) -> None:
    here = Site()
    here.online()
    await here.lend()
    await here.attaching.clear()
    with pytest.raises(NotFound, match="network net not found"):
        async with asyncio.timeout(0.1):
            await here.lend()
    here.attaching.open(lambda container: None)
    here.online()
    await here.lend()
    await here.close()


async def test_a_leave_gives_all_back(left: Left) -> None:
    """Also a container leaves that is just starting: its record does not have the network yet."""
    here = Site()
    here.online()
    for each in ("c1", "starts"):
        await here.lend(each)
    container, starting = here.run(), here.run("starts", on=())
    found = (await here.lend()).network
    found.sandboxes["starts"] = starting
    await starting.lock.acquire()
    leaving = asyncio.ensure_future(here.attaching.clear())
    await here.until(lambda: left)
    starting.record.networks["net"] = EndpointSettings(network_id="n1")
    starting.lock.release()
    await leaving
    assert left == [(container, "n1"), (starting, "n1")] and not here.manager.attachments
    assert not [each for each in here.records.all if each[0] == "swarm-attachment"]
    await here.close()
