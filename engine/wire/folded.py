"""JSON of others read as Go reads it: names of fields match in any case, null means absent, unknown
names are ignored. A document that has a field in two spellings is refused: two readers would see
two documents in it.

Pure. Not here: bodies of requests (`api/parameters.py`).
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")


def decode(raw: bytes | bytearray, of: type[T]) -> T:
    """The document as a struct. Raises msgspec.MsgspecError, UnicodeDecodeError, RecursionError."""
    return convert(msgspec.json.decode(raw), of)


def convert(value: Any, of: type[T]) -> T:
    """A decoded document as a struct. Raises msgspec.ValidationError, RecursionError."""
    kind: Any = of
    return msgspec.convert(_shaped(value, _information(kind), ""), of)


@functools.cache
def _information(of: type) -> inspect.Type:
    return inspect.type_info(of)


def _shaped(value: Any, kind: inspect.Type, place: str) -> Any:
    """The value with the names of structs as they are spelled in the type, and without nulls."""
    if isinstance(kind, inspect.UnionType):
        containers = (inspect.StructType, inspect.ListType, inspect.VarTupleType, inspect.DictType)
        kind = next((each for each in kind.types if isinstance(each, containers)), kind)
    if isinstance(kind, (inspect.ListType, inspect.VarTupleType)) and isinstance(value, list):
        return [_shaped(each, kind.item_type, place) for each in value]
    if isinstance(kind, inspect.DictType) and isinstance(value, dict):
        return {name: _shaped(item, kind.value_type, place) for name, item in value.items()}
    if not isinstance(kind, inspect.StructType) or not isinstance(value, dict):
        return value
    fields = {field.encode_name.lower(): field for field in kind.fields}
    found: dict[str, Any] = {}
    for name, item in value.items():
        field = fields.get(name.lower())
        if field is None:
            continue
        where = f"{place}.{field.encode_name}" if place else field.encode_name
        if field.encode_name in found:
            raise msgspec.ValidationError(f"{where} occurs twice")
        found[field.encode_name] = _shaped(item, field.type, where)
    return {name: item for name, item in found.items() if item is not None}
