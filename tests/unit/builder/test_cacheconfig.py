"""Configurations of build caches: BuildKit's form, and whatever else a registry may send."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder import cacheconfig
from engine.builder.cacheconfig import CacheLayer, Step, Steps
from engine.errors import InvalidParameter

KEY = "ab" * 32
BLOBS = tuple(f"sha256:{number:064x}" for number in range(4))
TIME = "2026-01-02T03:04:05.000000006Z"


def configuration(*parents: int | None, layer: int = 0, **more: Any) -> bytes:
    """One record on layers with these parents, as Go encodes it: zeros are absent."""
    layers = [
        {"blob": blob} | ({"parent": parent} if parent else {}) for blob, parent in zip(BLOBS, parents, strict=False)
    ]
    record = {"digest": f"sha256:{KEY}", "layers": [{"layer": layer, "createdAt": TIME}], "inputs": [[]]}
    return json.dumps({"layers": layers, "records": [record], **more}).encode()


def test_a_configuration() -> None:
    # the second layer is on the first, whose place is 0
    found = cacheconfig.read(configuration(-1, 0, 1, layer=2))
    assert found.layers == (CacheLayer(BLOBS[0], -1), CacheLayer(BLOBS[1], 0), CacheLayer(BLOBS[2], 1))
    assert found.by_key == {KEY: Step(KEY, 2, TIME)}
    assert found.chain(found.by_key[KEY]) == [0, 1, 2]


@pytest.mark.parametrize("raw", [configuration(0), configuration(-1, 2, 1, layer=1), configuration(-1, layer=1)])
def test_layers_without_an_end(raw: bytes) -> None:
    found = cacheconfig.read(raw)
    with pytest.raises(InvalidParameter, match="layers have no end"):
        found.chain(found.by_key[KEY])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"x", "invalid cache configuration"),
        (b"[]", "invalid cache configuration"),
        (b'{"records":[{"digest":"sha256:1"}]}', "invalid digest 'sha256:1'"),
        (b" " * (cacheconfig.LARGEST + 1), "larger than 1048576 bytes"),
        (b'{"layers":[{"parent":"x"}]}', "invalid cache configuration"),
    ],
)
def test_what_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        cacheconfig.read(raw)


def test_a_configuration_that_is_written() -> None:
    """Layers that several steps have are one layer."""
    results = [("aa" * 32, ["d0", "d1"], TIME), ("bb" * 32, ["d0"], TIME), ("cc" * 32, ["d0", "d2", "d1"], TIME)]
    blobs = {"d0": BLOBS[0], "d1": BLOBS[1], "d2": BLOBS[2]}
    raw = cacheconfig.write(reversed(results), blobs)
    assert raw == cacheconfig.write(results, blobs)
    assert json.loads(raw)["layers"] == [
        {"blob": BLOBS[0], "parent": -1},
        {"blob": BLOBS[1]},
        {"blob": BLOBS[2]},
        {"blob": BLOBS[1], "parent": 2},
    ]
    found = cacheconfig.read(raw)
    for key, diff_ids, created in results:
        step = found.by_key[key]
        assert step.created == created
        assert [found.layers[place].blob for place in found.chain(step)] == [blobs[each] for each in diff_ids]


def test_an_inline_cache() -> None:
    steps = [Step("cd" * 32, 1, TIME), Step(KEY, 0, TIME)]
    text = cacheconfig.write_inline(steps)
    records = json.loads(base64.b64decode(text))
    assert [record["digest"] for record in records] == [f"sha256:{KEY}", f"sha256:{'cd' * 32}"]
    assert records[0]["layers"] == [{"createdAt": TIME}] and records[1]["layers"] == [{"layer": 1, "createdAt": TIME}]
    found = cacheconfig.read_inline(text, ["d0", "d1"], BLOBS[:2])
    assert found.by_key == {step.key: step for step in steps}
    assert found.layers == (CacheLayer(BLOBS[0], -1), CacheLayer(BLOBS[1], 0))
    assert cacheconfig.read_inline("", ["d0"], BLOBS[:1]) == Steps((CacheLayer(BLOBS[0], -1),), {})


@pytest.mark.parametrize("text", ["%", 7, base64.b64encode(b"{").decode(), base64.b64encode(b'],"x":[').decode()])
def test_an_inline_cache_that_is_damaged(text: object) -> None:
    with pytest.raises(InvalidParameter, match="invalid cache configuration"):
        cacheconfig.read_inline(text, [], [])
    with pytest.raises(InvalidParameter, match="1 layers, but 0"):
        cacheconfig.read_inline(text if isinstance(text, str) else "", ["d0"], [])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5) | st.sampled_from([KEY, f"sha256:{KEY}", "", TIME]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["layers", "records", "digest", "layer", "blob", "parent"]), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(_JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=50))
def test_any_bytes_are_a_configuration_or_refused(raw: bytes) -> None:
    for read in (cacheconfig.read, lambda raw: cacheconfig.read_inline(base64.b64encode(raw).decode(), (), ())):
        try:
            found = read(raw)
        except InvalidParameter:
            continue
        for step in found.by_key.values():
            try:
                assert all(0 <= place < len(found.layers) for place in found.chain(step))
            except InvalidParameter as error:
                assert "no end" in error.message
