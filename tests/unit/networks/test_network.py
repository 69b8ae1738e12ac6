from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.config import Config
from engine.errors import InvalidParameter, NotFound
from engine.networks import bridge
from engine.networks.bridge import BridgeNetwork
from engine.networks.network import NetworkStore
from engine.storage.records import Records


def test_predefined_networks_keep_their_ids(tmp_path: Path) -> None:
    async def body() -> None:
        seen = []
        for _ in range(2):
            records = Records(tmp_path / "state.db")
            store = NetworkStore(records)
            await store.open()
            seen.append(sorted((record.name, record.driver, record.id) for record in store))
            records.close()
        assert seen[0] == seen[1]
        assert [(name, driver) for name, driver, _ in seen[0]] == [
            ("bridge", "bridge"),
            ("host", "host"),
            ("none", "null"),
        ]
        assert all(len(identifier) == 64 for _, _, identifier in seen[0])

    asyncio.run(body())


def test_names(tmp_path: Path) -> None:
    async def body() -> None:
        records = Records(tmp_path / "state.db")
        network = BridgeNetwork(Config(), records)
        await network.networks.open()
        identifier = network.id_of("default")
        assert identifier == network.id_of("") == network.id_of("bridge") == network.id_of(identifier[:20])
        assert network.name_of("default") == network.name_of(identifier) == "bridge"
        assert network.name_of("mine") == "mine"
        assert network.networks.get("host").driver == "host"
        with pytest.raises(NotFound, match="network mine not found"):
            network.check_mode("mine")
        with pytest.raises(NotFound):
            network.networks.get("")
        records.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("text", "interface"),
    [("172.30.0.0/16", "172.30.0.1/16"), ("172.30.0.9/24", "172.30.0.9/24"), ("10.0.0.0/30", "10.0.0.1/30")],
)
def test_configured_subnet(text: str, interface: str) -> None:
    assert str(bridge._subnet(text)) == interface


@pytest.mark.parametrize(
    "text", ["x", "10.0.0.0/33", "10.0.0.0/31", "10.0.0.1", "10.0.0.255/24", "::1/64", "1.2.3.4/a"]
)
def test_wrong_subnets(text: str) -> None:
    with pytest.raises(InvalidParameter, match="bridge subnet"):
        bridge._subnet(text)


@pytest.mark.parametrize("name", ["", "a b", "x" * 16, "a/b", "-x", 'a"b', "ä"])
def test_wrong_bridge_names(name: str, tmp_path: Path) -> None:
    records = Records(tmp_path / "state.db")
    with pytest.raises(InvalidParameter, match="bridge"):
        BridgeNetwork(Config(bridge=name), records)
    records.close()
