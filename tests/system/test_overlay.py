"""Overlay networks on the real kernel without a swarm: three hosts in network namespaces on one
bridge, each with the networks of an engine, as the agent of a node calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Coroutine, Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest

from engine.config import Config
from engine.errors import Forbidden, NotFound, ServerError
from engine.networks import sandboxes
from engine.networks.attachments import Lent
from engine.networks.endpoints import Sandbox
from engine.networks.network import NetworkRecord, Overlay
from engine.networks.overlay import driver as overlay
from engine.networks.overlay import overlays
from engine.networks.overlay.driver import UPLINK, VXLAN, _there
from engine.networks.ports import Published
from engine.networks.publishing import Request
from engine.storage.records import Records
from engine.system import namespaces, netfilter
from engine.system.netlink import rtnl, xfrm
from engine.system.netlink.codec import NetlinkError
from engine.system.netlink.rtnl import RouteSocket
from engine.system.netlink.xfrm import KEY, Association, XfrmSocket
from engine.wire.containers import EndpointSettings, PortBinding
from engine.wire.networks import IPAM, IPAMConfig
from tests.support import PATIENCE
from tests.support.engine.harness import until
from tests.support.fakes.networks import Both

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

T = TypeVar("T")

NO_PORTS = Request()
HOSTS = 3
NET = "10.88.0"


class Keeper:
    """Descriptors that outlive an engine, as the monitor holds them."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def hold(self, name: str, descriptor: int) -> None:
        self.let_go(name)
        self.held[name] = os.dup(descriptor)

    def let_go(self, name: str) -> None:
        if name in self.held:
            os.close(self.held.pop(name))


class Container(NamedTuple):
    """A process in the namespace of a sandbox."""

    name: str
    endpoints: dict[str, EndpointSettings]
    process: subprocess.Popen[bytes]
    pidfd: int

    @property
    def pid(self) -> int:
        return self.process.pid

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nsenter", f"--net=/proc/{self.pid}/ns/net", *argv],
            capture_output=True,
            text=True,
            timeout=30 * PATIENCE,
            check=False,
        )

    def reaches(self, address: str) -> bool:
        return self.run("busybox", "ping", "-c", "1", "-W", "1", "-s", "1422", address).returncode == 0

    def routes(self) -> str:
        return self.run("ip", "route").stdout


class Host:
    """A host with the networks of one engine, whose event loop runs in a thread there."""

    def __init__(self, number: int, bridge: str, directory: Path) -> None:
        self.address = f"{NET}.{number}"
        self.keeper = Keeper()
        self.containers: dict[str, Container] = {}
        self.lending: dict[str, IPv4Address] = {}
        self._directory = directory / str(number)
        self._directory.mkdir()
        with namespaces.new_network() as self.namespace:
            pass
        end = f"sw{secrets.token_hex(4)}"
        place = f"/proc/{os.getpid()}/fd/{self.namespace}"
        run("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", place)
        run("ip", "link", "set", end, "master", bridge, "up")
        self.inside("ip", "link", "set", "lo", "up")
        self.inside("ip", "link", "set", "eth0", "up")
        self.inside("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.open()

    def _run(self) -> None:
        with namespaces.inside_network(self.namespace):
            self.loop.run_forever()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def inside(self, *argv: str) -> str:
        return run("nsenter", f"--net=/proc/{os.getpid()}/fd/{self.namespace}", *argv)

    def links(self) -> set[str]:
        with namespaces.inside_network(self.namespace), RouteSocket() as kernel:
            return {link.name for link in kernel.links()}

    # --- the engine -------------------------------------------------------------------------------

    def open(self) -> None:
        async def opened() -> None:
            self._records = Records(self._directory / "state.db")
            self.networks = Both(Config(), self._records)
            await self.networks.open()
            self.networks.networks.keeper = self.keeper
            self.networks.lender = self

        self.do(opened())

    def close(self, *, remove: bool) -> None:
        async def closed() -> None:
            await self.networks.close(remove)
            self._records.close()

        self.do(closed())

    def end(self) -> None:
        for each in [*self.containers]:
            self.leave(each)
        self.close(remove=True)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        os.close(self.namespace)

    @property
    def overlays(self) -> Any:
        return self.networks.overlays

    def adopt(self, record: NetworkRecord, vni: int = 4097, *, keep: bool = False) -> None:
        self.do(self.overlays.adopt(record, Overlay(vni=vni, port=4789, local=IPv4Address(self.address)), keep=keep))

    def peers(self, record: NetworkRecord, put: dict[str, str], *gone: str) -> None:
        by_address = {IPv4Address(address): IPv4Address(node) for address, node in put.items()}
        self.do(self.overlays.set_peers(record.id, by_address, [IPv4Address(each) for each in gone]))

    def start(self, name: str, *addresses: tuple[NetworkRecord, str], request: Request = NO_PORTS) -> Container:
        wanted = {record.name: EndpointSettings(network_id=record.id) for record, _ in addresses}
        self.lending |= {record.name: IPv4Address(address) for record, address in addresses}
        first = addresses[0][0].name
        joined = self.do(self.networks.join(Sandbox(name, name, request=request), wanted, first))
        self.do(self.networks.opened(name))
        process = subprocess.Popen(["nsenter", f"--net={joined.path}", "sleep", "1000"])
        until("it is there", lambda: same(f"/proc/{process.pid}/ns/net", joined.path))
        made = self.containers[name] = Container(name, joined.endpoints, process, os.pidfd_open(process.pid))
        return made

    async def lend(self, container_id: str, name: str, key: str, settings: EndpointSettings) -> Lent:
        """In place of the managers."""
        return Lent(self.networks.by_id[settings.network_id], {4: self.lending[key]})

    def release(self, container_id: str, network_id: str) -> None:
        """It is not needed here."""

    async def give_back(self, container_id: str, network_id: str) -> None:
        """It is not needed here."""

    def leave(self, name: str) -> None:
        container = self.containers.pop(name)
        container.process.kill()
        container.process.wait()
        os.close(container.pidfd)
        self.do(self.networks.leave(name))

    def restore(self, **ports: tuple[Published, ...]) -> None:
        """The containers that ran on without an engine, with their published ports."""
        for each in self.containers.values():
            published = ports.get(each.name, ())
            self.networks.restore(Sandbox(each.name, each.name), each.endpoints, each, published)
        self.do(self.networks.settle())

    def space(self, record: NetworkRecord) -> Any:
        return self.networks.drivers.overlays.space(self.networks.by_id[record.id])


def same(one: str, other: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samefile(one, other)
    return False


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def network(name: str, subnet: str, gateway: str, **fields: Any) -> NetworkRecord:
    ipam = IPAM(config=[IPAMConfig(subnet=subnet, gateway=gateway)])
    fixed = {"driver": "overlay", "scope": "swarm", "created": time.time_ns()}
    return NetworkRecord(id=secrets.token_hex(32), name=name, ipam=ipam, **fixed, **fields)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    bridge = f"sw{secrets.token_hex(4)}"
    run("ip", "link", "add", bridge, "type", "bridge")
    run("ip", "link", "set", bridge, "up")
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    made: list[Host] = []
    try:
        for number in range(1, HOSTS + 1):
            made.append(Host(number, bridge, tmp_path))
        yield made
    finally:
        for each in made:
            each.end()
        run("ip", "link", "delete", bridge)
    assert not any(each.keeper.held for each in made)
    until("descriptors closed", lambda: len(os.listdir("/proc/self/fd")) <= before + 1)


@pytest.fixture
def web() -> NetworkRecord:
    return network("web", "10.0.0.0/20", "10.0.0.1")


def spread(hosts: list[Host], record: NetworkRecord, prefix: str, vni: int) -> list[Container]:
    """A container on each host, with an address that ends in the host's number and 0."""
    nodes = {f"{prefix}.{number}0": host.address for number, host in enumerate(hosts, 1)}
    made = []
    for host, address in zip(hosts, nodes, strict=True):
        host.adopt(record, vni)
        host.peers(record, nodes)
        made.append(host.start(f"{record.name}-{address}", (record, address)))
    return made


def test_traffic(hosts: list[Host], web: NetworkRecord) -> None:
    """Between hosts and beyond them; not out of an internal network, and not between networks."""
    inner = network("inner", "10.0.16.0/20", "10.0.16.1", internal=True)
    containers = spread(hosts, web, "10.0.0", 4097)
    others = spread(hosts, inner, "10.0.16", 4098)
    assert "10.0.0.0/20 via 10.0.0.1" in containers[0].routes()
    assert "mtu 1450" in containers[0].run("ip", "link", "show", "eth0").stdout
    for each in containers:
        for address in ("10.0.0.10", "10.0.0.20", "10.0.0.30", "10.0.0.1", f"{NET}.2"):
            assert each.reaches(address), address
        assert not each.reaches("10.0.0.40"), "no such endpoint"
        assert not each.reaches("10.0.16.10"), "another network"
    assert others[0].reaches("10.0.16.30")
    assert "default" not in others[0].routes()
    assert not others[0].reaches(f"{NET}.2")
    assert f"ov-{inner.id[:12]}" not in hosts[0].links()

    hosts[0].peers(web, {}, "10.0.0.30")
    assert not containers[0].reaches("10.0.0.30")
    hosts[0].peers(web, {"10.0.0.30": hosts[2].address})
    assert containers[0].reaches("10.0.0.30")

    both = hosts[1].start("both", (inner, "10.0.16.21"), (web, "10.0.0.21"))
    hosts[0].peers(web, {"10.0.0.21": hosts[1].address})
    hosts[0].peers(inner, {"10.0.16.21": hosts[1].address})
    assert "default via 10.0.0.1" in both.routes()
    assert containers[0].reaches("10.0.0.21") and others[0].reaches("10.0.16.21") and both.reaches(f"{NET}.3")


def test_several_subnets(hosts: list[Host]) -> None:
    """A container has an address of one of them, and that one's gateway."""
    config = [
        IPAMConfig(subnet="10.0.1.0/24", gateway="10.0.1.1"),
        IPAMConfig(subnet="10.9.0.0/20", gateway="10.9.0.7"),
    ]
    wide = msgspec.structs.replace(network("wide", "", ""), ipam=IPAM(config=config))
    nodes = {"10.0.1.5": hosts[0].address, "10.9.0.5": hosts[1].address}
    for host in hosts[:2]:
        host.adopt(wide)
        host.peers(wide, nodes)
    first, second = (host.start("one", (wide, address)) for host, address in zip(hosts[:2], nodes, strict=True))
    assert "default via 10.0.1.1" in first.routes() and "10.9.0.0/20 via 10.0.1.1" in first.routes()
    assert "default via 10.9.0.7" in second.routes()
    assert first.endpoints["wide"].gateway == "10.0.1.1" and second.endpoints["wide"].gateway == "10.9.0.7"
    assert (first.endpoints["wide"].ip_prefix_len, second.endpoints["wide"].ip_prefix_len) == (24, 20)
    for address in (*nodes, "10.0.1.1", "10.9.0.7", f"{NET}.3"):
        assert first.reaches(address) and second.reaches(address), address
    assert not first.reaches("10.9.0.9")
    shown = hosts[0].networks.inspected(hosts[0].networks.get("wide"))
    assert {*shown.status.ipam.subnets} == {"10.0.1.0/24", "10.9.0.0/20"}


def test_an_endpoint_moves(hosts: list[Host], web: NetworkRecord) -> None:
    containers = spread(hosts, web, "10.0.0", 4097)
    hosts[1].leave("web-10.0.0.20")
    moved = hosts[2].start("moved", (web, "10.0.0.20"))
    for host in hosts:
        host.peers(web, {"10.0.0.20": hosts[2].address})
    assert containers[0].reaches("10.0.0.20") and moved.reaches("10.0.0.10")
    assert not hosts[0].space(web).nodes.get(IPv4Address(hosts[1].address)), "no endpoint is left there"


@pytest.mark.parametrize("failing", ["plug", "resolver", "cancelled"])
def test_the_address_of_a_start_that_failed(
    hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """This node reaches the endpoint on another node that has the address next."""
    inner = network("inner", "10.0.16.0/20", "10.0.16.1")
    host = hosts[0]
    for each in hosts[:2]:
        each.adopt(web, 4097)
        each.adopt(inner, 4098)
    driver, begun, go_on = host.networks.drivers.overlays, threading.Event(), threading.Event()
    new_sandbox = driver.new_sandbox

    def refused(*_: Any) -> Any:
        raise NetlinkError(12, "Cannot allocate memory")

    async def not_served(*_: Any, **__: Any) -> None:
        raise ServerError("resolver: Cannot allocate memory")

    def slow(*arguments: Any) -> Any:
        made = new_sandbox(*arguments)
        begun.set()
        go_on.wait(10 * PATIENCE)
        return made

    async def cancelled() -> None:
        wanted = {web.name: EndpointSettings(network_id=web.id)}
        host.lending[web.name] = IPv4Address("10.0.0.10")
        starting = asyncio.ensure_future(host.networks.join(Sandbox("one", "one"), wanted, web.name))
        await asyncio.to_thread(begun.wait, 10)
        starting.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await starting

    if failing == "cancelled":
        monkeypatch.setattr(driver, "new_sandbox", slow)
        host.do(cancelled())
    else:
        where, name, failure = (
            (driver, "plug", refused) if failing == "plug" else (host.networks, "_serve_names", not_served)
        )
        monkeypatch.setattr(where, name, failure)
        with pytest.raises(ServerError, match="Cannot allocate memory"):
            host.start("one", (web, "10.0.0.10"), (inner, "10.0.16.10"))
    monkeypatch.undo()
    assert not host.space(web).local and not driver._endpoints
    client, server = host.start("client", (web, "10.0.0.11")), hosts[1].start("server", (web, "10.0.0.10"))
    hosts[1].peers(web, {"10.0.0.11": host.address})
    host.peers(web, {"10.0.0.10": hosts[1].address})
    assert client.reaches("10.0.0.10") and server.reaches("10.0.0.11")


def test_an_address_that_two_nodes_have_for_a_while(
    hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The managers have given it to another node, which was reached again. The container here ends
    later than the view comes.
    """
    monkeypatch.setattr(sandboxes, "LINGER", 0.2)
    for each in hosts[:2]:
        each.adopt(web)
    client, old = hosts[0].start("client", (web, "10.0.0.11")), hosts[0].start("old", (web, "10.0.0.10"))
    hosts[1].start("new", (web, "10.0.0.10"))
    hosts[1].peers(web, {"10.0.0.11": hosts[0].address})
    hosts[0].peers(web, {"10.0.0.10": hosts[1].address})
    assert client.reaches("10.0.0.10")
    hosts[0].leave(old.name)
    with RouteSocketIn(hosts[0].space(web).descriptor) as kernel:
        end = sandboxes.host_end(old.endpoints["web"].endpoint_id)
        until("its link is gone", lambda: kernel.link(end) is None)
    until("the other node is reached", lambda: client.reaches("10.0.0.10"), 5)
    assert not hosts[0].do(hosts[0].overlays.mend())


def test_removal(hosts: list[Host], web: NetworkRecord) -> None:
    """Nothing of a network is left, and its number is free at once."""
    host = hosts[0]
    for turn in range(3):
        host.adopt(web)
        host.adopt(web)
        host.start(f"one{turn}", (web, "10.0.0.10"))
        with pytest.raises(Forbidden, match="has active endpoints"):
            host.do(host.overlays.drop(web.id))
        host.leave(f"one{turn}")
        assert host.networks.get("web").record == web
        with pytest.raises(Forbidden, match="the swarm's"):
            host.do(host.networks.remove("web"))
        host.do(host.overlays.drop(web.id))
        host.do(host.overlays.drop(web.id))
        with pytest.raises(NotFound):
            host.networks.get("web")
        with pytest.raises(NotFound):
            host.peers(web, {})
        assert not host.keeper.held and host.links() <= {"lo", "eth0", "docker0", "engined0", *bridges(host)}
    elsewhere = Overlay(vni=4097, port=4789, local=IPv4Address("10.99.99.99"))
    with pytest.raises(ServerError, match="no link of this host has the data path address"):
        host.do(host.overlays.adopt(web, elsewhere))
    assert not host.keeper.held


def bridges(host: Host) -> set[str]:
    """The links of the default bridge."""
    return {name for name in host.links() if name.startswith("veth")} | {host.networks.get("bridge").bridge}


def test_another_holder_of_the_number(hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks cannot have one number. The second one leaves nothing behind."""
    monkeypatch.setattr(overlay, "PATIENCE", 0.2)
    hosts[0].adopt(web)
    other = network("other", "10.0.16.0/20", "10.0.16.1")
    hosts[0].keeper.let_go(next(iter(hosts[0].keeper.held)))  # as an engine that shares this host
    with pytest.raises(ServerError, match="VXLAN 4097 at UDP port 4789"):
        hosts[0].adopt(other)
    assert f"ov-{other.id[:12]}" not in hosts[0].links()


def test_repair(hosts: list[Host], web: NetworkRecord) -> None:
    """Links, routes and neighbours that another program removes are put back at once."""
    containers = spread(hosts, web, "10.0.0", 4097)
    host, space = hosts[0], hosts[0].space(web)

    def disturb(*argv: str) -> None:
        with namespaces.inside_network(space.descriptor):
            run(*argv)
        until(f"{argv} is undone", lambda: containers[0].reaches("10.0.0.20") and containers[0].reaches(f"{NET}.2"))

    disturb("ip", "link", "delete", VXLAN)
    disturb("ip", "link", "set", VXLAN, "down")
    disturb("ip", "link", "delete", UPLINK)
    disturb("ip", "link", "set", UPLINK, "down")
    disturb("ip", "address", "flush", "dev", UPLINK)
    disturb("ip", "route", "delete", "10.0.0.20")
    disturb("ip", "route", "delete", "10.0.0.10")
    disturb("ip", "neighbour", "delete", hosts[1].address, "dev", VXLAN)
    host.inside("ip", "link", "delete", f"ov-{web.id[:12]}")
    until("the link to the host is back", lambda: containers[0].reaches(f"{NET}.2"))
    with RouteSocketIn(space.descriptor) as kernel:
        kernel.apply(rtnl.delete_link(sandboxes.host_end(containers[0].endpoints["web"].endpoint_id)))
    assert host.do(host.overlays.mend())
    assert not host.do(host.overlays.mend())
    assert containers[0].reaches("10.0.0.20") and containers[0].reaches(f"{NET}.2")


@contextlib.contextmanager
def RouteSocketIn(descriptor: int) -> Iterator[RouteSocket]:
    with namespaces.inside_network(descriptor), RouteSocket() as kernel:
        yield kernel


@pytest.mark.parametrize("moment", ["host_end", "routes", "neighbours"])
def test_a_container_that_ends_during_a_repair(
    hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The repair completes everything else."""
    host = hosts[0]
    host.adopt(web)
    host.peers(web, {"10.0.0.20": hosts[1].address})
    containers = [host.start(f"one{number}", (web, f"10.0.0.{number}")) for number in range(10, 13)]
    space, driver = host.space(web), host.networks.drivers.overlays
    ending = [containers[1].endpoints["web"].endpoint_id]
    with RouteSocketIn(space.descriptor) as kernel:
        lost = rtnl.delete_route(IPv4Network("10.0.0.20"), space.vxlan)
        of_one = rtnl.delete_route(IPv4Network("10.0.0.11"), _there(kernel, sandboxes.host_end(ending[0])).ifindex)
        kernel.apply(lost, of_one)

    def end() -> None:
        """The kernel has removed its namespace, and the event loop releases the endpoint."""
        endpoint_id = ending.pop()
        with RouteSocketIn(space.descriptor) as kernel:
            kernel.apply(rtnl.delete_link(sandboxes.host_end(endpoint_id)))
        driver._left(endpoint_id)

    reads = sandboxes if moment == "host_end" else space.inside
    read = getattr(reads, moment)

    def reading(*arguments: Any, **options: Any) -> Any:
        result = read(*arguments, **options)
        if ending and threading.current_thread() is threading.main_thread():
            end()
        return result

    monkeypatch.setattr(reads, moment, reading)
    with space.lock:
        assert driver._complete_routes(host.networks.by_id[web.id], space)
    assert not ending and len(space.local) == 2
    with RouteSocketIn(space.descriptor) as kernel:
        assert any(str(each.to) == "10.0.0.20/32" for each in kernel.routes())


def test_an_endpoint_that_is_released_during_a_repair(
    hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is not taken for one of this node afterwards."""
    host = hosts[0]
    host.adopt(web)
    host.start("one", (web, "10.0.0.10"))
    driver = host.networks.drivers.overlays
    joined = driver._joined

    def late(*arguments: Any) -> None:
        asyncio.run_coroutine_threadsafe(host.networks.leave("one"), host.loop).result(10 * PATIENCE)
        joined(*arguments)

    monkeypatch.setattr(driver, "_joined", late)
    host.do(asyncio.to_thread(driver.mend, host.networks.by_id[web.id]))
    assert not host.space(web).local and not driver._endpoints
    monkeypatch.undo()
    host.leave("one")


def test_a_disconnect_during_a_repair(hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container is not attached again. After a failure it is on the network as before."""
    inner = network("inner", "10.0.16.0/20", "10.0.16.1")
    host = hosts[0]
    host.adopt(web, 4097)
    host.adopt(inner, 4098)
    container = host.start("one", (inner, "10.0.16.10"), (web, "10.0.0.10"))
    sandbox, found = host.networks._sandboxes["one"], host.networks.by_id[inner.id]
    driver = host.networks.drivers.overlays
    unplug = driver.unplug

    def then_repaired(*arguments: Any) -> None:
        unplug(*arguments)
        driver.mend(found)

    with monkeypatch.context() as patched:
        patched.setattr(driver, "unplug", refused)
        with pytest.raises(ServerError, match="Cannot allocate memory"):
            host.do(host.networks.disconnect("one", "inner"))
    assert [*sandbox.endpoints] == [inner.id, web.id] and container.reaches("10.0.16.1")
    monkeypatch.setattr(driver, "unplug", then_repaired)
    host.do(host.networks.disconnect("one", "inner"))
    assert [*sandbox.endpoints] == [web.id] and not host.space(inner).local
    assert "eth0" not in container.run("ip", "link").stdout and container.reaches("10.0.0.1")


def test_repairs_go_on_after_a_failure(
    hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(overlays, "LOOK", 0.05)
    host = hosts[0]
    host.adopt(web)
    failures: list[Exception] = [KeyError("bug"), RuntimeError("another")]
    mend = host.networks.drivers.overlays.mend

    def failing(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return mend(*arguments)

    monkeypatch.setattr(host.networks.drivers.overlays, "mend", failing)
    until("both have failed", lambda: not failures)
    with RouteSocketIn(host.space(web).descriptor) as kernel:
        kernel.apply(rtnl.delete_link(UPLINK))
    until("it is repaired", lambda: f"ov-{web.id[:12]}" in host.links())
    assert "cannot restore it: another" in caplog.text


def test_a_restart_of_the_engine(hosts: list[Host], web: NetworkRecord) -> None:
    """Containers keep their connections meanwhile, and what has changed since is applied."""
    containers = spread(hosts, web, "10.0.0", 4097)
    host = hosts[0]
    host.close(remove=False)
    assert containers[0].reaches("10.0.0.20") and containers[1].reaches("10.0.0.10")
    host.open()
    assert containers[0].reaches(f"{NET}.3"), "the host masquerades new connections before the adoption"
    host.adopt(web)
    assert containers[0].reaches("10.0.0.20")
    host.peers(web, {"10.0.0.30": hosts[2].address})
    host.restore()
    assert containers[0].reaches("10.0.0.30") and containers[0].reaches(f"{NET}.3")
    assert not containers[0].reaches("10.0.0.20"), "it went meanwhile"
    host.leave("web-10.0.0.10")
    host.do(host.overlays.drop(web.id))


def test_a_network_that_is_not_needed_after_a_restart(hosts: list[Host], web: NetworkRecord) -> None:
    host = hosts[0]
    host.adopt(web)
    host.close(remove=False)
    host.open()
    host.restore()
    assert not host.keeper.held
    until("its link is gone", lambda: f"ov-{web.id[:12]}" not in host.links())
    other = network("other", "10.0.16.0/20", "10.0.16.1")
    host.adopt(other)


def test_engine_and_keeper_have_died(hosts: list[Host], web: NetworkRecord) -> None:
    """The kernel has removed the network. The containers run on, and are attached again."""
    containers = spread(hosts, web, "10.0.0", 4097)
    host = hosts[0]
    host.close(remove=False)
    for name in [*host.keeper.held]:
        host.keeper.let_go(name)
    until("the network has gone", lambda: f"ov-{web.id[:12]}" not in host.links())
    assert not containers[0].reaches("10.0.0.20")
    host.open()
    host.adopt(web)
    host.peers(web, {"10.0.0.20": hosts[1].address})
    host.restore()
    assert containers[0].reaches("10.0.0.20") and containers[0].reaches(f"{NET}.2")
    assert containers[1].reaches("10.0.0.10")


def test_the_data_address_comes_after_the_engine(hosts: list[Host], web: NetworkRecord) -> None:
    """A network of an earlier engine is adopted without it."""
    containers = spread(hosts, web, "10.0.0", 4097)
    host = hosts[0]
    host.close(remove=False)
    host.inside("ip", "address", "delete", f"{host.address}/24", "dev", "eth0")
    host.open()
    host.adopt(web)
    host.peers(web, {"10.0.0.20": hosts[1].address})
    host.restore()
    host.inside("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
    assert containers[0].reaches("10.0.0.20") and containers[0].reaches(f"{NET}.2")
    assert not host.do(host.overlays.mend())


PORTS = Request((), {"80/tcp": [PortBinding(host_ip="", host_port="8080")]})


@pytest.mark.parametrize("kept", [True, False])
def test_a_network_that_is_adopted_late(
    hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The first attempt of a new engine fails. Containers that ran on keep the network meanwhile,
    or are attached again if the kernel has removed it.
    """
    containers = spread(hosts, web, "10.0.0", 4097)
    host = hosts[0]
    published = host.start("published", (web, "10.0.0.12"), request=PORTS)
    server = subprocess.Popen(
        ["nsenter", f"--net=/proc/{published.pid}/ns/net", "busybox", "nc", "-ll", "-p", "80", "-e", "echo", "here"]
    )
    asked = ["busybox", "nc", "-w", "2", host.address, "8080"]
    until("it listens", lambda: "here" in published.run("busybox", "nc", "-w", "1", "127.0.0.1", "80").stdout)
    assert "here" in hosts[1].inside(*asked)
    ports = host.networks.ports_of("published")
    host.close(remove=False)
    if not kept:
        for name in [*host.keeper.held]:
            host.keeper.let_go(name)
        until("the network has gone", lambda: f"ov-{web.id[:12]}" not in host.links())
    host.open()
    driver = host.networks.drivers.overlays
    with monkeypatch.context() as patched:
        patched.setattr(driver, "_complete_vxlan", refused)
        with pytest.raises(ServerError, match="Cannot allocate memory"):
            host.adopt(web, keep=True)
    host.restore(published=ports)
    assert host.networks.get("web").sandboxes.keys() == {"web-10.0.0.10", "published"}
    assert containers[0].reaches("10.0.0.20") == containers[0].reaches(f"{NET}.2") == kept
    if kept:
        assert "here" in hosts[1].inside(*asked)
    with pytest.raises(Forbidden, match="active endpoints"):
        host.do(host.overlays.drop(web.id))
    host.adopt(web)
    host.peers(web, {"10.0.0.30": hosts[2].address})
    assert containers[0].reaches("10.0.0.30") and containers[0].reaches(f"{NET}.2")
    assert "here" in hosts[1].inside(*asked)
    host.do(host.overlays.mend())
    assert not host.do(host.overlays.mend())
    assert not containers[0].reaches("10.0.0.20"), "it went meanwhile"
    for each in [*host.containers]:
        host.leave(each)
    server.kill()
    server.wait()
    host.do(host.overlays.drop(web.id))
    assert not host.keeper.held


def test_a_network_that_is_not_adopted_after_all(
    hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hosts[0]
    host.adopt(web)
    host.start("one", (web, "10.0.0.10"))
    host.close(remove=False)
    host.open()
    monkeypatch.setattr(host.networks.drivers.overlays, "_complete_vxlan", refused)
    with pytest.raises(ServerError, match="Cannot allocate memory"):
        host.adopt(web, keep=True)
    host.restore()
    assert host.keeper.held
    host.leave("one")
    host.do(host.overlays.drop(web.id))
    host.do(host.overlays.drop(web.id))
    assert not host.keeper.held
    until("its link is gone", lambda: f"ov-{web.id[:12]}" not in host.links())
    with pytest.raises(NotFound):
        host.networks.get("web")
    with namespaces.inside_network(host.namespace):
        assert f"ov-{web.id[:12]}" not in netfilter.run("list ruleset")


def refused(*_: Any, **__: Any) -> Any:
    raise NetlinkError(12, "Cannot allocate memory")


def test_rules_in_a_container_that_are_refused(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """A start names network and container. The next engine starts, and attaches the container as
    soon as it can.
    """
    host, entrance = hosts[0], network("ingress", "10.255.0.0/16", "10.255.0.1", ingress=True)
    meant = Overlay(vni=4096, port=4789, local=IPv4Address(host.address), ingress=True)

    def no_rules(*_: Any, **__: Any) -> None:
        raise netfilter.NetfilterError("Could not process rule: Cannot allocate memory")

    host.do(host.overlays.adopt(entrance, meant))
    with monkeypatch.context() as patched:
        patched.setattr(overlay.ingress, "answer_by", no_rules)
        with pytest.raises(ServerError, match="network ingress, container one: Could not process rule"):
            host.start("one", (entrance, "10.255.0.5"))
    container = host.start("one", (entrance, "10.255.0.5"))
    host.close(remove=False)
    host.keeper.let_go(next(iter(host.keeper.held)))
    host.open()
    host.do(host.overlays.adopt(entrance, meant))
    with monkeypatch.context() as patched:
        patched.setattr(overlay.ingress, "answer_by", no_rules)
        host.restore()
    until("the namespace before has gone", lambda: not container.reaches("10.255.0.1"))
    assert host.do(host.overlays.mend()) and container.reaches("10.255.0.1")


def test_datagrams_that_a_container_cannot_answer_yet(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next change of ports tries again, until it has succeeded."""
    host, entrance = hosts[0], network("ingress", "10.255.0.0/16", "10.255.0.1", ingress=True)
    meant = Overlay(vni=4096, port=4789, local=IPv4Address(host.address), ingress=True)
    host.do(host.overlays.adopt(entrance, meant))
    host.start("one", (entrance, "10.255.0.5"))
    asked: list[IPv4Address] = []

    def answering(namespace: int, address: IPv4Address) -> None:
        os.close(namespace)
        asked.append(address)
        if len(asked) == 1:
            raise netfilter.NetfilterError("Could not process rule: Cannot allocate memory")

    monkeypatch.setattr(overlays, "answer_datagrams", answering)
    for _ in range(3):
        assert host.do(host.overlays.set_ports({("udp", 53): (53, [IPv4Address("10.255.0.5")])})) == {}
    assert len(asked) == 2
    host.do(host.overlays.set_ports({}))


def test_the_options_of_a_network(hosts: list[Host]) -> None:
    small = network("small", "10.0.0.0/24", "10.0.0.9", options={"com.docker.network.driver.mtu": "1300"})
    hosts[0].adopt(small)
    container = hosts[0].start("one", (small, "10.0.0.1"))
    assert "mtu 1300" in container.run("ip", "link", "show", "eth0").stdout
    assert container.reaches(f"{NET}.1") and container.reaches("10.0.0.9")


def test_many_endpoints(hosts: list[Host], web: NetworkRecord) -> None:
    """Thousands of peers come and go, and the space forgets them."""
    container = spread(hosts, web, "10.0.0", 4097)[0]
    many = {f"10.0.{1 + number // 250}.{number % 250 + 1}": f"{NET}.{100 + number % 100}" for number in range(3000)}
    hosts[0].peers(web, many)
    assert len(hosts[0].space(web).nodes) == 102
    assert container.reaches("10.0.0.20")
    hosts[0].peers(web, {}, *many)
    with RouteSocketIn(hosts[0].space(web).descriptor) as kernel:
        assert len([each for each in kernel.routes() if each.ifindex == hosts[0].space(web).vxlan]) == 2
        assert len(kernel.neighbours(forwarding=True)) >= 2
    assert container.reaches("10.0.0.20")


def test_many_nodes(hosts: list[Host], web: NetworkRecord) -> None:
    """The comparison with the kernel takes time in proportion to the nodes, not to their square."""
    host = hosts[0]
    host.adopt(web)
    found, space, driver = host.networks.by_id[web.id], host.space(web), host.networks.drivers.overlays

    def compared(count: int) -> float:
        driver.set_nodes(found, [IPv4Address(f"{NET}.0") + number for number in range(count)])
        begun = time.thread_time()
        assert not driver._complete_routes(found, space)
        return time.thread_time() - begun

    few = min(compared(500) for _ in range(3)) or 0.01  # a kernel may count time by ticks
    assert min(compared(4000) for _ in range(2)) < 20 * few


@pytest.mark.parametrize("failing", ["encryption", "removals", "additions"])
@pytest.mark.parametrize("then", ["set_peers", "mend"])
def test_a_change_that_fails(
    hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch, failing: str, then: str
) -> None:
    """What it has left out, additions and removals, is done by the next one, or by a repair."""
    container = spread(hosts, web, "10.0.0", 4097)[0]
    host, space, driver = hosts[0], hosts[0].space(web), hosts[0].networks.drivers.overlays

    with monkeypatch.context() as patched:
        if failing == "encryption":
            patched.setattr(driver, "_encrypt", refused)
        elif failing == "removals":
            patched.setattr(overlay, "_apply_removals", refused)
        else:
            patched.setattr(space.inside, "apply", refused)
        for _ in range(2):
            with pytest.raises(ServerError, match="cannot allocate memory"):
                host.peers(web, {"10.0.0.21": hosts[1].address, "10.0.0.31": hosts[2].address}, "10.0.0.20")
            host.do(host.overlays.mend())
    if then == "mend":
        assert host.do(host.overlays.mend())
    else:
        host.peers(web, {"10.0.0.21": hosts[1].address}, "10.0.0.20")
    assert not host.do(host.overlays.mend())
    with RouteSocketIn(space.descriptor) as kernel:
        led = {str(each.to.network_address) for each in kernel.routes() if each.ifindex == space.vxlan}
    assert led == {"10.0.0.21", "10.0.0.30", "10.0.0.31"}
    assert container.reaches("10.0.0.30")


def test_nodes_that_were_refused(hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    host = hosts[0]
    host.adopt(web)
    found, space, driver = host.networks.by_id[web.id], host.space(web), host.networks.drivers.overlays
    node = IPv4Address(hosts[1].address)

    def refused(*_: Any, **__: Any) -> Any:
        raise ServerError("encryption of networks: no memory")

    with monkeypatch.context() as patched:
        patched.setattr(driver, "_encrypt", refused)
        with pytest.raises(ServerError):
            driver.set_nodes(found, [node])
    driver.set_nodes(found, [node])
    with RouteSocketIn(space.descriptor) as kernel:
        assert any(each.address == node and each.ifindex == space.vxlan for each in kernel.neighbours())


def test_policies_of_encryption() -> None:
    """The kernel takes them, as iproute2 shows."""
    one = Association(IPv4Address("10.0.0.1"), IPv4Address("10.0.0.2"), 0x1234, 7, bytes(range(KEY)))
    with namespaces.new_network() as namespace, XfrmSocket() as kernel:
        kernel.apply(xfrm.set_policy(one, port=4789, mark=0xD0C4E3), xfrm.set_policy(one, port=4789, mark=0xD0C4E3))
        shown = run("ip", "xfrm", "policy")
        for words in ("src 10.0.0.1/32 dst 10.0.0.2/32 proto udp dport 4789", "mark 0xd0c4e3/0xffffffff", "reqid 7"):
            assert words in shown
        kernel.apply(xfrm.delete_policy(one, port=4789, mark=0xD0C4E3))
        kernel.apply(xfrm.delete_policy(one, port=4789, mark=0xD0C4E3), xfrm.delete_association(one), missing=True)
        assert not run("ip", "xfrm", "policy")
    os.close(namespace)


def test_an_encrypted_network(hosts: list[Host], web: NetworkRecord) -> None:
    """Without ESP in the kernel nothing is led to other nodes, instead of in the clear."""
    host = hosts[0]
    meant = Overlay(vni=4097, port=4789, local=IPv4Address(host.address), encrypted=True, secret=bytes(32))
    host.do(host.overlays.adopt(web, meant))
    assert "mtu 1413" in host.start("one", (web, "10.0.0.10")).run("ip", "link", "show", "eth0").stdout
    assert encrypted(host) == {"0x1001"}
    encrypts = "esp" in overlay.features()
    refused = pytest.raises(ServerError, match="encryption of networks: ESP")
    with contextlib.nullcontext() if encrypts else refused:
        host.peers(web, {"10.0.0.20": hosts[1].address})
    with RouteSocketIn(host.space(web).descriptor) as kernel:
        assert any(each.ifindex == host.space(web).vxlan for each in kernel.routes()) == encrypts
    host.leave("one")
    host.do(host.overlays.drop(web.id))
    assert not encrypted(host)


def encrypted(host: Host) -> set[str]:
    """Numbers of the networks whose packets are dropped in the clear."""
    table = f"engined-{host.networks.get('bridge').bridge}-esp"
    with namespaces.inside_network(host.namespace):
        if table not in netfilter.run("list tables"):
            return set()
        listed = netfilter.run(f"list set inet {table} numbers")
    return {*re.findall(r"0x[0-9a-f]+", listed)}


def test_encrypted_networks_and_the_next_engine(
    hosts: list[Host], web: NetworkRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network is in the clear before it is adopted, or before its VXLAN has gone."""
    host = hosts[0]
    names = "late", "left", "gone"
    others = [network(name, f"10.0.{at}.0/20", f"10.0.{at}.1") for name, at in zip(names, (16, 32, 48), strict=True)]

    def adopt(record: NetworkRecord, number: int, *, keep: bool = False) -> None:
        local = IPv4Address(host.address)
        meant = Overlay(vni=number, port=4789, local=local, encrypted=True, secret=bytes(32))
        host.do(host.overlays.adopt(record, meant, keep=keep))

    for number, record in enumerate((web, *others), 1):
        adopt(record, number)
    host.close(remove=False)
    host.open()
    adopt(web, 1)
    assert encrypted(host) == {"0x1", "0x2", "0x3", "0x4"}
    with monkeypatch.context() as patched:
        patched.setattr(host.networks.drivers.overlays, "_complete_vxlan", refused)
        for number, record in enumerate(others[:2], 2):
            with pytest.raises(ServerError, match="Cannot allocate memory"):
                adopt(record, number, keep=True)
    host.restore()
    assert encrypted(host) == {"0x1", "0x2", "0x3"}, "the cluster does not know the last one"
    host.do(host.overlays.drop(others[1].id))
    adopt(others[0], 2)
    assert encrypted(host) == {"0x1", "0x2"}

    encryption, space, order = host.networks.drivers.overlays._encryption, host.space(web), list[bool]()
    remove = encryption.remove

    def removed(number: int) -> None:
        with RouteSocketIn(namespace) as kernel:
            order.append(kernel.link(VXLAN) is None)
        remove(number)

    namespace = os.dup(space.descriptor)
    monkeypatch.setattr(encryption, "remove", removed)
    host.do(host.overlays.drop(web.id))
    os.close(namespace)
    assert order == [True] and encrypted(host) == {"0x2"}


def test_features_leave_nothing_behind() -> None:
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    assert "overlay" in overlay.features()
    assert len(os.listdir("/proc/self/fd")) == before
