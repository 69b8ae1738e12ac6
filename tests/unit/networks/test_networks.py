"""`Networks` on a host without a kernel: every step may fail or be cancelled, and nothing is
left behind.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv4Interface, ip_address
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.config import Config
from engine.errors import Conflict, EngineError, Forbidden, InvalidParameter, NotFound, ServerError
from engine.networks import endpoints, host, macvlan, sandboxes
from engine.networks.bridge import driver as bridge
from engine.networks.bridge.driver import BridgeDriver
from engine.networks.endpoints import Sandbox
from engine.networks.network import Options
from engine.networks.ports import Published
from engine.networks.publishing import Request
from engine.storage.records import Records
from engine.system.netlink.codec import NetlinkError
from engine.wire.containers import EndpointIPAMConfig, EndpointSettings, PortBinding
from engine.wire.networks import NetworkCreate
from tests.support.fakes.networks import Both
from tests.unit.networks.fakes import Host, Kernel

ANY = EndpointSettings()


class Process(NamedTuple):
    pid: int
    pidfd: int


PROCESS = Process(1, -1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    made.install(monkeypatch)
    return made


@asynccontextmanager
async def opened(directory: Path, **config: Any) -> AsyncIterator[Both]:
    records = Records(directory / "state.db")
    networks = Both(Config(**config), records)
    await networks.open()
    await networks.settle()
    try:
        yield networks
    finally:
        await networks.close(remove=True)
        records.close()


def body(name: str, subnet: str = "", **fields: Any) -> NetworkCreate:
    ipam = {"IPAM": {"Config": [{"Subnet": subnet}]}} if subnet else {}
    return msgspec.convert({"Name": name} | ipam | fields, NetworkCreate)


def static(address: str) -> EndpointSettings:
    return EndpointSettings(ipam_config=EndpointIPAMConfig(ipv4_address=address))


def used(networks: Both) -> dict[str, int]:
    """Number of addresses in use, by network."""
    return {each.record.name: len(each.pools[4]) for each in networks if each.pools and len(each.pools[4])}


def elements(world: Host) -> dict[str, int]:
    (sets,) = world.tables.values()
    return {name: len(each) for name, each in sets.items() if each}


def snapshot(networks: Both, world: Host) -> Any:
    """Everything that an endpoint or a network could leave behind."""
    return (
        used(networks),
        {each.record.name: sorted(each.sandboxes) for each in networks},
        sorted(name for name in world.links if name.startswith("veth")),
        {name: each.alias for name, each in world.links.items() if not name.startswith("veth")},
        {key: dict(value) for key, value in world.namespaces.items()},
        elements(world),
        dict(world.held),
        len(networks._names),
        sorted(networks._publishing._targets),
        dict(world.neighbours),
    )


def test_a_network_and_a_sandbox(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            before = snapshot(networks, world)
            made = await networks.create(body("web", "10.1.0.0/24"))
            found = networks.get("web")
            assert world.links[found.bridge].alias == f"engined {networks.get('bridge').record.id[:12]}"
            assert networks.shown(found).ipam.config[0].gateway == "10.1.0.1"
            ports = Request((), {"80/tcp": [PortBinding(host_ip="", host_port="8080")]})
            sandbox = Sandbox("c" * 64, "one", request=ports)
            joined = await networks.join(sandbox, {"web": ANY}, "web", {"web": "02:42:00:00:00:07"})
            given = joined.endpoints["web"]
            assert (given.ip_address, given.gateway, given.mac_address) == ("10.1.0.2", "10.1.0.1", "02:42:00:00:00:07")
            assert (given.aliases, given.dns_names) == (None, ["one", "c" * 12])
            assert joined.path is not None and joined.path.startswith(f"/proc/{os.getpid()}/fd/")
            assert await networks.opened("c" * 64) == (Published("tcp", "0.0.0.0", 8080, 80),)
            assert elements(world)["any4"] == 1
            assert networks.inspected(found).containers["c" * 64].ipv4_address == "10.1.0.2/24"
            with pytest.raises(Forbidden, match=r'network web has active endpoints \(name:"one" id:"c{12}"\)$'):
                await networks.remove("web")
            await networks.leave("c" * 64)
            await networks.leave("c" * 64)
            await networks.remove(made.id[:20])
            await asyncio.gather(*(task for _, task in networks._going.values()))
            assert snapshot(networks, world) == before
            with pytest.raises(NotFound, match="network web not found"):
                networks.get("web")
        assert not world.links and not world.namespaces

    asyncio.run(run())


def test_host_and_none_have_no_links(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            assert (await networks.join(Sandbox("a", "a"), {"host": ANY}, "host")).path is None
            assert not world.namespaces
            for name in ("b", "c"):
                assert (await networks.join(Sandbox(name, name), {"none": ANY}, "none")).path
                assert [*world.namespaces.values()] == [{}]
                if name == "b":
                    networks.runs(name)
                    assert not world.namespaces, "the process holds it"
                await networks.leave(name)
                assert not world.namespaces
            await networks.leave("a")

    asyncio.run(run())


def test_addresses_from_outside(world: Host, tmp_path: Path) -> None:
    """A cluster's allocator chose the address. Inside the subnet no other endpoint gets it; outside
    it is used unchanged.
    """

    async def run() -> None:
        async with opened(tmp_path) as networks:
            # a subnet of the engine's choice: users may not ask for addresses there
            await networks.create(body("web"))
            web = networks.get("web")
            pool = web.pools[4]
            inside, outside = pool.subnet[2], ip_address("198.51.100.7")
            given = [endpoints.allocate(web, ANY, assigned={4: address}) for address in (inside, outside)]
            assert [each.ip_address for each in given] == [str(inside), str(outside)]
            assert len(pool) == 1
            assert str(pool.take()) == str(pool.subnet[3])
            with pytest.raises(Forbidden, match="Address already in use"):
                endpoints.allocate(web, ANY, assigned={4: inside})
            for settings in given:
                endpoints.release(web, settings)
            assert used(networks) == {"web": 1}, "the one that was taken by hand"

    asyncio.run(run())


# --- every step fails once ------------------------------------------------------------------------


def _errors(what: str) -> BaseException:
    if what in ("rules", "elements", "resolver", "hold") or what.startswith("create "):
        return ServerError(f"refused: {what}")
    return NetlinkError(12, f"{what}: Cannot allocate memory")


def _refuse(what: str, refused: str) -> None:
    if what == refused:
        raise _errors(what)


def _fail_at(world: Host, number: int, what: str) -> None:
    if len(world.steps) == number + 1:
        raise _errors(what)


def _each_step_fails(
    world: Host,
    directory: Path,
    prepare: Callable[[Both], Awaitable[Any]],
    act: Callable[[Both], Awaitable[Any]],
) -> list[str]:
    """Run `act` repeatedly, with its n-th step failing; the state must be unchanged afterwards.
    Returns the number of steps."""

    async def run() -> list[str]:
        async with opened(directory) as networks:
            await prepare(networks)
            before, number = snapshot(networks, world), 0
            while True:
                world.steps.clear()
                world.fail = functools.partial(_fail_at, world, number)
                try:
                    await act(networks)
                except (EngineError, OSError):
                    world.fail = lambda _: None
                    assert snapshot(networks, world) == before, f"step {number}: {world.steps[number]}"
                    number += 1
                    continue
                finally:
                    world.fail = lambda _: None
                if len(world.steps) <= number:
                    return [*world.steps]
                # The failed step may be optional, such as one of an undo: the action succeeded
                # anyway.
                pytest.fail(f"step {number}, {world.steps[number]}, failed without an error")

    return asyncio.run(run())


def test_a_create_that_fails_leaves_nothing(world: Host, tmp_path: Path) -> None:
    async def nothing(_: Both) -> None:
        pass

    steps = _each_step_fails(world, tmp_path, nothing, lambda networks: networks.create(body("web", "10.1.0.0/24")))
    assert "elements" in steps and any(each.startswith("bridge br-") for each in steps)


def test_a_create_of_a_parent_that_fails_leaves_nothing(world: Host, tmp_path: Path) -> None:
    async def nothing(_: Both) -> None:
        pass

    wanted = body("lan", "10.1.0.0/24", Driver="macvlan")
    steps = _each_step_fails(world, tmp_path, nothing, lambda networks: networks.create(wanted))
    assert steps[0] == "create dummy" and len(steps) == 3


PORTS = Request((), {"80/tcp": [PortBinding(host_ip="", host_port="8080")]})


def test_a_start_that_fails_leaves_nothing(world: Host, tmp_path: Path) -> None:
    """On a bridge with icc off, on a second one and on a macvlan network, with a published port."""

    async def prepare(networks: Both) -> None:
        await networks.create(body("a", "10.1.0.0/24", Options={"com.docker.network.bridge.enable_icc": "false"}))
        await networks.create(body("b", "10.2.0.0/24"))
        await networks.create(body("lan", "10.3.0.0/24", Driver="macvlan"))

    async def act(networks: Both) -> None:
        try:
            await networks.join(Sandbox("c", "c", request=PORTS), {"b": ANY, "lan": ANY, "a": static("10.1.0.77")}, "a")
            await networks.opened("c")
        except BaseException:
            await networks.leave("c")  # as a start does
            raise

    steps = _each_step_fails(world, tmp_path, prepare, act)
    assert {"configure", "finish", "route", "resolver", "elements", "hold"} <= {*steps}


def test_a_connect_that_fails_leaves_nothing(world: Host, tmp_path: Path) -> None:
    async def prepare(networks: Both) -> None:
        await networks.create(body("a", "10.1.0.0/24"))
        await networks.create(body("b", "10.2.0.0/24", Options={"com.docker.network.bridge.enable_icc": "false"}))
        await networks.join(Sandbox("c", "c"), {"b": ANY}, "b")

    async def act(networks: Both) -> None:
        await networks.connect("c", "a", ANY, PROCESS)

    assert "resolver" in _each_step_fails(world, tmp_path, prepare, act)


def test_a_refusal_names_the_network_that_the_kernel_refused(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("a", "10.1.0.0/24"))
            await networks.create(body("b", "10.2.0.0/24"))
            second = f"plug {networks.get('b').bridge}"
            world.fail = lambda what: _refuse(what, second)
            with pytest.raises(ServerError, match=r"^network b, container c: plug br-.*Cannot allocate memory"):
                await networks.join(Sandbox("c", "c"), {"a": ANY, "b": ANY}, "a")
            world.fail = lambda _: None

    asyncio.run(run())


def test_a_disconnect_is_done_though_the_default_route_is_refused(world: Host, tmp_path: Path) -> None:
    """The endpoint has already been removed, so the container's record must not keep it."""

    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("a", "10.1.0.0/24"))
            await networks.create(body("b", "10.2.0.0/24"))
            await networks.join(Sandbox("c", "c"), {"a": ANY, "b": ANY}, "a")
            world.fail = lambda what: _refuse(what, "route")
            await networks.disconnect("c", "a")
            world.fail = lambda _: None
            assert not networks.get("a").sandboxes
            assert used(networks) == {"b": 1}
            await networks.leave("c")

    asyncio.run(run())


def test_an_end_whose_ports_cannot_be_closed_gives_the_addresses_back(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("a", "10.1.0.0/24"))
            await networks.join(Sandbox("c", "c", request=PORTS), {"a": ANY}, "a")
            await networks.opened("c")
            withdraw = networks._publishing.withdraw

            async def refuse(owner: str) -> None:
                await withdraw(owner)
                raise ServerError("the host allows no more threads")

            networks._publishing.withdraw = refuse  # type: ignore[method-assign]
            with pytest.raises(ServerError):
                await networks.leave("c")
            assert not world.namespaces and used(networks) == {}

    asyncio.run(run())


# --- cancelled at every await ---------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["join", "connect", "create"])
def test_cancelled_at_any_moment(world: Host, tmp_path: Path, verb: str) -> None:
    """After a cancellation, and a `leave` as a start does it, only a complete network or endpoint
    is left."""

    def act(networks: Both) -> Coroutine[Any, Any, Any]:
        if verb == "join":
            return networks.join(Sandbox("c", "c", request=PORTS), {"a": ANY, "b": ANY}, "a")
        if verb == "connect":
            return networks.connect("r", "a", ANY, PROCESS)
        return networks.create(body("new", "10.9.0.0/24"))

    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("a", "10.1.0.0/24"))
            await networks.create(body("b", "10.2.0.0/24"))
            await networks.join(Sandbox("r", "r"), {"b": ANY}, "b")
            before, turns = snapshot(networks, world), 0
            while True:
                task = asyncio.ensure_future(act(networks))
                for _ in range(turns):
                    await asyncio.sleep(0)
                    if turns % 3 == 2:
                        await asyncio.sleep(0.001)
                finished = task.done()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert task.cancelled() or task.exception() is None, task
                await networks.leave("c")
                if verb == "connect" and "r" in networks.get("a").sandboxes:
                    await networks.disconnect("r", "a")
                if verb == "create" and any(each.record.name == "new" for each in networks):
                    await networks.remove("new")
                for _ in range(100):  # results of threads that had already started
                    if snapshot(networks, world) == before and not networks._going:
                        break
                    await asyncio.sleep(0.01)
                assert snapshot(networks, world) == before, f"cancelled after {turns} turns"
                if finished:
                    return
                turns += 1

    asyncio.run(run())


# --- several at once ------------------------------------------------------------------------------


def test_a_leave_overtakes_a_connect(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("a", "10.1.0.0/24"))
            await networks.create(body("b", "10.2.0.0/24"))
            before = snapshot(networks, world)
            await networks.join(Sandbox("c", "c"), {"a": ANY}, "a")
            outcomes = await asyncio.gather(
                networks.connect("c", "b", ANY, PROCESS),
                networks.leave("c"),
                networks.connect("c", "b", ANY, PROCESS),
                networks.disconnect("c", "a"),
                return_exceptions=True,
            )
            assert isinstance(outcomes[0], EndpointSettings) and outcomes[1] is None
            assert isinstance(outcomes[2], Forbidden | NotFound), "it came second, or too late"
            assert snapshot(networks, world) == before

    asyncio.run(run())


def test_a_network_with_an_endpoint_on_its_way_stays(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("a", "10.1.0.0/24"))
            joining = asyncio.ensure_future(networks.join(Sandbox("c", "c"), {"a": ANY}, "a"))
            await asyncio.sleep(0)
            with pytest.raises(Forbidden, match="has active endpoints"):
                await networks.remove("a")
            await joining
            await networks.leave("c")
            await networks.remove("a")

    asyncio.run(run())


def test_a_name_is_free_while_its_bridge_still_goes(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            fields = {"Options": {"com.docker.network.bridge.name": "mine0"}}
            for _ in range(5):
                await networks.create(body("a", "10.1.0.0/24", **fields))
                await networks.remove("a")
            await networks.create(body("a", "10.1.0.0/24", **fields))
            assert world.links["mine0"].alias

    asyncio.run(run())


def test_engines_side_by_side(world: Host, tmp_path: Path) -> None:
    """Neither engine uses, sweeps or removes the other's bridges."""

    async def run() -> None:
        (tmp_path / "1").mkdir()
        (tmp_path / "2").mkdir()
        async with opened(tmp_path / "1", bridge="one0") as first:
            await first.create(body("web"))
            mine = set(world.links)
            async with opened(tmp_path / "2", bridge="two0") as second:
                await second.create(body("web"))
                subnets = [each.get("web").pools[4].subnet for each in (first, second)]
                assert not subnets[0].overlaps(subnets[1])
                assert not first.get("bridge").pools[4].subnet.overlaps(second.get("bridge").pools[4].subnet)
                assert sorted(world.tables) == ["engined-one0", "engined-two0"]
            assert {*world.links} == mine

    asyncio.run(run())


def test_a_contested_subnet(world: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [True, True, False]
    monkeypatch.setattr(BridgeDriver, "_contested", lambda *_: answers.pop(0))

    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("a"))
            assert str(networks.get("a").pools[4].subnet) == "172.18.2.0/24"
            assert {name for name in world.links if name.startswith("br-")} == {networks.get("a").bridge}
            monkeypatch.setattr(BridgeDriver, "_contested", lambda *_: True)
            with pytest.raises(ServerError, match="could not find an available, non-overlapping IPv4 address pool"):
                await networks.create(body("b"))
            assert {name for name in world.links if name.startswith("br-")} == {networks.get("a").bridge}

    asyncio.run(run())


# --- after a restart ------------------------------------------------------------------------------


def test_a_bridge_that_is_deleted_comes_back(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("a", "10.1.0.0/24"))
            joined = await networks.join(Sandbox("c", "c"), {"a": ANY}, "a")
            found = networks.get("a")
            end = sandboxes.host_end(joined.endpoints["a"].endpoint_id)
            before = found.link
            assert before is not None
            world.take_away(found.bridge)
            for _ in range(500):
                if found.link is not before:
                    break
                await asyncio.sleep(0.01)
            assert found.link is not None and found.link is not before
            assert world.links[end].master == found.link.ifindex
            assert str(world.addresses[found.link.ifindex][0]) == "10.1.0.1/24"
            assert (found.link.ifindex, IPv4Address("10.1.0.2")) in world.neighbours
            await networks.leave("c")

    asyncio.run(run())


def test_containers_that_ran_on(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        records = Records(tmp_path / "state.db")
        first = Both(Config(), records)
        await first.open()
        await first.create(body("a", "10.1.0.0/24"))
        joined = await first.join(Sandbox("c", "c", request=PORTS), {"a": ANY}, "a")
        await first.join(Sandbox("ended", "ended"), {"a": static("10.1.0.9")}, "a")
        ports = await first.opened("c")
        await first.close(remove=False)
        bridge = world.links[first.get("a").bridge]
        second = Both(Config(), records)
        await second.open()
        second.restore(Sandbox("c", "c", request=PORTS), joined.endpoints, PROCESS, ports)
        second.restore(Sandbox("c", "c"), joined.endpoints, PROCESS)
        await second.settle()
        assert second.get("a").link == bridge
        assert used(second) == {"a": 1}
        assert [*world.neighbours] == [(bridge.ifindex, IPv4Address("10.1.0.2"))]
        assert second.ports_of("c") == ports and elements(world)["any4"] == 1
        other = await second.join(Sandbox("d", "d"), {"a": ANY}, "a")
        assert other.endpoints["a"].ip_address == "10.1.0.3"
        second.renamed("c", "web")
        assert second.inspected(second.get("a")).containers["c"].name == "web"
        await second.leave("c")
        await second.leave("d")
        assert used(second) == {} and "any4" not in elements(world)
        await second.close(remove=True)
        records.close()
        assert not world.links and not world.namespaces

    asyncio.run(run())


def test_reserved_addresses(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("a", "10.1.0.0/29"))
            networks.reserve({"a": static("10.1.0.2"), "gone": static("10.1.0.3"), "bridge": static("10.1.0.4")})
            taken = [
                (await networks.join(Sandbox(each, each), {"a": ANY}, "a")).endpoints["a"].ip_address for each in "wxyz"
            ]
            assert taken == ["10.1.0.3", "10.1.0.4", "10.1.0.5", "10.1.0.6"]
            networks.unreserve({"a": static("10.1.0.2")})
            assert (await networks.join(Sandbox("v", "v"), {"a": ANY}, "a")).endpoints["a"].ip_address == "10.1.0.2"
            for each in "vwxyz":
                await networks.leave(each)

    asyncio.run(run())


# --- checks ---------------------------------------------------------------------------------------


def test_check_and_check_connected(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("a", "10.1.0.0/24"))
            assert networks.check_connected("c", "a", {"a": ANY, "bridge": ANY}) == "a"
            assert networks.check_connected("c", networks.get("a").record.id[:15], {"a": ANY}) == "a"
            made_again = EndpointSettings(network_id="0" * 64)
            assert networks.check_connected("c", "a", {"a": made_again}) == "a"
            another = EndpointSettings(network_id=networks.get("bridge").record.id)
            for among in ({"bridge": ANY}, {"a": another}):
                with pytest.raises(Forbidden, match="container c is not connected to the network a"):
                    networks.check_connected("c", "a", among)
            with pytest.raises(Forbidden, match="cannot be disconnected from host network"):
                networks.check_connected("c", "host", {"host": ANY})
            with pytest.raises(NotFound, match="network nothere not found"):
                networks.check_connected("c", "nothere", {"nothere": ANY})
            assert networks.check("c" * 64, "a", static("10.1.0.9"), ["bridge"]).dns_names is None
            for name, wanted, among, kind, words in (
                ("a", ANY, ["a"], Forbidden, "already exists in network a"),
                ("a", ANY, ["host"], Forbidden, "connected to host network"),
                ("none", ANY, ["a"], Forbidden, r"private \(none\) mode"),
                ("a", ANY, ["none"], Forbidden, r"private \(none\) mode"),
                ("a", static("10.2.0.9"), [], InvalidParameter, "10.2.0.9 is not a host address"),
                ("bridge", static("172.17.0.9"), [], InvalidParameter, "user defined networks only"),
            ):
                with pytest.raises(kind, match=words):
                    networks.check("c", name, wanted, among)
            with pytest.raises(Conflict):
                await networks.create(body("a", CheckDuplicate=True))
            with pytest.raises(NotFound, match="container c has left its networks"):
                await networks.connect("c", "a", ANY, PROCESS)

    asyncio.run(run())


# --- parents of macvlan networks, links in groups -------------------------------------------------


def options(parent: str, *, dummy: bool = False) -> Options:
    return Options(parent=parent, dummy=dummy)


def test_parents(world: Host) -> None:
    kernel: Any = Kernel(world)
    world.add_link("lan0", "")
    assert not macvlan.open_parent(kernel, "n", options("lan0"), "engined x"), "one that was there"
    assert macvlan.open_parent(kernel, "n", options("lan0.10"), "engined x")
    assert macvlan.open_parent(kernel, "n", options("lan0.10"), "engined x"), "again: it is still the engine's"
    assert macvlan.open_parent(kernel, "n", options("dm-1", dummy=True), "engined x")
    assert [(each.name, each.kind, each.alias, each.up) for each in world.links.values()] == [
        ("lan0", "", "", False),
        ("lan0.10", "vlan", "engined x", True),
        ("dm-1", "dummy", "engined x", True),
    ]
    for parent in ("nothere", "nothere.10", "lan0.0", "lan0.4095", "lan0.x", "lan0.", "lo", "x" * 16):
        with pytest.raises(InvalidParameter, match="network n: parent link"):
            macvlan.open_parent(kernel, "n", options(parent), "engined x")
    macvlan.remove_parent(kernel, "lan0.10", "engined y")
    assert "lan0.10" in world.links, "another engine's stays"
    macvlan.remove_parent(kernel, "lan0", "engined x")
    assert "lan0" in world.links, "so does the host's own"
    for _ in range(2):
        macvlan.remove_parent(kernel, "lan0.10", "engined x")
    assert "lan0.10" not in world.links


def test_a_kernel_without_a_kind_of_link(world: Host) -> None:
    kernel: Any = Kernel(world)
    world.add_link("lan0", "")

    def unsupported(what: str) -> None:
        raise NetlinkError(95, f"{what}: Operation not supported")

    world.fail = unsupported
    with pytest.raises(
        ServerError, match=r"network n: parent link 'lan0.10': this kernel has no links of the kind vlan"
    ):
        macvlan.open_parent(kernel, "n", options("lan0.10"), "engined x")


def test_the_sweep_removes_orphans_at_once(world: Host) -> None:
    """Remove the links of this engine that have no record, in one request; all others stay."""
    kernel: Any = Kernel(world)
    for name, kind, alias in (
        ("br-1", "bridge", "engined x"),
        ("br-2", "bridge", "engined x"),
        ("dm-1", "dummy", "engined x"),
        ("br-3", "bridge", "engined y"),
        ("br-4", "bridge", ""),
        ("veth1", "veth", ""),
        ("tr1", "veth", "engined x"),
        ("ov-1", "veth", "engined x"),
    ):
        world.add_link(name, kind, alias)
    host.sweep(kernel, kernel.links(), "engined x", {"br-2"})
    assert sorted(world.links) == ["br-2", "br-3", "br-4", "ov-1", "veth1"]
    assert sum(each.startswith("removal of links of group") for each in world.steps) == 1
    world.steps.clear()
    host.sweep(kernel, kernel.links(), "engined x", {"br-2"})
    assert not world.steps


def test_a_bridge_whose_maker_was_killed(world: Host) -> None:
    """The kernel takes the alias only after it has made the link. The engine recognises a
    bridge without alias by its address. It removes the bridge, or sets the alias if it has the
    network.
    """
    kernel: Any = Kernel(world)
    for name, alias in (("br-1", "engined x"), ("br-2", "engined x"), ("br-3", "engined y")):
        world.add_link(name, "bridge", address=host.bridge_address(name, alias))
    world.add_link("br-4", "bridge", address="02:42:00:00:00:01")
    host.sweep(kernel, kernel.links(), "engined x", {"br-2"})
    assert sorted(world.links) == ["br-2", "br-3", "br-4"]
    found, lent = bridge.open_user(kernel, "br-2", "engined x", [IPv4Interface("10.9.0.1/24")])
    assert found.alias == world.links["br-2"].alias == "engined x"
    assert lent == ()
    world.add_link("engined0", "bridge", address=host.bridge_address("engined0", host.ALIAS))
    assert bridge.open_default(kernel, "engined0", None)[0].alias == host.ALIAS
    assert bridge.open_user(kernel, "br-4", "engined x", [])[0].alias == ""


# --- derivation -----------------------------------------------------------------------------------


def test_the_target_of_ports_and_the_default_route(world: Host, tmp_path: Path) -> None:
    """Docker's order: both IP versions first, then by name; macvlan networks have routers of
    their own.
    """

    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("b", "10.1.0.0/24"))
            await networks.create(body("z", "10.2.0.0/24", EnableIPv6=True))
            await networks.create(body("inner", "10.3.0.0/24", Internal=True))
            world.add_link("lan0", "")
            await networks.create(body("a-lan", "10.4.0.0/24", Driver="macvlan", Options={"parent": "lan0"}))
            joined = await networks.join(Sandbox("c", "c"), {"b": ANY, "z": ANY, "inner": ANY}, "inner")
            given, known = joined.endpoints, networks.by_id
            target = endpoints.target(given.values(), known)
            assert target is not None and target.addresses[0] == IPv4Address("10.2.0.2") and target.addresses[1]
            gateways = endpoints.default_gateways(given.values(), known)
            assert [str(each) for each in gateways] == ["10.2.0.1", str(networks.get("z").gateways[6].ip)]
            assert given["inner"].gateway == ""
            assert endpoints.target([given["inner"]], known) is None
            lan = await networks.connect("c", "a-lan", ANY, PROCESS)
            assert endpoints.target([lan, given["b"]], known) is None, "its default route is not by this host"
            assert endpoints.configured(lan) == EndpointSettings(network_id=lan.network_id, dns_names=["c"])
            await networks.leave("c")

    asyncio.run(run())
