"""Request heads, split at any place and damaged in any way."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.http.head import Head, HeadReader
from engine.http.messages import Query

LIMIT = 2000
SEEDS = [
    b"GET /a/b?c=d&e HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\nExpect: 100-continue\r\n\r\n",
    b"PUT /x HTTP/1.1\r\nhost:x\r\nTransfer-Encoding: chunked\r\nX-Registry-Auth: e30=\r\n\r\n",
    b"POST /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"\r\nGET http://h/p%20q#f HTTP/1.1\r\nHost: x\r\nConnection: a, Close\r\nUpgrade: tcp\r\n\r\n",
]


def read(pieces: list[bytes]) -> tuple[Head | None, int]:
    """The head, and the number of its bytes. Raises InvalidParameter."""
    reader, taken = HeadReader(LIMIT), 0
    for piece in pieces:
        end, head = reader.read(piece, 0)
        assert 0 <= end <= len(piece)
        taken += end
        if head is not None:
            assert reader.size == 0
            return head, taken
        assert end == len(piece)
    return None, taken


def said(head: Head | None) -> object:
    if head is None:
        return None
    left = None if head.reader is None else (type(head.reader), head.reader.left)
    return [left, dict(head.query), [*head.headers]] + [
        getattr(head, name)
        for name in ("method", "path", "target", "http10", "keep", "expects", "upgrade", "repeatable")
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_split_in_two_and_a_tail(seed: bytes) -> None:
    head, taken = read([seed])
    assert head is not None and taken == len(seed)
    for at in range(1, len(seed)):
        again, taken = read([seed[:at], seed[at:] + b"tail"])
        assert said(again) == said(head) and taken == len(seed)


@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 120), st.binary(max_size=3)), max_size=4), st.data())
def test_spoilt_heads(seed: bytes, changes: list[tuple[int, bytes]], data: st.DataObject) -> None:
    """A damaged head is still a head or raises InvalidParameter, however it is split."""
    for at, put in changes:
        seed = seed[:at] + put + seed[at + len(put) + at % 2 :]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(seed)), max_size=5)))
    pieces = [seed[a:b] for a, b in zip([0, *cuts], [*cuts, len(seed)], strict=True) if a < b]
    try:
        whole = read([seed]) if seed else (None, 0)
    except InvalidParameter as error:
        assert error.message
        whole = None
    try:
        split = read(pieces)
    except InvalidParameter:
        split = None
    if whole is None or split is None:
        assert whole is None and split is None
    else:
        assert said(whole[0]) == said(split[0]) and whole[1] == split[1]


def test_a_head_that_is_too_large() -> None:
    field = b"A: " + b"x" * LIMIT + b"\r\n\r\n"
    with pytest.raises(InvalidParameter, match="larger than 2000 bytes"):
        read([b"GET / HTTP/1.1\r\nHost: x\r\n" + field])
    reader = HeadReader(LIMIT)
    reader.read(b"GET /", 0)
    with pytest.raises(InvalidParameter, match="larger than 2000 bytes"):
        for _ in range(LIMIT + 1):
            reader.read(b"x", 0)


@pytest.mark.parametrize(
    "field",
    [
        "Authorization: Bearer x",
        "X-Registry-Auth: e30=",
        "x-registry-config: e30=",
        "Cookie: a=b",
        "Proxy-Authorization: Basic x",
        "Connection: close",
        "Upgrade: tcp",
        "Expect: 100-continue",
        "Content-Length: 3",
    ],
)
def test_heads_that_are_not_remembered(field: str) -> None:
    """Credentials are kept no longer than their request."""
    head, _ = read([f"POST / HTTP/1.1\r\nHost: x\r\n{field}\r\n\r\n".encode()])
    assert head is not None and not head.repeatable
    plain, _ = read([b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"])
    assert plain is not None and plain.repeatable


@given(st.binary(max_size=60))
@example(b"a=%")
@example(b"a=%ff")
@example(b"%00=b")
def test_any_query_is_pairs_or_a_refusal(text: bytes) -> None:
    try:
        found = Query(text)
    except InvalidParameter as error:
        assert "the query" in error.message
        return
    assert len(found) <= text.count(b"&") + 1
    for name in found:
        assert found.get_all(name)[0] == found[name] == found.get(name)
        assert "\0" not in name + found[name]


@given(st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6)), max_size=5))
def test_a_query_as_python_writes_it(pairs: list[tuple[str, str]]) -> None:
    from urllib.parse import urlencode

    pairs = [(name.replace("\0", ""), value.replace("\0", "")) for name, value in pairs]
    found = Query(urlencode(pairs, errors="surrogatepass").encode())
    for name, _ in pairs:
        assert found.get_all(name) == tuple(value for other, value in pairs if other == name)
