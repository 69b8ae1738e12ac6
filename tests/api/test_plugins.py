"""Managed plugins through the API, the docker CLI and docker-py, with a real registry: install,
set, enable, upgrade, push, create, remove, and what each version of the API says.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import docker.errors
import pytest

from tests.support.engine.harness import Result, TempEngine, until
from tests.support.images.archives import Image, Node, digest, directory, docker_archive, tar
from tests.support.images.registry import DOCKER_MANIFEST, Registry
from tests.support.plugins import images as plugin_images

pytestmark = pytest.mark.own

ROOT = tar([directory("bin"), Node("bin/plugin", b"no program")])
"""Of plugins that are never enabled."""


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with Registry() as found:
        yield found


@pytest.fixture(scope="module")
def plugged() -> Iterator[TempEngine]:
    with TempEngine() as found:
        found.load_busybox()
        yield found


@pytest.fixture
def engine(plugged: TempEngine) -> Iterator[TempEngine]:
    """No plugin outlives its test."""
    yield plugged
    plugged.remove_all()
    for volume in plugged.request("GET", "/v1.24/volumes").json()["Volumes"]:
        plugged.request("DELETE", f"/v1.24/volumes/{volume['Name']}?force=1")
    for plugin in plugins(plugged):
        assert plugged.request("DELETE", f"/v1.41/plugins/{plugin['Id']}?force=1").status == 200
    assert os.listdir(plugged.root / "tmp") == []


def plugins(engine: TempEngine, query: str = "") -> list[Any]:
    answer = engine.request("GET", f"/v1.41/plugins{query}")
    assert answer.status == 200, answer
    found: list[Any] = answer.json()
    return found


def config(**more: Any) -> dict[str, Any]:
    """Of a plugin that is never enabled."""
    document = plugin_images.config("MountingVolumes", "docker.volumedriver/1.0", **more)
    document["rootfs"] = {"type": "layers", "diff_ids": [digest(more.pop("layer", ROOT))]}
    return document


def put(registry: Registry, repository: str, tag: str = "latest", layer: bytes = ROOT, **more: Any) -> str:
    """Put a plugin that is never enabled. Returns its name."""
    document = {**config(**more), "rootfs": {"type": "layers", "diff_ids": [digest(layer)]}}
    plugin_images.put(registry, repository, tag, document, layer=layer)
    return f"{registry.host}/{repository}" + (f":{tag}" if tag != "latest" else "")


def cli(engine: TempEngine, *arguments: str, status: int = 0, version: str = "1.41") -> Result:
    done = subprocess.run(
        ["docker", *arguments],
        env=engine.environment | {"DOCKER_API_VERSION": version},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    result = Result(done.returncode, done.stdout, done.stderr)
    assert done.returncode == status, result
    return result


def accepted(engine: TempEngine, name: str) -> Any:
    answer = engine.request("GET", f"/v1.41/plugins/privileges?remote={quote(name)}")
    assert answer.status == 200, answer
    return answer.json()


def pull(engine: TempEngine, name: str, local: str = "", privileges: Any = None, verb: str = "", **more: Any) -> Any:
    """The answer to a pull, or an upgrade of `verb`."""
    body = accepted(engine, name) if privileges is None else privileges
    target = f"/v1.41/plugins/{verb}upgrade" if verb else "/v1.41/plugins/pull"
    return engine.request("POST", f"{target}?remote={quote(name)}&name={quote(local)}", body, **more)


def failure(answer: Any) -> str:
    """The error at the end of a stream."""
    assert answer.status == 200, answer
    return str(json.loads(answer.body.splitlines()[-1])["error"])


# --- the docker CLI and docker-py -----------------------------------------------------------------


def test_a_life_with_the_cli(registry: Registry, engine: TempEngine) -> None:
    document = plugin_images.config("MountingVolumes", "docker.volumedriver/1.0")
    plugin_images.put(registry, "v/life", "latest", document)
    name = f"{registry.host}/v/life"
    out = cli(engine, "plugin", "install", "--grant-all-permissions", name, "DEBUG=1").out
    assert f"Installed plugin {name}" in out and "Pull complete" in out
    assert cli(engine, "plugin", "ls", "--format", "{{.Name}} {{.Enabled}}").line == f"{name}:latest true"
    assert cli(engine, "plugin", "inspect", "-f", "{{.Settings.Env}}", name).line == "[PYTHONHOME=/usr DEBUG=1]"
    assert "cannot set on an active plugin" in cli(engine, "plugin", "set", name, "DEBUG=2", status=1).err
    cli(engine, "volume", "create", "-d", name, "vol")
    said = cli(engine, "run", "--rm", "-v", "vol:/v", "busybox", "sh", "-c", "echo hi >/v/f; cat /v/f")
    assert said.line == "hi"
    assert f"plugin {name}:latest is in use by volume vol" in cli(engine, "plugin", "disable", name, status=1).err
    assert "is in use" in cli(engine, "plugin", "rm", name, status=1).err
    cli(engine, "volume", "rm", "vol")
    assert "is active" in cli(engine, "plugin", "rm", name, status=1).err
    cli(engine, "plugin", "disable", name)
    refused = cli(engine, "volume", "create", "-d", name, "vol", status=1).err
    assert f'plugin "{name}:latest" found but disabled' in refused
    assert cli(engine, "plugin", "ls", "-f", "enabled=true", "-q").out == ""
    cli(engine, "plugin", "set", name, "DEBUG=0", "args=-a -b")
    assert '"PYTHONHOME" is not settable' in cli(engine, "plugin", "set", name, "PYTHONHOME=/", status=1).err
    cli(engine, "plugin", "upgrade", "--grant-all-permissions", name)
    assert cli(engine, "plugin", "inspect", "-f", "{{.Settings.Args}}", name).line == "[-a -b]"
    cli(engine, "plugin", "set", name, "args=")
    cli(engine, "plugin", "enable", name)
    cli(engine, "plugin", "rm", "--force", name)
    assert plugins(engine) == []


def test_other_names_and_create_and_push_with_the_cli(registry: Registry, engine: TempEngine, tmp_path: Path) -> None:
    name = put(registry, "v/named", "1.2")
    cli(engine, "plugin", "install", "--grant-all-permissions", "--disable", "--alias", "mine", name)
    (plugin,) = plugins(engine)
    assert plugin["Name"] == "mine:latest" and plugin["PluginReference"] == name and not plugin["Enabled"]
    assert cli(engine, "plugin", "inspect", "-f", "{{.Name}}", plugin["Id"][:7]).line == "mine:latest"
    document = {key: value for key, value in config().items() if key != "rootfs"}
    (tmp_path / "config.json").write_text(json.dumps(document))
    (tmp_path / "rootfs" / "bin").mkdir(parents=True)
    (tmp_path / "rootfs" / "bin" / "plugin").write_text("made")
    made = f"{registry.host}/v/made"
    assert cli(engine, "plugin", "create", made, str(tmp_path)).line == made
    assert f"plugin {made}:latest already exists" in cli(engine, "plugin", "create", made, str(tmp_path), status=1).err
    out = cli(engine, "plugin", "push", made).out
    assert "Pushed" in out and "latest: digest: sha256:" in out
    cli(engine, "plugin", "rm", made)
    cli(engine, "plugin", "install", "--grant-all-permissions", "--disable", made)
    raw = registry.manifest("v/made", "latest")[1]
    layer = json.loads(raw)["layers"][0]
    packed = registry.request("GET", f"/v2/v/made/blobs/{layer['digest']}")[2]
    assert b"made" in gzip.decompress(packed)
    assert "Layer already exists" in cli(engine, "plugin", "push", made).out
    assert registry.manifest("v/made", "latest")[1] == raw, "the same bytes"


def test_docker_py(registry: Registry, engine: TempEngine, tmp_path: Path) -> None:
    name = put(registry, "v/py")
    with contextlib.closing(engine.client()) as client:
        client.api._version = "1.41"
        plugin = client.plugins.install(name, "py:v1")
        assert plugin.name == "py:v1" and not plugin.enabled and client.plugins.get("py:v1").id == plugin.id
        plugin.configure({"DEBUG": "1"})
        plugin.reload()
        assert "DEBUG=1" in plugin.settings["Env"]
        assert [each.name for each in client.plugins.list()] == ["py:v1"]
        for _ in plugin.upgrade(name):
            pass
        with pytest.raises(docker.errors.APIError, match="already disabled"):
            plugin.disable()
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "rootfs").mkdir()
        made = client.plugins.create("empty", str(tmp_path), gzip=True)
        assert made.name == "empty:latest"
        with pytest.raises(docker.errors.APIError):
            made.enable()
        for each in (plugin, made):
            each.remove()
        with pytest.raises(docker.errors.NotFound):
            client.plugins.get("py:v1")


# --- the API --------------------------------------------------------------------------------------


def test_the_privileges_must_be_those_that_were_shown(registry: Registry, engine: TempEngine) -> None:
    mounts = [{"Name": "m", "Source": "/var/lib", "Destination": "/m", "Type": "bind", "Options": ["rbind"]}]
    name = put(registry, "v/asks", PidHost=True, Mounts=mounts, Network={"Type": "host"})
    wanted = accepted(engine, name)
    assert wanted == [
        {"Name": "network", "Description": "permissions to access a network", "Value": ["host"]},
        {"Name": "host pid namespace", "Description": "allow access to host pid namespace", "Value": ["true"]},
        {"Name": "mount", "Description": "host path to mount", "Value": ["/var/lib"]},
        {
            "Name": "capabilities",
            "Description": "list of additional capabilities required",
            "Value": ["CAP_SYS_ADMIN"],
        },
    ]
    for other in ([], wanted[1:], wanted[:-1], [*wanted, {"Name": "device", "Value": ["/dev/fuse"]}]):
        answer = pull(engine, name, privileges=other)
        assert answer.status == 400 and "incorrect privileges" in answer.json()["message"], answer
    answer = engine.request("POST", f"/v1.41/plugins/pull?remote={name}", b"null")
    assert answer.status == 400 and "incorrect privileges" in answer.json()["message"]
    assert plugins(engine) == []
    answer = pull(engine, name, privileges=wanted[::-1])
    assert answer.status == 200 and answer.headers["docker-plugin-name"] == f"{name}:latest", answer
    put(registry, "v/asks", PidHost=True, Mounts=mounts, Network={"Type": "host"}, IpcHost=True)
    answer = pull(engine, name, privileges=wanted, verb=f"{name}/")
    assert answer.status == 400 and "not accepted: host ipc namespace [true]" in answer.json()["message"]
    assert pull(engine, name, verb=f"{name}/").status == 200
    assert engine.request("GET", f"/v1.41/plugins/{name}/json").json()["Config"]["IpcHost"] is True


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "words"),
    [
        ("GET", "/plugins/a/b:c/json", None, 404, 'plugin "a/b:c" not found'),
        ("DELETE", "/plugins/a?force=1", None, 404, 'plugin "a" not found'),
        ("POST", "/plugins/a/enable?timeout=0", None, 404, 'plugin "a" not found'),
        ("POST", "/plugins/a/enable?timeout=-1", None, 400, "timeout"),
        ("POST", "/plugins/a/disable", None, 404, 'plugin "a" not found'),
        ("POST", "/plugins/a/set", ["a=b"], 404, 'plugin "a" not found'),
        ("POST", "/plugins/a/set", {"a": "b"}, 400, "invalid JSON body"),
        ("POST", "/plugins/a/push", None, 404, 'plugin "a" not found'),
        ("POST", "/plugins/a/upgrade?remote=x", [], 404, 'plugin "a" not found'),
        ("POST", "/plugins/a/upgrade", [], 400, "remote"),
        ("POST", "/plugins/pull", [], 400, "missing parameter: remote"),
        ("POST", "/plugins/pull?remote=x//y", [], 400, "invalid reference format"),
        ("POST", "/plugins/pull?remote=x&name=A", [], 400, "must be lowercase"),
        ("POST", "/plugins/pull?remote=x", None, 400, "body is empty"),
        ("POST", "/plugins/pull?remote=x", [{"Name": 1}], 400, "expected string"),
        ("GET", "/plugins/privileges", None, 400, "missing parameter: remote"),
        ("POST", "/plugins/create", b"", 400, "missing parameter: name"),
        ("POST", "/plugins/create?name=x", b"", 400, "config.json not found"),
        ("GET", '/plugins?filters={"name":["x"]}', None, 400, "name"),
        ("GET", '/plugins?filters={"enabled":["maybe"]}', None, 400, "enabled"),
    ],
)
def test_refusals(engine: TempEngine, method: str, target: str, body: Any, status: int, words: str) -> None:
    answer = engine.request(method, f"/v1.41{target}", body)
    assert answer.status == status and words in answer.json()["message"], answer


def test_filters_and_versions(registry: Registry, engine: TempEngine) -> None:
    name = put(registry, "v/shown", DockerVersion="17.06", PidHost=True)
    authz = {"Types": ["docker.authz/1.0", "docker.metricscollector/1.0"], "Socket": "p.sock"}
    put(registry, "v/authz", Interface=authz)
    for each in ("shown", "authz"):
        assert pull(engine, f"{registry.host}/v/{each}").status == 200

    def names(filters: Any) -> list[str]:
        return [each["Name"].split("/")[-1] for each in plugins(engine, f"?filters={quote(json.dumps(filters))}")]

    assert names({}) == names({"enabled": ["false"]}) == names({"enable": ["0"]}) == ["authz:latest", "shown:latest"]
    assert names({"capability": ["volumedriver"]}) == names({"capability": {"VolumeDriver": True}}) == ["shown:latest"]
    assert names({"capability": ["metricscollector"], "enabled": ["false"]}) == ["authz:latest"]
    assert names({"enabled": {"true": True}}) == []

    newest = engine.request("GET", f"/v1.55/plugins/{name}/json").json()
    assert newest["Config"]["DockerVersion"] == "17.06" and newest["Config"]["Interface"]["ProtocolScheme"] == ""
    assert "DockerVersion" not in engine.request("GET", f"/v1.55/plugins/{registry.host}/v/authz/json").json()["Config"]
    assert newest["Config"]["PidHost"] is True and newest["PluginReference"] == f"{name}:latest"
    for version, lacks in (
        ("1.37", {"ProtocolScheme"}),
        ("1.28", {"ProtocolScheme", "PidHost", "IpcHost"}),
        ("1.25", {"ProtocolScheme", "PidHost", "IpcHost", "PluginReference"}),
    ):
        found = engine.request("GET", f"/v{version}/plugins/{name}/json").json()
        keys = {*found, *found["Config"], *found["Config"]["Interface"]}
        assert {*newest, *newest["Config"], *newest["Config"]["Interface"]} - keys == lacks, version
        listed = engine.request("GET", f"/v{version}/plugins").json()
        assert found in listed
    assert engine.request("POST", f"/v1.25/plugins/{name}/upgrade?remote=x", []).status == 400
    assert engine.request("GET", "/v1.23/plugins").status == 404


def test_version_1_24(registry: Registry, engine: TempEngine) -> None:
    """Plain statuses, no question for privileges, a shape of its own."""
    document = plugin_images.config("MountingVolumes", "docker.volumedriver/1.0")
    plugin_images.put(registry, "v/old", "latest", document)
    name = f"{registry.host}/v/old"
    answer = engine.request("POST", f"/v1.24/plugins/pull?name={name}")
    assert answer.status == 200, answer
    assert [each["Name"] for each in answer.json()] == ["network", "capabilities"]
    found = engine.request("GET", f"/v1.24/plugins/{name}").json()
    assert engine.request("GET", "/v1.24/plugins").json() == [found]
    settings = {"Mounts": [], "Env": ["PYTHONHOME=/usr", "DEBUG=0"], "Args": [], "Devices": []}
    assert found.pop("Config") == settings
    manifest = found.pop("Manifest")
    assert found.pop("Id") and found == {"Name": name, "Tag": "latest", "Active": False}
    assert {key: manifest[key] for key in ("ManifestVersion", "Interface", "Capabilities", "Workdir", "Devices")} == {
        "ManifestVersion": "v0",
        "Interface": {"Types": ["docker.volumedriver/1.0"], "Socket": "plugin.sock"},
        "Capabilities": ["CAP_SYS_ADMIN"],
        "Workdir": "/app",
        "Devices": [],
    }

    def verb(method: str, target: str, status: int, words: str = "") -> None:
        answer = engine.request(method, f"/v1.24/plugins/{target}")
        assert answer.status == status, answer
        if words:
            assert words in answer.json()["message"]
        else:
            assert answer.body == b"" and answer.headers["content-type"].startswith("text/plain")

    verb("POST", f"pull?name={name}", 500, f"plugin {name}:latest already exists")
    verb("POST", "pull?name=x//y", 500, "invalid reference format")
    verb("POST", f"{name}/disable", 500, "is already disabled")
    verb("POST", f"{name}/enable", 200)
    verb("POST", f"{name}/enable", 500, "is already enabled")
    verb("DELETE", name, 500, f"plugin {name}:latest is active")
    assert engine.request("GET", f"/v1.24/plugins/{name}").json()["Active"] is True
    verb("POST", f"{name}/disable", 200)
    verb("DELETE", name, 200)
    verb("DELETE", name, 404, f'plugin "{name}" not found')
    verb("POST", f"{name}/enable", 404, "not found")


def test_states_are_conflicts_since_1_25(registry: Registry, engine: TempEngine) -> None:
    document = plugin_images.config("MountingVolumes", "docker.volumedriver/1.0")
    plugin_images.put(registry, "v/busy", "latest", document)
    name = f"{registry.host}/v/busy"
    assert pull(engine, name).status == 200

    def verb(method: str, target: str, status: int, body: Any = None, version: str = "1.41") -> Any:
        answer = engine.request(method, f"/v{version}/plugins/{target}", body)
        assert answer.status == status, answer
        return answer

    verb("POST", f"pull?remote={name}", 409, [])
    verb("POST", f"create?name={name}", 409, b"")
    verb("POST", f"{name}/disable", 409)
    verb("POST", f"{name}/enable?timeout=20", 200)
    verb("POST", f"{name}/enable", 409)
    verb("POST", f"{name}/set", 409, ["DEBUG=1"])
    verb("POST", f"{name}/upgrade?remote={name}", 409, [])
    verb("DELETE", name, 409)
    assert engine.request("POST", "/v1.41/volumes/create", {"Name": "held", "Driver": name}).status == 201
    assert "in use by volume held" in verb("POST", f"{name}/disable", 409).json()["message"]
    verb("POST", f"{name}/disable?force=1", 409, version="1.27")
    assert "in use by volume held" in verb("DELETE", name, 409).json()["message"]
    verb("POST", f"{name}/disable?force=1", 200)
    verb("POST", f"{name}/set", 204, ["DEBUG=1"])
    verb("POST", f"{name}/enable", 200)
    gone = verb("DELETE", f"{name}?force=true", 200).json()
    assert gone["Name"] == f"{name}:latest" and not gone["Enabled"]


def test_events(registry: Registry, engine: TempEngine) -> None:
    name = put(registry, "v/events")
    assert pull(engine, name).status == 200
    (plugin,) = plugins(engine)
    assert engine.request("POST", f"/v1.41/plugins/{name}/push").status == 200
    assert engine.request("DELETE", f"/v1.41/plugins/{name}").status == 200
    now = time.time_ns()
    window = f"since=0&until={now // 10**9}.{now % 10**9:09}"
    filters = quote(json.dumps({"plugin": [plugin["Id"]]}))
    answer = engine.request("GET", f"/v1.41/events?{window}&filters={filters}")
    events = [json.loads(line) for line in answer.body.splitlines()]
    assert [event["Action"] for event in events] == ["pull", "push", "remove"]
    assert {(event["Type"], event["Actor"]["Attributes"]["name"]) for event in events} == {("plugin", f"{name}:latest")}


# --- images and plugins ---------------------------------------------------------------------------


def test_an_image_is_no_plugin_and_the_reverse(registry: Registry, engine: TempEngine) -> None:
    name = put(registry, "v/plugin")
    kind = plugin_images.CONFIG_TYPE
    answer = engine.request("POST", f"/v1.41/images/create?fromImage={name}&tag=latest")
    assert answer.status == 400 and answer.json()["message"] == f'Encountered remote "{kind}"(plugin) when fetching'
    assert kind in cli(engine, "pull", name, status=1).err
    registry.put("v/image", "latest", Image([ROOT], []), media_type=DOCKER_MANIFEST)
    for query in ("privileges?remote=", "pull?remote="):
        method = "GET" if query.startswith("privileges") else "POST"
        answer = engine.request(method, f"/v1.41/plugins/{query}{registry.host}/v/image", [])
        assert answer.status == 400 and "(image) when fetching" in answer.json()["message"], answer
    assert cli(engine, "plugin", "install", "--grant-all-permissions", f"{registry.host}/v/none", status=1).err


def test_layers_are_shared_and_survive_their_image(registry: Registry, engine: TempEngine) -> None:
    shared = tar([Node("bin/plugin", os.urandom(5000))])
    name = put(registry, "v/shares", layer=shared)
    archive = docker_archive(Image([shared], ["shared:latest"]))
    kind = {"Content-Type": "application/x-tar"}
    assert engine.request("POST", "/v1.41/images/load", archive, kind).status == 200
    assert b"Already exists" in pull(engine, name).body
    assert engine.request("DELETE", "/v1.41/images/shared").status == 200
    assert engine.request("POST", '/v1.41/images/prune?filters={"dangling":["false"]}').status == 200
    engine.load_busybox()
    before = layers(engine)
    assert "Layer already exists" in cli(engine, "plugin", "push", name).out
    assert engine.request("DELETE", f"/v1.41/plugins/{name}").status == 200
    assert len(before) - len(layers(engine)) == 2, "its layer and its snapshot"


def layers(engine: TempEngine) -> set[str]:
    return {each for each in os.listdir(engine.root / "layers") if each.isdecimal()}


# --- a registry that lies -------------------------------------------------------------------------


def test_a_registry_that_lies(registry: Registry, engine: TempEngine) -> None:
    before = layers(engine)
    name = f"{registry.host}/v/lies"
    other = tar([Node("bin/plugin", b"something else")])
    plugin_images.put(registry, "v/lies", "latest", config(), layer=other)
    assert "diff_id" in failure(pull(engine, name))
    document = {**config(), "rootfs": {"type": "layers", "diff_ids": []}}
    plugin_images.put(registry, "v/lies", "none", document, layer=ROOT)
    assert pull(engine, f"{name}:none", "counted").status == 200, "the manifest vouches for it"
    assert engine.request("DELETE", "/v1.41/plugins/counted").status == 200
    # the registry's files are changed behind its back
    sent = plugin_images.put(registry, "v/lies", "config", config(), layer=ROOT)
    wanted = json.loads(sent.manifest)["config"]["digest"]
    blob = registry.base / "data/docker/registry/v2/blobs/sha256" / wanted[7:9] / wanted[7:] / "data"
    raw = blob.read_bytes()
    blob.write_bytes(raw.replace(b"CAP_SYS_ADMIN", b"CAP_SYS_CHOWN"))
    answer = engine.request("GET", f"/v1.41/plugins/privileges?remote={name}:config")
    assert answer.status == 500 and "verification failed" in answer.json()["message"], answer
    blob.write_bytes(raw)
    assert plugins(engine) == [] and layers(engine) == before


def test_credentials(engine: TempEngine) -> None:
    with Registry(password=True) as guarded:
        plugin_images.put(guarded, "v/secret", "latest", config(), layer=ROOT)
        name = f"{guarded.host}/v/secret"
        assert engine.request("GET", f"/v1.41/plugins/privileges?remote={name}").status == 404
        answer = engine.request("GET", f"/v1.41/plugins/privileges?remote={name}", None, guarded.auth)
        assert answer.status == 200, answer
        assert pull(engine, name, privileges=answer.json(), headers=guarded.auth).status == 200
        answer = engine.request("POST", f"/v1.41/plugins/{name}/push", None, guarded.auth)
        assert "error" not in json.loads(answer.body.splitlines()[-1])
        assert "error" in json.loads(engine.request("POST", f"/v1.41/plugins/{name}/push").body.splitlines()[-1])


# --- restarts -------------------------------------------------------------------------------------


def test_a_daemon_that_is_killed_during_a_pull(registry: Registry, engine: TempEngine) -> None:
    before = layers(engine)
    name = put(registry, "v/cut", layer=tar([Node(f"noise{number}", os.urandom(1 << 20)) for number in range(40)]))
    command = ["docker", "plugin", "install", "--grant-all-permissions", "--disable", name]
    environment = engine.environment | {"DOCKER_API_VERSION": "1.41"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
        until("a layer is being made", lambda: layers(engine) - before)
        engine.kill9()
        client.wait()
    engine.start()
    # the pull may have ended before
    assert len(layers(engine) - before) == (2 if plugins(engine) else 0)


def test_a_restart_of_the_daemon(registry: Registry, engine: TempEngine) -> None:
    name = put(registry, "v/kept")
    assert pull(engine, name).status == 200
    assert engine.request("POST", f"/v1.41/plugins/{name}/set", ["DEBUG=1"]).status == 204
    before, kept = plugins(engine), layers(engine)
    engine.kill9()
    engine.start()
    assert plugins(engine) == before and layers(engine) == kept
    assert engine.request("POST", f"/v1.41/plugins/{name}/push").status == 200
    engine.restart()
    assert plugins(engine) == before and layers(engine) == kept
