"""Protocol Buffers (proto3 wire format) for structs whose fields carry their numbers.

    class BytesMessage(msgspec.Struct):
        data: Annotated[bytes, 1] = b""

A field is a str, bytes, int, bool, another struct (`X | None`), a list of these, or a dict whose
keys are strings. A field with its default value is not encoded. Unknown fields are skipped. int
stands for every varint type of at most 64 bits, of which 2^63 and above decode as negative numbers;
`UInt64` is the one without a sign. Strings that are not UTF-8 keep their bytes by surrogateescape,
because file names are such strings.

This codec takes no memory worth mentioning and about 5 us for a small message. The package
`protobuf` takes 4 MB and needs generated code.

Pure. Not here: the messages, their transport (`grpc.py`).
Raises: InvalidParameter for bytes that are not a message of the type.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec

from engine.errors import InvalidParameter, words

T = TypeVar("T", bound=msgspec.Struct)
UInt64 = typing.NewType("UInt64", int)

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
DEEPEST = 32
"""Levels of nested messages."""

_Encoder = Callable[[Any], bytes]
_Decoder = Callable[[Any, Any, int], Any]
"""From the value so far and the value on the wire (int or memoryview) at a depth to the new
value.
"""


class _Kind(typing.NamedTuple):
    """How one type of element is written and read."""

    wire: int
    encode: _Encoder
    decode: Callable[[Any, int], Any]


class _Field(typing.NamedTuple):
    name: str
    wires: tuple[int, ...]
    """Wire types that `decode` accepts: two for lists of integers, which may be packed."""
    encode: _Encoder
    """The whole field with its tags; empty for a default value."""
    decode: _Decoder


def encode(message: msgspec.Struct) -> bytes:
    """The message's bytes, fields in the order of the struct."""
    return b"".join([field.encode(getattr(message, field.name)) for field in _plan(type(message))[0]])


def decode(data: bytes | memoryview, of: type[T]) -> T:
    """The message in `data`. Of a scalar that is repeated, the last value counts.

    Raises InvalidParameter.
    """
    try:
        return _decode(memoryview(data), of, 0)
    except IndexError:
        raise InvalidParameter(f"malformed protobuf message {of.__name__}: it is truncated") from None
    except (ValueError, OverflowError) as error:
        raise InvalidParameter(f"malformed protobuf message {of.__name__}: {words(error)}") from None


def _decode(view: memoryview, of: type[T], depth: int) -> T:
    if depth > DEEPEST:
        raise ValueError("it is nested too deeply")
    by_number = _plan(of)[1]
    values: dict[str, Any] = {}
    for number, wire, value in _fields(view):
        field = by_number.get(number)
        if field is None:
            continue
        if wire not in field.wires:
            raise ValueError(f"field {number} has wire type {wire}")
        values[field.name] = field.decode(values.get(field.name), value, depth)
    return of(**values)


def _fields(view: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value (int or memoryview) of each field."""
    place, size = 0, len(view)
    while place < size:
        tag = view[place]
        place += 1
        if tag >= 0x80:
            tag, place = read_varint(view, place - 1)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise ValueError("a field has the number 0")
        value: Any
        if wire == VARINT:
            value, place = read_varint(view, place)
        else:
            if wire == BYTES:
                length, place = read_varint(view, place)
            elif wire in (FIXED32, FIXED64):
                length = 4 if wire == FIXED32 else 8
            else:
                raise ValueError(f"wire type {wire} is not supported")
            end = place + length
            if end > size:
                raise ValueError("it is truncated")
            value = view[place:end]
            place = end
        yield number, wire, value


def read_varint(view: memoryview, place: int) -> tuple[int, int]:
    """The number at `place`, and the place after it."""
    value = shift = 0
    while True:
        byte = view[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                raise ValueError("a number has more than 64 bits")
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 10 bytes")


def varint(value: int) -> bytes:
    """A number as base-128 varint; negative ones as 64-bit two's complement."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    if value < 0x80:
        return bytes((value,))
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _prefixed(data: bytes) -> bytes:
    return varint(len(data)) + data


def _signed(value: Any, _depth: int) -> int:
    number: int = value
    return number - (1 << 64) if number >> 63 else number


def _to_text(value: Any, _depth: int) -> str:
    return str(value, "utf-8", "surrogateescape")


_SCALARS: dict[Any, _Kind] = {
    bool: _Kind(VARINT, lambda value: b"\x01" if value else b"\x00", lambda value, _: value != 0),
    int: _Kind(VARINT, varint, _signed),
    UInt64: _Kind(VARINT, varint, lambda value, _: value),
    bytes: _Kind(BYTES, _prefixed, lambda value, _: bytes(value)),
    str: _Kind(BYTES, lambda value: _prefixed(value.encode("utf-8", "surrogateescape")), _to_text),
}


@cache
def _plan(of: type[msgspec.Struct]) -> tuple[tuple[_Field, ...], dict[int, _Field]]:
    """The fields of a struct in their order, and by number."""
    by_number: dict[int, _Field] = {}
    for name, hint in typing.get_type_hints(of, include_extras=True).items():
        kind, number = typing.get_args(hint)
        assert number not in by_number, f"{of.__name__}: two fields have the number {number}"
        by_number[number] = _field(name, number, kind)
    return tuple(by_number.values()), by_number


def _field(name: str, number: int, hint: Any) -> _Field:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return _list(name, number, _kind(arguments[0]))
    if origin is dict:
        assert arguments[0] is str, name
        return _map(name, number, _kind(arguments[1]))
    optional = origin in (typing.Union, types.UnionType)
    if optional:
        (hint,) = [argument for argument in arguments if argument is not types.NoneType]
    kind = _kind(hint)
    tag = varint(number << 3 | kind.wire)

    def one(value: Any) -> bytes:
        return tag + kind.encode(value) if (value is not None if optional else value) else b""

    def decode_one(_before: Any, value: Any, depth: int) -> Any:
        return kind.decode(value, depth)

    return _Field(name, (kind.wire,), one, decode_one)


def _kind(hint: Any) -> _Kind:
    scalar = _SCALARS.get(hint)
    if scalar is not None:
        return scalar
    assert issubclass(hint, msgspec.Struct), hint
    return _Kind(
        BYTES, lambda message: _prefixed(encode(message)), lambda value, depth: _decode(value, hint, depth + 1)
    )


def _list(name: str, number: int, kind: _Kind) -> _Field:
    tag = varint(number << 3 | BYTES)
    if kind.wire == VARINT:  # packed

        def packed(values: Any) -> bytes:
            return tag + _prefixed(b"".join(map(kind.encode, values))) if values else b""

        def decode_packed(before: Any, value: Any, depth: int) -> Any:
            items = before if before is not None else []
            if isinstance(value, int):
                items.append(kind.decode(value, depth))
                return items
            place = 0
            while place < len(value):
                number, place = read_varint(value, place)
                items.append(kind.decode(number, depth))
            return items

        return _Field(name, (VARINT, BYTES), packed, decode_packed)

    def repeated(values: Any) -> bytes:
        return b"".join([tag + kind.encode(value) for value in values])

    def decode_repeated(before: Any, value: Any, depth: int) -> Any:
        items = before if before is not None else []
        items.append(kind.decode(value, depth))
        return items

    return _Field(name, (BYTES,), repeated, decode_repeated)


def _map(name: str, number: int, kind: _Kind) -> _Field:
    tag = varint(number << 3 | BYTES)
    value_tag = varint(2 << 3 | kind.wire)
    text = _SCALARS[str]
    blank = b"" if kind.wire == BYTES else 0

    def entries(values: Any) -> bytes:
        return b"".join(
            tag + _prefixed(b"\x0a" + text.encode(key) + value_tag + kind.encode(value))
            for key, value in values.items()
        )

    def decode_entry(before: Any, value: Any, depth: int) -> Any:
        found = before if before is not None else {}
        key: Any = b""
        content: Any = blank
        for part, wire, given in _fields(value):
            if part == 1 and wire == BYTES:
                key = given
            elif part == 2 and wire == kind.wire:
                content = given
        found[text.decode(key, depth)] = kind.decode(memoryview(content) if blank == b"" else content, depth)
        return found

    return _Field(name, (BYTES,), entries, decode_entry)
