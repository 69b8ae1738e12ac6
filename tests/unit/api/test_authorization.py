"""What authorization plugins are shown of a request and its reply, and what is refused unasked."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import parameters
from engine.api.authorization import (
    LONGEST_REPLY,
    AuthorizedApplication,
    check_keys,
    check_query,
    check_target,
    shown_headers,
)
from engine.api.engine import Engine
from engine.api.routes import CREDENTIALS, HIJACK, JSON, POST, UPLOAD
from engine.errors import Conflict, InvalidParameter, ServerError
from engine.http.budget import Budget
from engine.http.messages import NO_BODY, AnyReply, Body, Headers, Query, Reply, Request, StreamReply, percent_decode
from engine.plugins.authz import Chain, Denied
from engine.wire.containers import CreateBody
from tests.unit.api.parts import engine

# --- targets --------------------------------------------------------------------------------------


@given(st.text("/.%2eEfF6cC5~aZ0-_x:@", max_size=12))
def test_accepted_paths_have_one_reading(text: str) -> None:
    """All characters that routes have are literal, so decoding shows none that was hidden."""
    target = ("/" + text).encode()
    try:
        check_target(target)
        decoded = percent_decode(target, "the path")
    except InvalidParameter:
        return
    assert _of_routes(decoded) == _of_routes(re.sub("%..", "", target.decode()))
    assert "//" not in decoded and not {".", ".."} & set(decoded.split("/"))


def _of_routes(text: str) -> str:
    return re.sub("[^A-Za-z0-9._~/-]", "", text)


@pytest.mark.parametrize("octet", range(256))
@pytest.mark.parametrize("upper", [True, False])
def test_encoded_octets(octet: int, upper: bool) -> None:
    target = b"/a%" + (b"%02X" if upper else b"%02x") % octet
    refused = octet < 128 and (chr(octet).isalnum() or chr(octet) in "-._~/")
    if refused:
        with pytest.raises(InvalidParameter, match="authorization plugins are in use"):
            check_target(target)
    else:
        check_target(target)


def test_the_query_is_free() -> None:
    check_target(b"/info?a=//..%2F%61&b=/./")
    check_target(b"/info?a=1%3Bb")
    with pytest.raises(InvalidParameter, match="must be UTF-8"):
        check_target(b"/info?a=\xff")
    with pytest.raises(InvalidParameter, match="semicolon in the query"):
        check_target(b"/containers/x?force=1;")


# --- bodies ---------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abAB\u017f\u212ask", max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)


def ambiguous(value: Any) -> bool:
    if isinstance(value, dict):
        return len({key.casefold() for key in value}) < len(value) or any(map(ambiguous, value.values()))
    return isinstance(value, list) and any(map(ambiguous, value))


@given(VALUES, st.sampled_from((None, 1)))
def test_keys_that_differ_in_case(value: Any, indent: int | None) -> None:
    body = json.dumps(value, indent=indent).encode()
    if ambiguous(value):
        with pytest.raises(InvalidParameter, match="invalid JSON body: it has the key"):
            check_keys(body)
    else:
        check_keys(body)


@given(st.binary(max_size=20))
def test_bytes_never_pass_as_something_else(body: bytes) -> None:
    try:
        check_keys(body)
    except InvalidParameter:
        return
    if body.strip():
        json.loads(body.strip().decode())


@pytest.mark.parametrize(
    "body", [b"", b"  \n", b"{}", b"null", b"[1e999, -0, 1E5]", b"9" * 10_000, b'{"a":{"a":1},"b":[{"a":1},{"a":2}]}']
)
def test_bodies_with_one_reading(body: bytes) -> None:
    check_keys(body)


@pytest.mark.parametrize("body", [b'{"a":1,"a":1}', b'[{"a":1,"\\u0061":1}]', "{}".encode("utf-16"), b"{} {}", b"\xff"])
def test_bodies_with_two_readings(body: bytes) -> None:
    with pytest.raises(InvalidParameter, match="invalid JSON body"):
        check_keys(body)


def test_json_in_the_query() -> None:
    check_query(Query(b'filters={"a":["b"]}&x={not JSON&y=[[[&z={"a":1}'))
    for text in (b'filters={"a":1,"a":2}', b'x=1&x=+[{"a":1,"A":2}]'):
        with pytest.raises(InvalidParameter, match="it has the key"):
            check_query(Query(text))


def test_a_key_twice_is_found_at_any_depth_of_the_query() -> None:
    """Whether the reader of the parameter, or this check, runs out of the stack first."""
    for depth in (1, 100, *range(900, 1100), 100_000):
        text = '{"a":' + depth * "[" + depth * "]" + ',"a":1}'
        with pytest.raises(InvalidParameter):
            check_query(Query(f"filters={text}".encode()))


def test_field_names_are_exact_only_with_plugins() -> None:
    for body in (b'{"image":"x"}', b'{"HostConfig":{"memory":1}}', b'{"HostConfig":{"LogConfig":{"type":"none"}}}'):
        parameters.decode_json(body, CreateBody)
        with pytest.raises(InvalidParameter, match="authorization plugins are in use, so the field must be spelled"):
            parameters.decode_json(body, CreateBody, exact=True)
    body = b'{"Image":"x","Labels":{"image":"y","memory":"z"},"Unknown":1}'
    assert parameters.decode_json(body, CreateBody, exact=True).labels == {"image": "y", "memory": "z"}


# --- header fields --------------------------------------------------------------------------------


def test_header_fields_are_spelled_as_go_does() -> None:
    fields = [
        (b"x-foo2bar-BAZ", b" 1 "),
        (b"HOST", b"h"),
        (b"authorization", b"secret"),
        (b"X-REGISTRY-AUTH", b"secret"),
        (b"x-registry-config", b"secret"),
        (b"X-Foo2bar-baz", b"2"),
        (b"Accept", b"\xe9"),
    ]
    assert shown_headers(Headers(fields)) == {"X-Foo2bar-Baz": "1, 2", "Accept": "\xe9"}


# --- requests -------------------------------------------------------------------------------------


class Chains(Chain):
    """Remembers what is asked, and denies as told."""

    def __init__(self) -> None:
        super().__init__(())
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.deny = self.hangs = "-"
        self.hanging = asyncio.Event()

    async def ask(self, method: str, fields: bytes, bodies: Mapping[str, bytes]) -> None:
        self.calls.append((method[-3:], json.loads(fields) | {name: body for name, body in bodies.items() if body}))
        if method.endswith(self.hangs):
            self.hanging.set()
            await asyncio.Event().wait()
        if method.endswith(self.deny):
            raise Denied("no")


class Chunks:
    def __init__(self) -> None:
        self.closed = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        raise AssertionError("nothing may be read before the plugins have allowed it")

    async def aclose(self) -> None:
        self.closed += 1


class Link:
    """A connection."""

    def __init__(self) -> None:
        self.hijacked = 0

    def hijack(self, request: Request, content_type: str, protocol: str) -> Any:
        self.hijacked += 1
        return self.hijacked

    def certificate(self) -> None:
        return None


class World:
    """An application whose routes answer with `reply`, and read bodies into `bodies`."""

    def __init__(self, reply: Any = None) -> None:
        self.reply = reply if reply is not None else Reply(200, b"{}")
        self.bodies: list[bytes] = []
        self.chain = Chains()
        rows = (
            POST("/json", self.reads, body=JSON),
            POST("/auth", self.reads, body=CREDENTIALS),
            POST("/upload", self.reads, body=UPLOAD),
            POST("/none", self.reads),
            POST("/plain", self.answers),
            POST("/hijack", self.hijacks, mode=HIJACK),
        )
        self.app = AuthorizedApplication(engine(), self.chain, rows)
        self.link = Link()

    async def reads(self, _: Engine, request: Request) -> AnyReply:
        self.bodies.append(await request.body.read(100))
        return self.answers(_, request)

    def answers(self, _: Engine, request: Request) -> AnyReply:
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply  # type: ignore[no-any-return]

    async def hijacks(self, _: Engine, request: Request) -> AnyReply:
        await request.hijack("x")
        return Reply(204)

    async def ask(self, path: str, body: bytes = b"", method: str = "POST", *, upgrade: bool = False) -> Any:
        content = Body(None, body) if body else NO_BODY
        request = Request(method, path, body=content, target=path.encode(), upgrade=upgrade, connection=self.link)
        try:
            return await self.app(request)
        except Exception as error:
            return self.app.error_reply(error)

    def run(self, path: str, body: bytes = b"", method: str = "POST", **more: bool) -> Any:
        return asyncio.run(self.ask(path, body, method, **more))


def test_each_kind_of_body() -> None:
    world = World()
    assert world.run("/json", b'{"a":1}').status == 200
    assert world.run("/auth", b'{"b":1}').status == 200
    assert world.run("/upload", b'{"c":1,"c":2}').status == 200
    assert world.run("/json").status == 200
    assert world.bodies == [b'{"a":1}', b'{"b":1}', b'{"c":1,"c":2}', b""]
    shown = [asked.get("RequestBody") for kind, asked in world.chain.calls if kind == "Req"]
    assert shown == [b'{"a":1}', None, None, None]
    shown = [asked.get("ResponseBody") for kind, asked in world.chain.calls if kind == "Res"]
    assert shown == [b"{}", None, b"{}", b"{}"]


def test_a_body_counts_as_being_read_while_a_plugin_is_asked() -> None:
    budget = Budget(1 << 20, 1)

    class Wire:
        """Sends the body when it is wanted."""

        owner = "unix:1/0"

        def __init__(self, announced: int | None) -> None:
            self.budget = budget
            self.body = Body(self, announced=announced)

        def body_wanted(self) -> None:
            if not self.body.ended:
                self.body.feed(b" " * 299_998 + b"{}")
                self.body.end()

        def body_taken(self) -> None:
            pass

        def body_borrowed(self, early: object) -> None:
            return None

    async def scenario(world: World, announced: int | None) -> None:
        world.chain.hangs = "Req"
        request = Request("POST", "/json", body=Wire(announced).body, target=b"/json", connection=world.link)
        asking = asyncio.ensure_future(world.app(request))
        await world.chain.hanging.wait()
        assert budget.reserved >= 300_000
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert budget.reserved == 0

    for announced in (300_000, None):
        asyncio.run(scenario(World(), announced))


def test_a_handler_cannot_read_a_body_that_its_row_does_not_have() -> None:
    world = World()
    assert world.run("/none", b"secret").status == 500 and world.bodies == []
    assert world.run("/none").status == 200
    assert not NO_BODY.withheld, "it is shared by all requests without a body"


def test_a_long_body_is_not_asked_about() -> None:
    world = World()
    assert world.run("/json", b" " * (parameters.BODY_LIMIT + 1)).status == 413
    assert world.chain.calls == []


def test_a_long_reply_is_refused() -> None:
    world = World(Reply(200, bytes(LONGEST_REPLY), "text/plain"))
    assert world.run("/plain").status == 200
    world = World(Reply(200, bytes(LONGEST_REPLY + 1), "text/plain"))
    reply = world.run("/plain")
    assert reply.status == 500 and b"larger than the 16777216 bytes" in reply.body
    assert [kind for kind, _ in world.chain.calls] == ["Req"]


@pytest.mark.parametrize(
    ("content_type", "shown"),
    [("application/json", True), ("text/plain; charset=utf-8", True), ("application/x-tar", False)],
)
def test_archives_are_not_shown(content_type: str, shown: bool) -> None:
    world = World(Reply(200, b"{}", content_type, (("X-A", "b"),)))
    world.run("/plain")
    _, asked = world.chain.calls[1]
    assert ("ResponseBody" in asked) == shown
    assert (
        asked["ResponseHeaders"].items()
        >= {"Content-Type": content_type, "X-A": "b", "Server": asked["ResponseHeaders"]["Server"]}.items()
    )


@pytest.mark.parametrize(("kind", "status"), [(Conflict, 409), (ValueError, 500), (ServerError, 500)])
def test_errors_are_asked_about(kind: type[Exception], status: int) -> None:
    world = World(kind("words"))
    assert world.run("/plain").status == status
    assert world.chain.calls[1][1]["ResponseStatusCode"] == status


def test_a_stream_that_is_denied_is_closed() -> None:
    chunks = Chunks()
    world = World(StreamReply(200, chunks))
    assert isinstance(world.run("/plain"), StreamReply) and chunks.closed == 0
    world.chain.deny = "Res"
    assert world.run("/plain").status == 403 and chunks.closed == 1


def test_a_stream_whose_client_leaves_meanwhile_is_closed() -> None:
    chunks = Chunks()
    world = World(StreamReply(200, chunks))
    world.chain.hangs = "Res"

    async def scenario() -> None:
        asking = asyncio.ensure_future(world.ask("/plain"))
        await world.chain.hanging.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(scenario())
    assert chunks.closed == 1


def test_a_hijack_is_asked_about_once() -> None:
    world = World()
    for upgrade, status in ((True, 101), (False, 200)):
        world.chain.calls.clear()
        assert world.run("/hijack", upgrade=upgrade).status == 204
        assert [asked.get("ResponseStatusCode") for _, asked in world.chain.calls] == [None, status, 204]
    world.chain.deny = "Res"
    assert world.run("/hijack").status == 403 and world.link.hijacked == 2


def test_what_is_not_asked_about() -> None:
    world = World()
    assert (world.run("/absent").status, world.run("//json").status, world.run("/v9.9/json").status) == (404, 400, 400)
    assert world.chain.calls == []
    assert world.run("*", method="OPTIONS").status == 200
    assert [asked["RequestMethod"] for _, asked in world.chain.calls] == ["OPTIONS", "OPTIONS"]


def test_a_denied_request_does_not_reach_its_handler() -> None:
    world = World()
    world.chain.deny = "Req"
    for path in ("/json", "/upload", "/none", "/plain", "/hijack"):
        assert world.run(path, b"{}").status == 403
    assert world.bodies == [] and world.link.hijacked == 0
    assert {kind for kind, _ in world.chain.calls} == {"Req"}
