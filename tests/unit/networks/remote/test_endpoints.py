"""Endpoints and addresses of plugins, on a host without a kernel and with plugins without
sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.config import Config
from engine.errors import EngineError, Forbidden, NotFound, ServerError
from engine.networks.endpoints import Sandbox
from engine.networks.remote import links as remote_links
from engine.networks.sandboxes import Interface
from engine.plugins.client import Plugin, Refused
from engine.plugins.discovery import Discovery
from engine.plugins.registry import Plugins
from engine.storage.records import Records
from engine.wire.containers import EndpointSettings
from engine.wire.networks import NetworkCreate
from tests.support.fakes.networks import Both
from tests.unit.networks.fakes import Host

ONE, TWO = "c1" * 32, "c2" * 32
ANY = EndpointSettings()
ANSWERS: dict[str, Any] = {
    "NetworkDriver.GetCapabilities": {"Scope": "local"},
    "NetworkDriver.Join": {"InterfaceName": {"SrcName": "v0", "DstPrefix": "eth"}, "Gateway": "10.1.0.1"},
    "IpamDriver.GetDefaultAddressSpaces": {"LocalDefaultAddressSpace": "here"},
    "IpamDriver.RequestPool": {
        "PoolID": "p",
        "Pool": "10.1.0.0/24",
        "Data": {"com.docker.network.gateway": "10.1.0.1/24"},
    },
    "IpamDriver.RequestAddress": {"Address": "10.1.0.5/24"},
}


class Fake(Plugin):
    """Answers from a table. `fail` is called before each answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answers = dict(ANSWERS)
        self.called: list[str] = []
        self.fail: Callable[[str], None] = lambda _: None
        self.hang: asyncio.Event | None = None

    async def call(self, method: str, answer: Any, body: Mapping[str, object] | None = None) -> Any:
        self.called.append(method.partition(".")[2])
        self.fail(method)
        if method == "NetworkDriver.Join" and self.hang is not None:
            self.hang.set()
            await asyncio.sleep(0.05)
        return msgspec.convert(self.answers.get(method, {}), answer)

    def since(self) -> list[str]:
        called, self.called = self.called, []
        return [each for each in called if not each.startswith("Get")]


class Known(Plugins):
    def __init__(self, *plugins: Fake) -> None:
        super().__init__(Discovery((), ()), 1.0)
        self.known = {each.name: each for each in plugins}

    async def get(self, name: str, kind: str) -> Plugin:
        if name not in self.known:
            raise NotFound(f'plugin "{name}" not found')
        return self.known[name]


class Process(NamedTuple):
    pid: int
    pidfd: int


class Keys:
    """`remote_links`, without mounts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: set[str] = set()
        self.inside: dict[str, list[str]] = {}
        for name in ("show", "hide", "hide_all", "move_in", "move_out"):
            monkeypatch.setattr(remote_links, name, getattr(self, f"_{name}"))

    def _show(self, namespace: int, key: Path) -> set[str]:
        self.shown.add(key.name)
        return {"lo"}

    def _hide(self, key: Path) -> None:
        self.shown.discard(key.name)

    def _hide_all(self, directory: Path, kept: Collection[str] = ()) -> None:
        self.shown.intersection_update(kept)

    def _move_in(self, _: Any, key: Path, source: str, interface: Interface, routes: Iterable[Any]) -> None:
        self.inside.setdefault(key.name, []).append(interface.name)

    def _move_out(self, key: Path, name: str, source: str) -> None:
        self.inside[key.name].remove(name)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    made.install(monkeypatch)
    return made


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    return Keys(monkeypatch)


@contextlib.asynccontextmanager
async def opened(directory: Path, *plugins: Fake) -> AsyncIterator[Both]:
    records = Records(directory / "state.db")
    networks = Both(Config(), records, Known(*plugins))
    await networks.open()
    await networks.settle()
    try:
        yield networks
    finally:
        await networks.close(remove=True)
        records.close()


async def create(networks: Both, name: str, driver: str = "far", **fields: Any) -> Any:
    return await networks.create(msgspec.convert({"Name": name, "Driver": driver} | fields, NetworkCreate))


def rows(networks: Both) -> dict[str, Any]:
    return networks.remote_endpoints._rows


def test_a_cancelled_start_is_undone(world: Host, keys: Keys, tmp_path: Path) -> None:
    """Also when the plugin is carrying it out."""

    async def run() -> None:
        far, desk = Fake("far"), Fake("desk")
        async with opened(tmp_path, far, desk) as networks:
            await create(networks, "net", IPAM={"Driver": "desk"})
            far.since(), desk.since()
            far.hang = asyncio.Event()
            starting = asyncio.create_task(networks.join(Sandbox(ONE, "one"), {"net": ANY}, "net"))
            await far.hang.wait()
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert far.since() == ["CreateEndpoint", "Join", "Leave", "DeleteEndpoint"]
            assert desk.since() == ["RequestAddress", "ReleaseAddress"]
            assert (rows(networks), keys.shown, world.namespaces) == ({}, set(), {})
            assert keys.inside == {ONE[:12]: []}
            found = networks.get("net")
            assert not found.sandboxes and len(found.pools[4]) == 0

    asyncio.run(run())


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize(
    ("method", "undone"),
    [
        ("CreateEndpoint", ["DeleteEndpoint"]),
        ("Join", ["Leave", "DeleteEndpoint"]),
        ("ProgramExternalConnectivity", ["RevokeExternalConnectivity", "Leave", "DeleteEndpoint"]),
    ],
)
def test_what_may_have_been_done_is_undone(
    method: str, undone: list[str], refused: bool, world: Host, keys: Keys, tmp_path: Path
) -> None:
    async def run() -> None:
        far = Fake("far")
        async with opened(tmp_path, far) as networks:
            await create(networks, "net", IPAM={"Config": [{"Subnet": "10.1.0.0/24"}]})

            def fail(called: str) -> None:
                if called.endswith(method):
                    raise Refused("no") if refused else ServerError("unknown")

            far.fail = fail
            far.since()
            with pytest.raises(ServerError, match="network net"):
                await networks.join(Sandbox(ONE, "one"), {"net": ANY}, "net")
            called = far.since()
            # what the plugin has refused, it need not undo
            assert called[called.index(method) + 1 :] == undone[refused:]
            assert (rows(networks), keys.shown, world.namespaces) == ({}, set(), {})
            far.fail = lambda _: None
            joined = await networks.join(Sandbox(ONE, "one"), {"net": ANY}, "net")
            assert joined.endpoints["net"].gateway == "10.1.0.1"

    asyncio.run(run())


def test_what_an_earlier_daemon_left_is_given_back(world: Host, keys: Keys, tmp_path: Path) -> None:
    async def run() -> None:
        far, desk = Fake("far"), Fake("desk")
        async with opened(tmp_path, far, desk) as networks:
            await create(networks, "net", IPAM={"Driver": "desk"})
            kept = await networks.join(Sandbox(ONE, "one"), {"net": ANY}, "net")
            desk.answers["IpamDriver.RequestAddress"] = {"Address": "10.1.0.6/24"}
            await networks.join(Sandbox(TWO, "two"), {"net": ANY}, "net")
        far.since(), desk.since()
        records = Records(tmp_path / "state.db")
        networks = Both(Config(), records, Known(far, desk))
        await networks.open()
        assert {*rows(networks)} == {ONE, TWO}
        networks.restore(Sandbox(ONE, "one"), kept.endpoints, Process(1, -1))
        await networks.settle()
        assert {*networks.remote_endpoints._returning} == {TWO}
        await networks.join(Sandbox(TWO, "two"), {"net": ANY}, "net")  # waits for it
        assert far.since()[:3] == ["RevokeExternalConnectivity", "Leave", "DeleteEndpoint"]
        assert desk.since() == ["ReleaseAddress", "RequestAddress"]
        await networks.leave(ONE)
        await networks.leave(TWO)
        assert (rows(networks), keys.shown) == ({}, set())
        await networks.close(remove=True)
        records.close()

    asyncio.run(run())


def test_the_same_address_twice(world: Host, keys: Keys, tmp_path: Path) -> None:
    """A plugin's mistake is not passed on."""

    async def run() -> None:
        far, desk = Fake("far"), Fake("desk")
        async with opened(tmp_path, far, desk) as networks:
            await create(networks, "net", IPAM={"Driver": "desk"})
            await networks.join(Sandbox(ONE, "one"), {"net": ANY}, "net")
            with pytest.raises(Forbidden, match=r"Address already in use: 10\.1\.0\.5 on network net"):
                await networks.join(Sandbox(TWO, "two"), {"net": ANY}, "net")
            assert {*rows(networks)} == {ONE}
            desk.answers["IpamDriver.RequestAddress"] = {"Address": "10.2.0.5/24"}
            with pytest.raises(ServerError, match=r"returned 10\.2\.0\.5, which is not in 10\.1\.0\.0/24"):
                await networks.join(Sandbox(TWO, "two"), {"net": ANY}, "net")
            assert desk.since()[-1] == "ReleaseAddress"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ({}, "invalid pool ''"),
        ({"PoolID": "p", "Pool": "10.1.0.0"}, "invalid pool '10.1.0.0'"),
        ({"PoolID": "p", "Pool": "0.0.0.0/0"}, "invalid pool"),
        ({"PoolID": "p", "Pool": "fd00::/64"}, "not one of IPv4"),
        (
            {"PoolID": "p", "Pool": "10.1.0.0/24", "Data": {"com.docker.network.gateway": "10.9.0.1/24"}},
            "invalid gateway",
        ),
    ],
)
def test_pools_that_are_no_pools(pool: dict[str, Any], words: str, world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        desk = Fake("desk")
        desk.answers["IpamDriver.RequestPool"] = pool
        desk.answers["IpamDriver.RequestAddress"] = {"Address": "10.1.0.1/24"}
        async with opened(tmp_path, desk) as networks:
            with pytest.raises(ServerError) as raised:
                await create(networks, "net", driver="bridge", IPAM={"Driver": "desk"})
            assert raised.value.message.startswith("network net: IPAM plugin desk returned an invalid")
            assert words in raised.value.message
            assert desk.since()[-1] == "ReleasePool"
            assert [each.record.name for each in networks] == ["bridge", "host", "none"]

    asyncio.run(run())


def test_a_pool_that_overlaps_is_given_back(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        desk = Fake("desk")
        async with opened(tmp_path, desk) as networks:
            await create(networks, "own", driver="bridge", IPAM={"Config": [{"Subnet": "10.1.0.0/16"}]})
            with pytest.raises(Forbidden, match="Pool overlaps with other one on this address space"):
                await create(networks, "net", driver="bridge", IPAM={"Driver": "desk"})
            assert desk.since() == ["RequestPool", "ReleasePool"]

    asyncio.run(run())


def test_a_name_is_taken_while_its_plugin_makes_the_network(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        far = Fake("far")
        async with opened(tmp_path, far) as networks:
            outcomes = await asyncio.gather(
                *(create(networks, "net", IPAM={"Config": [{"Subnet": f"10.{at}.0.0/24"}]}) for at in range(1, 4)),
                return_exceptions=True,
            )
            assert sorted(type(each).__name__ for each in outcomes) == ["Conflict", "Conflict", "NetworkCreated"]
            assert far.since() == ["CreateNetwork"]
            assert [*networks.users("far")] == ["network net"]
            await networks.remove("net")
            assert far.since() == ["DeleteNetwork"]
            assert not networks.networks._between and not [*networks.users("far")]

    asyncio.run(run())


def test_a_network_whose_plugin_fails_is_not_there(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        far = Fake("far")
        async with opened(tmp_path, far) as networks:
            for error, undone in ((Refused("no"), []), (ServerError("unknown"), ["DeleteNetwork"])):

                def fail(called: str, error: EngineError = error) -> None:
                    if called.endswith("CreateNetwork"):
                        raise error

                far.fail = fail
                with pytest.raises(ServerError, match="network net"):
                    await create(networks, "net")
                assert far.since() == ["CreateNetwork", *undone]
                assert not networks.networks._between
                with pytest.raises(NotFound):
                    networks.get("net")

    asyncio.run(run())
