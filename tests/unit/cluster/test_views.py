"""Views of the swarm's networks: what of them is put into the kernel, in which order, and what is
left after a failure, a restart and a leave.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from ipaddress import IPv4Address
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cluster import views as module
from engine.cluster.views import NodeNetworks
from engine.errors import NotFound, ServerError
from engine.networks.dns.names import Names
from engine.swarm_session.messages import EndpointView, NetworkView, PortView, ServiceView, View, Views
from tests.support import PATIENCE
from tests.support.fakes.overlays import FakeOverlays, MemoryRecords, fake_networks

NET = NetworkView(name="net", vni=4097, subnets=(("10.0.0.0/20", "10.0.0.1"),), attachable=True)
INGRESS = NetworkView(name="ingress", vni=4096, subnets=(("10.255.0.0/16", "10.255.0.1"),), ingress=True)
NODES = {"me": "192.168.7.1", "n2": "192.168.7.2", "n3": "192.168.7.3"}
WEB = ServiceView(id="web", name="web", address="10.0.0.2", aliases=("www",))


def ip(text: str) -> IPv4Address:
    return IPv4Address(text)


def task(number: int, node: str = "n2", *, ready: bool = True, service: str = "web", net: str = "10.0.0") -> Any:
    return EndpointView(
        id=f"t{number}", node=node, address=f"{net}.{number}", name=f"web.{number}.t", service=service, ready=ready
    )


def whole(*endpoints: EndpointView, services: tuple[ServiceView, ...] = (WEB,), nodes: Any = NODES) -> Views:
    return Views(
        whole=True, of=(View(network="net", definition=NET, endpoints=endpoints, services=services, nodes=nodes),)
    )


def change(**fields: Any) -> Views:
    return Views(of=(View(network="net", **fields),))


class Site:
    """One daemon after the other, with the same records and kernel."""

    def __init__(self) -> None:
        self.records = MemoryRecords()
        self.overlays: FakeOverlays
        self.networks: NodeNetworks
        self.boot()

    def boot(self, *, reboot: bool = True) -> None:
        part = fake_networks()
        if not reboot:
            part.overlays = self.overlays
        parts: Any = SimpleNamespace(networks=part, records=self.records)
        self.overlays = part.overlays
        self.networks = NodeNetworks(parts)
        self.networks.open("me", "192.168.7.1")

    async def take(self, message: Views) -> None:
        await self.networks.update(message)
        await self.quiet()

    async def quiet(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def until(self, probe: Callable[[], object]) -> None:
        async with asyncio.timeout(10 * PATIENCE):
            while not probe():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN", (0.001, 0.002))
    monkeypatch.setattr(module, "DROP_PAUSE", 0.001)
    monkeypatch.setattr(module, "SAVE_PAUSE", 0.001)


async def test_a_view_becomes_routes_backends_and_names() -> None:
    here = Site()
    await here.take(whole(task(3, "me"), task(4), task(5, "n3", ready=False)))
    record, overlay = here.overlays.adopted["net"]
    assert (record.name, record.driver, record.scope, record.attachable) == ("net", "overlay", "swarm", True)
    assert [(each.subnet, each.gateway) for each in record.ipam.config] == [("10.0.0.0/20", "10.0.0.1")]
    assert (overlay.vni, overlay.port, overlay.local) == (4097, 4789, ip("192.168.7.1"))
    assert here.overlays.peers["net"] == {ip("10.0.0.4"): ip("192.168.7.2"), ip("10.0.0.5"): ip("192.168.7.3")}
    assert here.overlays.services["net"] == {ip("10.0.0.2"): (ip("10.0.0.3"), ip("10.0.0.4"))}
    ready = (ip("10.0.0.3"), ip("10.0.0.4"))
    assert here.overlays.names["net"] == {
        "web": Names(("web", "www"), (ip("10.0.0.2"),)),
        "web/tasks": Names(("tasks.web", "tasks.www"), ready, True),
        "t4": Names(("web.4.t",), (ip("10.0.0.4"),)),
        "t5": Names(("web.5.t",), (ip("10.0.0.5"),)),
    }
    await here.networks.close()


async def test_an_ingress_network_that_was_never_made_here_goes() -> None:
    here = Site()
    await here.take(Views(whole=True, of=(View(network="ingress", definition=INGRESS, nodes=NODES),)))
    assert not here.overlays.adopted and len(here.networks) == 1
    await here.take(Views(of=(View(network="ingress", gone=True),)))
    await here.until(lambda: not len(here.networks))
    await here.until(lambda: not here.records.all)
    await here.networks.close()


async def test_saving_goes_on_after_any_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Site()
    await here.take(whole(task(3)))
    await here.until(lambda: here.networks._saving is None)
    row = NodeNetworks._changed_row

    def failing(*_: object) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(NodeNetworks, "_changed_row", failing)
    await here.networks.update(change(endpoints=(task(4),)))
    await here.until(lambda: here.networks._saving is None)
    monkeypatch.setattr(NodeNetworks, "_changed_row", row)
    await here.networks.update(change(endpoints=(task(5),)))
    await here.until(lambda: {("swarm-endpoint", f"net/t{number}") for number in (3, 4, 5)} <= here.records.all.keys())
    await here.networks.close()


async def test_changes_cost_what_they_change() -> None:
    here = Site()
    await here.take(whole(*(task(number) for number in range(3, 200))))
    here.overlays.calls.clear()
    await here.take(change(endpoints=(task(3, ready=False),)))
    assert here.overlays.calls == ["services", "names"]
    assert ip("10.0.0.3") not in here.overlays.services["net"][ip("10.0.0.2")]
    here.overlays.calls.clear()
    await here.take(change(endpoints=(task(3, ready=False),)))
    assert here.overlays.calls == []
    await here.take(change(endpoints_gone=("t3",)))
    assert here.overlays.calls == ["names", "peers"]
    await here.take(change(services_gone=("web",)))
    assert here.overlays.services["net"] == {} and "web" not in here.overlays.names["net"]
    await here.networks.close()


async def test_a_service_without_a_virtual_address_is_its_ready_tasks() -> None:
    here = Site()
    web = ServiceView(id="web", name="web")
    await here.take(whole(task(3), task(4, ready=False), services=(web,)))
    assert here.overlays.names["net"]["web"] == Names(("web",), (ip("10.0.0.3"),), True)
    assert here.overlays.services["net"] == {}
    await here.networks.close()


async def test_an_address_that_moves_to_another_endpoint_keeps_its_route() -> None:
    here = Site()
    await here.take(whole(task(3)))
    moved = EndpointView(id="other", node="n3", address="10.0.0.3", service="web", ready=True)
    await here.take(change(endpoints=(moved,)))
    await here.take(change(endpoints_gone=("t3",)))
    assert here.overlays.peers["net"] == {ip("10.0.0.3"): ip("192.168.7.3")}
    await here.take(change(endpoints=(task(3),), endpoints_gone=("other",)))
    assert here.overlays.peers["net"] == {ip("10.0.0.3"): ip("192.168.7.2")}
    await here.networks.close()


async def test_a_whole_view_replaces_the_one_before_also_in_parts() -> None:
    here = Site()
    await here.take(whole(task(3), task(4), task(5, "n3")))
    here.overlays.calls.clear()
    parts = (
        View(network="net", definition=NET, nodes={"me": "192.168.7.1", "n2": "192.168.7.2"}),
        View(network="net", services=(WEB,)),
        View(network="net", endpoints=(task(3), task(6))),
    )
    await here.take(Views(whole=True, of=parts))
    assert {*here.overlays.peers["net"]} == {ip("10.0.0.3"), ip("10.0.0.6")}
    assert here.overlays.services["net"] == {ip("10.0.0.2"): (ip("10.0.0.3"), ip("10.0.0.6"))}
    await here.networks.close()


async def test_a_node_that_is_lost_keeps_its_address_and_moves_with_a_new_one() -> None:
    here = Site()
    await here.take(whole(task(3)))
    await here.take(change(nodes={"n2": ""}))
    assert here.overlays.peers["net"] == {ip("10.0.0.3"): ip("192.168.7.2")}
    await here.take(change(nodes={"n2": "192.168.7.9"}))
    assert here.overlays.peers["net"] == {ip("10.0.0.3"): ip("192.168.7.9")}
    await here.networks.close()


async def test_a_node_whose_own_address_changes() -> None:
    """Other nodes send their packets to the new one."""
    here = Site()
    await here.take(whole(task(3)))
    assert here.overlays.adopted["net"][1].local == ip("192.168.7.1")
    here.overlays.trouble = ServerError("no link of this host has the address yet")
    await here.networks.update(change(nodes={"me": "192.168.7.8"}))
    await asyncio.sleep(0.01)
    here.overlays.trouble = None
    await here.until(lambda: here.overlays.adopted["net"][1].local == ip("192.168.7.8"))
    here.overlays.calls.clear()
    await here.take(change(endpoints=(task(4),)))
    assert "adopt" not in here.overlays.calls
    await here.networks.close()


async def test_a_network_goes_with_its_last_container() -> None:
    here = Site()
    await here.take(whole(task(3, "me")))
    sandboxes = here.overlays.found["net"].sandboxes
    sandboxes["c1"] = object()
    await here.take(Views(of=(View(network="net", gone=True),)))
    await asyncio.sleep(0.01)
    assert "net" in here.overlays.adopted
    sandboxes.clear()
    await here.until(lambda: not here.overlays.adopted)
    await here.until(lambda: not here.records.all)
    assert len(here.networks) == 0
    await here.take(whole(task(3, "me")))
    assert "net" in here.overlays.adopted
    await here.networks.close()


async def test_a_network_that_is_needed_again_while_it_goes() -> None:
    here = Site()
    await here.take(whole(task(3)))
    await here.networks.update(Views(of=(View(network="net", gone=True),)))
    while "drop" not in here.overlays.calls:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await here.take(whole(task(3)))
    assert here.overlays.peers["net"] == {ip("10.0.0.3"): ip("192.168.7.2")}
    assert len(here.networks) == 1
    await here.networks.close()


async def test_a_container_that_starts_while_the_network_goes_waits_for_another_one() -> None:
    here = Site()
    await here.take(whole(task(3)))
    before = here.overlays.found["net"]
    await here.networks.update(Views(of=(View(network="net", gone=True),)))
    while "drop" not in here.overlays.calls:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await here.networks.update(whole(task(3)))
    found = await here.networks.need("net")
    assert found is not before and found is here.overlays.found["net"]
    here.networks.keep_while(lambda network: network == "net")
    here.overlays.calls.clear()
    await here.take(Views(of=(View(network="net", gone=True),)))
    await asyncio.sleep(0.01)
    assert here.overlays.calls == []
    here.networks.keep_while(lambda network: False)
    await here.until(lambda: not here.overlays.adopted)
    await here.networks.close()


async def test_what_the_kernel_refuses_is_tried_again() -> None:
    here = Site()
    here.overlays.trouble = OSError(95, "Operation not supported")
    await here.networks.update(whole(task(3)))
    with pytest.raises(ServerError, match=r"network net: .*not supported"):
        await here.networks.need("net")
    here.overlays.trouble = None
    await here.until(lambda: here.overlays.peers.get("net"))
    assert (await here.networks.need("net")).record.name == "net"
    here.overlays.trouble = OSError(105, "No buffer space available")
    await here.networks.update(change(endpoints=(task(4),)))
    await asyncio.sleep(0.01)
    await here.networks.update(change(endpoints=(task(5),)))
    here.overlays.trouble = None
    await here.until(lambda: len(here.overlays.peers["net"]) == 3)
    await here.networks.close()


async def test_what_is_needed_is_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN", (1000.0, 1000.0))
    here = Site()
    here.overlays.trouble = OSError(16, "Device or resource busy")
    await here.take(whole(task(3)))
    assert here.networks.trouble("net") == "device or resource busy"
    assert here.networks.trouble("x") == "the managers have not sent its view"
    here.overlays.trouble = None
    async with asyncio.timeout(10 * PATIENCE):
        assert (await here.networks.need("net")).record.name == "net"
    here.overlays.found["net"].sandboxes["c1"] = object()
    assert here.networks.occupants() == [("c1", "net")]
    await here.networks.close()


async def test_the_next_daemon_has_everything_without_a_manager() -> None:
    here = Site()
    ports = (PortView(protocol="tcp", published=80, target=8080),)
    message = Views(
        whole=True,
        of=(
            *whole(task(3), task(4, "me")).of,
            View(
                network="ing",
                definition=INGRESS,
                endpoints=(task(3, net="10.255.0"),),
                services=(ServiceView(id="web", name="web", ports=ports),),
                nodes=NODES,
            ),
        ),
    )
    await here.take(message)
    await here.take(change(endpoints=(task(5, "n3"),), endpoints_gone=("t3",)))
    await here.networks.close()
    before = here.overlays
    here.boot()
    await here.networks.restore("me")
    assert here.overlays.adopted == before.adopted and here.overlays.peers == before.peers
    assert here.overlays.services == before.services and here.overlays.names == before.names
    assert here.overlays.ports == before.ports == {("tcp", 80): (8080, (ip("10.255.0.3"),))}
    assert here.overlays.nodes == before.nodes == {node: ip(each) for node, each in NODES.items()}
    here.overlays.calls.clear()
    here.networks.open("me", "")
    await here.quiet()
    assert here.overlays.calls == []
    await here.networks.close()


@pytest.mark.parametrize("then", ["open", "gone", "clear"])
async def test_a_network_that_cannot_be_adopted_at_the_start_is_kept(then: str) -> None:
    """Until it can, or the managers or the operator say that it goes."""
    here = Site()
    ports = (PortView(protocol="tcp", published=80, target=8080),)
    published = ServiceView(id="web", name="web", ports=ports)
    ingress = View(network="ingress", definition=INGRESS, services=(published,), nodes=NODES)
    await here.take(Views(whole=True, of=(*whole(task(3)).of, ingress)))
    await here.networks.close()
    here.boot()
    here.overlays.trouble = ServerError("no link of this host has the data path address")
    await here.networks.restore("me")
    assert here.overlays.awaited == {"net", "ingress"} and not here.overlays.adopted
    assert here.overlays.ports is None, "published ports stay, too"
    if then == "open":
        here.overlays.trouble = None
        here.networks.open("me", "192.168.7.1")
        await here.until(lambda: here.overlays.adopted.keys() == {"net", "ingress"})
        await here.until(lambda: here.overlays.ports)
    elif then == "gone":
        here.networks.open("me", "192.168.7.1")
        await here.networks.update(Views(whole=True, of=()))
        await here.until(lambda: not len(here.networks))
    else:
        await here.networks.clear()
    assert not here.overlays.awaited
    await here.networks.close()


async def test_ingress_is_made_when_it_is_used() -> None:
    here = Site()
    ingress = View(network="ing", definition=INGRESS, nodes=NODES)
    await here.take(Views(whole=True, of=(ingress,)))
    assert not here.overlays.adopted and here.overlays.ports is None
    assert [each.name for each in here.networks.records()] == ["ingress"]
    port = PortView(protocol="tcp", published=80, target=8080)
    web = ServiceView(id="web", name="web", ports=(port,))
    await here.take(Views(of=(View(network="ing", services=(web,)),)))
    assert here.overlays.ports == {("tcp", 80): (8080, ())}
    assert here.overlays.adopted["ing"][1].ingress
    await here.take(Views(of=(View(network="ing", endpoints=(task(3, "me", net="10.255.0"),)),)))
    assert here.overlays.ports == {("tcp", 80): (8080, (ip("10.255.0.3"),))}
    assert here.overlays.names["ing"] == {}
    await here.take(Views(of=(View(network="ing", services_gone=("web",)),)))
    assert here.overlays.ports == {} and here.overlays.adopted  # a task here is still on it
    await here.take(Views(of=(View(network="ing", endpoints_gone=("t3",)),)))
    assert not here.overlays.adopted and len(here.networks) == 1
    await here.networks.close()


async def test_no_traffic_to_a_withdrawn_task_of_this_node() -> None:
    here = Site()
    await here.take(whole(task(3, "me"), task(4)))
    here.networks.withdrawn("t3", True)
    await here.quiet()
    assert here.overlays.services["net"] == {ip("10.0.0.2"): (ip("10.0.0.4"),)}
    await here.take(whole(task(3, "me"), task(4)))  # another session
    assert here.overlays.services["net"] == {ip("10.0.0.2"): (ip("10.0.0.4"),)}
    here.networks.withdrawn("t3", False)
    await here.quiet()
    assert here.overlays.services["net"] == {ip("10.0.0.2"): (ip("10.0.0.3"), ip("10.0.0.4"))}
    await here.networks.close()


async def test_a_task_waits_for_its_network() -> None:
    here = Site()
    waiting = asyncio.ensure_future(here.networks.need("net"))
    await here.quiet()
    assert not waiting.done()
    await here.take(whole())
    assert (await waiting).record.id == "net"
    with pytest.raises(NotFound):
        await here.networks.need("another")
    await here.networks.close()


async def test_changes_of_an_unknown_network_end_the_session() -> None:
    here = Site()
    with pytest.raises(ServerError):
        await here.networks.update(change(endpoints=(task(3),)))
    await here.networks.close()


async def test_nothing_is_left_after_a_leave() -> None:
    here = Site()
    await here.take(whole(task(3)))
    await here.networks.clear()
    assert not here.overlays.adopted and not here.records.all and len(here.networks) == 0


async def test_any_sequence_of_changes_has_the_result_of_a_whole_view() -> None:
    for seed in range(30):
        chance = random.Random(seed)
        here = Site()
        endpoints: dict[str, EndpointView] = {}
        services = {"web": WEB, "db": ServiceView(id="db", name="db", address="10.0.0.250")}
        nodes = dict(NODES)
        await here.networks.update(whole(services=tuple(services.values())))
        for _ in range(60):
            match chance.randrange(5):
                case 0 | 1:
                    number = chance.randrange(3, 9)
                    each = EndpointView(
                        id=f"t{chance.randrange(12)}",
                        node=chance.choice([*NODES]),
                        address=f"10.0.0.{number}",
                        service=chance.choice(["web", "db", ""]),
                        name="n",
                        ready=chance.random() < 0.7,
                    )
                    taken = {other.address for other in endpoints.values() if other.id != each.id}
                    if each.address in taken:
                        continue
                    endpoints[each.id] = each
                    message = change(endpoints=(each,))
                case 2:
                    gone = chance.choice([*endpoints, "none"])
                    endpoints.pop(gone, None)
                    message = change(endpoints_gone=(gone,))
                case 3:
                    key = chance.choice(["web", "db"])
                    if services.pop(key, None) is None:
                        services[key] = ServiceView(id=key, name=key, address=f"10.0.0.{250 + chance.randrange(4)}")
                        if len({each.address for each in services.values()}) < len(services):
                            del services[key]
                            continue
                        message = change(services=(services[key],))
                    else:
                        message = change(services_gone=(key,))
                case _:
                    nodes["n2"] = f"192.168.7.{chance.randrange(10, 14)}"
                    message = change(nodes={"n2": nodes["n2"]})
            here.overlays.trouble = OSError(5, "refused") if chance.random() < 0.2 else None
            await here.networks.update(message)
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
        here.overlays.trouble = None
        await here.until(lambda here=here: not here.networks._work)  # type: ignore[misc]
        other = Site()
        await other.networks.update(
            whole(*endpoints.values(), services=tuple(services.values()), nodes=nodes),
        )
        await other.until(lambda other=other: not other.networks._work)  # type: ignore[misc]
        for kind in ("peers", "services", "names"):
            assert getattr(here.overlays, kind) == getattr(other.overlays, kind), (seed, kind)
        await here.networks.close()
        await other.networks.close()
