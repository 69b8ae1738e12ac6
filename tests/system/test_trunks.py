"""Networks with more endpoints than the ports that they take of their bridge: macvlans over trunks,
on the real kernel, in namespaces of the test. But for one body, few ports and few addresses for
each trunk stand for the many of a real network.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from engine.config import Config
from engine.networks import endpoints
from engine.networks.bridge import trunks
from engine.networks.publishing import Request
from engine.storage.records import Records
from engine.system.netlink import rtnl
from engine.system.netlink.rtnl import RouteSocket
from engine.wire.containers import EndpointSettings, PortBinding
from engine.wire.networks import NetworkCreate
from tests.system.test_bridge import Body, Engine, Process, Sandbox, _sleeping_in, inside, isolated, network, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

NETFILTER = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


def reached(sandbox: Sandbox, address: str) -> bool:
    return inside(sandbox, "busybox", "ping", "-c", "1", "-W", "2", address).returncode == 0


def kind(sandbox: Sandbox, name: str = "eth0") -> str:
    """Of its link: `veth` or `macvlan`."""
    shown = inside(sandbox, "ip", "-d", "-o", "link", "show", name).stdout
    return next(each for each in ("veth", "macvlan", "") if each in shown)


def ports() -> set[str]:
    """Names of the trunks' ends in bridges."""
    with RouteSocket() as links:
        return {link.name for link in links.links() if link.name.startswith("tr") and link.master}


async def several(networks: Engine, count: int, on: str = "bridge") -> list[Sandbox]:
    return [await networks.endpoint(f"{on}{number}", on=on) for number in range(count)]


def on_host(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["busybox", *argv], capture_output=True, text=True, timeout=60, check=False)


def host_reaches(address: str) -> bool:
    return on_host("ping", "-c", "1", "-W", "2", address).returncode == 0


def show_frames_to_netfilter(value: str) -> None:
    NETFILTER.write_text(value)


def serve(sandbox: Sandbox, text: str) -> subprocess.Popen[bytes]:
    """A program that listens at port 80 and answers this text."""
    listen = ["busybox", "nc", "-ll", "-p", "80", "-e", "echo", text]
    return subprocess.Popen(["nsenter", f"--net={sandbox.path}", *listen])


async def _all_reach_all(directory: Path) -> None:
    """Endpoints with a port, on one trunk and on two reach each other, their gateway and the host
    in both directions, by IPv4 and IPv6.
    """
    async with network(directory) as networks:
        body = {
            "Name": "six",
            "EnableIPv6": True,
            "IPAM": {"Config": [{"Subnet": "10.1.0.0/24"}, {"Subnet": "fd01::/64"}]},
        }
        await networks.create(msgspec.convert(body, NetworkCreate))
        for name in ("bridge", "six"):
            there = await several(networks, 7, name)
            assert [kind(each) for each in there] == ["veth"] * 2 + ["macvlan"] * 5
            for one, other in itertools.permutations((*there[1:4], there[6]), 2):
                assert reached(one, other.endpoint.ip_address)
            for each in there:
                assert reached(each, each.endpoint.gateway) and host_reaches(each.endpoint.ip_address)
            if name == "six":
                assert reached(there[2], there[6].endpoint.global_ipv6_address)
                assert reached(there[6], there[0].endpoint.global_ipv6_address)
                assert reached(there[5], there[5].endpoint.ipv6_gateway)
        assert len(ports()) == 4, "one for each three addresses, without those of the first two"


async def _the_host_is_not_on_a_trunk(directory: Path) -> None:
    """No frame reaches the lower device by its MAC, so the rules of the bridge hold for all frames.
    The host answers once for its addresses.
    """
    async with network(directory) as networks:
        there = await several(networks, 4)
        with RouteSocket() as links:
            every = {link.name: link for link in links.links()}
        (lower,) = (link for link in every.values() if link.name.startswith("tl"))
        assert lower.address == every[networks.get("bridge").bridge].address
        settings = (("ipv4", "forwarding"), ("ipv4", "rp_filter"), ("ipv4", "arp_ignore"), ("ipv6", "disable_ipv6"))
        assert [setting(f"{version}/conf/{lower.name}/{name}") for version, name in settings] == ["0", "1", "8", "1"]
        for each in (there[0], there[3]):
            asked = inside(each, "busybox", "arping", "-b", "-c", "1", "-w", "2", each.endpoint.gateway)
            assert "Received 1 response" in asked.stdout, asked.stdout


def setting(path: str) -> str:
    return Path("/proc/sys/net", path).read_text().strip()


async def _own_ports(directory: Path) -> None:
    """A container that may change its links has a port of the bridge, however many there are."""
    async with network(directory) as networks:
        there = await several(networks, 4)
        joined = await networks.join(
            endpoints.Sandbox("admin", "admin", changes_links=True), {"bridge": EndpointSettings()}, "bridge"
        )
        assert joined.path and kind(there[3]) == "macvlan"
        assert kind(Sandbox(joined.path, joined.endpoints["bridge"])) == "veth"


async def _connected(directory: Path) -> None:
    """A running container joins a crowded network and leaves it."""
    async with network(directory) as networks:
        await networks.create(NetworkCreate(name="more"))
        there = await several(networks, 4, "more")
        one = await networks.endpoint("one")
        async with _sleeping_in(one) as container:
            process = Process(container.pid, os.pidfd_open(container.pid))
            settings = await networks.connect("one", "more", EndpointSettings(), process)
            assert kind(one, "eth1") == "macvlan" and reached(one, there[0].endpoint.ip_address)
            assert reached(there[3], settings.ip_address)
            await networks.disconnect("one", "more")
            assert kind(one, "eth1") == "" and kind(one) == "veth"
            os.close(process.pidfd)


async def _apart(directory: Path) -> None:
    """Without icc no endpoint reaches another one; all reach the gateway, and the host them."""
    for name, seen in (("plain", "0"), ("seen", "1")):
        show_frames_to_netfilter(seen)
        async with network(directory / name) as networks:
            body = {"Name": "apart", "Options": {"com.docker.network.bridge.enable_icc": "false"}}
            await networks.create(msgspec.convert(body, NetworkCreate))
            there = await several(networks, 6, "apart")
            assert [kind(each) for each in there] == ["veth"] * 2 + ["macvlan"] * 4
            for one, other in itertools.permutations((*there[1:4], there[5]), 2):
                assert not reached(one, other.endpoint.ip_address), seen
            for each in there:
                assert reached(each, each.endpoint.gateway) and host_reaches(each.endpoint.ip_address)


async def _published(directory: Path) -> None:
    """Ports of endpoints with a port of the bridge and over trunks: the host, each endpoint and the
    same one reach them by an address of the host, with and without icc, and where netfilter sees
    the frames of bridges.
    """
    for icc, seen in itertools.product((True, False), "01"):
        show_frames_to_netfilter(seen)
        async with network(directory / f"{icc}{seen}", icc=icc) as networks:
            await several(networks, 1)
            there, servers = [], []
            for number in range(5):
                name, port = f"web{number}", str(8000 + number)
                request = Request((), {"80/tcp": [PortBinding(host_ip="", host_port=port)]})
                sandbox = endpoints.Sandbox(name, name, request=request)
                joined = await networks.join(sandbox, {"bridge": EndpointSettings()}, "bridge")
                assert joined.path and await networks.opened(name)
                there.append(Sandbox(joined.path, joined.endpoints["bridge"]))
                servers.append(serve(there[-1], name))
            assert [kind(each) for each in there] == ["veth"] + ["macvlan"] * 4
            gateway = there[0].endpoint.gateway
            for number in range(5):
                ask = "nc", "-w", "5", gateway, str(8000 + number)
                await until(lambda ask=ask: on_host(*ask).stdout, "the server listens")
                answers = [inside(each, "busybox", *ask).stdout.strip() for each in there]
                assert answers == [f"web{number}"] * 5, (icc, seen)
            for server in servers:
                server.kill()
                server.wait()


async def _deleted(directory: Path) -> None:
    """An operator deletes trunks and the bridge: they come back with all endpoints, their addresses
    and routes, whether the kernel's notice or a new container comes first.
    """
    async with network(directory) as networks:
        there = await several(networks, 7)
        wanted = [(one, other.endpoint.ip_address) for one, other in itertools.pairwise((*there[1:], there[0]))]
        bridge = networks.get("bridge").bridge
        deletions = ({min(ports())}, ports(), {bridge}, {bridge, *ports()})
        for number, names in enumerate(deletions):
            with RouteSocket() as links:
                links.apply(*(rtnl.delete_link(name) for name in sorted(names)))
            if number % 2:
                there.append(await networks.endpoint(f"later{number}"))
            for one, address in wanted:
                await until(lambda one=one, address=address: reached(one, address), f"{address} is reached again")
                await until(lambda one=one: reached(one, one.endpoint.gateway), "so is the gateway")
            assert "default" in inside(there[6], "ip", "route").stdout


async def _restart(directory: Path) -> None:
    """Endpoints over trunks outlast the daemon; a trunk that is deleted meanwhile comes back, one
    that a killed daemon has not finished goes, and those of a network that is gone.
    """
    records = Records(directory / "state.db")
    before = Engine(Config(), records)
    await before.open()
    there = await several(before, 7)
    assert len(ports()) == 2
    async with _sleeping_in(there[3]) as first, _sleeping_in(there[6]) as second:
        await before.close(remove=False)
        network_id = before.get("bridge").record.id
        with RouteSocket() as links:
            links.apply(rtnl.delete_link(f"tr{network_id[:10]}02"))
            mine = os.open("/proc/self/ns/net", os.O_RDONLY)
            unfinished = f"{network_id[:10]}05"
            links.apply(rtnl.create_veth(f"tr{unfinished}", f"tl{unfinished}", mine))
            links.apply(rtnl.create_veth("trffffffffff00", "tlffffffffff00", mine))
            links.apply(rtnl.change_link("trffffffffff00", alias=before.drivers.alias))
            os.close(mine)
        after = Engine(Config(), records)
        await after.open()
        pidfds = []
        for container, sandbox, process in (("bridge3", there[3], first), ("bridge6", there[6], second)):
            held = Process(process.pid, os.pidfd_open(process.pid))
            after.restore(endpoints.Sandbox(container, container), {"bridge": sandbox.endpoint}, held)
            pidfds.append(held.pidfd)
        await after.settle()
        assert ports() == {f"tr{network_id[:10]}{number:02x}" for number in (1, 2)}
        third, sixth = (
            Sandbox(f"/proc/{process.pid}/ns/net", sandbox.endpoint)
            for process, sandbox in ((first, there[3]), (second, there[6]))
        )
        assert reached(third, sixth.endpoint.ip_address) and reached(sixth, sixth.endpoint.gateway)
        for process in (first, second):
            process.kill()
            process.wait()
        for container in ("bridge3", "bridge6"):
            await after.leave(container)
        await after.close(remove=True)
        for pidfd in pidfds:
            os.close(pidfd)
    records.close()
    assert not ports()


async def _at_once(directory: Path) -> None:
    """Many endpoints at once, which make trunks at the same time; half of them leave again."""
    async with network(directory) as networks:
        there = await asyncio.gather(*(networks.endpoint(f"c{number}") for number in range(40)))
        assert "macvlan" in {kind(each) for each in there}
        await asyncio.gather(*(networks.leave(f"c{number}") for number in range(0, 40, 2)))
        for one, other in itertools.pairwise(there[1::2]):
            assert reached(one, other.endpoint.ip_address)


async def _without(directory: Path) -> None:
    """An operator who wants no trunks has none."""
    async with network(directory, bridge_trunks=False) as networks:
        assert {kind(each) for each in await several(networks, 5)} == {"veth"}
        assert not ports()


async def _beyond_the_bridge(directory: Path) -> None:
    """More endpoints than a bridge has ports. Those that end give theirs back."""
    async with network(directory) as networks:
        slots = asyncio.Semaphore(8)

        async def join(number: int) -> Sandbox:
            async with slots:
                return await networks.endpoint(f"c{number}")

        there = await asyncio.gather(*(join(number) for number in range(1100)))
        first, *_, last = there
        assert (kind(first), kind(last)) == ("veth", "macvlan")
        assert reached(first, last.endpoint.ip_address) and reached(last, there[900].endpoint.ip_address)
        assert reached(last, last.endpoint.gateway)
        assert len(ports()) == 2
        await asyncio.gather(*(networks.leave(f"c{number}") for number in range(1100)))
        assert kind(await networks.endpoint("after")) == "veth"


def test_the_real_numbers(tmp_path: Path) -> None:
    isolated(_beyond_the_bridge, tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        _all_reach_all,
        _the_host_is_not_on_a_trunk,
        _own_ports,
        _connected,
        _apart,
        _published,
        _deleted,
        _restart,
        _at_once,
        _without,
    ],
    ids=lambda body: body.__name__.strip("_"),
)
def test_trunks(body: Body, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunks, "PORTS", 2)
    monkeypatch.setattr(trunks, "LEAVES", 3)
    for name in ("plain", "seen", "True0", "True1", "False0", "False1"):
        (tmp_path / name).mkdir()
    isolated(body, tmp_path)
