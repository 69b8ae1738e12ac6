"""The engine about itself, at old and new versions: headers, /version, /info and /events."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.builds.building import build, image
from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until

NEWEST = "1.55"


def get(engine: TempEngine, path: str, version: str = "") -> Any:
    answer = engine.request("GET", f"{version and '/v' + version}{path}")
    assert answer.status == 200, answer
    return answer.json()


# --- headers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_ping(engine: TempEngine, method: str) -> None:
    answer = engine.request(method, "/_ping")
    assert answer.status == 200 and answer.body == (b"OK" if method == "GET" else b"")
    assert answer.headers["content-length"] == ("2" if method == "GET" else "0")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    expected = {
        "api-version": NEWEST,
        "builder-version": "1",
        "cache-control": "no-cache, no-store, must-revalidate",
        "docker-experimental": "false",
        "ostype": "linux",
        "pragma": "no-cache",
        "swarm": "inactive",
    }
    assert answer.headers.items() >= expected.items()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1.56/info", 400),
        ("GET", "/v1.17/info", 400),
        ("GET", "/v1.55/nothing", 404),
        ("POST", "/v1.55/auth", 400),
        ("GET", "/v1.55/services", 503),
        ("POST", "/v1.55/plugins/pull", 400),
        ("GET", "/v1.55/plugins/x/json", 404),
        ("GET", "/v1.55/containers/x/checkpoints", 501),
        ("POST", "/v1.55/containers/x/checkpoints", 501),
        ("DELETE", "/v1.55/containers/x/checkpoints/y", 501),
        ("POST", "/v1.55/build/prune", 200),
        ("GET", "/v1.24/system/df", 404),
        ("GET", "/v1.25/system/df", 200),
        ("GET", "/v1.42/system/df?type=x", 400),
        ("GET", "/v1.41/system/df?type=x", 200),
    ],
)
def test_statuses(engine: TempEngine, method: str, path: str, status: int) -> None:
    """Clients compare the whole Content-Type of an error."""
    answer = engine.request(method, path)
    assert answer.status == status, answer
    assert answer.headers["api-version"] == NEWEST and answer.headers["ostype"] == "linux"
    assert answer.headers["content-type"] == "application/json"
    if status != 200:
        assert answer.message


def test_a_version_that_is_not_served_names_both_bounds(engine: TempEngine) -> None:
    for version in ("1.17", "1.56", "2.0"):
        words = engine.request("GET", f"/v{version}/info").message
        assert "1.18" in words and NEWEST in words, words


# --- /version and /info ---------------------------------------------------------------------------


def test_version(engine: TempEngine) -> None:
    found = get(engine, "/version")
    assert (found["ApiVersion"], found["MinAPIVersion"]) == (NEWEST, "1.18")
    first, *others = found["Components"]
    assert first["Name"] == "Engine" and found["Version"] == f"29.7.2+engined.{first['Version']}"
    assert all(isinstance(value, str) for value in first["Details"].values())
    same = {"ApiVersion", "Arch", "BuildTime", "GitCommit", "GoVersion", "KernelVersion", "MinAPIVersion", "Os"}
    assert {name: first["Details"][name] for name in same} == {name: found[name] for name in same}
    assert others and all(each["Version"] for each in others)
    assert not {"Components", "Platform"} & get(engine, "/version", "1.24").keys()


def test_info(engine: TempEngine) -> None:
    found = get(engine, "/info")
    assert found["CgroupVersion"] in ("1", "2") and isinstance(found["Warnings"], list)
    assert found["DefaultRuntime"] in found["Runtimes"] and found["RuncCommit"]["ID"]
    assert all(option.startswith("name=") for option in found["SecurityOptions"])
    older = get(engine, "/info", "1.24")
    assert [option.split("=")[1].split(",")[0] for option in found["SecurityOptions"]] == older["SecurityOptions"]
    assert older["ClusterStore"] == "" and "Warnings" not in older


def test_devices_that_vendors_describe(tmp_path: Path) -> None:
    specification = {
        "cdiVersion": "0.6.0",
        "kind": "example.com/lamp",
        "devices": [{"name": "one", "containerEdits": {"env": ["LAMP=1"]}}],
    }
    with TempEngine("--cdi-spec-directory", str(tmp_path)) as engine:
        found = get(engine, "/info")
        assert found["CDISpecDirs"] == [str(tmp_path)] and "DiscoveredDevices" not in found
        (tmp_path / "lamp.json").write_text(json.dumps(specification))
        assert get(engine, "/info")["DiscoveredDevices"] == [{"Source": "cdi", "ID": "example.com/lamp=one"}]
        assert "DiscoveredDevices" not in get(engine, "/info", "1.49")


# --- /events --------------------------------------------------------------------------------------


def past(engine: TempEngine, since: float, version: str, **filters: list[str]) -> list[dict[str, Any]]:
    query = f"since={since:.9f}&until={time.time():.9f}&filters={quote(json.dumps(filters))}"
    answer = engine.request("GET", f"/v{version}/events?{query}")
    assert answer.status == 200, answer
    return [json.loads(line) for line in answer.body.splitlines()]


def test_events_of_a_container(engine: TempEngine) -> None:
    engine.load_busybox()
    begin = time.time()
    identifier = engine.started("sh", "-c", "exit 3", name="told", Labels={"tier": "back", "name": "other"})
    engine.wait(identifier)

    def dead(version: str) -> list[dict[str, Any]]:
        return past(engine, begin, version, type=["container"], event=["die"], container=[identifier])

    [event] = until("it has died", lambda: dead(NEWEST))
    assert event.keys() == {"Type", "Action", "Actor", "scope", "time", "timeNano"}
    assert event["scope"] == "local" and event["Actor"]["ID"] == identifier
    attributes = event["Actor"]["Attributes"]
    assert int(attributes.pop("execDuration")) >= 0
    assert attributes == {"image": "busybox", "name": "told", "exitCode": "3", "tier": "back"}

    [older] = dead("1.51")
    old = {"status": "die", "id": identifier, "from": "busybox"}
    assert older == event | {"Actor": older["Actor"]} | old
    [oldest] = dead("1.24")
    assert "scope" not in oldest and oldest.items() >= old.items()


def test_events_of_images_that_are_made(builder: TempEngine) -> None:
    builder.load_busybox()
    identifier = builder.create("true")
    begin = time.time()
    answer = builder.request("POST", f"/v1.44/commit?container={identifier}&repo=made&tag=1")
    assert answer.status == 201, answer
    committed = answer.json()["Id"]
    built = build(builder, "FROM busybox\nLABEL a=b\nLABEL c=d\n")
    made = [committed, image(builder, built.id)["Id"]]
    for version, expected in (("1.46", made), ("1.45", [])):
        found = past(builder, begin, version, type=["image"], event=["create"])
        assert [event["Actor"]["ID"] for event in found] == expected


def test_events_of_prunes(own_engine: TempEngine) -> None:
    """`docker system prune` asks in this order."""
    engine = own_engine
    engine.create("true")
    engine.request("POST", f"/v{NEWEST}/networks/create", {"Name": "unused"})
    engine.request("POST", f"/v{NEWEST}/volumes/create", {"Name": "unused"})
    begin = time.time()
    reclaimed = {}
    for kind, path in (
        ("container", "/containers/prune"),
        ("network", "/networks/prune"),
        ("volume", '/volumes/prune?filters={"all":["1"]}'),
        ("image", '/images/prune?filters={"dangling":["0"]}'),
        ("builder", "/build/prune?all=1"),
    ):
        answer = engine.request("POST", f"/v{NEWEST}{path}")
        assert answer.status == 200, answer
        reclaimed[kind] = str(answer.json().get("SpaceReclaimed", 0))
    assert int(reclaimed["image"]) > 0
    found = past(engine, begin, NEWEST, event=["prune"])
    assert [event["Type"] for event in found] == [*reclaimed]
    for event in found:
        assert event["Actor"] == {"ID": "", "Attributes": {"reclaimed": reclaimed[event["Type"]]}}


@pytest.mark.parametrize(
    ("version", "accept", "expected"),
    [
        (NEWEST, "", "application/jsonl"),
        ("1.51", "", "application/json"),
        ("1.51", "application/jsonl", "application/jsonl"),
        ("1.24", "application/json-seq", "application/json-seq"),
    ],
)
def test_the_media_type_of_events(engine: TempEngine, version: str, accept: str, expected: str) -> None:
    """Its head comes at once, before the first event."""
    name = "v-of-events"
    filters = quote(json.dumps({"volume": [name]}))
    with client.connect(engine.socket) as connection:
        lines = [f"GET /v{version}/events?filters={filters} HTTP/1.1", "Host: x"]
        if accept:
            lines.append(f"Accept: {accept}")
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        received = read_until(connection, b"\r\n\r\n")
        assert f"Content-Type: {expected}\r\n".encode() in received, received
        engine.request("POST", "/v1.44/volumes/create", {"Name": name})
        begin = b"\x1e{" if expected == "application/json-seq" else b"\r\n{"
        assert begin in read_until(connection, b"}\n", received)
    engine.request("DELETE", f"/v1.44/volumes/{name}")


def read_until(connection: socket.socket, end: bytes, received: bytes = b"") -> bytes:
    """What has come from the connection, with `end` in it."""
    while end not in received:
        chunk = connection.recv(65536)
        assert chunk, received
        received += chunk
    return received
