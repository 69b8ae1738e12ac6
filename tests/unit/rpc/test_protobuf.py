"""The codec against examples of the specification, and against Google's implementation on random
messages.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import msgspec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.buildkit.messages import Packet, Stat
from engine.errors import InvalidParameter
from engine.rpc import protobuf


class Inner(msgspec.Struct):
    number: Annotated[int, 1] = 0
    name: Annotated[str, 2] = ""


class Outer(msgspec.Struct):
    number: Annotated[int, 1] = 0
    flag: Annotated[bool, 2] = False
    text: Annotated[str, 3] = ""
    raw: Annotated[bytes, 4] = b""
    inner: Annotated[Inner | None, 5] = None
    words: Annotated[list[str], 6] = []
    inners: Annotated[list[Inner], 7] = []
    numbers: Annotated[list[int], 8] = []
    named: Annotated[dict[str, bytes], 9] = {}
    counted: Annotated[dict[str, int], 16] = {}
    kept: Annotated[dict[str, Inner], 2047] = {}


_integers = st.integers(-(1 << 63), (1 << 63) - 1)
_texts = st.text(st.characters(codec="utf-8"))
_inners = st.builds(Inner, number=_integers, name=_texts)
_outers = st.builds(
    Outer,
    number=_integers,
    flag=st.booleans(),
    text=_texts,
    raw=st.binary(),
    inner=st.none() | _inners,
    words=st.lists(_texts),
    inners=st.lists(_inners),
    numbers=st.lists(_integers),
    named=st.dictionaries(_texts, st.binary()),
    counted=st.dictionaries(_texts, _integers),
    kept=st.dictionaries(_texts, _inners),
)

SAMPLES = (
    (Inner(number=150), "089601"),  # protobuf.dev, encoding: a simple message
    (Inner(name="testing"), "120774657374696e67"),
    (Outer(inner=Inner(number=150)), "2a03089601"),
    (Outer(numbers=[3, 270, 86942]), "4206038e029ea705"),
    (Inner(number=-2), "08feffffffffffffffff01"),
    (Outer(counted={"a": 1}), "82010" + "5" + "0a01611001"),
    (Outer(), ""),
)


@pytest.mark.parametrize(("message", "encoded"), SAMPLES)
def test_samples(message: msgspec.Struct, encoded: str) -> None:
    assert protobuf.encode(message).hex() == encoded
    assert protobuf.decode(bytes.fromhex(encoded), type(message)) == message


@pytest.mark.parametrize(
    ("data", "of", "message"),
    [
        ("4003408e02", Outer, Outer(numbers=[3, 270])),
        ("08010802", Inner, Inner(number=2)),  # the last value counts
        ("9a0603616263" + "0801", Inner, Inner(number=1)),
        ("990601020304050607080801", Inner, Inner(number=1)),
        ("9d06010203040801", Inner, Inner(number=1)),
        ("4a00", Outer, Outer(named={"": b""})),  # an entry without key and value
        ("1201ff", Inner, Inner(name="\udcff")),
    ],
)
def test_what_other_encoders_write(data: str, of: type[msgspec.Struct], message: msgspec.Struct) -> None:
    assert protobuf.decode(bytes.fromhex(data), of) == message


def test_names_that_are_not_utf8_keep_their_bytes() -> None:
    packet = Packet(stat=Stat(path="caf\udce9", mode=0o644))
    assert protobuf.decode(protobuf.encode(packet), Packet) == packet


@pytest.mark.parametrize(
    "data",
    [
        "08",  # no value
        "0880",  # a number without end
        "08ffffffffffffffffffff01",  # more than 10 bytes
        "08ffffffffffffffffff02",  # more than 64 bits
        "1205616263",  # truncated
        "0b0c",  # a group
        "0f",  # an unknown wire type
        "0001",  # field 0
        "0a00",  # a number as bytes
        "1001",  # a text as number
        "12ffffffffffffffffff01",  # a length of 2^64
    ],
)
def test_malformed(data: str) -> None:
    with pytest.raises(InvalidParameter, match="malformed protobuf message Inner"):
        protobuf.decode(bytes.fromhex(data), Inner)


class Nest(msgspec.Struct):
    nest: Annotated[Nest | None, 1] = None


def test_nesting_is_bounded() -> None:
    data = b""
    for _ in range(100):
        data = b"\x0a" + protobuf.varint(len(data)) + data
    with pytest.raises(InvalidParameter, match="nested too deeply"):
        protobuf.decode(data, Nest)


@given(_outers)
def test_round_trip(message: Outer) -> None:
    assert protobuf.decode(protobuf.encode(message), Outer) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_an_error(data: bytes) -> None:
    try:
        message = protobuf.decode(data, Outer)
    except InvalidParameter:
        return
    again = protobuf.decode(protobuf.encode(message), Outer)
    assert again == message


@given(_outers)
def test_google_reads_it(message: Outer) -> None:
    theirs = _google_class().FromString(protobuf.encode(message))
    assert _from_google(theirs) == message


@given(_outers)
def test_it_reads_google(message: Outer) -> None:
    theirs = _google_class()(
        number=message.number,
        flag=message.flag,
        text=message.text,
        raw=message.raw,
        words=message.words,
        numbers=message.numbers,
        inners=[{"number": inner.number, "name": inner.name} for inner in message.inners],
        named=message.named,
        counted=message.counted,
    )
    if message.inner is not None:
        theirs.inner.SetInParent()
        theirs.inner.number, theirs.inner.name = message.inner.number, message.inner.name
    for key, inner in message.kept.items():
        theirs.kept[key].number, theirs.kept[key].name = inner.number, inner.name
    assert protobuf.decode(theirs.SerializeToString(), Outer) == message


def _from_google(theirs: Any) -> Outer:
    def inner(given: Any) -> Inner:
        return Inner(number=given.number, name=given.name)

    return Outer(
        number=theirs.number,
        flag=theirs.flag,
        text=theirs.text,
        raw=theirs.raw,
        inner=inner(theirs.inner) if theirs.HasField("inner") else None,
        words=list(theirs.words),
        inners=[inner(given) for given in theirs.inners],
        numbers=list(theirs.numbers),
        named=dict(theirs.named),
        counted=dict(theirs.counted),
        kept={key: inner(given) for key, given in theirs.kept.items()},
    )


@cache
def _google_class() -> Any:
    """`Outer` of a descriptor written by hand."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="codec_test.proto", package="codec", syntax="proto3")
    small = file.message_type.add(name="Inner")
    small.field.add(name="number", number=1, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    small.field.add(name="name", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    large = file.message_type.add(name="Outer")
    inner = ".codec.Inner"
    rows: tuple[tuple[str, int, int, bool, str], ...] = (
        ("number", 1, field.TYPE_INT64, False, ""),
        ("flag", 2, field.TYPE_BOOL, False, ""),
        ("text", 3, field.TYPE_STRING, False, ""),
        ("raw", 4, field.TYPE_BYTES, False, ""),
        ("inner", 5, field.TYPE_MESSAGE, False, inner),
        ("words", 6, field.TYPE_STRING, True, ""),
        ("inners", 7, field.TYPE_MESSAGE, True, inner),
        ("numbers", 8, field.TYPE_INT64, True, ""),
        ("named", 9, field.TYPE_MESSAGE, True, ".codec.Outer.NamedEntry"),
        ("counted", 16, field.TYPE_MESSAGE, True, ".codec.Outer.CountedEntry"),
        ("kept", 2047, field.TYPE_MESSAGE, True, ".codec.Outer.KeptEntry"),
    )
    for name, number, kind, repeated, of in rows:
        label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
        large.field.add(name=name, number=number, type=kind, label=label, type_name=of or None)
    values: tuple[tuple[str, int, str], ...] = (
        ("NamedEntry", field.TYPE_BYTES, ""),
        ("CountedEntry", field.TYPE_INT64, ""),
        ("KeptEntry", field.TYPE_MESSAGE, inner),
    )
    for name, kind, of in values:
        entry = large.nested_type.add(name=name)
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
        entry.field.add(name="value", number=2, type=kind, label=field.LABEL_OPTIONAL, type_name=of or None)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("codec.Outer"))
