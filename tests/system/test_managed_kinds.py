"""Managed plugins of every kind but volumes, in use: networks, addresses, logs and
authorization.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.harness import TempEngine, links, until
from tests.support.images.registry import Registry
from tests.support.logs.targets.log_plugin import LogPlugin
from tests.support.plugins import images as plugin_images
from tests.support.plugins.images import Installed
from tests.support.plugins.networks import ip

pytestmark = pytest.mark.own

PREFIX = "mk"
"""Of the network plugin's links."""

Install = Callable[..., Installed]


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with Registry() as found:
        yield found


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TempEngine]:
    with TempEngine("--plugin-timeout", "5", "--plugin-socket-directory", str(tmp_path / "none")) as found:
        found.load_busybox()
        yield found
        found.remove_all()


@pytest.fixture
def install(engine: TempEngine, registry: Registry, tmp_path: Path) -> Install:
    """Install and enable a plugin: its class, its type, fields of its config."""

    def run(of: str, kind: str, *arguments: str, **more: Any) -> Installed:
        control = tmp_path / of
        control.mkdir()
        args = {"Name": "args", "Description": "", "Settable": ["value"], "Value": [*arguments]}
        document = plugin_images.config(of, kind, control=control, Args=args, **more)
        repository = f"vendor/{of.lower()}"
        plugin_images.put(registry, repository, "latest", document)
        plugin = Installed(engine, f"{registry.host}/{repository}:latest", control)
        plugin.install()
        plugin.request("POST", "/enable?timeout=60", status=200)
        return plugin

    return run


def of_plugin() -> list[str]:
    return [name for name in links() if name.startswith(PREFIX)]


def network_plugin(install: Install) -> Installed:
    return install(
        *("NetworkPlugin", "docker.networkdriver/1.0", PREFIX),
        Network={"Type": "host"},
        Linux={"Capabilities": ["CAP_NET_ADMIN"], "AllowAllDevices": False, "Devices": []},
    )


def test_a_network_and_its_addresses(engine: TempEngine, install: Install) -> None:
    network = network_plugin(install)
    ipam = install("IpamPlugin", "docker.ipamdriver/1.0")
    body = {"Name": "far", "Driver": network.name.removesuffix(":latest"), "IPAM": {"Driver": ipam.name}}
    answer = engine.request("POST", "/v1.41/networks/create", body)
    assert answer.status == 201, answer
    shown = engine.request("GET", "/v1.41/networks/far").json()
    assert (shown["Driver"], shown["IPAM"]["Driver"]) == (network.name, ipam.name)
    serving = engine.started("sleep", "600", network="far", name="serving")
    assert engine.wait(engine.started("ping", "-c", "1", "-W", "5", "serving", network="far")) == 0
    assert engine.inspect(serving)["NetworkSettings"]["Networks"]["far"]["IPAddress"].startswith("10.77.")
    for plugin in (network, ipam):
        assert "network far" in plugin.request("POST", "/disable", status=409).message
    engine.restart()
    engine.post(f"/containers/{serving}/stop?t=0")
    engine.post(f"/containers/{serving}/start")
    engine.remove_all()
    until("nothing of it is left", lambda: not of_plugin())
    methods = [method for method, _ in ipam.calls()]
    assert methods.count("IpamDriver.RequestAddress") == methods.count("IpamDriver.ReleaseAddress")
    for plugin in (network, ipam):
        plugin.request("POST", "/disable", status=200)
        plugin.request("DELETE", status=200)
    assert not os.path.exists(engine.run / "netns") or not os.listdir(engine.run / "netns")


def test_a_network_plugin_that_died_in_a_call_is_asked_to_undo_it(engine: TempEngine, install: Install) -> None:
    plugin = network_plugin(install)
    assert engine.request("POST", "/v1.41/networks/create", {"Name": "far", "Driver": plugin.name}).status == 201
    plugin.faults(**{"NetworkDriver.CreateEndpoint": "die"})
    container = engine.create("true", network="far")
    assert engine.request("POST", f"/v1.41/containers/{container}/start").status == 500
    # its next process may have been asked for its kinds since
    until("it is asked to undo it", lambda: "NetworkDriver.DeleteEndpoint" in [name for name, _ in plugin.calls()])
    plugin.faults()
    engine.remove_all()
    for name in of_plugin():  # its next process does not know the bridge
        ip("link", "delete", name)


def test_logs(engine: TempEngine, install: Install) -> None:
    program = [
        "/bin/python",
        "-m",
        "tests.support.logs.targets.log_plugin",
        "/run/docker/plugins/plugin.sock",
        "/control",
    ]
    plugin = install("LogPlugin", "docker.logdriver/1.0", Entrypoint=program)
    target = LogPlugin(plugin.control, plugin.control / "none")
    host = {"LogConfig": {"Type": plugin.name.removesuffix(":latest"), "Config": {}}}
    container = engine.started("sh", "-c", "for i in $(seq 1000); do echo line $i; done; sleep 600", host=host)
    lines = [f"line {number}".encode() for number in range(1, 1001)]
    until("all lines are there", lambda: [entry.line for entry in target.entries()] == lines)
    assert engine.logs(container).splitlines() == lines
    assert "container" in plugin.request("POST", "/disable", status=409).message
    assert plugin.name in engine.request("GET", "/v1.41/info").json()["Plugins"]["Log"]
    os.kill(plugin.pid, signal.SIGKILL)
    until("it is asked again", lambda: len(target.calls("StartLogging")) == 2)
    engine.post(f"/containers/{container}/kill")
    until("it is told of the end", lambda: target.calls("StopLogging"))
    engine.remove_all()
    until("nothing uses it", lambda: plugin.request("POST", "/disable").status == 200)


def test_authorization(engine: TempEngine, install: Install) -> None:
    plugin = install("AuthzPlugin", "docker.authz/1.0")
    engine.terminate()
    engine.arguments = (*engine.arguments, "--authorization-plugin", plugin.name)
    engine.start()
    assert engine.request("GET", "/v1.41/info").json()["Plugins"]["Authorization"] == [plugin.name]
    paths = [body["RequestUri"] for method, body in plugin.calls() if method == "AuthZPlugin.AuthZReq"]
    assert paths == ["/v1.41/info"]
    assert "--authorization-plugin" in plugin.request("POST", "/disable", status=409).message
    assert plugin.request("POST", "/disable?force=1").status == 409
    assert plugin.request("DELETE", "?force=1").status == 409
    plugin.faults(**{"AuthZPlugin.AuthZReq": "error"})
    refused = engine.request("GET", "/v1.41/info")
    assert refused.status == 500 and "refused by the test" in refused.message
    plugin.faults()
    os.kill(plugin.pid, signal.SIGKILL)
    until("it decides again", lambda: engine.request("GET", "/_ping").status == 200)
    engine.restart()
    assert engine.request("GET", "/_ping").status == 200
