"""A managed volume plugin in use: containers on its volumes, kills of every process, faults of the
plugin, and what is left on the host.
"""

from __future__ import annotations

import io
import os
import signal
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.harness import TempEngine, until
from tests.support.images.registry import Registry
from tests.support.plugins import images as plugin_images
from tests.support.plugins.images import Installed

pytestmark = pytest.mark.own

REPOSITORY = "vendor/volumes"
VOLUMES = "docker.volumedriver/1.0"


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with Registry() as found:
        yield found


@pytest.fixture
def plugin(registry: Registry, tmp_path: Path) -> Iterator[Installed]:
    control = tmp_path / "control"
    control.mkdir()
    document = plugin_images.config("MountingVolumes", VOLUMES, control=control)
    plugin_images.put(registry, REPOSITORY, "latest", document)
    engine = TempEngine("--plugin-timeout", "3", "--plugin-socket-directory", str(tmp_path / "none"))
    with engine:
        engine.load_busybox()
        found = Installed(engine, f"{registry.host}/{REPOSITORY}:latest", control)
        found.install()
        found.request("POST", "/enable?timeout=60", status=200)
        yield found


def volume(plugin: Installed, name: str = "v", status: int = 201) -> Any:
    body = {"Name": name, "Driver": plugin.name.removesuffix(":latest")}
    answer = plugin.engine.request("POST", "/v1.41/volumes/create", body)
    assert answer.status == status, answer
    return answer.json()


def counts(plugin: Installed) -> tuple[int, int]:
    """How often Mount and Unmount were called."""
    methods = [method for method, _ in plugin.calls()]
    return methods.count("VolumeDriver.Mount"), methods.count("VolumeDriver.Unmount")


def host_mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def test_containers_share_a_volume_that_the_host_does_not_see(plugin: Installed) -> None:
    engine = plugin.engine
    assert volume(plugin)["Driver"] == plugin.name
    writer = engine.started("sh", "-c", "echo hello >/v/f; exec sleep 600", host={"Binds": ["v:/v"]})
    until("the file is written", lambda: Path(f"/proc/{engine.inspect(writer)['State']['Pid']}/root/v/f").exists())
    reader = engine.started("cat", "/v/f", host={"Binds": ["v:/v:ro"]})
    assert engine.wait(reader) == 0 and engine.logs(reader) == b"hello\n"
    part = engine.request(
        "POST",
        "/v1.47/containers/create",
        {
            "Image": "busybox",
            "Cmd": ["cat", "/w"],
            "HostConfig": {
                "NetworkMode": "none",
                "Mounts": [{"Type": "volume", "Source": "v", "Target": "/w", "VolumeOptions": {"Subpath": "f"}}],
            },
        },
    ).json()["Id"]
    engine.post(f"/containers/{part}/start")
    assert engine.wait(part) == 0 and engine.logs(part) == b"hello\n"
    archive = engine.request("GET", f"/v1.41/containers/{writer}/archive?path=/v/f")
    with tarfile.open(fileobj=io.BytesIO(archive.body)) as found:
        assert found.getmember("f").size == len("hello\n")
    assert str(engine.root / "plugins") not in host_mounts() and "/data" not in host_mounts()
    refused = plugin.request("POST", "/disable", status=409)
    assert "volume v" in refused.message
    plugin.request("DELETE", status=409)
    engine.remove_all()
    until("each mount has its unmount", lambda: len({*counts(plugin)}) == 1)
    assert engine.request("DELETE", "/v1.41/volumes/v").status == 204
    plugin.request("POST", "/disable", status=200)
    assert plugin.pid == 0
    plugin.request("DELETE", status=200)
    assert engine.request("GET", "/v1.41/plugins").json() == []


@pytest.mark.parametrize(("method", "path"), [("POST", "/disable"), ("DELETE", "?force=1")])
def test_an_enable_that_waits_is_given_up(plugin: Installed, method: str, path: str) -> None:
    plugin.request("POST", "/disable", status=200)
    plugin.faults(**{"Plugin.Activate": "hang"})
    answers: list[Any] = []
    enabling = threading.Thread(target=lambda: answers.append(plugin.request("POST", "/enable?timeout=600")))
    enabling.start()
    until("it runs", lambda: plugin.pid)
    assert "is being enabled" in plugin.request("POST", "/set", ["DEBUG=1"], status=409).message
    assert "is being enabled" in plugin.request("DELETE", status=409).message
    plugin.request(method, path, status=200)
    enabling.join(60)
    assert answers[0].status == 500 and "it is being disabled" in answers[0].message
    assert plugin.pid == 0


def test_a_plugin_that_does_not_serve_its_activation(plugin: Installed) -> None:
    """Docker does not activate managed plugins, so its own test plugins do not serve the call."""
    plugin.request("POST", "/disable", status=200)
    plugin.faults(**{"Plugin.Activate": "unserved"})
    plugin.request("POST", "/enable", status=200)
    engine = plugin.engine
    host = {"Binds": ["v:/v"], "VolumeDriver": plugin.name}
    assert engine.wait(engine.started("sh", "-c", "echo hello > /v/f", host=host)) == 0
    assert engine.request("GET", "/v1.41/volumes/v").json()["Driver"] == plugin.name


def test_the_image_fills_a_new_volume(plugin: Installed) -> None:
    engine = plugin.engine
    body = {"Mounts": [{"Type": "volume", "Source": "filled", "Target": "/bin"}]}
    body["Mounts"][0]["VolumeOptions"] = {"DriverConfig": {"Name": plugin.name}}  # type: ignore[index]
    assert engine.wait(engine.started("true", host=body)) == 0
    assert engine.request("GET", "/v1.41/volumes/filled").json()["Driver"] == plugin.name


def test_the_daemon_is_killed_while_a_volume_is_in_use(plugin: Installed) -> None:
    engine, before = plugin.engine, plugin.pid
    assert before
    volume(plugin)
    user = engine.started("sh", "-c", "echo kept >/v/f; exec sleep 600", host={"Binds": ["v:/v"]})
    engine.restart()
    assert plugin.pid == before
    assert plugin.request("GET", "/json").json()["Enabled"]
    reader = engine.started("cat", "/v/f", host={"Binds": ["v:/v"]})
    assert engine.wait(reader) == 0 and engine.logs(reader) == b"kept\n"
    engine.replace_monitor()
    assert plugin.pid == before
    engine.post(f"/containers/{user}/stop?t=0")
    until("each mount has its unmount", lambda: len({*counts(plugin)}) == 1)
    engine.terminate()
    engine.start()
    assert plugin.pid == before


def test_the_plugin_is_killed_while_a_volume_is_in_use(plugin: Installed) -> None:
    """What it has mounted stays mounted, and its next process finds it."""
    engine = plugin.engine
    volume(plugin)
    engine.started("sh", "-c", "echo kept >/v/f; exec sleep 600", host={"Binds": ["v:/v"]})
    before = plugin.pid
    os.kill(before, signal.SIGKILL)
    until("it runs again", lambda: plugin.pid not in (0, before))
    reader = engine.create("cat", "/v/f", host={"Binds": ["v:/v"]})
    assert until("it answers", lambda: engine.request("POST", f"/v1.24/containers/{reader}/start").status == 204)
    assert engine.wait(reader) == 0 and engine.logs(reader) == b"kept\n"


def test_a_plugin_starts_with_the_host(plugin: Installed) -> None:
    engine = plugin.engine
    volume(plugin)
    policy = {"Binds": ["v:/v"], "RestartPolicy": {"Name": "always"}}
    container = engine.started("sleep", "600", host=policy)
    engine.reboot()
    until("the container runs", lambda: engine.inspect(container)["State"]["Running"])
    assert plugin.request("GET", "/json").json()["Enabled"] and plugin.pid


def test_a_disabled_plugin_is_not_used(plugin: Installed) -> None:
    engine = plugin.engine
    volume(plugin)
    container = engine.create("true", host={"Binds": ["v:/v"]})
    plugin.request("POST", "/disable?force=1", status=200)
    answer = engine.request("POST", f"/v1.41/containers/{container}/start")
    assert answer.status >= 400 and f'plugin "{plugin.name}" found but disabled' in answer.message
    assert "found but disabled" in volume(plugin, "other", 404)["message"]
    engine.restart()
    assert plugin.pid == 0
    plugin.request("POST", "/enable?timeout=60", status=200)
    engine.post(f"/containers/{container}/start")


@pytest.mark.parametrize("fault", ["hang", "garbage", "error", "die", "die after"])
def test_faults(plugin: Installed, fault: str) -> None:
    """A start fails with a message, whatever the plugin does; nothing stays, and the next start
    works.
    """
    engine = plugin.engine
    volume(plugin)
    before = engine.footprint()
    container = engine.create("true", host={"Binds": ["v:/v"]})
    plugin.faults(**{"VolumeDriver.Mount": fault})
    answer = engine.request("POST", f"/v1.41/containers/{container}/start")
    assert answer.status == 500 and "mount v" in answer.message, answer
    assert not engine.inspect(container)["State"]["Running"]
    plugin.faults()
    until("it starts", lambda: engine.request("POST", f"/v1.24/containers/{container}/start").status == 204)
    assert engine.wait(container) == 0
    engine.remove_all()
    before.processes = {f"{plugin.pid} python "}  # another one where it has died
    engine.assert_settles(before)


def test_a_hundred_faults_leave_nothing(plugin: Installed) -> None:
    engine = plugin.engine
    volume(plugin)
    before = engine.footprint()
    container = engine.create("true", host={"Binds": ["v:/v"]})
    for index in range(100):
        plugin.faults(**{f"VolumeDriver.{('Mount', 'Unmount')[index % 2]}": ("garbage", "error")[index // 2 % 2]})
        engine.request("POST", f"/v1.41/containers/{container}/start")
        engine.wait(container)
    plugin.faults()
    engine.post(f"/containers/{container}/start")
    engine.wait(container)
    engine.remove_all()
    engine.assert_settles(before)
