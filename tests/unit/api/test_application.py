"""Version prefix, route windows, and errors as answers."""

from __future__ import annotations

import dataclasses
import errno
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import __version__
from engine.api import replies
from engine.api.application import Application
from engine.api.engine import Engine
from engine.api.routes import DELETE, GET, HEAD, HIJACK, POST, PUT, ROUTES, STREAM, Route
from engine.config import Config
from engine.errors import (
    Conflict,
    EngineError,
    Forbidden,
    InvalidParameter,
    NotAcceptable,
    NotFound,
    NotModified,
    ServerError,
    Unauthorized,
    Unavailable,
    Unimplemented,
)
from engine.http.messages import Reply, Request
from tests.unit.api.parts import application, ask, engine, request, shown


def tell(engine: Engine, asked: Request) -> Reply:
    words = f"{asked.version.name} {asked.status} {asked.parameters} {asked.cancellable}"
    return Reply(asked.status, words.encode())


ROWS = (
    GET("/things", tell),
    POST("/things", tell, 201),
    HEAD("/things/{id}", tell, since="1.20"),
    PUT("/things/{id}", tell, since="1.20", until="1.22"),
    PUT("/things/{id}", tell, 202, since="1.22"),
    DELETE("/things/{name:path}", tell, 204, until="1.24"),
    GET("/things/{id}/wait", tell, mode=STREAM),
    POST("/things/{id}/attach", tell, mode=HIJACK, since="1.19"),
)
APP = application(ROWS)


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/things", 200, "1.55 200 {} False"),
        ("GET", "/v1.24/things", 200, "1.24 200 {} False"),
        ("GET", "/v1.18/things", 200, "1.18 200 {} False"),
        ("POST", "/v1.21/things", 201, "1.21 201 {} False"),
        ("HEAD", "/v1.20/things/x", 200, "1.20 200 {'id': 'x'} False"),
        ("PUT", "/v1.21/things/x", 200, "1.21 200 {'id': 'x'} False"),
        ("PUT", "/v1.22/things/x", 202, "1.22 202 {'id': 'x'} False"),
        ("PUT", "/things/v1.24", 202, "1.55 202 {'id': 'v1.24'} False"),
        ("DELETE", "/v1.23/things/a/b", 204, "1.23 204 {'name': 'a/b'} False"),
        ("GET", "/v1.24/things/x/wait", 200, "1.24 200 {'id': 'x'} True"),
        ("POST", "/things/x/attach", 200, "1.55 200 {'id': 'x'} False"),
    ],
)
def test_found(method: str, path: str, status: int, words: str) -> None:
    reply = ask(APP, path, method)
    assert (reply.status, reply.body.decode()) == (status, words)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1.24"),
        ("GET", "/v1.24/"),
        ("GET", "/v1.24things"),
        ("GET", "/v1.24/v1.24/things"),
        ("GET", "/nothing"),
        ("DELETE", "/things"),
        ("PATCH", "/things"),
        ("GET", "/things/"),
        ("HEAD", "/things"),
        ("HEAD", "/v1.19/things/x"),
        ("PUT", "/v1.19/things/x"),
        ("DELETE", "/things/x"),
        ("DELETE", "/v1.24/things/x"),
        ("POST", "/v1.18/things/x/attach"),
        ("GET", "/version1/things"),
        ("GET", "*"),
    ],
)
def test_page_not_found(method: str, path: str) -> None:
    reply = ask(APP, path, method)
    assert reply.status == 404 and reply.body == b'{"message":"page not found"}\n'


@pytest.mark.parametrize("path", ["/", "/v1.24/containers/json", "/nothing", "*", "/v9.9/x"])
def test_options_is_200_with_nothing(path: str) -> None:
    reply = ask(APP, path, "OPTIONS")
    assert (reply.status, reply.body) == (200, b"")


@pytest.mark.parametrize(
    ("target", "location"),
    [
        (b"/v1.24/things//x", "/v1.24/things/x"),
        (b"//things///x?a=b//c", "/things/x?a=b//c"),
        (b"/nothing//", "/nothing/"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_doubled_slashes_move_to_the_clean_path(target: bytes, location: str, method: str) -> None:
    """As Go's router answers. So names with a leading slash are found."""
    asked = Request(method, target.partition(b"?")[0].decode(), target=target)
    reply = APP(asked)
    assert isinstance(reply, Reply)
    assert reply.status == 301 and dict(reply.headers) == {"Location": location} and reply.body == b""


def test_an_encoded_slash_is_part_of_the_name() -> None:
    asked = Request("PUT", "/v1.24/things//x", target=b"/v1.24/things/%2Fx")
    assert isinstance(reply := APP(asked), Reply)
    assert reply.status == 202 and b"'id': 'x'" in reply.body


def test_a_query_may_have_slashes() -> None:
    asked = Request("PUT", "/things/x", target=b"/things/x?from=http://host//y")
    assert isinstance(reply := APP(asked), Reply)
    assert reply.status == 202


OUTSIDE_A_SWARM = [
    ("GET", "/swarm"),
    ("POST", "/swarm/leave"),
    ("POST", "/swarm/update"),
    ("GET", "/nodes"),
    ("GET", "/nodes/self"),
    ("DELETE", "/nodes/x"),
    ("POST", "/nodes/x/update"),
    ("GET", "/services"),
    ("POST", "/services/create"),
    ("GET", "/services/x"),
    ("DELETE", "/services/x"),
    ("POST", "/services/x/update"),
    ("GET", "/tasks"),
    ("GET", "/tasks/x"),
]


LATER = [
    ("1.25", "GET", "/services/x/logs"),
    ("1.25", "GET", "/secrets"),
    ("1.25", "POST", "/secrets/create"),
    ("1.25", "DELETE", "/secrets/x"),
    ("1.29", "GET", "/tasks/x/logs"),
    ("1.30", "GET", "/configs"),
    ("1.30", "POST", "/configs/x/update"),
]


@pytest.mark.parametrize(("method", "path"), OUTSIDE_A_SWARM)
def test_outside_a_swarm(method: str, path: str) -> None:
    words = "This node is not part of a swarm" if path == "/swarm/leave" else "This node is not a swarm manager."
    for version, status in (("1.24", 406), ("1.25", 503), ("1.55", 503)):
        reply = ask(application(), f"/v{version}{path}", method)
        assert reply.status == status and shown(reply)["message"].startswith(words)
    assert ask(application(), "/v1.23" + path, method).status == 404, "1.24 brought them"


@pytest.mark.parametrize(("version", "method", "path"), LATER)
def test_what_later_versions_have_outside_a_swarm(version: str, method: str, path: str) -> None:
    assert ask(application(), f"/v{version}{path}", method).status == 503
    before = ask(application(), f"/v1.{int(version[2:]) - 1}{path}", method)
    assert before.status == (404 if version == "1.25" else 400)


def test_a_request_of_a_later_version_names_it() -> None:
    """From 1.25 on, as dockerd; a version without it says nothing about it before."""
    for version, path, since in (("1.29", "/configs", "1.30"), ("1.25", "/distribution/a/b/json", "1.30")):
        reply = ask(application(), f"/v{version}{path}")
        assert (reply.status, shown(reply)["message"]) == (400, f"GET {path} requires minimum API version {since}")
    assert ask(application(), "/v1.24/configs").status == 404
    assert ask(application(), "/v1.25/configs", "PATCH").status == 404
    assert ask(application(), "/v1.55/containers/x/copy", "POST").status == 404, "one of earlier versions"


def test_delete_without_a_name() -> None:
    reply = ask(application(), "/v1.24/containers/", "DELETE")
    assert reply.status == 400 and shown(reply) == {"message": "No container name or ID supplied"}


def test_windows_of_one_route_do_not_overlap() -> None:
    """A route whose status changed has a row for each window of versions."""
    rows: dict[tuple[str, str], list[Route]] = {}
    for route in ROUTES:
        assert route.since < route.until
        rows.setdefault((route.method, route.path), []).append(route)
    for windows in rows.values():
        for earlier, later in itertools.pairwise(windows):
            assert earlier.until <= later.since
    assert [row.status for row in rows["POST", "/exec/{id}/resize"]] == [201, 200]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "/v1.56/things",
            "client version 1.56 is too new. Maximum supported API version is 1.55: "
            "client is newer than server (client API version: 1.56, server API version: 1.55), "
            "this engine serves 1.18 to 1.55",
        ),
        (
            "/v1.74/nothing",
            "client version 1.74 is too new. Maximum supported API version is 1.55: "
            "client is newer than server (client API version: 1.74, server API version: 1.55), "
            "this engine serves 1.18 to 1.55",
        ),
        (
            "/v1.17/things",
            "client version 1.17 is too old. Minimum supported API version is 1.18, "
            "please upgrade your client to a newer version (this engine serves 1.18 to 1.55)",
        ),
        (
            "/v1.56",
            "client version 1.56 is too new. Maximum supported API version is 1.55: "
            "client is newer than server (client API version: 1.56, server API version: 1.55), "
            "this engine serves 1.18 to 1.55",
        ),
    ],
)
def test_versions_not_spoken(path: str, message: str) -> None:
    reply = ask(APP, path)
    assert reply.status == 400 and shown(reply) == {"message": message}


def test_is_hijack() -> None:
    assert APP.is_hijack("POST", "/things/x/attach") and APP.is_hijack("POST", "/v1.19/things/x/attach")
    for method, path in (
        ("POST", "/v1.18/things/x/attach"), ("POST", "/v1.99/things/x/attach"), ("GET", "/things/x/attach"),
        ("GET", "/things"), ("POST", "/"), ("POST", ""),
    ):  # fmt: skip
        assert not APP.is_hijack(method, path)


@given(st.sampled_from(["GET", "POST", "X"]), st.text(max_size=30))
def test_any_path_is_answered(method: str, path: str) -> None:
    for each in (path, "/v" + path, "/v1." + path, "/v1.24/" + path):
        assert ask(APP, each, method).status in (200, 201, 400, 404)
        APP.is_hijack(method, each)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidParameter("m"), 400),
        (Forbidden("m"), 403),
        (NotFound("m"), 404),
        (NotAcceptable("m"), 406),
        (Conflict("m"), 409),
        (Unauthorized("m"), 401),
        (ServerError("m"), 500),
        (Unimplemented("m"), 501),
        (Unavailable("m"), 503),
    ],
)
def test_kinds_of_error(error: EngineError, status: int) -> None:
    reply = replies.error_reply(error)
    assert reply.status == status and shown(reply) == {"message": "m"}
    assert dict(reply.headers) == ({"Retry-After": "1"} if status == 503 else {})


def test_an_error_of_no_kind_is_internal() -> None:
    reply = replies.error_reply(EngineError("m"))
    assert reply.status == 500 and shown(reply) == {"message": "internal error; the engine's log has the details"}


def test_a_more_special_error_is_of_its_kind() -> None:
    class NoSuchThing(NotFound):
        pass

    assert replies.error_reply(NoSuchThing("x")).status == 404


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 500, "no space left on device"),
        (OSError(errno.EACCES, "Permission denied", "/a/b"), 500, "/a/b: permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), 503, "the engine has no more file descriptors"),
        (OSError("odd"), 500, "odd"),
        (MemoryError(), 503, "the host has no more memory for the engine"),
    ],
)
def test_errors_of_the_host_have_plain_words(
    error: Exception, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    reply = replies.error_reply(error)
    assert reply.status == status and shown(reply) == {"message": message}
    assert "unexpected error" in caplog.text, "it should have become a kind where it was met"


def test_not_modified_has_no_body() -> None:
    reply = replies.error_reply(NotModified("x"))
    assert reply.status == 304 and reply.body == b""


def test_a_bug_is_logged_and_told_without_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def buggy(engine: Engine, asked: Request) -> Reply:
        raise ZeroDivisionError("division by zero")

    reply = ask(application((GET("/bug", buggy),)), "/bug")
    assert reply.status == 500 and shown(reply) == {"message": "internal error; the engine's log has the details"}
    assert "Traceback" in caplog.text and "in buggy" in caplog.text


def test_every_answer_tells_the_engine() -> None:
    headers = {
        "Server": f"engined/{__version__} (linux)",
        "Api-Version": "1.55",
        "Docker-Experimental": "false",
        "Ostype": "linux",
    }
    assert dict(application().headers) == headers
    experimental = dataclasses.replace(engine(), config=Config(experimental=True))
    assert dict(Application(experimental).headers) == {**headers, "Docker-Experimental": "true"}


def test_every_row_is_found_at_its_versions() -> None:
    app = application()
    for route in ROUTES:
        path = route.path.replace("{name:path}", "a/b")
        while "{" in path:
            path = path[: path.index("{")] + "x" + path[path.index("}") + 1 :]
        found = app._router.match(route.method, path)
        assert found is not None and route in found[0], route


def test_json_lines() -> None:
    import asyncio
    from collections.abc import AsyncIterator

    async def lines(error: Exception | None) -> AsyncIterator[dict[str, str]]:
        yield {"status": "one"}
        if error is not None:
            raise error

    async def collect(error: Exception | None) -> bytes:
        return b"".join([piece async for piece in replies.json_lines(lines(error), request())])

    assert asyncio.run(collect(None)) == b'{"status":"one"}\r\n'
    full = OSError(errno.ENOSPC, "No space left on device")
    assert b'"error":"no space left on device"' in asyncio.run(collect(full))
    assert asyncio.run(collect(ServerError("disk full"))) == (
        b'{"status":"one"}\r\n{"errorDetail":{"message":"disk full"},"error":"disk full"}\r\n'
    )
    with pytest.raises(KeyError):
        asyncio.run(collect(KeyError("bug")))
