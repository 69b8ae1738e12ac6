"""Networks of plugins on the real kernel: endpoints, addresses, restarts, and faults at each call
of the protocols, after which nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.engine import client
from tests.support.engine.harness import TempEngine, kill_and_wait, links, until
from tests.support.plugins.networks import IpamPlugin, NetworkPlugin
from tests.support.plugins.protocol import Plugin

P = TypeVar("P", bound=Plugin)

pytestmark = [pytest.mark.own, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


@pytest.fixture(scope="module")
def plugged() -> Iterator[TempEngine]:
    engine = TempEngine()
    engine.arguments = (
        *("--plugin-socket-directory", str(engine.base / "sockets"), "--plugin-timeout", "2"),
        *("--plugin-spec-directory", str(engine.base / "specs")),
    )
    with engine:
        engine.load_busybox()
        yield engine


@pytest.fixture
def engine(plugged: TempEngine) -> Iterator[TempEngine]:
    yield plugged
    plugged.remove_all()


@contextlib.contextmanager
def served(engine: TempEngine, name: str, plugin: P) -> Iterator[P]:
    """The plugin while it listens; at the end everything is removed while it still does."""
    socket = engine.base / "sockets" / f"{name}.sock"
    plugin.listen(socket)
    try:
        yield plugin
        plugin.heal()
        engine.remove_all()
    finally:
        plugin.close()
        socket.unlink(missing_ok=True)


@pytest.fixture
def far(plugged: TempEngine) -> Iterator[NetworkPlugin]:
    """The network driver `far`."""
    plugin = NetworkPlugin(f"t{secrets.token_hex(2)}")
    try:
        with served(plugged, "far", plugin):
            yield plugin
        assert (plugin.links(), plugin.networks, plugin.endpoints, plugin.joined) == ([], {}, {}, {})
    finally:
        plugin.remove_all()


@pytest.fixture
def desk(plugged: TempEngine) -> Iterator[IpamPlugin]:
    """The IPAM driver `desk`."""
    with served(plugged, "desk", IpamPlugin()) as plugin:
        yield plugin
    assert plugin.pools == {}


def create(engine: TempEngine, name: str, status: int = 201, driver: str = "far", **body: Any) -> Any:
    answer = engine.request("POST", "/v1.24/networks/create", {"Name": name, "Driver": driver} | body)
    assert answer.status == status, answer
    return answer.json()


def network(engine: TempEngine, name: str) -> Any:
    return engine.request("GET", f"/v1.24/networks/{name}").json()


def of(engine: TempEngine, container: str, name: str) -> Any:
    return engine.inspect(container)["NetworkSettings"]["Networks"][name]


def output(engine: TempEngine, container: str, *command: str) -> str:
    return engine.docker("exec", container, *command).out


def keys(engine: TempEngine) -> list[str]:
    """Names of the mounted namespaces."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    below = f"{engine.run}/netns/"
    return [path.removeprefix(below) for line in lines if (path := line.split()[4]).startswith(below)]


def test_a_life(engine: TempEngine, far: NetworkPlugin) -> None:
    before = engine.footprint()
    made = create(engine, "n1", Options={"a": "b"}, IPAM={"Config": [{"Subnet": "10.76.1.0/24"}]})["Id"]
    (body,) = far.bodies("CreateNetwork")
    assert body == {
        "NetworkID": made,
        "Options": {"com.docker.network.enable_ipv6": False, "com.docker.network.generic": {"a": "b"}},
        "IPv4Data": [{"AddressSpace": "LocalDefault", "Pool": "10.76.1.0/24", "Gateway": "10.76.1.1/24"}],
        "IPv6Data": [],
    }
    shown = network(engine, "n1")
    assert (shown["Driver"], shown["Scope"], shown["Options"]) == ("far", "local", {"a": "b"})
    assert shown["IPAM"]["Config"] == [{"Subnet": "10.76.1.0/24", "Gateway": "10.76.1.1"}]
    assert "far" in engine.request("GET", "/v1.24/info").json()["Plugins"]["Network"]
    one = engine.started("sleep", "100", network="n1", ExposedPorts={"80/tcp": {}})
    settings = of(engine, one, "n1")
    assert (settings["IPAddress"], settings["IPPrefixLen"], settings["Gateway"]) == ("10.76.1.2", 24, "10.76.1.1")
    assert far.called() == ["CreateNetwork", "CreateEndpoint", "Join", "ProgramExternalConnectivity"]
    (asked,) = far.bodies("CreateEndpoint")
    assert asked["Interface"] == {"Address": "10.76.1.2/24", "AddressIPv6": "", "MacAddress": ""}
    assert asked["Options"] == {
        "com.docker.network.endpoint.exposedports": [{"Proto": 6, "Port": 80}],
        "com.docker.network.portmap": [],
    }
    assert far.key_was_there == [True]
    assert keys(engine) == [one[:12]]
    assert far.joined == {settings["EndpointID"]: f"{engine.run}/netns/{one[:12]}"}
    two = engine.started("sleep", "100", network="n1")
    assert "10.76.1.3" in output(engine, two, "ip", "address", "show", "eth0")
    assert "via 10.76.1.1 dev eth0" in output(engine, two, "ip", "route")
    output(engine, two, "ping", "-c", "1", "-W", "5", "10.76.1.2")
    engine.post(f"/containers/{one}/stop?t=0")
    until("the endpoint is gone", lambda: len(far.endpoints) == 1)
    assert far.called()[-3:] == ["RevokeExternalConnectivity", "Leave", "DeleteEndpoint"]
    until("the key is gone", lambda: keys(engine) == [two[:12]])
    assert engine.request("DELETE", "/v1.24/networks/n1").status == 403
    engine.remove_all()
    assert far.called()[-1] == "DeleteNetwork"
    assert far.links() == []
    engine.assert_settles(before)


# --- addresses, several networks, settings --------------------------------------------------------


def test_ipv6_static_addresses_and_a_mac(engine: TempEngine, far: NetworkPlugin) -> None:
    config = [{"Subnet": "10.76.2.0/24"}, {"Subnet": "fd76:2::/64"}]
    create(engine, "n2", EnableIPv6=True, Internal=True, IPAM={"Config": config})
    (body,) = far.bodies("CreateNetwork")
    assert body["Options"]["com.docker.network.internal"] is True
    assert body["IPv6Data"][0]["Pool"] == "fd76:2::/64"
    wanted = {"IPAMConfig": {"IPv4Address": "10.76.2.9", "IPv6Address": "fd76:2::9"}, "MacAddress": "02:00:00:00:00:09"}
    answer = engine.request(
        "POST",
        "/v1.44/containers/create",
        {
            "Image": "busybox",
            "Cmd": ["sleep", "100"],
            "HostConfig": {"NetworkMode": "n2"},
            "NetworkingConfig": {"EndpointsConfig": {"n2": wanted}},
        },
    )
    container = answer.json()["Id"]
    engine.post(f"/containers/{container}/start")
    (asked,) = far.bodies("CreateEndpoint")
    assert asked["Interface"] == {
        "Address": "10.76.2.9/24",
        "AddressIPv6": "fd76:2::9/64",
        "MacAddress": "02:00:00:00:00:09",
    }
    shown = output(engine, container, "ip", "address", "show", "eth0")
    assert "10.76.2.9/24" in shown and "fd76:2::9/64" in shown and "02:00:00:00:00:09" in shown
    assert "ProgramExternalConnectivity" not in far.called()


def test_default_routes_of_both_versions(engine: TempEngine, far: NetworkPlugin) -> None:
    config = [{"Subnet": "10.76.12.0/24"}, {"Subnet": "fd76:12::/64"}]
    create(engine, "n12", EnableIPv6=True, IPAM={"Config": config})
    container = engine.started("sleep", "100", network="n12")
    settings = of(engine, container, "n12")
    assert (settings["Gateway"], settings["IPv6Gateway"]) == ("10.76.12.1", "fd76:12::1")
    assert "default via 10.76.12.1 dev eth0" in output(engine, container, "ip", "route")
    assert "default via fd76:12::1 dev eth0" in output(engine, container, "ip", "-6", "route")
    output(engine, container, "ping", "-c", "1", "-W", "5", "fd76:12::1")


def test_names_and_published_ports(engine: TempEngine, far: NetworkPlugin) -> None:
    """Containers find one another by name; the plugin gets the ports that are published."""
    create(engine, "n13", IPAM={"Config": [{"Subnet": "10.76.13.0/24"}]})
    bindings = {"80/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8080"}]}
    engine.started("sleep", "100", name="first", network="n13", host={"PortBindings": bindings})
    (body,) = far.bodies("ProgramExternalConnectivity")
    assert body["Options"]["com.docker.network.portmap"] == [
        {"Proto": 6, "IP": "", "Port": 80, "HostIP": "127.0.0.1", "HostPort": 8080, "HostPortEnd": 8080}
    ]
    second = engine.started("sleep", "100", network="n13")
    output(engine, second, "ping", "-c", "1", "-W", "5", "first")


def test_a_stop_of_the_engine_leaves_nothing(engine: TempEngine, far: NetworkPlugin) -> None:
    create(engine, "n14", IPAM={"Config": [{"Subnet": "10.76.14.0/24"}]})
    engine.started("sleep", "1000", network="n14")
    engine.kill9()
    engine.stop()
    engine.assert_gone()
    assert far.endpoints == {} and far.joined == {}
    engine.start()


def test_a_driver_that_chooses_addresses(engine: TempEngine, far: NetworkPlugin) -> None:
    far.fills = {"Address": "10.99.0.7/16", "MacAddress": "02:00:00:00:00:07"}
    far.more = {
        "Gateway": "10.99.0.1",
        "InterfaceName": {"SrcName": "", "DstPrefix": ""},
    }
    create(engine, "n3", IPAM={"Driver": "null"})
    (body,) = far.bodies("CreateNetwork")
    assert body["IPv4Data"] == [{"AddressSpace": "null", "Pool": "0.0.0.0/0"}]
    assert network(engine, "n3")["IPAM"] == {"Driver": "null", "Options": None, "Config": []}
    del far.more["InterfaceName"]
    container = engine.started("sleep", "100", network="n3")
    settings = of(engine, container, "n3")
    assert (settings["IPAddress"], settings["IPPrefixLen"], settings["MacAddress"]) == (
        "10.99.0.7",
        16,
        "02:00:00:00:00:07",
    )
    assert "10.99.0.7/16" in output(engine, container, "ip", "address", "show", "eth0")


def test_routes_and_names(engine: TempEngine, far: NetworkPlugin) -> None:
    create(engine, "n4", IPAM={"Config": [{"Subnet": "10.76.4.0/24"}]})
    far.more = {
        "StaticRoutes": [
            {"Destination": "10.200.0.0/16", "RouteType": 0, "NextHop": "10.76.4.1"},
            {"Destination": "10.201.0.0/16", "RouteType": 1, "NextHop": ""},
        ],
        "Gateway": "",
        "DisableGatewayService": True,
    }
    container = engine.started("sleep", "100", network="n4")
    routes = output(engine, container, "ip", "route")
    assert "10.200.0.0/16 via 10.76.4.1 dev eth0" in routes
    assert "10.201.0.0/16 dev eth0" in routes
    assert "default" not in routes
    assert "ProgramExternalConnectivity" not in far.called()


def test_connect_and_disconnect(engine: TempEngine, far: NetworkPlugin) -> None:
    before = engine.footprint()
    create(engine, "n5", IPAM={"Config": [{"Subnet": "10.76.5.0/24"}]})
    create(engine, "n6", IPAM={"Config": [{"Subnet": "10.76.6.0/24"}]})
    create(engine, "local", driver="bridge")
    container = engine.started("sleep", "100", network="bridge")
    assert keys(engine) == []
    for name in ("n5", "local", "n6"):
        body = {"Container": container, "EndpointConfig": {}}
        assert engine.request("POST", f"/v1.24/networks/{name}/connect", body).status == 200
    assert keys(engine) == [container[:12]]
    shown = output(engine, container, "ip", "-o", "address")
    assert "eth1    inet 10.76.5.2/24" in shown and "eth3    inet 10.76.6.2/24" in shown
    for name in ("bridge", "n5", "local"):
        body = {"Container": container}
        assert engine.request("POST", f"/v1.24/networks/{name}/disconnect", body).status == 200
    assert keys(engine) == [container[:12]]
    # the last endpoint is the outlet now
    assert far.called()[-1] == "ProgramExternalConnectivity"
    assert "default via 10.76.6.1 dev eth3" in output(engine, container, "ip", "route")
    assert engine.request("POST", "/v1.24/networks/n6/disconnect", {"Container": container}).status == 200
    assert far.called()[-3:] == ["RevokeExternalConnectivity", "Leave", "DeleteEndpoint"]
    assert keys(engine) == [] and far.endpoints == {} and len(far.links()) == 2
    engine.remove_all()
    engine.assert_settles(before)


def test_a_container_on_bridge_and_plugin_from_its_start(engine: TempEngine, far: NetworkPlugin) -> None:
    create(engine, "n7", IPAM={"Config": [{"Subnet": "10.76.7.0/24"}]})
    create(engine, "local", driver="bridge")
    container = engine.create("sleep", "100", network="local")
    assert engine.request("POST", "/v1.24/networks/n7/connect", {"Container": container}).status == 200
    engine.post(f"/containers/{container}/start")
    shown = output(engine, container, "ip", "-o", "address")
    assert "eth1    inet 10.76.7.2/24" in shown and "eth0    inet" in shown


# --- IPAM plugins ---------------------------------------------------------------------------------


def test_a_bridge_with_addresses_of_a_plugin(engine: TempEngine, desk: IpamPlugin) -> None:
    create(engine, "b1", driver="bridge", IPAM={"Driver": "desk", "Options": {"o": "p"}})
    assert desk.bodies("RequestPool") == [
        {"AddressSpace": "here", "Pool": "", "SubPool": "", "Options": {"o": "p"}, "V6": False}
    ]
    assert desk.bodies("RequestAddress") == [
        {
            "PoolID": "here/10.77.0.0/24",
            "Address": "",
            "Options": {"RequestAddressType": "com.docker.network.gateway"},
        }
    ]
    shown = network(engine, "b1")["IPAM"]
    assert shown == {
        "Driver": "desk",
        "Options": {"o": "p"},
        "Config": [{"Subnet": "10.77.0.0/24", "Gateway": "10.77.0.1"}],
    }
    container = engine.started("sleep", "100", network="b1")
    assert of(engine, container, "b1")["IPAddress"] == "10.77.0.2"
    assert desk.pools == {"here/10.77.0.0/24": {"10.77.0.1", "10.77.0.2"}}
    output(engine, container, "ping", "-c", "1", "-W", "5", "10.77.0.1")
    engine.post(f"/containers/{container}/stop?t=0")
    until("the address is given back", lambda: desk.pools == {"here/10.77.0.0/24": {"10.77.0.1"}})


def test_both_plugins_with_both_versions(engine: TempEngine, far: NetworkPlugin) -> None:
    with served(engine, "strict", IpamPlugin(mac=True)) as strict:
        config = [{"Subnet": "10.76.8.0/24", "IPRange": "10.76.8.0/25", "Gateway": "10.76.8.200"}]
        create(engine, "n8", EnableIPv6=True, IPAM={"Driver": "strict", "Config": config})
        assert [body["Pool"] for body in strict.bodies("RequestPool")] == ["10.76.8.0/24", ""]
        static = {"EndpointsConfig": {"n8": {"IPAMConfig": {"IPv4Address": "10.76.8.9"}}}}
        container = engine.create("sleep", "100", network="n8", NetworkingConfig=static)
        engine.post(f"/containers/{container}/start")
        settings = of(engine, container, "n8")
        assert (settings["IPAddress"], settings["GlobalIPv6Address"]) == ("10.76.8.9", "fd77::2")
        mac = settings["MacAddress"]
        assert mac
        options = {"com.docker.network.endpoint.macaddress": mac}
        assert [body["Options"] for body in strict.bodies("RequestAddress")[-2:]] == [options] * 2
        assert mac in output(engine, container, "ip", "address", "show", "eth0")
        assert far.bodies("CreateNetwork")[0]["IPv4Data"][0]["AddressSpace"] == "here"
    assert strict.pools == {}


# --- restarts of the daemon -----------------------------------------------------------------------


def test_a_killed_daemon_keeps_endpoints(engine: TempEngine, far: NetworkPlugin, desk: IpamPlugin) -> None:
    before = engine.footprint()
    create(engine, "k1", IPAM={"Driver": "desk"})
    kept = engine.started("sleep", "1000", network="k1")
    ended = engine.started("sleep", "1000", network="k1")
    pid = engine.inspect(ended)["State"]["Pid"]
    settings = of(engine, kept, "k1")
    called = len(far.calls)
    engine.kill9()
    kill_and_wait(pid)
    engine.start()
    assert of(engine, kept, "k1") == settings
    until("the other endpoint is given back", lambda: len(far.endpoints) == 1)
    until("its address is given back", lambda: desk.pools == {"here/10.77.0.0/24": {"10.77.0.1", "10.77.0.2"}})
    until("its key is gone", lambda: keys(engine) == [kept[:12]])
    since = [method.partition(".")[2] for method, _ in far.calls[called:]]
    assert since == ["Activate", "GetCapabilities", "RevokeExternalConnectivity", "Leave", "DeleteEndpoint"]
    output(engine, kept, "ping", "-c", "1", "-W", "5", "10.77.0.1")
    again = engine.started("sleep", "1000", network="k1")
    output(engine, again, "ping", "-c", "1", "-W", "5", "10.77.0.2")
    engine.remove_all()
    engine.assert_settles(before)


def test_a_daemon_killed_during_a_join(engine: TempEngine, far: NetworkPlugin) -> None:
    """The next daemon asks the plugin to undo what it may have done."""
    before = engine.footprint()
    create(engine, "k2")
    container = engine.create("sleep", "1000", network="k2")
    far.delays["NetworkDriver.Join"] = 1.0
    with client.connect(engine.socket) as connection:
        connection.sendall(f"POST /v1.24/containers/{container}/start HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        until("the plugin was asked", lambda: far.called()[-1] == "Join")
        engine.kill9()
    until("the plugin has done it", lambda: far.joined)
    far.heal()
    engine.start()
    until("the endpoint is gone", lambda: not far.endpoints and not far.joined)
    until("its key is gone", lambda: keys(engine) == [])
    engine.post(f"/containers/{container}/start")
    engine.remove_all()
    engine.assert_settles(before)


def test_a_plugin_that_is_absent(engine: TempEngine) -> None:
    before = engine.footprint()
    plugin = NetworkPlugin(f"t{secrets.token_hex(2)}")
    with served(engine, "gone", plugin):
        made = create(engine, "k3", driver="gone")["Id"]
        running = engine.started("sleep", "1000", network="k3")
        stopped = engine.create("sleep", "1000", network="k3")
        socket = engine.base / "sockets" / "gone.sock"
        hidden = socket.with_suffix(".hidden")
        socket.rename(hidden)
        engine.restart()
        assert "k3" in engine.networks()
        answer = engine.request("POST", f"/v1.24/containers/{stopped}/start")
        assert (answer.status, answer.json()["message"]) == (500, 'network k3: plugin "gone" not found')
        answer = engine.request("DELETE", f"/v1.24/networks/{made}")
        assert answer.status == 403  # in use
        engine.request("DELETE", f"/v1.24/containers/{running}?force=1")
        until("the sandbox is gone", lambda: keys(engine) == [])
        answer = engine.request("DELETE", f"/v1.24/networks/{made}")
        assert answer.status == 500
        assert answer.json()["message"] == 'network k3 cannot be removed: plugin "gone" not found'
        assert plugin.endpoints
        hidden.rename(socket)
        engine.restart()  # the endpoint's row was kept
        until("the endpoint is gone", lambda: plugin.endpoints == {})
    assert plugin.links() == []
    engine.assert_settles(before)


def test_addresses_are_requested_again(engine: TempEngine) -> None:
    with served(engine, "forgetful", IpamPlugin(replay=True)) as plugin:
        create(engine, "k4", driver="bridge", IPAM={"Driver": "forgetful"})
        container = engine.started("sleep", "1000", network="k4")
        before = {key: set(used) for key, used in plugin.pools.items()}
        engine.kill9()
        plugin.pools.clear()
        engine.start()
        until("the plugin knows them again", lambda: plugin.pools == before)
        assert of(engine, container, "k4")["IPAddress"] == "10.77.0.2"
    assert plugin.pools == {}


def test_a_plugin_that_outlives_the_daemon_has_its_addresses_still(engine: TempEngine) -> None:
    """The engine requests them again from a plugin with a new client, as after a restart of it."""
    sockets = engine.base / "sockets"
    with served(engine, "keeping", IpamPlugin(replay=True)) as plugin:
        create(engine, "k5", driver="bridge", IPAM={"Driver": "keeping"})
        engine.started("sleep", "1000", network="k5")
        engine.kill9()
        engine.start()
        container = engine.started("sleep", "1000", network="k5")
        assert of(engine, container, "k5")["IPAddress"] == "10.77.0.3"
        plugin.pools.clear()
        (sockets / "keeping").mkdir()
        (sockets / "keeping.sock").rename(sockets / "keeping/keeping.sock")
        engine.started("sleep", "1000", network="k5")
        assert plugin.pools == {"here/10.77.0.0/24": {f"10.77.0.{number}" for number in (1, 2, 3, 4)}}
        (sockets / "keeping/keeping.sock").rename(sockets / "keeping.sock")
    (sockets / "keeping").rmdir()
    assert plugin.pools == {}


def test_what_is_owed_is_given_back_before_its_network(
    engine: TempEngine, far: NetworkPlugin, desk: IpamPlugin
) -> None:
    before = engine.footprint()
    create(engine, "k6", IPAM={"Driver": "desk"})
    container = engine.started("sleep", "1000", network="k6")
    sockets = [engine.base / "sockets" / f"{name}.sock" for name in ("far", "desk")]
    for each in sockets:
        each.rename(each.with_suffix(".away"))
    assert engine.request("DELETE", f"/v1.24/containers/{container}?force=1").status == 204
    until("its sandbox is gone", lambda: keys(engine) == [])
    assert far.endpoints and len(desk.pools["here/10.77.0.0/24"]) == 2
    for each in sockets:
        each.with_suffix(".away").rename(each)
    assert engine.request("DELETE", "/v1.24/networks/k6").status == 204
    assert far.called()[-3:] == ["Leave", "DeleteEndpoint", "DeleteNetwork"]
    assert (far.endpoints, far.joined, desk.pools) == ({}, {}, {})
    calls = len(far.called()), len(desk.bodies("ReleaseAddress"))
    engine.restart()
    create(engine, "k7", IPAM={"Driver": "desk"})  # what an earlier daemon has left is done by then
    assert engine.request("DELETE", "/v1.24/networks/k7").status == 204
    assert calls == (len(far.called()) - 2, len(desk.bodies("ReleaseAddress")) - 1)
    engine.assert_settles(before)


def test_a_network_is_removed_while_its_last_container_leaves(engine: TempEngine, desk: IpamPlugin) -> None:
    create(engine, "k8", driver="bridge", IPAM={"Driver": "desk"})
    container = engine.started("sleep", "1000", network="k8")
    desk.stalls["IpamDriver.ReleaseAddress"] = 0.5
    engine.post(f"/containers/{container}/stop?t=0")
    until("it has left", lambda: network(engine, "k8")["Containers"] == {})
    assert engine.request("DELETE", "/v1.24/networks/k8").status == 204
    released = [body["Address"] for body in desk.bodies("ReleaseAddress")]
    assert released == ["10.77.0.2", "10.77.0.1"] and desk.pools == {}


# --- faults ---------------------------------------------------------------------------------------

FAULTS = ("Err", "garbage", "half", "killed", "hang", "404", "500")
HANG = 2.3
"""Seconds; the engine waits for 2."""


def fault(plugin: Plugin, method: str, kind: str) -> None:
    if kind == "Err":
        plugin.answers[method] = {"Err": "no luck", "Error": "no luck"}
    elif kind == "garbage":
        plugin.answers[method] = b'{"Interface": 7, "Error": []'
    elif kind == "half":
        plugin.cut[method] = 0.5
    elif kind == "killed":
        plugin.cut[method] = 0.0
    elif kind == "hang":
        plugin.stalls[method] = HANG
    else:
        plugin.answers[method] = (int(kind), b"broken")


CALLS = (
    *(f"NetworkDriver.{each}" for each in ("CreateEndpoint", "Join", "ProgramExternalConnectivity")),
    "IpamDriver.RequestAddress",
)


@pytest.mark.parametrize("method", CALLS)
def test_faults_of_a_start(engine: TempEngine, far: NetworkPlugin, desk: IpamPlugin, method: str) -> None:
    create(engine, "f1", IPAM={"Driver": "desk"})
    container = ended(engine, "f1")
    until("it has left", lambda: not far.endpoints and keys(engine) == [])
    before, links_before, pools = engine.footprint(), {*links()}, {key: {*used} for key, used in desk.pools.items()}
    for kind in FAULTS:
        fault(far if method.startswith("Network") else desk, method, kind)
        answer = engine.request("POST", f"/v1.24/containers/{container}/start")
        far.heal()
        desk.heal()
        if (method, kind) == ("NetworkDriver.ProgramExternalConnectivity", "404"):  # it is optional
            assert answer.status == 204
            engine.post(f"/containers/{container}/stop?t=0")
        else:
            assert answer.status == 500, (kind, answer)
            assert "network f1" in answer.json()["message"]
        until(f"the endpoint is gone after {kind}", lambda: not far.endpoints and not far.joined)
        until(f"its key is gone after {kind}", lambda: keys(engine) == [])
        assert {*links()} - links_before == set(), kind
        if method.startswith("Ipam") and kind in ("garbage", "half", "killed", "hang"):
            # which address the plugin has taken is unknown
            desk.pools = {key: {*used} for key, used in pools.items()}
        until(f"addresses are given back after {kind}", lambda: desk.pools == pools)
    engine.assert_settles(before)
    assert "plugin-endpoint" not in engine.recorded()
    engine.post(f"/containers/{container}/start")


def ended(engine: TempEngine, on: str) -> str:
    """A container that has run once, so that it has all its files."""
    container = engine.started("sleep", "1000", network=on)
    engine.post(f"/containers/{container}/stop?t=0")
    return container


NETWORK_CALLS = (
    *("NetworkDriver.CreateNetwork", "IpamDriver.RequestPool", "IpamDriver.RequestAddress"),
    *("IpamDriver.ReleasePool", "IpamDriver.ReleaseAddress", "NetworkDriver.DeleteNetwork"),
)


@pytest.mark.parametrize("method", NETWORK_CALLS)
def test_faults_of_a_network(engine: TempEngine, far: NetworkPlugin, desk: IpamPlugin, method: str) -> None:
    """One that fails is not there; removals succeed whatever the plugin answers."""
    for kind in FAULTS:
        plugin = far if method.startswith("Network") else desk
        if "Delete" in method or "Release" in method:
            create(engine, "f2", IPAM={"Driver": "desk"})
            fault(plugin, method, kind)
            assert engine.request("DELETE", "/v1.24/networks/f2").status == 204, kind
        else:
            fault(plugin, method, kind)
            answer = create(engine, "f2", 500, IPAM={"Driver": "desk"})
            assert "network f2: " in answer["message"], kind
        plugin.heal()
        assert "f2" not in engine.networks()
        if "Network" in method and "Create" in method:
            assert (far.networks, far.links(), desk.pools) == ({}, [], {}), kind
        for network in [*far.networks]:
            far.methods()["NetworkDriver.DeleteNetwork"]({"NetworkID": network})
        desk.pools.clear()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"InterfaceName": {"SrcName": "absent0", "DstPrefix": "eth"}},
            "interface absent0 does not exist on this host",
        ),
        ({"InterfaceName": {"SrcName": "a/b", "DstPrefix": "eth"}}, "'a/b' is not one for an interface"),
        ({"Gateway": "elsewhere"}, "gateway 'elsewhere' is invalid"),
        ({"Gateway": "192.0.2.1"}, "etwork is unreachable"),
        ({"StaticRoutes": [{"Destination": "10.0.0.0/8", "RouteType": 0}]}, "has no next hop"),
    ],
)
def test_answers_that_cannot_be_carried_out(
    engine: TempEngine, far: NetworkPlugin, more: dict[str, Any], words: str
) -> None:
    create(engine, "f3", IPAM={"Config": [{"Subnet": "10.76.9.0/24"}]})
    container = engine.create("sleep", "1000", network="f3")
    links_before = {*links()}
    far.more = more
    answer = engine.request("POST", f"/v1.24/containers/{container}/start")
    assert answer.status == 500 and words in answer.json()["message"], answer
    assert far.called()[-2:] == ["Leave", "DeleteEndpoint"]
    assert keys(engine) == [] and far.endpoints == {} and far.joined == {}
    assert {*links()} - links_before == set()


def test_a_driver_that_changes_what_was_given(engine: TempEngine, far: NetworkPlugin) -> None:
    create(engine, "f4", IPAM={"Config": [{"Subnet": "10.76.10.0/24"}]})
    far.fills = {"Address": "10.76.10.77/24"}
    container = engine.create("sleep", "1000", network="f4")
    answer = engine.request("POST", f"/v1.24/containers/{container}/start")
    assert answer.status == 500 and "driver modified interface address" in answer.json()["message"]
    assert far.called() == ["CreateNetwork", "CreateEndpoint", "DeleteEndpoint"]


def test_faults_of_an_end(engine: TempEngine, far: NetworkPlugin, desk: IpamPlugin) -> None:
    """The container ends, and nothing of the engine is left."""
    create(engine, "f5", IPAM={"Driver": "desk"})
    container = ended(engine, "f5")
    until("it has left", lambda: not far.endpoints and keys(engine) == [])
    before = engine.footprint()
    for kind in ("Err", "half", "killed"):
        for method in ("NetworkDriver.Leave", "NetworkDriver.DeleteEndpoint", "IpamDriver.ReleaseAddress"):
            engine.post(f"/containers/{container}/start")
            fault(far if method.startswith("Network") else desk, method, kind)
            engine.post(f"/containers/{container}/stop?t=0")
            until("it has left", lambda: "plugin-endpoint" not in engine.recorded())
            far.heal()
            desk.heal()
            engine.assert_settles(before)
    for endpoint in [*far.endpoints]:
        far.methods()["NetworkDriver.DeleteEndpoint"]({"EndpointID": endpoint})
    far.joined.clear()
    for used in desk.pools.values():
        used.intersection_update({"10.77.0.1"})


def test_a_plugin_that_hangs_at_an_end(engine: TempEngine, far: NetworkPlugin) -> None:
    """It delays the end once, and is asked again before the next start."""
    create(engine, "f7", IPAM={"Config": [{"Subnet": "10.76.15.0/24"}]})
    for method in ("RevokeExternalConnectivity", "Leave", "DeleteEndpoint"):
        container = engine.started("sleep", "1000", network="f7")
        far.stalls |= {f"NetworkDriver.{each}": HANG for each in (method, "Leave", "DeleteEndpoint")}
        begun = time.monotonic()
        engine.post(f"/containers/{container}/stop?t=0")
        until("the sandbox is gone", lambda: keys(engine) == [])
        assert time.monotonic() - begun < 3 * 2  # seconds: what three calls in turn would take
        far.heal()
        assert "plugin-endpoint" in engine.recorded()
        engine.post(f"/containers/{container}/start")
        assert len(far.endpoints) == len(far.joined) == 1
        engine.request("DELETE", f"/v1.24/containers/{container}?force=1")
    assert "plugin-endpoint" not in engine.recorded()


def test_a_hundred_faults(engine: TempEngine, far: NetworkPlugin, desk: IpamPlugin) -> None:
    """At any call of a container's start and end, one or two at once."""
    chance = random.Random(20)
    create(engine, "f6", IPAM={"Driver": "desk"})
    container = ended(engine, "f6")
    until("it has left", lambda: not far.endpoints and keys(engine) == [])
    before, links_before, descriptors = engine.footprint(), {*links()}, engine.open_files()
    ends = (f"NetworkDriver.{each}" for each in ("RevokeExternalConnectivity", "Leave", "DeleteEndpoint"))
    methods = [*ends, "IpamDriver.ReleaseAddress", *CALLS]
    for _ in range(100):
        for method in chance.sample(methods, chance.choice((1, 2))):
            kind = chance.choice(("Err", "garbage", "half", "killed"))
            fault(far if method.startswith("Network") else desk, method, kind)
        answer = engine.request("POST", f"/v1.24/containers/{container}/start")
        if answer.status == 204:
            engine.post(f"/containers/{container}/stop?t=0")
        else:
            assert answer.status == 500, answer
        until("the engine has given everything back", lambda: "plugin-endpoint" not in engine.recorded())
        far.heal()
        desk.heal()
        # what the plugin has kept, as it did not take it back
        for endpoint in [*far.endpoints]:
            far.methods()["NetworkDriver.DeleteEndpoint"]({"EndpointID": endpoint})
        far.joined.clear()
        for used in desk.pools.values():
            used.intersection_update({"10.77.0.1"})
        assert keys(engine) == []
        assert {*links()} - links_before == set()
    engine.assert_settles(before)
    assert engine.open_files() <= descriptors
    engine.post(f"/containers/{container}/start")


def test_a_hanging_plugin_delays_its_own_networks_alone() -> None:
    with TempEngine() as engine, contextlib.ExitStack() as stack:
        engine.terminate()  # the directory of sockets is below its own
        engine.arguments = ("--plugin-socket-directory", str(engine.base / "sockets"), "--plugin-timeout", "600")
        engine.start()
        engine.load_busybox()
        far = NetworkPlugin(f"t{secrets.token_hex(2)}")
        stack.callback(far.remove_all)
        stack.enter_context(served(engine, "far", far))
        create(engine, "slow", IPAM={"Config": [{"Subnet": "10.76.11.0/24"}]})
        waiting = [engine.create("sleep", "1000", network="slow") for _ in range(6)]
        far.stalls |= {f"NetworkDriver.{each}": 600 for each in ("Join", "CreateNetwork")}
        asked = [("POST", f"/v1.24/containers/{each}/start", None) for each in waiting]
        asked.append(("POST", "/v1.24/networks/create", {"Name": "late", "Driver": "far"}))
        with ThreadPoolExecutor(len(asked)) as pool:
            hanging = [pool.submit(engine.request, *each, timeout=120) for each in asked]
            try:
                until("the plugin hangs", lambda: len(far.joined) == 6 and len(far.networks) == 2)
                create(engine, "quick", driver="bridge")
                container = engine.started("sleep", "1000", network="quick")
                assert engine.request("DELETE", f"/v1.24/containers/{container}?force=1").status == 204
                assert engine.request("DELETE", "/v1.24/networks/quick").status == 204
                assert not any(each.done() for each in hanging)
            finally:
                far.heal()
            assert [each.result().status for each in hanging] == [204] * 6 + [201]


# --- refusals -------------------------------------------------------------------------------------


def test_refusals(engine: TempEngine, far: NetworkPlugin) -> None:
    answer = create(engine, "r1", 404, driver="absent")
    assert answer["message"] == 'network r1: plugin "absent" not found'
    answer = create(engine, "r1", 404, driver="bridge", IPAM={"Driver": "absent"})
    assert answer["message"] == 'network r1: plugin "absent" not found'
    answer = create(engine, "r1", 404, driver="bridge", IPAM={"Driver": "far"})
    assert answer["message"].endswith("plugin far does not implement the requested interface: IpamDriver")
    answer = create(engine, "r1", 400, driver="bridge", IPAM={"Driver": "null"})
    assert "need an IPAM driver that has subnets" in answer["message"]
    everywhere = NetworkPlugin("x")
    everywhere.scope = "global"
    with served(engine, "everywhere", everywhere):
        answer = create(engine, "r1", 403, driver="everywhere")
        assert "Cannot create a multi-host network from a worker node" in answer["message"]
    assert far.called() == []
