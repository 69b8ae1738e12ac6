"""Older shapes of replies, composed once from the rows of the version table.

An older object is a copy of the newest struct. Fields that the version does not have are UNSET, so
msgspec omits them; changed fields have the older value. Fields that the newest struct no longer has
are appended to the JSON. Nothing is converted to dicts, and unchanged objects are encoded as they
are. So encoding for an old version costs little more than for the newest one, however many rows
apply.

Pure. Not here: the rows (`v1_*.py`), which shape a version has (`__init__.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, inspect

from engine.api.versions.change import Source

_encode = msgspec.json.Encoder().encode
_replace = msgspec.structs.replace

_Tree = dict[str, "_Tree | Source"]
"""Changed fields of one object by name: a nested tree for an object, otherwise the field's
source.
"""

_View = Callable[[Any, Any], Any]
"""From the newest object and the newest root struct to the older object."""


class Shape:
    """One shape of one struct. Versions in which the struct looks the same share it, so it serves
    as a key for encoded replies.
    """

    __slots__ = ("_view", "encode")

    def __init__(self, of: type, fields: Mapping[str, Source]) -> None:
        """`fields`: the differences from the newest shape, by path. A path that ends in an unknown
        name adds a field.

        Raises ValueError for an impossible path.
        """
        self._view: _View | None = _struct_view(of, _tree(fields), root=True) if fields else None
        self.encode: Callable[[Any], bytes] = _encode if self._view is None else self._encode_older
        """The JSON of a struct, or of a list of them, without a newline."""

    def _encode_older(self, value: Any) -> bytes:
        view = self._view
        assert view is not None
        if isinstance(value, list):
            return _encode([view(item, item) for item in value])
        return _encode(view(value, value))

    @property
    def newest(self) -> bool:
        """True when the struct is encoded as it is."""
        return self._view is None


def _tree(fields: Mapping[str, Source]) -> _Tree:
    tree: _Tree = {}
    for path, source in fields.items():
        *parents, name = path.split(".")
        place = tree
        for parent in parents:
            inner = place.setdefault(parent, {})
            if not isinstance(inner, dict):
                break  # the whole object is replaced or absent, and its fields with it
            place = inner
        else:
            place[name] = source
    return tree


def _struct_view(of: type, tree: _Tree, *, root: bool) -> _View:
    fields = {field.encode_name: field for field in msgspec.structs.fields(of)}
    absent: dict[str, Any] = {}
    nested: list[tuple[str, _View]] = []
    computed: list[tuple[str, Callable[[Any], Any]]] = []
    added: list[tuple[str, Callable[[Any], Any]]] = []
    for name, change in tree.items():
        field = fields.get(name)
        if isinstance(change, dict):
            if field is None:
                raise ValueError(f"{of.__name__} has no object {name}")
            kind = inspect.type_info(field.type)
            # this field can be neither null nor UNSET
            if isinstance(kind, inspect.StructType) and field.type is kind.cls:
                nested.append((field.name, _struct_view(kind.cls, change, root=root)))
            else:
                nested.append((field.name, _field_view(kind, change, root=root, of=of)))
        elif change is not None:
            if not root:
                raise ValueError(f"{of.__name__}: an element of a list or map cannot have computed fields")
            if field is None:
                added.append((name, change))
            else:
                computed.append((field.name, change))
        elif field is not None:
            absent[field.name] = UNSET

    def view(value: Any, whole: Any) -> Any:
        changes = absent.copy()
        for attribute, inner in nested:
            changes[attribute] = inner(getattr(value, attribute), whole)
        for attribute, source in computed:
            changes[attribute] = source(whole)
        older = _replace(value, **changes)
        if not added:
            return older
        present = _encode(older)[:-1]
        more = _encode({name: source(whole) for name, source in added})[1:]
        return msgspec.Raw(present + (b"," if len(present) > 1 else b"") + more)

    def smaller(value: Any, _whole: Any) -> Any:
        return _replace(value, **absent)

    return view if nested or computed or added else smaller


def _field_view(kind: inspect.Type, tree: _Tree, *, root: bool, of: type) -> _View:
    """The view of a field that holds an object, or a list or map of objects. null stays, and so
    does UNSET.
    """
    if isinstance(kind, inspect.UnionType):
        structured = [each for each in kind.types if not isinstance(each, _SCALARS)]
        if len(structured) == 1:
            return _field_view(structured[0], tree, root=root, of=of)
    elif isinstance(kind, inspect.StructType):
        inner = _struct_view(kind.cls, tree, root=root)
        return lambda value, whole: value if value is None or value is UNSET else inner(value, whole)
    elif isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        element = _field_view(kind.item_type, tree, root=False, of=of)
        return lambda value, whole: (
            value if value is None or value is UNSET else [element(item, whole) for item in value]
        )
    elif isinstance(kind, inspect.DictType):
        element = _field_view(kind.value_type, tree, root=False, of=of)
        return lambda value, whole: (
            value if value is None or value is UNSET else {key: element(item, whole) for key, item in value.items()}
        )
    raise ValueError(f"{of.__name__}: {', '.join(tree)} cannot be in a {type(kind).__name__}")


_SCALARS = (
    inspect.NoneType,
    inspect.StrType,
    inspect.IntType,
    inspect.BoolType,
    inspect.FloatType,
    inspect.CustomType,
)
