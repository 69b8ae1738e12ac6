"""Authorization plugins: real plugin servers that allow and deny requests to a real engine. The
numbers are those of the rules in docs/AUTHORIZATION.md.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.system.tls import verifying_context
from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until
from tests.support.plugins.protocol import AuthzPlugin, Plugin, Raw
from tests.unit.http.test_tls import _authority, _issue

pytestmark = pytest.mark.own

REQ, RES = "AuthZPlugin.AuthZReq", "AuthZPlugin.AuthZRes"


def guarded(*names: str) -> tuple[TempEngine, list[AuthzPlugin]]:
    """An engine that is not started, and the plugins of these names, which listen."""
    engine = TempEngine()
    plugins = [AuthzPlugin() for _ in names]
    for name, plugin in zip(names, plugins, strict=True):
        plugin.listen(engine.base / "sockets" / f"{name}.sock")
    engine.arguments = ("--plugin-socket-directory", str(engine.base / "sockets"))
    for name in names:
        engine.arguments += ("--authorization-plugin", name)
    return engine, plugins


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[TempEngine, AuthzPlugin]]:
    engine, (plugin,) = guarded("gate")
    with engine:
        engine.load_busybox()
        yield engine, plugin
    plugin.close()


@pytest.fixture
def plugin(both: tuple[TempEngine, AuthzPlugin]) -> Iterator[AuthzPlugin]:
    found = both[1]
    found.calls.clear()
    yield found
    reset(found)


@pytest.fixture
def engine(both: tuple[TempEngine, AuthzPlugin], plugin: AuthzPlugin) -> Iterator[TempEngine]:
    yield both[0]
    reset(plugin)
    both[0].remove_all()
    for name in volumes(both[0]):
        assert both[0].request("DELETE", f"/v1.24/volumes/{name}").status == 204


def reset(plugin: AuthzPlugin) -> None:
    plugin.answers.clear()
    plugin.delays.clear()
    plugin.deny = lambda method, body: ""


def volumes(engine: TempEngine) -> list[str]:
    return [each["Name"] for each in engine.request("GET", "/v1.24/volumes").json()["Volumes"]]


def raw(engine: TempEngine, *lines: str, body: bytes = b"") -> bytes:
    """The answer to one request with exactly these lines."""
    return engine.send("\r\n".join([*lines, "Host: x", "Connection: close", "", ""]).encode() + body)


def only(plugin: AuthzPlugin, uri: str, method: str = "AuthZReq") -> Any:
    """The one call about a target."""
    (found,) = [body for body in plugin.asked(method) if body["RequestUri"] == uri]
    return found


# --- what they are shown --------------------------------------------------------------------------


def test_what_a_plugin_is_shown(engine: TempEngine, plugin: AuthzPlugin) -> None:
    headers = {"X-Registry-Auth": "c2VjcmV0", "X-Registry-Config": "e30=", "Authorization": "Basic x", "X-Mine": "1"}
    target = "/v1.24/volumes/create?a=%7B&a=2"
    answer = engine.request("POST", target, {"Name": "v1"}, headers)
    assert answer.status == 201
    (asked,), (replied,) = plugin.asked(), plugin.asked("AuthZRes")
    assert json.loads(asked["RequestBody"]) == {"Name": "v1"}
    assert (asked["RequestMethod"], asked["RequestUri"]) == ("POST", target)
    assert asked["RequestHeaders"] == {
        "Accept-Encoding": "identity",
        "Content-Length": "14",
        "Content-Type": "application/json",
        "X-Mine": "1",
    }
    assert asked.keys() == {"RequestMethod", "RequestUri", "RequestHeaders", "RequestBody"}, "and no user"
    assert replied | asked == replied and replied["ResponseStatusCode"] == 201
    assert replied["ResponseBody"] == answer.body
    assert replied["ResponseHeaders"]["Content-Type"] == "application/json"
    assert replied["ResponseHeaders"]["Api-Version"] == answer.headers["api-version"]


def test_rule_1_the_content_type_does_not_decide(engine: TempEngine, plugin: AuthzPlugin) -> None:
    body = b'{"Name":"v1"}'
    for number, given in enumerate(("Content-Type: text/plain", "Content-Type: application/x-tar", "X: y")):
        head = ("POST /volumes/create HTTP/1.1", given, f"Content-Length: {len(body)}")
        assert raw(engine, *head, body=body).startswith(b"HTTP/1.1 400 "), "the handler demands JSON"
        assert plugin.asked()[number]["RequestBody"] == body, "but what it could read is shown"


def test_rule_2_the_framing_does_not_decide(engine: TempEngine, plugin: AuthzPlugin) -> None:
    body = b'{"Name":"v1"}'
    chunked = b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
    post = "POST /volumes/create HTTP/1.1", "Content-Type: application/json"
    assert raw(engine, *post, "Transfer-Encoding: chunked", body=chunked).startswith(b"HTTP/1.1 201 ")
    assert only(plugin, "/volumes/create")["RequestBody"] == body
    plugin.calls.clear()
    refused = raw(engine, *post, "Content-Length: 0", "Transfer-Encoding: chunked", body=chunked)
    assert refused.startswith(b"HTTP/1.1 400 ")
    assert raw(engine, *post, "Content-Length: 20", body=body).startswith(b"HTTP/1.1 400 "), "it is cut off"
    assert plugin.calls == []
    answer = raw(engine, *post, "Content-Length: 0", body=body)
    assert answer.startswith(b"HTTP/1.1 201 ") and b'"Name":"v1"' not in answer
    assert "RequestBody" not in only(plugin, "/volumes/create"), "neither has the handler seen it"


@pytest.mark.parametrize("size", [70_000, (4 << 20) - 1000])
def test_rule_2_a_large_body_is_shown_whole(engine: TempEngine, plugin: AuthzPlugin, size: int) -> None:
    body = json.dumps({"Name": "v1", "Labels": {"a": "x" * size}}).encode()
    assert engine.request("POST", "/v1.24/volumes/create", body).status == 201
    assert only(plugin, "/v1.24/volumes/create")["RequestBody"] == body
    plugin.calls.clear()
    answer = engine.request("POST", "/v1.24/volumes/create", b" " * (4 << 20) + body)
    assert (answer.status, answer.message) == (413, "request body is larger than 4194304 bytes")
    assert plugin.calls == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"Name":"a","Name":"b"}', "it has the key 'Name' twice"),
        ('{"Name":"a","name":"b"}', "it has the key 'name' as 'Name' and as 'name'"),
        ('{"Name":"a","Labels":{"x":"1","X":"2"}}', "it has the key 'X' as 'x' and as 'X'"),
        ('{"N\\u0061me":"a","Name":"b"}', "it has the key 'Name' twice"),
        ('{"Driver\u017f":1,"Drivers":2}', "it has the key 'Drivers' as"),
        ('{"Name":"a"}{"Name":"b"}', "extra data"),
        ("[" * 100_000, "it is nested too deeply"),
        ("\ufeff{}", "expecting value"),
        ("{", "expecting property name"),
    ],
)
def test_rule_3_a_body_that_two_parsers_could_read_in_two_ways(
    engine: TempEngine, plugin: AuthzPlugin, body: str, words: str
) -> None:
    answer = engine.request("POST", "/v1.24/volumes/create", body.encode())
    assert answer.status == 400 and answer.message.startswith(f"invalid JSON body: {words}")
    assert plugin.calls == [] and volumes(engine) == []


@pytest.mark.parametrize(
    ("target", "body", "name"),
    [
        ("/containers/create", {"Image": "busybox", "hostconfig": {"Privileged": True}}, "HostConfig"),
        ("/containers/create", {"Image": "busybox", "HostConfig": {"privileged": True}}, "Privileged"),
        ("/containers/create", {"Image": "busybox", "HoſtConfig": {}}, "HostConfig"),
        ("/containers/create", {"Image": "busybox", "privileged": True}, "Privileged"),
        ("/containers/create", {"Image": "busybox", "HostConfig": {}, "memory": 1 << 30}, "Memory"),
        ("/containers/create", {"Image": "busybox", "cpuset": "0"}, "Cpuset"),
        ("/volumes/create", {"name": "v1"}, "Name"),
        ("/networks/create", {"Name": "n", "ipam": {}}, "IPAM"),
        ("/networks/create", {"Name": "n", "IPAM": {"Config": [{"subnet": "10.9.0.0/24"}]}}, "Subnet"),
        ("/swarm/init", {"listenAddr": "127.0.0.1"}, "ListenAddr"),
    ],
)
def test_rule_3_fields_are_spelled_as_documented(
    engine: TempEngine, plugin: AuthzPlugin, target: str, body: Any, name: str
) -> None:
    """A plugin that looks for `HostConfig` would not see another spelling, which handlers accept
    otherwise."""
    answer = engine.request("POST", "/v1.24" + target, json.dumps(body, ensure_ascii=False).encode())
    assert (answer.status, answer.message.endswith(f"so the field must be spelled {name}")) == (400, True), answer
    assert volumes(engine) == []


def test_rule_3_json_in_the_query(engine: TempEngine, plugin: AuthzPlugin) -> None:
    answer = engine.request("GET", "/v1.24/volumes?filters=%7B%22name%22:[%22a%22],%22name%22:[%22b%22]%7D")
    assert answer.status == 400 and "filters: invalid JSON body: it has the key 'name' twice" in answer.message
    assert plugin.calls == []


def test_rule_4_an_upload_is_not_shown(engine: TempEngine, plugin: AuthzPlugin) -> None:
    context = b'{"not":"a tar"}'
    for target in ("/build?q=1", "/images/load", "/images/create?fromSrc=-"):
        answer = engine.request("POST", f"/v1.24{target}", context, {"Content-Type": "application/json"})
        assert answer.status in (200, 400, 500), answer
        assert "RequestBody" not in only(plugin, f"/v1.24{target}")
    plugin.deny = lambda method, body: "no uploads"
    head = "POST /v1.24/images/load HTTP/1.1", "Content-Length: 999999999", "Expect: 100-continue"
    answer = raw(engine, *head)
    assert answer.startswith(b"HTTP/1.1 403 ") and b"authorization denied by plugin gate: no uploads" in answer


def test_rule_4_other_handlers_get_no_body(engine: TempEngine, plugin: AuthzPlugin) -> None:
    container = engine.started("sleep", "1000")
    plugin.calls.clear()
    answer = engine.request("POST", f"/v1.24/containers/{container}/kill", {"signal": "SIGTERM"})
    assert answer.status == 204 and "RequestBody" not in plugin.asked()[0]
    assert engine.wait(container) == 137, "the default signal"


# --- faults ---------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Any, str]] = {
    "an error": ({"Allow": True, "Err": "no database"}, "no database"),
    "a status": ((500, {"Err": "broken"}), "broken"),
    "a status with text": ((503, b"try later"), "try later"),
    "no such call": ((404, b""), "does not implement this call"),
    "not JSON": (b"yes", "sent an invalid reply"),
    "another type": (b'{"Allow":"true"}', "sent an invalid reply"),
    "a list": (b"[true]", "sent an invalid reply"),
    "not HTTP": (Raw(b"hello\r\n\r\n"), "is not HTTP"),
    "nothing": (Raw(b""), "closed the connection without an answer"),
    "half an answer": (Raw(b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"Allow"'), "in the middle of its answer"),
    "half a chunk": (
        Raw(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"Allow":true}'),
        "in the middle of its answer",
    ),
    "an endless answer": (b'{"Allow":true}' + b" " * (9 << 20), "sent more than 8388608 bytes"),
    "endless headers": (Raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 3_000_000), "sent more than 8388608 bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", [REQ, RES])
def test_rule_5_a_fault_refuses(engine: TempEngine, plugin: AuthzPlugin, fault: str, method: str) -> None:
    given, words = FAULTS[fault]
    plugin.answers[method] = given
    answer = engine.request("POST", "/v1.24/volumes/create", {"Name": "v1"})
    assert answer.status == 500
    assert answer.message.startswith(f"plugin gate failed with error: {method}: ") and words in answer.message
    plugin.answers.clear()
    assert volumes(engine) == (["v1"] if method == RES else [])


@pytest.mark.parametrize("given", [{}, {"Allow": False}, b"", {"Msg": "yes"}, {"allow": False}])
def test_rule_5_only_true_allows(engine: TempEngine, plugin: AuthzPlugin, given: Any) -> None:
    plugin.answers[REQ] = given
    answer = engine.request("GET", "/v1.24/info")
    assert (answer.status, answer.message.partition(": ")[0]) == (403, "authorization denied by plugin gate")


def test_rule_5_a_plugin_that_hangs(engine: TempEngine, plugin: AuthzPlugin) -> None:
    plugin.delays[REQ] = 60
    begin = time.monotonic()
    answer = engine.request("POST", "/v1.24/volumes/create", {"Name": "v1"})
    assert time.monotonic() - begin > 9
    assert answer.status == 500
    words = 'AuthZPlugin.AuthZReq: plugin "gate" did not answer within 10 seconds'
    assert answer.message == f"plugin gate failed with error: {words}"
    plugin.delays.clear()
    assert volumes(engine) == []


def test_rule_5_death_between_request_and_reply(engine: TempEngine, plugin: AuthzPlugin) -> None:
    plugin.last = REQ
    try:
        answer = engine.request("POST", "/v1.24/volumes/create", {"Name": "v1"})
    finally:
        revive(engine, plugin)
    assert answer.status == 500
    # it cannot connect, or its connection waited to be accepted
    assert answer.message.startswith('plugin gate failed with error: AuthZPlugin.AuthZRes: plugin "gate"'), answer
    assert volumes(engine) == ["v1"], "it was made"


def revive(engine: TempEngine, plugin: AuthzPlugin) -> None:
    plugin.close()
    plugin.last = ""
    plugin.listen(engine.base / "sockets" / "gate.sock")


def test_a_plugin_that_is_restarted_between_two_calls(engine: TempEngine, plugin: AuthzPlugin) -> None:
    for keep in (True, False, True):
        assert engine.request("GET", "/v1.24/info").status == 200
        plugin.keep = keep
        revive(engine, plugin)
        before = plugin.connections
        for _ in range(3):
            assert engine.request("GET", "/v1.24/info").status == 200
        assert plugin.connections - before == (1 if keep else 6)
    plugin.close()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        asking = threads.submit(engine.request, "GET", "/v1.24/info")
        revive(engine, plugin)
        assert asking.result().status == 200, "it waits while the plugin starts"


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "//v1.24/info",
        "/v1.24//info",
        "/v1.24/containers/a%2fb/json",
        "/v1.24/containers/a%2Fb/json",
        "/v1.24/x/../info",
        "/v1.24/./info",
        "/v1.24/info/..",
        "/v1.24/%2e%2E/info",
        "/v1.24/x%2e./info",
        "/v1.24/%69nfo",
        "/v1%2E24/info",
        "/v1.24/inf%6F",
        "http://x//info",
        "/v1.24/images/..%2f..%2finfo/json",
    ],
)
def test_rule_6_targets_with_two_readings(engine: TempEngine, plugin: AuthzPlugin, target: str) -> None:
    for method in ("GET", "OPTIONS", "POST"):
        answer = raw(engine, f"{method} {target} HTTP/1.1")
        assert answer.startswith(b"HTTP/1.1 400 ") and b"authorization plugins are in use" in answer, answer
    assert plugin.calls == []


def test_rule_6_the_target_is_shown_as_it_is_routed(engine: TempEngine, plugin: AuthzPlugin) -> None:
    for sent, shown in (
        ("/v1.24/info?a=//..%2f%69", "/v1.24/info?a=//..%2f%69"),
        ("http://other/v1.24/info", "/v1.24/info"),
        ("/v1.24/info#/v1.24/version", "/v1.24/info"),
        ("/v1.24/images/a:5000/b%3Ac/json", "/v1.24/images/a:5000/b%3Ac/json"),
        ("/info", "/info"),
    ):
        plugin.calls.clear()
        raw(engine, f"GET {sent} HTTP/1.1")
        assert [each["RequestUri"] for each in plugin.asked()] == [shown]


# --- replies --------------------------------------------------------------------------------------


def test_rule_7_a_denied_reply(engine: TempEngine, plugin: AuthzPlugin) -> None:
    plugin.deny = lambda method, body: "not for you" if method == RES else ""
    answer = engine.request("POST", "/v1.24/volumes/create", {"Name": "v1"})
    assert (answer.status, answer.message) == (403, "authorization denied by plugin gate: not for you")
    assert "location" not in answer.headers
    reset(plugin)
    assert volumes(engine) == ["v1"], "as in Docker"


def test_rule_7_errors_are_replies(engine: TempEngine, plugin: AuthzPlugin) -> None:
    answer = engine.request("GET", "/v1.24/containers/none/json")
    assert answer.status == 404
    (replied,) = plugin.asked("AuthZRes")
    assert (replied["ResponseStatusCode"], replied["ResponseBody"]) == (404, answer.body)
    plugin.deny = lambda method, body: "no" if method == RES else ""
    assert engine.request("GET", "/v1.24/containers/none/json").status == 403


def test_rule_7_a_stream_is_asked_about_before_its_head(engine: TempEngine, plugin: AuthzPlugin) -> None:
    events = client.json_stream(engine.socket, "/v1.24/events")
    (replied,) = plugin.asked("AuthZRes")
    assert replied["ResponseStatusCode"] == 200 and "ResponseBody" not in replied
    engine.request("POST", "/v1.24/volumes/create", {"Name": "v1"})
    assert next(iter(events))["Action"] == "create"
    container = engine.started("echo", "secret")
    engine.wait(container)
    plugin.deny = lambda method, body: "no logs" if method == RES and "/logs" in body["RequestUri"] else ""
    answer = engine.request("GET", f"/v1.24/containers/{container}/logs?stdout=1")
    assert (answer.status, b"secret" in answer.body) == (403, False)
    assert engine.request("GET", f"/v1.24/containers/{container}/export").status == 200
    assert "ResponseBody" not in only(plugin, f"/v1.24/containers/{container}/export", "AuthZRes")


def test_rule_8_credentials_are_not_shown(engine: TempEngine, plugin: AuthzPlugin) -> None:
    body = {"username": "u", "password": "secret", "serveraddress": "127.0.0.1:1"}
    answer = engine.request("POST", "/v1.24/auth", body)
    assert answer.status >= 400
    assert "RequestBody" not in only(plugin, "/v1.24/auth")
    assert "ResponseBody" not in only(plugin, "/v1.24/auth", "AuthZRes")
    assert "secret" not in json.dumps([each for _, each in plugin.calls])
    assert base64.b64encode(b"secret").decode() not in json.dumps([each for _, each in plugin.calls])


# --- start ----------------------------------------------------------------------------------------


def refused(engine: TempEngine) -> str:
    """The reason of an engine that does not start."""
    try:
        with pytest.raises(AssertionError, match="engined ended at start"):
            engine.start()
        assert engine.process is not None and engine.process.returncode == 1
        return engine.log().splitlines()[-1]
    finally:
        engine.process = None
        engine.close()


def test_rule_9_a_missing_plugin() -> None:
    engine, (plugin,) = guarded("gate")
    engine.arguments += ("--authorization-plugin", "absent")
    assert refused(engine) == 'engined: --authorization-plugin absent: plugin "absent" not found'
    plugin.close()


def test_rule_9_a_plugin_of_another_kind() -> None:
    engine, _ = guarded()
    other = Plugin("VolumeDriver")
    other.listen(engine.base / "sockets" / "other.sock")
    engine.arguments += ("--authorization-plugin", "other")
    words = "plugin other does not implement the requested interface: authz"
    assert refused(engine) == f"engined: --authorization-plugin other: {words}"
    other.close()


def test_rule_9_a_dead_plugin_does_not_keep_the_engine_from_being_stopped() -> None:
    engine, (plugin,) = guarded("gate")
    with engine:
        engine.load_busybox()
        engine.started("sleep", "1000")
        engine.kill9()
        plugin.close()
        (engine.base / "sockets" / "gate.sock").unlink()
        engine.stop()


# --- upgrades -------------------------------------------------------------------------------------


def upgrade(engine: TempEngine, target: str, *, method: str = "POST", body: Any = None, to: str = "tcp") -> bytes:
    """The beginning of the answer to a request that upgrades the connection."""
    content = b"" if body is None else json.dumps(body).encode()
    fields = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" if to == "websocket" else ""
    with client.connect(engine.socket) as connection:
        connection.sendall(
            f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {to}\r\n{fields}"
            "X-Docker-Expose-Session-Uuid: abc\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        received = b""
        while b"\r\n\r\n" not in received and (data := connection.recv(65536)):
            received += data
        return received


def test_rule_10_an_upgrade_is_asked_about_before_its_head(engine: TempEngine, plugin: AuthzPlugin) -> None:
    container = engine.started("sleep", "1000")
    made = engine.request("POST", f"/v1.24/containers/{container}/exec", {"Cmd": ["true"], "AttachStdout": True})
    upgrades: list[tuple[str, dict[str, Any]]] = [
        (f"/v1.24/containers/{container}/attach?stream=1&stdout=1", {}),
        (f"/v1.24/containers/{container}/logs?stdout=1&follow=1", {"method": "GET"}),
        (f"/v1.24/containers/{container}/attach/ws?stream=1&stdout=1", {"method": "GET", "to": "websocket"}),
        ("/session", {"to": "h2c"}),
        ("/grpc", {"to": "h2c"}),
        (f"/v1.24/exec/{made.json()['Id']}/start", {"body": {"Detach": False, "Tty": False}}),
    ]
    for target, how in upgrades:
        for method in (REQ, RES):
            plugin.calls.clear()
            plugin.deny = lambda called, body, method=method: "no" if called == method else ""  # type: ignore[misc]
            answer = upgrade(engine, target, **how)
            assert answer.startswith(b"HTTP/1.1 403 "), (target, method, answer)
            assert [called for called, _ in plugin.calls] == [REQ, RES][: 1 + (method == RES)]
        reset(plugin)
        plugin.calls.clear()
        assert upgrade(engine, target, **how).startswith(b"HTTP/1.1 101 "), target
        (replied,) = plugin.asked("AuthZRes")
        assert replied["ResponseStatusCode"] == 101 and "ResponseBody" not in replied
        assert plugin.asked()[0].get("RequestBody", b"") == (json.dumps(how["body"]).encode() if "body" in how else b"")


def test_a_connection_that_begins_with_http_2_is_one_of_grpc(engine: TempEngine, plugin: AuthzPlugin) -> None:
    plugin.deny = lambda method, body: "no" if body["RequestUri"] == "/grpc" else ""
    with client.connect(engine.socket) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert client.read_to_end(connection).startswith(b"HTTP/1.1 403 ")
    assert plugin.asked()[0]["RequestMethod"] == "POST"


def test_rule_10_a_stream_without_an_upgrade(engine: TempEngine, plugin: AuthzPlugin) -> None:
    container = engine.started("sh", "-c", "read x; echo got $x", OpenStdin=True, AttachStdin=True, StdinOnce=True)
    plugin.calls.clear()
    with client.connect(engine.socket) as connection:
        head = f"POST /v1.24/containers/{container}/attach?stream=1&stdin=1&stdout=1 HTTP/1.1\r\nHost: x\r\n\r\n"
        connection.sendall(head.encode() + b"early\n")
        received = client.read_to_end(connection)
    assert b"got early" in received
    assert only(plugin, head.split()[1], "AuthZRes")["ResponseStatusCode"] == 200


def test_after_a_denied_upgrade_the_connection_goes_on(engine: TempEngine, plugin: AuthzPlugin) -> None:
    container = engine.started("sleep", "1000")
    plugin.deny = lambda method, body: "no" if method == RES and "attach" in body["RequestUri"] else ""
    with contextlib.closing(http.client.HTTPConnection("x")) as connection:
        connection.sock = client.connect(engine.socket)
        for _ in range(2):
            connection.request("POST", f"/v1.24/containers/{container}/attach?stream=1&stdout=1")
            answer = connection.getresponse()
            assert answer.status == 403 and answer.read()
        connection.request("GET", "/_ping")
        assert connection.getresponse().read() == b"OK"


# --- every request --------------------------------------------------------------------------------


def test_rule_11_there_are_no_exceptions(engine: TempEngine, plugin: AuthzPlugin) -> None:
    plugin.deny = lambda method, body: "nothing"
    asked = [
        ("GET", "/_ping"),
        ("HEAD", "/_ping"),
        ("GET", "/v1.24/events"),
        ("OPTIONS", "/v1.24/info"),
        ("GET", "/version"),
    ]
    for method, target in asked:
        answer = engine.request(method, target)
        assert answer.status == 403, (method, target)
        assert method == "HEAD" or answer.message == "authorization denied by plugin gate: nothing"
    assert [(each["RequestMethod"], each["RequestUri"]) for each in plugin.asked()] == asked
    plugin.calls.clear()
    for method, target, status in (("GET", "/nothing", 404), ("PATCH", "/info", 404), ("GET", "/v9.9/info", 400)):
        assert engine.request(method, target).status == status
    assert plugin.calls == [], "there is no route"
    reset(plugin)
    assert engine.request("OPTIONS", "/v1.24/info").status == 200


def test_requests_on_one_connection_are_asked_about_in_turn(engine: TempEngine, plugin: AuthzPlugin) -> None:
    plugin.deny = lambda method, body: "no info" if "info" in body["RequestUri"] else ""
    targets = ["/_ping", "/info", "/version", "/info", "/_ping"] * 3
    data = b"".join(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for target in targets)
    answer = engine.send(data)
    assert [body["RequestUri"] for body in plugin.asked()] == targets
    statuses = [int(each[:3]) for each in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [403 if target == "/info" else 200 for target in targets]


def test_the_docker_cli_shows_the_message(engine: TempEngine, plugin: AuthzPlugin) -> None:
    plugin.deny = lambda method, body: (
        "privileged containers are not allowed"
        if b'"Privileged":true' in base64.b64decode(body.get("RequestBody", ""))
        else ""
    )
    refused = engine.docker("run", "--rm", "--privileged", "--network", "none", "busybox", "true", status=None)
    assert refused.status != 0
    assert "authorization denied by plugin gate: privileged containers are not allowed" in refused.err
    assert engine.docker("run", "--rm", "--network", "none", "busybox", "echo", "hi").out == "hi\n"


def test_info_names_them(engine: TempEngine) -> None:
    assert engine.request("GET", "/v1.24/info").json()["Plugins"]["Authorization"] == ["gate"]


def test_several_plugins_are_asked_in_order() -> None:
    engine, (first, second) = guarded("b-first", "a-second")
    engine.arguments += ("--authorization-plugin", "b-first")  # once more
    order: list[str] = []
    first.deny = lambda method, body: order.append(f"first {method[-3:]}") or ""  # type: ignore[func-returns-value]
    second.deny = lambda method, body: order.append(f"second {method[-3:]}") or ""  # type: ignore[func-returns-value]
    with engine:
        assert engine.request("GET", "/v1.24/info").json()["Plugins"]["Authorization"] == ["b-first", "a-second"]
        assert order == ["first Req", "second Req", "first Res", "second Res"]
        first.deny = lambda method, body: "first says no"
        order.clear()
        assert engine.request("GET", "/v1.24/info").message == "authorization denied by plugin b-first: first says no"
        assert order == [], "the second was not asked"
        reset(first)
    first.close()
    second.close()


def test_the_name_of_a_certificate_is_the_user(tmp_path: Path) -> None:
    authority, issuer = _authority(tmp_path, "authority")
    server, mine = _issue(tmp_path, "server", issuer), _issue(tmp_path, "alice", issuer)
    engine, (plugin,) = guarded("gate")
    engine.arguments += ("--tls-ca", authority, "--tls-cert", server[0], "--tls-key", server[1], "--tcp", "127.0.0.1:0")
    with engine:
        line = until("it listens", lambda: [each for each in engine.log().splitlines() if "tcp://" in each])[0]
        context = verifying_context(authority=authority)
        context.load_cert_chain(*mine)
        plugin.deny = lambda method, body: "" if body.get("User") == "alice" else "who?"
        connection = http.client.HTTPSConnection("127.0.0.1", int(line.rpartition(":")[2]), context=context)
        connection.request("GET", "/v1.24/info")
        assert connection.getresponse().status == 200
        connection.close()
        asked = plugin.asked()[-1]
        assert (asked["User"], asked["UserAuthNMethod"]) == ("alice", "TLS")
        assert base64.b64decode(asked["RequestPeerCertificates"][0]).decode() == Path(mine[0]).read_text()
        assert engine.request("GET", "/v1.24/info").status == 403, "no user on the Unix socket"
        reset(plugin)
    plugin.close()
