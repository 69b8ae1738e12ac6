"""Invalid requests are refused, in JSON that names the fault, whatever bytes arrive; and they
change nothing."""

from __future__ import annotations

import json
import socket

import pytest

from tests.support.engine import client
from tests.support.engine.harness import BREATH, TempEngine, until


def parsed(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and body of the first answer in `raw`, which must be framed
    by Content-Length.
    """
    head, separator, rest = raw.partition(b"\r\n\r\n")
    assert separator, raw
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, rest[: int(headers["content-length"])]


def message(raw: bytes, status: int) -> str:
    """The `message` of the one error answer in `raw`, which must have `status` and be JSON as
    all errors are.
    """
    found, headers, body = parsed(raw)
    assert found == status, raw
    assert headers["content-type"].startswith("application/json")
    value = json.loads(body)
    assert list(value) == ["message"] and value["message"], value
    assert "Traceback" not in value["message"]
    return str(value["message"])


@pytest.mark.own
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /_ping\r\n\r\n",
        b"GET /_ping HTTP/9.9\r\n\r\n",
        b"GE T /_ping HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /_ping HTTP/1.1\r\nno colon here\r\n\r\n",
        b"GET /_ping HTTP/1.1\r\nHost: x\r\nna me: value\r\n\r\n",
        b"GET /_ping HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
        b"POST /containers/create HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /containers/create HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /containers/create HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /containers/create HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n",
        b"POST /containers/create HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /_ping HTTP/1.1\r\nHost: x\r\nBig: " + b"a" * 70000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=lambda value: value[:24].decode("latin-1") + f"…{len(value)}",
)
def test_malformed_http(engine: TempEngine, request_bytes: bytes) -> None:
    assert message(engine.send(request_bytes), 400)
    assert engine.containers() == []


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/nowhere"),
        ("GET", "/v1.24/nowhere"),
        ("GET", "/v1.24/containers/a/b/c"),
        ("GET", "/"),
        ("GET", "/v1.24"),
        ("DELETE", "/v1.24/version"),
        ("PATCH", "/v1.24/containers/json"),
        ("PUT", "/_ping"),
    ],
)
@pytest.mark.own  # dockerd answers some of these with another status
def test_unknown_path_or_method(engine: TempEngine, method: str, target: str) -> None:
    answer = engine.request(method, target)
    assert (answer.status, answer.json()) == (404, {"message": "page not found"})


@pytest.mark.own
def test_unsupported_version(engine: TempEngine) -> None:
    newer = engine.request("GET", "/v1.99/containers/json")
    assert newer.status == 400
    assert newer.message == (
        "client version 1.99 is too new. Maximum supported API version is 1.55: "
        "client is newer than server (client API version: 1.99, server API version: 1.55), "
        "this engine serves 1.18 to 1.55"
    )
    older = engine.request("GET", "/v1.17/containers/json")
    assert older.status == 400
    assert older.message.startswith("client version 1.17 is too old. Minimum supported API version is 1.18")
    for version in range(18, 25):
        assert engine.request("GET", f"/v1.{version}/containers/json").body == b"[]\n"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", ""),
        (b"{", ""),
        (b"[]", ""),
        (b'"busybox"', ""),
        (b"{} trailing", ""),
        (b'{"Image": 3}', "Image"),
        (b'{"Image": "busybox", "Cmd": 3}', "Cmd"),
        (b'{"Image": "busybox", "Env": "A=b"}', "Env"),
        (b'{"Image": "busybox", "HostConfig": []}', "HostConfig"),
        (b'{"Image": "busybox", "HostConfig": {"Memory": "64m"}}', "Memory"),
        (b'{"Image": "busybox", "Labels": {"a": 1}}', "Labels"),
        (b"\xff\xfe", ""),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.own
def test_bad_create_bodies(engine: TempEngine, body: bytes, word: str) -> None:
    answer = engine.request("POST", "/v1.24/containers/create", body, {"Content-Type": "application/json"})
    assert answer.status == 400, answer
    assert word.lower() in answer.message.lower()
    assert engine.containers() == []


@pytest.mark.own
def test_json_body_over_its_limit(engine: TempEngine) -> None:
    answer = engine.send(
        b"POST /v1.24/containers/create HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000000000\r\n\r\n{"
    )
    assert message(answer, 413)
    assert engine.containers() == []


@pytest.mark.parametrize(
    ("method", "target", "status", "words"),
    [
        ("GET", "/containers/nobody/json", 404, "No such container: nobody"),
        ("POST", "/containers/nobody/start", 404, "No such container: nobody"),
        ("POST", "/containers/nobody/stop", 404, "No such container: nobody"),
        ("POST", "/containers/nobody/kill", 404, "No such container: nobody"),
        ("POST", "/containers/nobody/wait", 404, "No such container: nobody"),
        ("POST", "/containers/nobody/resize?h=1&w=1", 404, "No such container: nobody"),
        ("GET", "/containers/nobody/logs?stdout=1", 404, "No such container: nobody"),
        ("DELETE", "/containers/nobody", 404, "No such container: nobody"),
        ("GET", "/images/nothing/json", 404, "No such image: nothing:latest"),
        ("DELETE", "/images/nothing", 404, "No such image: nothing:latest"),
        ("POST", "/images/nothing/tag?repo=x&tag=y", 404, "No such image: nothing:latest"),
    ],
)
def test_what_is_not_there(engine: TempEngine, method: str, target: str, status: int, words: str) -> None:
    answer = engine.request(method, f"/v1.24{target}")
    assert answer.status == status, answer
    assert words in answer.message


@pytest.mark.own
@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("/containers/json?limit=many", "limit"),
        ("/containers/json?filters=nonsense", "filters"),
        ("/events?filters=nonsense", "filters"),
        ("/containers/{id}/logs?stdout=1&since=yesterday", "since"),
    ],
)
def test_bad_queries_name_the_parameter(engine: TempEngine, target: str, word: str) -> None:
    identifier = engine.create("true")
    answer = engine.request("GET", f"/v1.24{target.format(id=identifier)}")
    assert answer.status == 400, answer
    assert word in answer.message


@pytest.mark.own  # dockerd's attach errors are plain text
def test_attach_to_nobody(engine: TempEngine) -> None:
    for upgrade in ({}, {"Connection": "Upgrade", "Upgrade": "tcp"}):
        answer = engine.request("POST", "/v1.24/containers/nobody/attach?stream=1&stdout=1", headers=upgrade)
        assert (answer.status, answer.message) == (404, "No such container: nobody")


def test_logs_need_a_stream(engine: TempEngine) -> None:
    answer = engine.request("GET", f"/v1.24/containers/{engine.create('true')}/logs")
    assert answer.status == 400, answer


def test_bad_container_names(engine: TempEngine) -> None:
    for name in ("a/b", "a%20b", "%2F", "ä", "-", "a%00b"):
        answer = engine.request(
            "POST",
            f"/v1.24/containers/create?name={name.replace('ä', '%C3%A4')}",
            {"Image": "busybox", "Cmd": ["true"]},
        )
        if name == "-" and answer.status == 201:
            continue  # the documented pattern allows it, dockerd's does not
        assert answer.status == 400, answer
        assert answer.message
    assert len(engine.containers()) <= 1


def test_states_refuse_what_does_not_fit(engine: TempEngine) -> None:
    identifier = engine.create("sleep", "600")
    assert engine.request("POST", f"/v1.24/containers/{identifier}/stop").status == 304
    assert engine.request("POST", f"/v1.24/containers/{identifier}/kill").status == 500
    engine.post(f"/containers/{identifier}/start")
    started = engine.request("POST", f"/v1.24/containers/{identifier}/start")
    assert (started.status, started.body) == (304, b"")
    assert engine.request("DELETE", f"/v1.24/containers/{identifier}").status == 409
    assert engine.request("POST", f"/v1.24/containers/{identifier}/kill?signal=NONSENSE").status == 400
    assert engine.inspect(identifier)["State"]["Running"]


@pytest.mark.own
def test_head_has_no_body_and_the_connection_stays(engine: TempEngine) -> None:
    raw = engine.send(
        b"HEAD /_ping HTTP/1.1\r\nHost: x\r\n\r\nGET /_ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    first, _, rest = raw.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    for line in (b"Api-Version: 1.55", b"Ostype: linux", b"Server: engined/", b"Docker-Experimental: false"):
        assert line.lower() in first.lower(), first
    assert parsed(rest)[2] == b"OK"


def test_pipelining_in_one_segment_and_byte_by_byte(engine: TempEngine) -> None:
    one = b"GET /_ping HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /v1.24/containers/json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert engine.send(one * 50 + last).count(b"HTTP/1.1 200 ") == 51
    with client.connect(engine.socket) as connection:
        for byte in one + last:
            connection.sendall(bytes((byte,)))
        assert client.read_to_end(connection).count(b"HTTP/1.1 200 ") == 2


def test_chunked_body_and_expect_continue(engine: TempEngine) -> None:
    body = json.dumps({"Image": "busybox", "Cmd": ["true"]}).encode()
    head = (
        b"POST /v1.24/containers/create?name=chunked HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    )
    with client.connect(engine.socket) as connection:
        connection.sendall(head + b"Expect: 100-continue\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        for byte in body:
            connection.sendall(b"1\r\n%c\r\n" % byte)
        connection.sendall(b"0\r\n\r\n")
        assert client.read_to_end(connection).startswith(b"HTTP/1.1 201 ")
    assert engine.inspect("chunked")["Path"] == "true"


def test_half_a_body_then_gone_changes_nothing(engine: TempEngine) -> None:
    body = json.dumps({"Image": "busybox", "Cmd": ["true"]}).encode()
    connection = client.connect(engine.socket)
    connection.sendall(
        b"POST /v1.24/containers/create HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1]
    )
    connection.close()
    assert engine.containers() == []
    assert engine.request("GET", "/_ping").body == b"OK"


@pytest.mark.own
def test_clients_that_vanish_in_every_way(engine: TempEngine) -> None:
    """Streams whose reader disconnected abruptly must not keep descriptors, tasks or watchers."""
    identifier = engine.started("sleep", "600")
    until("idle", lambda: engine.request("GET", "/_ping").status == 200)
    before = engine.descriptors()
    for target in (
        "GET /v1.24/events",
        f"GET /v1.24/containers/{identifier}/logs?stdout=1&follow=1",
        f"POST /v1.24/containers/{identifier}/wait",
        f"POST /v1.24/containers/{identifier}/attach?stream=1&stdout=1",
        f"POST /v1.24/containers/{identifier}/attach?stream=1&stdin=1&stdout=1&logs=1",
        "POST /v1.24/images/load",
    ):
        for _ in range(20):
            connection = client.connect(engine.socket)
            connection.sendall(
                f"{target} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
                if "load" in target
                else f"{target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            )
            if "wait" not in target and "load" not in target:
                assert connection.recv(12) == b"HTTP/1.1 200"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
    until("descriptors of gone clients are closed", lambda: engine.descriptors() <= before + BREATH)
    assert engine.inspect(identifier)["State"]["Running"]


@pytest.mark.own
def test_an_idle_connection_costs_nobody(engine: TempEngine) -> None:
    idle = [client.connect(engine.socket) for _ in range(200)]
    assert engine.request("GET", "/_ping").status == 200
    for connection in idle:
        connection.close()
