"""Parameters and bodies as clients send them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import parameters
from engine.errors import InvalidParameter
from engine.http.messages import Headers, Query, Request
from engine.wire.containers import CreateBody
from tests.unit.api.parts import request


def query(text: str) -> Query:
    return Query(text.encode())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", True),
        ("a=True", True),
        ("a=true", True),
        ("a=0", False),
        ("a=False", False),
        ("a=false", False),
        ("a=", False),
        ("a", False),
        ("", False),
        ("b=1", False),
        ("a=1&a=0", True),
        ("a=0&a=1", False),
    ],
)
def test_booleans(text: str, expected: bool) -> None:
    assert parameters.boolean(query(text), "a") is expected


@pytest.mark.parametrize("value", ["2", "yes", "TRUE", "on", "-1", "01", "+1", "t", "x"])
def test_anything_else_is_true(value: str) -> None:
    assert parameters.boolean(query("follow=" + value), "follow") is True


def test_strict_booleans() -> None:
    for value, found in (("", False), ("1", True), ("T", True), ("true", True), ("0", False), ("FALSE", False)):
        assert parameters.strict_boolean(query("a=" + value), "a") is found
    assert parameters.strict_boolean(query("b=1"), "a") is False
    for value in ("yes", "2", "tRUE", "+1"):
        with pytest.raises(InvalidParameter, match="invalid value for a"):
            parameters.strict_boolean(query("a=" + value), "a")


@pytest.mark.parametrize("value", ["no", "No", "none", "NONE", "FALSE", "+0+", "+"])
def test_other_words_for_false(value: str) -> None:
    assert parameters.boolean(query("stream=" + value), "stream", default=True) is False


@given(st.text(max_size=10))
def test_any_text_is_a_boolean(value: str) -> None:
    found = parameters.boolean(Query(b"a=" + quote(value).encode()), "a") if "\0" not in value else True
    assert found is (value.strip().lower() not in ("", "0", "no", "false", "none"))


def test_default_of_a_boolean() -> None:
    assert parameters.boolean(query(""), "stream", True)
    assert not parameters.boolean(query("stream="), "stream", True)
    assert not parameters.boolean(query("stream=0"), "stream", True)


def test_integers() -> None:
    assert parameters.integer(query("t=10&t=x"), "t") == 10
    assert parameters.integer(query("t=-1"), "t", 5) == -1
    assert parameters.integer(query("t=%2B3"), "t") == 3
    assert parameters.integer(query("t="), "t", 5) == 5
    assert parameters.integer(query(""), "t", 5) == 5
    assert parameters.integer(query("t=9223372036854775807"), "t") == 2**63 - 1
    assert parameters.integer(query("h=24"), "h", minimum=0, maximum=65535) == 24
    with pytest.raises(InvalidParameter, match="missing parameter: t"):
        parameters.integer(query(""), "t")
    for text in ("x", "1.5", "0x1", "1_000", "9223372036854775808", "9" * 5000, "٣", "--1", "+-1", "1e3"):
        with pytest.raises(InvalidParameter, match="invalid value for t: "):
            parameters.integer(query("t=" + text.replace("+", "%2B")), "t")
    with pytest.raises(InvalidParameter, match="-1 is less than 0"):
        parameters.integer(query("h=-1"), "h", minimum=0)
    with pytest.raises(InvalidParameter, match="70000 is more than 65535"):
        parameters.integer(query("h=70000"), "h", maximum=65535)


def test_required() -> None:
    assert parameters.required(query("path=/a"), "path") == "/a"
    for text in ("", "path="):
        with pytest.raises(InvalidParameter, match="missing parameter: path"):
            parameters.required(query(text), "path")


def test_timestamps() -> None:
    assert parameters.timestamp(query(""), "since") == 0
    assert parameters.timestamp(query("since="), "since") == 0
    assert parameters.timestamp(query("since=123.456"), "since") == 123_456_000_000
    assert parameters.timestamp(query("since=2015-01-06T15:47:31.485331387Z"), "since") == 1420559251485331387
    before = time.time_ns()
    assert before <= parameters.timestamp(query("since=10m"), "since") + 600 * 10**9 <= time.time_ns()
    for text in ("x", "yesterday", "2015-99-99", "1h1"):
        with pytest.raises(InvalidParameter, match=f"invalid value for since: '{text}'"):
            parameters.timestamp(query("since=" + text), "since")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("{}", {}),
        ("null", {}),
        ('{"label":["a=b","c"]}', {"label": ["a=b", "c"]}),
        ('{"label":{"a=b":true,"c":true}}', {"label": ["a=b", "c"]}),
        ('{"label":[],"status":["exited"]}', {"status": ["exited"]}),
        ('{"label":null}', {}),
        ('{"label":{"a":true},"status":["x"]}', {"label": ["a"], "status": ["x"]}),
    ],
)
def test_filters(text: str, expected: dict[str, list[str]]) -> None:
    made = Query(b"filters=" + text.encode().replace(b"+", b"%2B"))
    assert parameters.filters(made, ("label", "status")) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "not JSON"),
        ('{"label"', "not JSON"),
        ("[]", "a JSON object is expected"),
        ('"label"', "a JSON object is expected"),
        ("1", "a JSON object is expected"),
        ('{"x":["y"]}', "Invalid filter 'x'"),
        ('{"label":"a"}', "'label' takes"),
        ('{"label":[1]}', "'label' takes"),
        ('{"label":{"a":1}}', "'label' takes"),
        ('{"label":{"a=b":true,"c":false}}', "'label' has false for 'c'"),
        ('{"label":[["a"]]}', "'label' takes"),
        ("[" * 100_000, "not JSON"),
        ('{"label":[' + '"a",' * 20_000 + '"a"]}', "more than 10000 values"),
    ],
)
def test_bad_filters(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        parameters.filters(query("filters=" + text), ("label", "status"))


def test_filter_meanings() -> None:
    assert parameters.filter_boolean({}, "dangling") is None
    assert parameters.filter_boolean({"dangling": ["true"]}, "dangling") is True
    assert parameters.filter_boolean({"dangling": ["0"]}, "dangling") is False
    for values in (["x"], [""], ["true", "false"]):
        with pytest.raises(InvalidParameter, match=r"^Invalid filter 'dangling="):
            parameters.filter_boolean({"dangling": values}, "dangling")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["label", "name", "x"]), inner),
    max_leaves=8,
)


@given(JSON)
def test_any_json_is_filters_or_a_refusal(value: Any) -> None:
    asked = Query(b"filters=" + quote(msgspec.json.encode(value)).encode())
    try:
        found = parameters.filters(asked, ("label", "name"))
    except InvalidParameter as error:
        assert "filter" in error.message
        return
    assert found.keys() <= {"label", "name"} and all(found.values())
    assert all(isinstance(each, str) for values in found.values() for each in values)
    if isinstance(value, dict):
        for name, values in value.items():
            wanted = [each for each in values or () if not isinstance(values, dict) or values[each]]
            assert found.get(name, []) == wanted


def with_type(content_type: str) -> Request:
    return Request("POST", "/", headers=Headers([(b"Content-Type", content_type.encode())] if content_type else []))


@pytest.mark.parametrize("given", ["application/json", "Application/JSON", "application/json; charset=utf-8"])
def test_types_of_a_json_body(given: str) -> None:
    parameters.check_json(with_type(given))
    with pytest.raises(InvalidParameter):
        parameters.check_json(with_type("x" + given))


@pytest.mark.parametrize("given", ["application/xml", "text/plain", "json", "application/jsonx"])
def test_other_types_are_refused_in_dockers_words(given: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        parameters.check_json(with_type(given))
    assert refused.value.message == f"unsupported Content-Type header ({given}): must be 'application/json'"


def test_a_json_body_has_a_type() -> None:
    with pytest.raises(InvalidParameter, match=r"malformed Content-Type header \(\): mime: no media type"):
        parameters.check_json(with_type(""))


# --- bodies ---------------------------------------------------------------------------------------


class Inner(msgspec.Struct, rename="pascal"):
    number: int = 3
    text: str = "t"


class Outer(msgspec.Struct, rename="pascal"):
    name: str = "none"
    cmd: list[str] | str | None = None
    flag: bool = True
    inner: Inner = msgspec.field(default_factory=Inner)
    maybe: Inner | None = None
    inners: list[Inner] = msgspec.field(default_factory=list)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    by_name: dict[str, Inner] = msgspec.field(default_factory=dict)
    free: dict[str, object] | msgspec.UnsetType = msgspec.UNSET
    io_max: int = msgspec.field(default=0, name="IOMax")
    size: int | msgspec.UnsetType = msgspec.UNSET
    again: Outer | None = None


def body(text: str, of: type[Any] = Outer, *, optional: bool = False, limit: int = 10_000) -> Any:
    made = request(body=text.encode())
    return asyncio.run(parameters.json_body(made, of, limit, optional=optional))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", Outer()),
        ("null", Outer()),
        (' {"Name":"x"} ', Outer(name="x")),
        ('{"name":"x","FLAG":false}', Outer(name="x", flag=False)),
        ('{"iomax":5,"INNER":{"NUMBER":4}}', Outer(io_max=5, inner=Inner(4))),
        ('{"name":"low","Name":"exact"}', Outer(name="exact")),
        ('{"Name":"exact","name":"low"}', Outer(name="exact")),
        ('{"Name":null,"Flag":null,"Inner":null,"Inners":null,"Labels":null,"Free":null,"Size":null}', Outer()),
        ('{"Inner":{"Number":null}}', Outer()),
        ('{"Maybe":{"text":"x"}}', Outer(maybe=Inner(text="x"))),
        ('{"Cmd":"sh"}', Outer(cmd="sh")),
        ('{"cmd":["sh",null]}', Outer(cmd=["sh", ""])),
        ('{"Inners":[{"number":1},null,{"Text":"x","extra":1}]}', Outer(inners=[Inner(1), Inner(), Inner(text="x")])),
        ('{"Labels":{"Name":"kept","name":"too","n":null}}', Outer(labels={"Name": "kept", "name": "too", "n": ""})),
        ('{"ByName":{"X":{"number":9},"y":null}}', Outer(by_name={"X": Inner(9), "y": Inner()})),
        ('{"Free":{"Any":{"thing":[null]}}}', Outer(free={"Any": {"thing": [None]}})),
        ('{"Unknown":1,"AlsoUnknown":{"x":[]}}', Outer()),
        ('{"Again":{"again":{"NAME":"deep"}}}', Outer(again=Outer(again=Outer(name="deep")))),
        ('{"Size":7}', Outer(size=7)),
    ],
)
def test_bodies(text: str, expected: Outer) -> None:
    assert body(text) == expected


def test_a_body_that_is_an_array() -> None:
    """Go's clients send null for an empty one."""
    of: Any = list[Inner]
    assert body('[{"number":1},null]', of) == [Inner(1), Inner()] and body("null", of) == body("[]", of) == []
    with pytest.raises(InvalidParameter, match="expected array, got object"):
        body("{}", of)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "request body is empty"),
        ("  \n", "request body is empty"),
        ("{", "invalid JSON body"),
        ("{} x", "invalid JSON body"),
        ("[]", "invalid JSON body: expected object, got array"),
        ('"x"', "invalid JSON body: expected object, got string"),
        ("nul", "invalid JSON body"),
        ('{"name":5}', "invalid JSON body: Name: expected string, got integer"),
        ('{"inner":{"number":"5"}}', "invalid JSON body: Inner.Number: expected integer, got string"),
        ('{"inner":{"number":1.5}}', "invalid JSON body: Inner.Number: expected integer, got number"),
        ('{"flag":1}', "invalid JSON body: Flag: expected boolean, got integer"),
        ('{"flag":"true"}', "invalid JSON body: Flag: expected boolean, got string"),
        ('{"cmd":[1]}', r"invalid JSON body: Cmd\[0\]: expected string, got integer"),
        ('{"inners":[{"text":[]}]}', r"invalid JSON body: Inners\[0\].Text: expected string, got array"),
        ('{"labels":["a"]}', "invalid JSON body: Labels: expected object, got array"),
        ('{"IOMax":9223372036854775808}', "invalid JSON body: IOMax: 9223372036854775808 is not a 64-bit integer"),
        ('{"Inner":{"Number":1e30}}', "invalid JSON body: Inner.Number: 1e.30 is not a 64-bit integer"),
        ('{"Size":-9223372036854775809}', "invalid JSON body: Size: .* is not a 64-bit integer"),
        ('{"name":"' + "x" * 10_000 + '"}', "request body is larger than 10000 bytes"),
        ('{"Free":' + '{"a":' * 1900, "invalid JSON body"),
    ],
)
def test_bad_bodies(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        body(text)


def test_deep_bodies_end_as_an_error() -> None:
    for text in ('{"Free":' + "[" * 200_000, '{"Again":' * 50_000, "[" * 500_000 + "]" * 500_000):
        with pytest.raises(InvalidParameter, match="invalid JSON body"):
            body(text, limit=10_000_000)


def test_bytes_that_are_not_text() -> None:
    for data in (b'{"name":"\xff"}', b'{"name":"\\ud800"}', b"\xef\xbb\xbf{}", b'{"\xff":1}'):
        with contextlib.suppress(InvalidParameter):
            asyncio.run(parameters.json_body(request(body=data), Outer))


def test_optional_body() -> None:
    assert body("", optional=True) == Outer()


def test_what_docker_sends_to_create() -> None:
    """Nulls, unknown newer fields, strings instead of lists."""
    text = """{"Hostname":"","AttachStdout":true,"Cmd":"true","Entrypoint":null,"Image":"busybox","Volumes":null,
    "Labels":{},"OnBuild":null,"HostConfig":{"Binds":null,"ConsoleSize":[0,0],"CapAdd":null,"MemorySwappiness":-1,
    "RestartPolicy":{"Name":"no","MaximumRetryCount":0},"LogConfig":{"Type":"","Config":{}},"CgroupnsMode":"",
    "PortBindings":{"80/tcp":[{"HostIp":"","HostPort":"8080"}],"81/tcp":null},"Init":null,"Annotations":{"a":"b"}},
    "NetworkingConfig":{"EndpointsConfig":{"default":{"IPAMConfig":null,"Links":null,"DriverOpts":null}}}}"""
    made = body(text, CreateBody)
    assert made.cmd == "true" and made.entrypoint is None and made.host_config.memory_swappiness == -1
    assert made.host_config.port_bindings["80/tcp"][0].host_port == "8080"
    assert "default" in made.networking_config.endpoints_config


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["Name", "cmd", "INNER", "Inners", "labels", "ByName", "free", "again",
                                         "size", "z"]),
                        inner, max_size=4), max_leaves=12))  # fmt: skip
def test_any_json_is_a_struct_or_an_error(value: Any) -> None:
    try:
        data = msgspec.json.encode(value)
    except (OverflowError, msgspec.MsgspecError):
        return
    try:
        made = parameters.decode_json(data, Outer)
    except InvalidParameter as error:
        assert "invalid JSON body" in error.message
    else:
        assert isinstance(made, Outer)
        msgspec.msgpack.encode(made.io_max)


@pytest.mark.parametrize("name", ["(older)", "(OLDER)"])
def test_notes_of_upgrades_are_not_the_clients(name: str) -> None:
    body = msgspec.json.encode({"Image": "busybox", name: {"endpoints_unchecked": True, "warnings": ["x"]}})
    assert parameters.decode_json(body, CreateBody) == CreateBody(image="busybox")


OFFERS = ("application/a", "application/b")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", ""),
        ("application/b", "application/b"),
        ("APPLICATION/B ; Q=1", "application/b"),
        ("application/b, application/a", "application/a"),
        ("application/b;q=0.9,application/a;q=0.8", "application/b"),
        ("application/a;q=0", ""),
        ("application/a;q=x,application/b;q=0.001", "application/b"),
        ("application/a;q=2", ""),
        ("*/*, application/*", ""),
        ("application/a;level=1", "application/a"),
        (";;,,", ""),
    ],
)
def test_accepted(accept: str, expected: str) -> None:
    assert parameters.accepted(Headers([(b"Accept", accept.encode())]), OFFERS) == expected


def test_accepted_in_two_headers() -> None:
    headers = Headers([(b"accept", b"text/plain"), (b"Accept", b"application/b")])
    assert parameters.accepted(headers, OFFERS) == "application/b"


@given(st.text(st.characters(max_codepoint=255), max_size=40))
def test_any_accept_header_is_read(accept: str) -> None:
    assert parameters.accepted(Headers([(b"Accept", accept.encode("latin-1"))]), OFFERS) in ("", *OFFERS)
