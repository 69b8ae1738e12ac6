"""Volume drivers as external programs, through a real plugin server on a Unix socket or TCP."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, until
from tests.support.plugins.protocol import VolumePlugin

pytestmark = pytest.mark.own


@pytest.fixture(scope="module")
def plugged() -> Iterator[TempEngine]:
    """An engine with its own plugin directories, and a plugin timeout of five seconds."""
    engine = TempEngine()
    specifications = engine.base / "specs"
    engine.arguments = (
        *("--plugin-socket-directory", str(engine.base / "sockets"), "--plugin-timeout", "5"),
        *("--plugin-spec-directory", str(specifications)),
    )
    specifications.mkdir()
    with engine:
        engine.load_busybox()
        yield engine


@pytest.fixture
def engine(plugged: TempEngine) -> Iterator[TempEngine]:
    yield plugged
    plugged.remove_all()
    for volume in plugged.request("GET", "/v1.24/volumes").json()["Volumes"]:
        assert plugged.request("DELETE", f"/v1.24/volumes/{volume['Name']}").status == 204, volume


@pytest.fixture
def plugin(plugged: TempEngine) -> Iterator[VolumePlugin]:
    """The driver `far`, on a socket."""
    found = VolumePlugin(plugged.base / "far")
    socket = plugged.base / "sockets" / "far.sock"
    found.listen(socket)
    yield found
    found.answers.clear()
    found.delays.clear()
    plugged.remove_all()
    for name in list(found.volumes):
        plugged.request("DELETE", f"/v1.24/volumes/{name}")
    found.close()
    socket.unlink()


def make(engine: TempEngine, status: int = 201, **body: Any) -> Any:
    answer = engine.request("POST", "/v1.24/volumes/create", body)
    assert answer.status == status, answer
    return answer.json()


def test_a_life(plugin: VolumePlugin, engine: TempEngine) -> None:
    made = make(engine, Name="v1", Driver="far", DriverOpts={"a": "b"}, Labels={"k": "v"})
    assert made == {
        "Name": "v1",
        "Driver": "far",
        "Mountpoint": str(plugin.directory / "v1"),
        "Status": {"options": {"a": "b"}},
        "Labels": {"k": "v"},
        "Scope": "local",
    }
    assert plugin.volumes == {"v1": {"a": "b"}}
    assert engine.request("GET", "/v1.24/volumes/v1").json() == made
    listed = engine.request("GET", "/v1.24/volumes").json()
    del made["Status"]
    assert listed == {"Volumes": [made], "Warnings": []}
    container = engine.started("sh", "-c", "echo hi >/v/f; sleep 100", host={"Binds": ["v1:/v"]})
    until("it wrote", (plugin.directory / "v1" / "f").exists)
    assert plugin.names("Mount") == ["v1"] and len(plugin.mounted["v1"]) == 1
    mount = engine.inspect(container)["Mounts"][0]
    assert (mount["Name"], mount["Driver"], mount["Source"]) == ("v1", "far", str(plugin.directory / "v1"))
    second = engine.started("sleep", "100", host={"Binds": ["v1:/v"]})
    assert len(set(plugin.mounted["v1"])) == 2
    assert engine.request("DELETE", "/v1.24/volumes/v1").status == 409
    for each in (container, second):
        assert engine.request("DELETE", f"/v1.24/containers/{each}?force=1").status == 204
    assert plugin.mounted["v1"] == []
    assert engine.request("DELETE", "/v1.24/volumes/v1").status == 204
    assert plugin.volumes == {} and plugin.names("Remove") == ["v1"]
    drivers = engine.request("GET", "/v1.24/info").json()["Plugins"]["Volume"]
    assert drivers == ["local", "far"]


def test_volume_driver_of_a_container(plugin: VolumePlugin, engine: TempEngine) -> None:
    out = engine.docker(
        "run",
        "--name",
        "c",
        "--network",
        "none",
        "--volume-driver",
        "far",
        "-v",
        "n1:/n",
        "-v",
        "/anon",
        "busybox",
        "true",
    )
    assert out.err == ""
    assert len(plugin.volumes) == 2 and "n1" in plugin.volumes
    engine.docker("rm", "-v", "c")
    assert list(plugin.volumes) == ["n1"]
    refused = engine.request(
        "POST",
        "/v1.24/containers/create",
        {"Image": "busybox", "HostConfig": {"Binds": ["n1:/n"], "VolumeDriver": "local"}},
    )
    assert refused.status == 409
    # Without a driver, a name refers to the existing volume.
    engine.docker("run", "--rm", "--network", "none", "-v", "n1:/n", "busybox", "touch", "/n/x")
    assert (plugin.directory / "n1" / "x").exists()


def test_copy_up_through_the_plugin(plugin: VolumePlugin, engine: TempEngine) -> None:
    make(engine, Name="copy", Driver="far")
    container = engine.create("true", host={"Binds": ["copy:/etc"]})
    assert sorted(os.listdir(plugin.directory / "copy")) == ["group", "passwd"]
    assert plugin.mounted["copy"] == []
    engine.post(f"/containers/{container}/start")
    assert engine.wait(container) == 0


def test_volumes_that_were_made_elsewhere(plugin: VolumePlugin, engine: TempEngine) -> None:
    plugin._create({"Name": "theirs"})
    listed = engine.request("GET", "/v1.24/volumes?filters=%7B%22dangling%22:[%22true%22]}").json()
    assert [(each["Name"], each["Driver"]) for each in listed["Volumes"]] == [("theirs", "far")]
    assert engine.request("GET", "/v1.24/volumes/theirs").json()["Driver"] == "far"
    container = engine.started("true", host={"Binds": ["theirs:/v"]})
    assert engine.wait(container) == 0
    assert engine.inspect(container)["Mounts"][0]["Driver"] == "far"
    assert plugin.names("Create") == []
    assert engine.request("GET", "/v1.24/volumes/absent").status == 404


def test_what_a_plugin_refuses(plugin: VolumePlugin, engine: TempEngine) -> None:
    plugin.answers["VolumeDriver.Create"] = {"Err": "out of space"}
    assert make(engine, 500, Name="v1", Driver="far")["message"] == "create v1: out of space"
    plugin.answers["VolumeDriver.Create"] = (500, {"Err": "broken"})
    assert make(engine, 500, Name="v1", Driver="far")["message"] == "create v1: VolumeDriver.Create: broken"
    plugin.answers["VolumeDriver.Create"] = (503, b"not JSON")
    assert make(engine, 500, Name="v1", Driver="far")["message"] == "create v1: VolumeDriver.Create: not JSON"
    plugin.answers["VolumeDriver.Create"] = b"not JSON"
    assert "sent an invalid reply" in make(engine, 500, Name="v1", Driver="far")["message"]
    plugin.answers.clear()
    assert engine.request("GET", "/v1.24/volumes").json()["Volumes"] == []
    make(engine, Name="v1", Driver="far")
    plugin.answers["VolumeDriver.Mount"] = {"Err": "no such target"}
    container = engine.create("true", host={"Binds": ["v1:/v:nocopy", "mine:/m"]})
    answer = engine.request("POST", f"/v1.24/containers/{container}/start")
    assert (answer.status, answer.message) == (500, "mount v1: no such target")
    plugin.answers["VolumeDriver.Mount"] = {"Mountpoint": "relative"}
    assert "not an absolute path" in engine.request("POST", f"/v1.24/containers/{container}/start").message
    plugin.answers.clear()
    engine.post(f"/containers/{container}/start")
    assert engine.wait(container) == 0
    assert engine.request("DELETE", f"/v1.24/containers/{container}").status == 204
    plugin.answers["VolumeDriver.Remove"] = {"Err": "still exported"}
    answer = engine.request("DELETE", "/v1.24/volumes/v1")
    assert (answer.status, answer.message) == (500, "remove v1: still exported")
    assert engine.request("GET", "/v1.24/volumes/v1").status == 200
    plugin.answers.clear()


def test_a_failed_create_gives_the_plugins_volume_back(plugin: VolumePlugin, engine: TempEngine) -> None:
    body = {"Image": "busybox", "HostConfig": {"Binds": ["aaa:/v", "b:/w"], "VolumeDriver": "far"}}
    plugin.answers["VolumeDriver.Mount"] = {"Err": "no"}
    answer = engine.request(
        "POST", "/v1.24/containers/create", body | {"HostConfig": {**body["HostConfig"], "Binds": ["aaa:/etc"]}}
    )  # type: ignore[dict-item]
    assert answer.status == 500, answer
    assert plugin.volumes == {} and plugin.names("Remove") == ["aaa"]


def test_a_plugin_that_does_not_answer(plugin: VolumePlugin, engine: TempEngine) -> None:
    plugin.delays["VolumeDriver.List"] = 60
    listed = engine.request("GET", "/v1.24/volumes").json()
    assert listed["Warnings"] == ['list far: VolumeDriver.List: plugin "far" did not answer within 5 seconds']
    plugin.delays.clear()
    assert engine.request("GET", "/v1.24/volumes").json()["Warnings"] == []


def test_unmounts_that_hang_delay_an_end_once(plugin: VolumePlugin, engine: TempEngine) -> None:
    binds = [f"v{number}:/v{number}" for number in range(6)]
    container = engine.started("sleep", "600", host={"Binds": binds, "VolumeDriver": "far"})
    plugin.delays["VolumeDriver.Unmount"] = 60
    begin = time.monotonic()
    assert engine.request("DELETE", f"/v1.24/containers/{container}?force=1").status == 204
    # seconds: six in turn take 30 at least, all at once 5
    assert time.monotonic() - begin < 25 and len(plugin.names("Unmount")) == 6


def test_engined_stop_does_not_wait_for_an_unmount_that_began_before() -> None:
    with TempEngine("--plugin-timeout", "600") as own:
        own.load_busybox()
        with contextlib.closing(VolumePlugin(own.base / "far")) as plugin:
            plugin.listen(own.run / "plugins" / "far.sock")
            container = own.started("sleep", "600", host={"Binds": ["v:/v", "w:/w"], "VolumeDriver": "far"})
            plugin.delays["VolumeDriver.Unmount"] = 600
            own.post(f"/containers/{container}/stop?t=0")
            until("it unmounts", lambda: plugin.names("Unmount"))
            own.stop()
            own.assert_gone()


def test_the_daemon_listens_while_the_clean_up_of_a_last_run_hangs() -> None:
    """And restart policies of other containers are carried out."""
    with TempEngine("--plugin-timeout", "600") as own:
        own.load_busybox()
        with contextlib.closing(VolumePlugin(own.base / "far")) as plugin:
            plugin.listen(own.run / "plugins" / "far.sock")
            always = {"RestartPolicy": {"Name": "always"}}
            other = own.started("sleep", "600", host=always)
            container = own.started("sleep", "600", host=always | {"Binds": ["v:/v"], "VolumeDriver": "far"})
            pids = [own.inspect(each)["State"]["Pid"] for each in (other, container)]
            own.kill9()
            plugin.delays["VolumeDriver.Unmount"] = 600
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            own.start()
            until("the other runs again", lambda: own.inspect(other)["State"]["Running"])
            assert plugin.names("Unmount") == ["v"] and not own.inspect(container)["State"]["Pid"]
            own.stop()


def test_a_socket_without_a_server(engine: TempEngine, plugged: TempEngine) -> None:
    dead = VolumePlugin(plugged.base / "dead")
    dead.listen(plugged.base / "sockets" / "dead.sock")
    dead.close()
    try:
        answer = make(engine, 500, Name="v1", Driver="dead")
        assert answer["message"].startswith("create v1: error looking up volume plugin dead: Plugin.Activate")
        # Calls that ask all plugins do not wait for it, or the reason would be the time limit.
        (warning,) = engine.request("GET", "/v1.24/volumes").json()["Warnings"]
        assert warning.startswith('error looking up volume plugin dead: Plugin.Activate: plugin "dead": ')
        assert engine.request("GET", "/v1.24/volumes/unknown").status == 404
        # It appears while the engine waits for it.
        threading.Timer(0.5, dead.listen, [plugged.base / "sockets" / "dead.sock"]).start()
        make(engine, Name="v1", Driver="dead")
        assert engine.request("DELETE", "/v1.24/volumes/v1").status == 204
    finally:
        dead.close()
        (plugged.base / "sockets" / "dead.sock").unlink()


def test_a_driver_that_went_away(plugin: VolumePlugin, engine: TempEngine, plugged: TempEngine) -> None:
    make(engine, Name="v1", Driver="far")
    socket = plugged.base / "sockets" / "far.sock"
    hidden = socket.with_suffix(".away")
    socket.rename(hidden)
    try:
        answer = engine.request("DELETE", "/v1.24/volumes/v1")
        assert answer.status == 404
        assert answer.message == 'remove v1: error looking up volume plugin far: plugin "far" not found'
        assert [each["Name"] for each in engine.request("GET", "/v1.24/volumes").json()["Volumes"]] == ["v1"]
    finally:
        hidden.rename(socket)


def test_files_name_plugins(engine: TempEngine, plugged: TempEngine) -> None:
    specifications = plugged.base / "specs"
    plugin = VolumePlugin(plugged.base / "filed", scope="global")
    (specifications / "filed.spec").write_text(plugin.listen() + "\n")
    other = VolumePlugin(plugged.base / "json", implements=("NetworkDriver",))
    (specifications / "net.json").write_text(f'{{"Name":"net","Addr":"{other.listen()}"}}')
    (specifications / "bad.json").write_text("{")
    try:
        made = make(engine, Name="v1", Driver="filed")
        assert (made["Scope"], made["Mountpoint"]) == ("global", str(plugged.base / "filed" / "v1"))
        assert engine.request("GET", "/v1.24/volumes/v1").json() == made
        container = engine.started("touch", "/v/f", host={"Binds": ["v1:/v"]})
        assert engine.wait(container) == 0 and Path(made["Mountpoint"], "f").exists()
        assert make(engine, 404, Name="v2", Driver="net")["message"] == (
            "create v2: error looking up volume plugin net: "
            "plugin net does not implement the requested interface: VolumeDriver"
        )
        assert "error looking up volume plugin bad" in make(engine, 500, Name="v2", Driver="bad")["message"]
        assert len(engine.request("GET", "/v1.24/volumes").json()["Warnings"]) == 1  # not of `net`
        engine.remove_all()
        assert engine.request("DELETE", "/v1.24/volumes/v1").status == 204
    finally:
        for name in ("filed.spec", "net.json", "bad.json"):
            (specifications / name).unlink()
        plugin.close()
        other.close()


def test_a_restart_of_the_daemon_keeps_the_plugins_count(plugin: VolumePlugin, engine: TempEngine) -> None:
    container = engine.started("sleep", "100", host={"Binds": ["v1:/v"], "VolumeDriver": "far"})
    assert len(plugin.mounted["v1"]) == 1
    engine.restart()
    assert engine.request("DELETE", f"/v1.24/containers/{container}?force=1").status == 204
    assert plugin.mounted["v1"] == []
    assert engine.request("DELETE", "/v1.24/volumes/v1").status == 204


def test_force_drops_a_volume_that_its_plugin_keeps(plugin: VolumePlugin, engine: TempEngine) -> None:
    make(engine, Name="v1", Driver="far")
    plugin.answers["VolumeDriver.Remove"] = {"Err": "the array is busy"}
    refused = engine.request("DELETE", "/v1.55/volumes/v1")
    assert (refused.status, "the array is busy" in refused.message) == (500, True)
    assert engine.request("DELETE", "/v1.55/volumes/v1?force=1").status == 204
    assert plugin.names("Remove") == ["v1", "v1"]
    plugin.volumes.clear()
    assert engine.request("GET", "/v1.55/volumes/v1").status == 404


def test_when_a_plugin_made_a_volume(plugin: VolumePlugin, engine: TempEngine) -> None:
    for said, shown in (("2020-01-02T03:04:05Z", "2020-01-02T03:04:05Z"), ("long ago", None)):
        view = {"Name": "v1", "Mountpoint": "", "CreatedAt": said}
        plugin.answers |= {"VolumeDriver.Get": {"Volume": view}, "VolumeDriver.List": {"Volumes": [view]}}
        (listed,) = engine.request("GET", "/v1.55/volumes").json()["Volumes"]
        assert listed.get("CreatedAt") == engine.request("GET", "/v1.55/volumes/v1").json().get("CreatedAt") == shown
    plugin.answers.clear()


def test_answers_without_an_object(plugin: VolumePlugin, engine: TempEngine) -> None:
    """Go's JSON of an empty error, and no body at all."""
    for number, answer in enumerate((b"null\n", b"", b" \n")):
        plugin.answers["VolumeDriver.Create"] = plugin.answers["VolumeDriver.Get"] = answer
        assert make(engine, Name=f"n{number}", Driver="far")["Name"] == f"n{number}"
        plugin.answers["VolumeDriver.Remove"] = answer
        assert engine.request("DELETE", f"/v1.24/volumes/n{number}").status == 204


def test_a_plugin_that_does_not_show_what_it_has_made(plugin: VolumePlugin, engine: TempEngine) -> None:
    plugin.answers["VolumeDriver.Get"] = {}
    assert make(engine, Name="dark", Driver="far", DriverOpts={"a": "1"})["Driver"] == "far"
    answer = engine.request("GET", "/v1.24/volumes/dark")
    assert answer.status == 404 and "no such volume" in answer.json()["message"]
    plugin.answers.clear()
    assert engine.request("GET", "/v1.24/volumes/dark").json()["Status"] == {"options": {"a": "1"}}


def test_a_volume_that_its_plugin_has_lost(plugin: VolumePlugin, engine: TempEngine) -> None:
    make(engine, Name="lost", Driver="far", DriverOpts={"a": "1"})
    del plugin.volumes["lost"]
    made = make(engine, Name="lost", Driver="far", DriverOpts={"a": "2"})
    assert made["Status"] == {"options": {"a": "2"}}, "it is made again"
    container = engine.create("true", HostConfig={"Binds": ["lost:/x"]})
    del plugin.volumes["lost"]
    for driver in ("far", "local"):
        answer = make(engine, 409, Name="lost", Driver=driver)
        assert "found references to volume 'lost' in driver 'far'" in answer["message"]
    engine.request("DELETE", f"/v1.24/containers/{container}")
    assert make(engine, Name="lost", Driver="local")["Driver"] == "local"


def test_a_plugin_that_does_not_answer_has_lost_nothing(plugin: VolumePlugin, engine: TempEngine) -> None:
    make(engine, Name="kept", Driver="far")
    plugin.cut["VolumeDriver.Get"] = 0.0
    assert "already exists" in make(engine, 409, Name="kept", Driver="local")["message"]
    plugin.cut.clear()
    assert engine.request("GET", "/v1.24/volumes/kept").json()["Driver"] == "far"


def test_plugins_are_asked_for_a_volume_at_once(engine: TempEngine, plugged: TempEngine) -> None:
    both = threading.Barrier(2, timeout=5 * PATIENCE)

    class Waits(VolumePlugin):
        def answer(self, method: str, body: dict[str, Any]) -> Any:
            if method == "VolumeDriver.Get":
                both.wait()
            return super().answer(method, body)

    found = [Waits(plugged.base / name) for name in ("one", "two")]
    for each in found:
        each.listen(plugged.base / "sockets" / f"{each.directory.name}.sock")
    try:
        assert engine.request("GET", "/v1.24/volumes/nowhere").status == 404
        assert not both.broken
    finally:
        for each in found:
            each.close()
            (plugged.base / "sockets" / f"{each.directory.name}.sock").unlink()


def test_calls_without_arguments_have_an_object(engine: TempEngine, plugged: TempEngine) -> None:
    """Docker's own test plugin decodes the body of each of them."""
    fresh = VolumePlugin(plugged.base / "fresh")
    socket = plugged.base / "sockets" / "fresh.sock"
    fresh.listen(socket)
    try:
        make(engine, Name="v", Driver="fresh")
        assert engine.request("GET", "/v1.24/volumes").status == 200
        assert {method for method, _ in fresh.calls} >= {"VolumeDriver.Capabilities", "VolumeDriver.List"}
        assert fresh.bare == ["Plugin.Activate"]
        assert engine.request("DELETE", "/v1.24/volumes/v").status == 204
    finally:
        fresh.close()
        socket.unlink()


def test_a_prune_leaves_volumes_of_plugins(plugin: VolumePlugin, engine: TempEngine) -> None:
    make(engine, Name="v1", Driver="far")
    answer = engine.request("POST", "/v1.41/volumes/prune")
    assert answer.json() == {"VolumesDeleted": [], "SpaceReclaimed": 0}
    assert plugin.names("Remove") == []
    assert make(engine, Driver="far")["Labels"] == {"com.docker.volume.anonymous": ""}


def test_a_part_of_a_volume(plugin: VolumePlugin, engine: TempEngine) -> None:
    place = Path(make(engine, Name="v1", Driver="far")["Mountpoint"])
    (place / "d").mkdir(parents=True)
    (place / "out").symlink_to("/etc")
    for subpath, status in (("d", 204), ("out", 400), ("missing", 404)):
        mount = {"Type": "volume", "Source": "v1", "Target": "/p", "VolumeOptions": {"Subpath": subpath}}
        container = engine.create("touch", "/p/file", host={"Mounts": [mount]})
        assert engine.request("POST", f"/v1.55/containers/{container}/start").status == status, subpath
        if status == 204:
            assert engine.wait(container) == 0
    assert os.listdir(place / "d") == ["file"]
    until("the plugin's mounts are given back", lambda: plugin.mounted["v1"] == [])
