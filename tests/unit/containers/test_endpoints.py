from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.containers import endpoints
from engine.containers.store import ContainerRecord
from engine.errors import EngineError, Forbidden, InvalidParameter
from engine.wire.containers import Config, EndpointSettings, HostConfig, NetworkingConfig


class Networks:
    """Networks `a`, whose id is `1234`, and `full`, which takes no endpoint; and a network `a` of a
    swarm, whose id is `swarm`.
    """

    def name_of(self, mode: str) -> str:
        return {"": "bridge", "default": "bridge", "1234": "a", "swarm": "a"}.get(mode, mode)

    def is_shared(self, network_id: str, name: str) -> bool:
        return (network_id, name) == ("swarm", "a")

    def check_endpoint(self, text: str, wanted: EndpointSettings) -> None:
        if text == "full":
            raise Forbidden("network full takes none")


def wanted(mode: str, /, *, unchecked: bool = False, **asked: Any) -> endpoints.Wanted:
    config = msgspec.convert({"EndpointsConfig": asked}, NetworkingConfig)
    networks: Any = Networks()
    return endpoints.wanted(networks, mode, config, unchecked=unchecked)


NONE = EndpointSettings()
IFNAME = {"com.docker.network.endpoint.ifname": "front"}


@pytest.mark.parametrize(
    ("mode", "asked", "found"),
    [
        ("default", {}, {"bridge": NONE}),
        ("a", {}, {"a": NONE}),
        ("1234", {"1234": {"Aliases": ["x"]}}, {"a": EndpointSettings(aliases=["x"])}),
        ("", {"default": None}, {"bridge": NONE}),
        ("a", {"b": {}, "a": {"GwPriority": 2}}, {"b": NONE, "a": EndpointSettings(gw_priority=2)}),
        ("bridge", {"a": {}, "b": {}}, {"a": NONE, "b": NONE}),
        ("host", {"host": {}}, {"host": NONE}),
        ("swarm", {}, {"a": EndpointSettings(network_id="swarm")}),
        ("b", {"swarm": {}, "b": {}}, {"a": EndpointSettings(network_id="swarm"), "b": NONE}),
        ("a", {"a": {"NetworkID": "swarm"}}, {"a": EndpointSettings(network_id="swarm")}),
        ("a", {"b": {"NetworkID": "swarm"}, "a": {}}, {"b": NONE, "a": NONE}),
        # what only the engine sets is not taken from a client
        ("a", {"a": {"IPAddress": "1.2.3.4", "EndpointID": "e", "NetworkID": "n", "DNSNames": ["d"]}}, {"a": NONE}),
    ],
)
def test_requested_endpoints(mode: str, asked: dict[str, Any], found: dict[str, EndpointSettings]) -> None:
    assert wanted(mode, **asked).networks == found


def test_requested_macs() -> None:
    found = wanted("a", a={"MacAddress": "02-42-AC-00-00-01"}, b={})
    assert found.macs == {"a": "02:42:ac:00:00:01"} and found.networks["a"].mac_address == ""


@pytest.mark.parametrize(
    ("mode", "asked", "words"),
    [
        ("a", {"a": {}, "1234": {}}, "network a is given twice, once as 1234"),
        ("host", {"a": {}}, "its NetworkMode is host, and no other network goes with host"),
        ("a", {"a": {}, "none": {}}, "its NetworkMode is a, and no other network goes with none"),
        ("a", {"a": {"Links": ["x:y:z"]}}, "bad format for links"),
        ("a", {"a": {"IPAMConfig": {"IPv4Address": "x"}}}, "network a: IPv4Address: invalid IP address: 'x'"),
        ("a", {"a": {"MacAddress": "x"}}, "network a: invalid MacAddress 'x'"),
        ("full", {}, "network full takes none"),
        ("a", {"a": {"DriverOpts": IFNAME}, "b": {"DriverOpts": IFNAME}}, "cannot be named front"),
        ("a", {"a": {"MacAddress": "x"}, "full": {}}, "invalid endpoint settings:\nnetwork a: invalid MacAddress"),
    ],
)
def test_refused_endpoints(mode: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        wanted(mode, **asked)
    assert words in raised.value.message


def test_endpoints_that_the_start_refuses() -> None:
    assert wanted("full", unchecked=True).networks == {"full": NONE}
    with pytest.raises(EngineError):
        wanted("a", unchecked=True, a={"MacAddress": "x"})


def test_macs_of_records_of_earlier_versions() -> None:
    """They have that of the main network in Config."""
    record = ContainerRecord(
        id="c", name="c", created=0, image_id="i", parent="", path="", args=(), config=Config(), host=HostConfig()
    )
    assert record.requested_macs("a") == {}
    older = msgspec.structs.replace(record, config=Config(mac_address="02:42:00:00:00:01"))
    assert older.requested_macs("a") == {"a": "02:42:00:00:00:01"}
    newer = msgspec.structs.replace(older, macs={"b": "02:42:00:00:00:02"})
    assert newer.requested_macs("a") == {"a": "02:42:00:00:00:01", "b": "02:42:00:00:00:02"}
