"""Undocumented habits of clients of different ages: paths, query values, types, old shapes."""

from __future__ import annotations

import base64
import json
import socket
import time
from urllib.parse import quote

import pytest

from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, until


@pytest.fixture
def box(engine: TempEngine) -> str:
    """A created container's id."""
    engine.load_busybox()
    return engine.create("top", name="box")


def raw(engine: TempEngine, request_line: str, *fields: str) -> bytes:
    return engine.send(
        "\r\n".join([f"{request_line} HTTP/1.1", "Host: x", "Connection: close", *fields, "", ""]).encode()
    )


def test_a_name_with_its_slash(engine: TempEngine, box: str) -> None:
    answer = engine.request("GET", "/v1.24/containers/%2Fbox/json")
    assert answer.status == 200 and answer.json()["Id"] == box
    moved = raw(engine, "GET /v1.24/containers//box/json?size=1")
    assert moved.startswith(b"HTTP/1.1 301 ") and b"\r\nLocation: /v1.24/containers/box/json?size=1\r\n" in moved


def test_an_untyped_inspect_again_and_again(engine: TempEngine) -> None:
    """The docker CLI asks for a container of the name `ORG/IMAGE` first. The route of a path is
    remembered.
    """
    engine.load_busybox()
    assert engine.request("POST", "/v1.40/images/busybox/tag?repo=org/app").status == 201
    for _ in range(3):
        answer = engine.request("GET", "/v1.40/containers/org/app/json")
        assert (answer.status, answer.message) == (404, "No such container: org/app")
        assert "org/app:latest" in engine.docker("inspect", "org/app").out
    assert engine.request("DELETE", "/v1.40/images/org/app").status == 200


def test_options(engine: TempEngine) -> None:
    for path in ("/", "/v1.24/containers/json", "/nothing"):
        assert raw(engine, f"OPTIONS {path}").startswith(b"HTTP/1.1 200 ")


def test_a_request_without_host(engine: TempEngine) -> None:
    assert engine.send(b"GET /_ping HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert engine.send(b"GET /_ping HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_outside_a_swarm(engine: TempEngine) -> None:
    left = engine.request("POST", "/v1.24/swarm/leave?force=1")
    assert left.status == 406 and left.message == "This node is not part of a swarm"
    for path in ("/swarm", "/nodes", "/services", "/tasks"):
        answer = engine.request("GET", "/v1.24" + path)
        assert answer.status == 406 and answer.message.startswith("This node is not a swarm manager.")
    assert engine.docker("node", "ls", status=1).err.count("This node is not a swarm manager.") == 1
    assert engine.request("GET", "/v1.24/info").json()["Swarm"]["LocalNodeState"] == "inactive"
    assert engine.request("GET", "/v1.24/secrets").status == 404


def test_a_delete_without_a_name(engine: TempEngine) -> None:
    answer = engine.request("DELETE", "/v1.24/containers/")
    assert answer.status == 400 and answer.message == "No container name or ID supplied"


@pytest.mark.parametrize("value", ["1", "true", "True", "TRUE", "yes", "t", "x"])
def test_words_for_true(engine: TempEngine, box: str, value: str) -> None:
    listed = engine.request("GET", f"/v1.24/containers/json?all={value}").json()
    assert [each["Id"] for each in listed] == [box]


@pytest.mark.parametrize("value", ["0", "false", "False", "no", "none", ""])
def test_words_for_false(engine: TempEngine, box: str, value: str) -> None:
    assert engine.request("GET", f"/v1.24/containers/json?all={value}").json() == []


@pytest.mark.parametrize(
    "path",
    [
        "/containers/create",
        "/containers/box/exec",
        "/containers/box/update",
        "/exec/box/start",
        "/commit?container=box",
        "/networks/create",
        "/networks/none/connect",
        "/networks/none/disconnect",
        "/volumes/create",
        "/plugins/pull?remote=127.0.0.1:1/x",
        "/plugins/x/set",
        "/plugins/x/upgrade?remote=127.0.0.1:1/x",
        "/swarm/init",
        "/swarm/join",
    ],
)
@pytest.mark.usefixtures("box")
def test_the_type_of_a_json_body(engine: TempEngine, path: str) -> None:
    """A page in a browser cannot send JSON with its type to another site without being asked."""
    body = b"[]" if "plugins" in path else b'{"Image":"no-such-image","Availability":"x"}'
    for given in (None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        headers = {} if given is None else {"Content-Type": given}
        refused = engine.request("POST", f"/v1.40{path}", body, headers)
        assert refused.status == 400, refused
        assert "must be 'application/json'" in refused.message, refused
    accepted = engine.request("POST", f"/v1.40{path}", body, {"Content-Type": "application/json; charset=utf-8"})
    assert "Content-Type" not in accepted.body.decode(), accepted
    if path.startswith("/commit"):
        assert engine.request("DELETE", f"/v1.40/images/{accepted.json()['Id']}").status == 200


def test_bodies_that_need_no_type(engine: TempEngine) -> None:
    """Archives, empty bodies and the body of a start that says nothing."""
    container = engine.create("true")
    put = engine.request("PUT", f"/v1.40/containers/{container}/archive?path=/", b"\0" * 1024, {})
    assert put.status == 200, put
    assert engine.request("POST", "/v1.40/images/load", b"\0" * 1024, {}).status != 415
    assert engine.request("POST", "/v1.40/volumes/create", b"", {"Content-Type": "text/plain"}).status == 201
    assert engine.request("POST", f"/v1.40/commit?container={container}&repo=typed", b"", {}).status == 201
    assert engine.request("DELETE", "/v1.40/images/typed").status == 200
    assert engine.request("POST", f"/v1.40/containers/{container}/start", b"{}", {}).status == 204
    assert engine.request("POST", "/v1.40/volumes/prune?filters=" + quote('{"all":["1"]}')).status == 200


def test_events_of_the_past(engine: TempEngine, box: str) -> None:
    """`docker events --until` without `--since` begins with the stored events."""
    time.sleep(1.1)
    found = engine.request("GET", f"/v1.24/events?until={int(time.time())}").body
    assert ("create", box) in [(event["Action"], event["Actor"]["ID"]) for event in map(json.loads, found.splitlines())]
    scoped = engine.request("GET", f'/v1.24/events?until={int(time.time())}&filters={{"scope":["swarm"]}}')
    assert scoped.status == 200 and scoped.body == b""


def test_a_kill_of_a_stopped_container(engine: TempEngine, box: str) -> None:
    for version, status in (("1.18", 204), ("1.19", 204), ("1.20", 500), ("1.24", 500)):
        assert engine.request("POST", f"/v{version}/containers/box/kill").status == status


def test_an_invalid_filter(engine: TempEngine) -> None:
    answer = engine.request("GET", '/v1.24/images/json?filters={"dangling":["invalid"]}')
    assert answer.status == 400 and answer.message == "Invalid filter 'dangling=invalid'"


def test_detach_keys_that_are_none(engine: TempEngine, box: str) -> None:
    answer = engine.request("POST", "/v1.24/containers/box/attach?stream=1&detachKeys=ctrl-A,a")
    assert answer.status == 400 and answer.message.startswith("Invalid escape keys (ctrl-A,a)")


def test_a_file_of_1970(engine: TempEngine, box: str) -> None:
    engine.post("/containers/box/start")
    created = engine.request("POST", "/v1.24/containers/box/exec", {"Cmd": ["touch", "-d", "@0", "/old"]}).json()
    engine.request("POST", f"/v1.24/exec/{created['Id']}/start", {"Detach": True})

    def stat() -> str:
        answer = engine.request("HEAD", "/v1.24/containers/box/archive?path=/old")
        if answer.status != 200:
            return ""
        return str(json.loads(base64.b64decode(answer.headers["x-docker-container-path-stat"]))["mtime"])

    until("the file has its time", lambda: stat() == "1970-01-01T00:00:00Z")


def test_config_at_old_versions(engine: TempEngine) -> None:
    engine.load_busybox()
    host = {"Memory": 64 << 20, "CpuShares": 512}
    engine.request(
        "POST", "/v1.24/containers/create?name=limited", {"Image": "busybox", "Cmd": ["top"], "HostConfig": host}
    )
    for version in ("1.18", "1.19"):
        config = engine.request("GET", f"/v{version}/containers/limited/json").json()["Config"]
        assert (config["Memory"], config["CpuShares"], config["Cpuset"]) == (64 << 20, 512, "")
        assert config["MacAddress"] == "" and config["NetworkDisabled"] is False and config["ExposedPorts"] == {}
    config = engine.request("GET", "/v1.20/containers/limited/json").json()["Config"]
    assert config["VolumeDriver"] == "" and "Memory" not in config
    config = engine.request("GET", "/v1.21/containers/limited/json").json()["Config"]
    assert not config.keys() & {"Memory", "VolumeDriver", "MacAddress", "NetworkDisabled", "ExposedPorts"}


@pytest.mark.own
def test_info_shows_the_configuration() -> None:
    options = ("--insecure-registry", "10.0.0.0/8", "--insecure-registry", "r.example:5000")
    with TempEngine(*options, "--registry-mirror", "https://mirror.example") as engine:
        info = engine.request("GET", "/v1.24/info").json()
        registries = info["RegistryConfig"]
        assert (
            "10.0.0.0/8" in registries["InsecureRegistryCIDRs"] and "127.0.0.0/8" in registries["InsecureRegistryCIDRs"]
        )
        assert registries["IndexConfigs"]["r.example:5000"]["Secure"] is False
        assert registries["Mirrors"] == ["https://mirror.example/"]
        assert info["Plugins"]["Network"] == ["bridge", "host", "ipvlan", "macvlan", "null", "overlay"]
        everywhere = ["awslogs", "fluentd", "gelf", "json-file", "local", "none", "splunk", "syslog"]
        assert [name for name in info["Plugins"]["Log"] if name != "journald"] == everywhere
        assert info["LoggingDriver"] == "json-file"


@pytest.mark.own
def test_connections_wait_when_descriptors_are_used_up() -> None:
    """With 256 descriptors 400 clients are served one after the other; none is reset, and the log
    stays short.
    """
    with TempEngine(within=("prlimit", "--nofile=256:256")) as engine:
        clients = []
        for _ in range(400):
            client = socket.socket(socket.AF_UNIX)
            client.settimeout(30 * PATIENCE)
            client.connect(engine.socket)
            client.sendall(b"GET /v1.24/info HTTP/1.1\r\nHost: x\r\n\r\n")
            clients.append(client)
        for client in clients:
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
            client.close()
        assert engine.log().count("accepting connections is paused") == 1
        assert len(engine.log().splitlines()) < 50
