"""Older shapes of replies, composed once from the rows of the version table.

An older object is a copy of the newest struct. Fields that the version does not have are UNSET, so
msgspec omits them; changed fields have the older value. Fields that the newest struct no longer has
are appended to the JSON. Nothing is converted to dicts, and unchanged objects are encoded as they
are. So encoding for an old version costs little more than for the newest one, however many rows
apply.

A struct looks the same wherever it occurs: rows of an image of the list also apply to the images in
the reply of /system/df.

Pure. Not here: the rows (`v1_*.py`), which shape a version has (`__init__.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, inspect

from engine.api.versions.change import Source

_encode = msgspec.json.Encoder().encode
_replace = msgspec.structs.replace

Fields = Mapping[str, Source]
"""Differences of a struct from its newest shape, by path."""

_View = Callable[[Any, Any], Any]
"""From the newest object and the newest root struct to the older object."""


class _Node:
    """What changes in one field: its value (`source`), and then fields of the object in it."""

    __slots__ = ("changed", "fields", "source")

    def __init__(self) -> None:
        self.changed = False
        self.source: Source = None
        self.fields: _Tree = {}


_Tree = dict[str, _Node]


class Shape:
    """One shape of one struct. Versions in which the struct looks the same share it, so it serves
    as a key for encoded replies.
    """

    __slots__ = ("_view", "encode")

    def __init__(self, of: type, fields: Fields, inside: Mapping[type, Fields] | None = None) -> None:
        """`fields`: the differences from the newest shape, by path. A path that ends in an unknown
        name adds a field. `inside`: the differences of structs that occur in this one.

        Raises ValueError for an impossible path.
        """
        inside = {kind: each for kind, each in (inside or {}).items() if each}
        changed = bool(fields) or not structs_in(of).isdisjoint(inside)
        self._view: _View | None = _struct_view(of, _tree(fields), inside, root=True) if changed else None
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


@functools.cache
def structs_in(of: type) -> frozenset[type]:
    """The structs that occur in a struct, at any depth, without itself."""
    found: set[type] = set()

    def visit(kind: inspect.Type) -> None:
        if isinstance(kind, inspect.StructType):
            if kind.cls not in found:
                found.add(kind.cls)
                for field in kind.fields:
                    visit(field.type)
        elif isinstance(kind, inspect.UnionType):
            for each in kind.types:
                visit(each)
        elif isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
            visit(kind.item_type)
        elif isinstance(kind, inspect.DictType):
            visit(kind.value_type)

    visit(inspect.type_info(of))
    return frozenset(found - {of})


def _tree(fields: Fields) -> _Tree:
    tree: _Tree = {}
    for path, source in fields.items():
        *parents, name = path.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, _Node()).fields
        node = place.setdefault(name, _Node())
        node.changed, node.source = True, source
    return tree


def _struct_view(of: type, tree: _Tree, inside: Mapping[type, Fields], *, root: bool) -> _View:
    fields = {field.encode_name: field for field in msgspec.structs.fields(of)}
    absent: dict[str, Any] = {}
    nested: list[tuple[str, _View]] = []
    computed: list[tuple[str, Callable[[Any], Any]]] = []
    added: list[tuple[str, Callable[[Any], Any]]] = []
    for name, node in tree.items():
        if node.changed and node.source is not None and not root:
            raise ValueError(f"{of.__name__}: an element of a list or map cannot have computed fields")
        field = fields.get(name)
        if field is None:
            if node.fields and not node.changed:
                raise ValueError(f"{of.__name__} has no object {name}")
            if node.source is not None:
                added.append((name, node.source))
        elif node.changed and node.source is None:
            absent[field.name] = UNSET
        elif node.changed and node.source is not None:
            computed.append((field.name, node.source))
    for name, field in fields.items():
        node = tree.get(name, _NO_CHANGE)
        if field.name in absent:
            continue
        kind = inspect.type_info(field.type)
        if node.fields or not _structs(kind).isdisjoint(inside):
            # this field can be neither null nor UNSET
            if isinstance(kind, inspect.StructType) and field.type is kind.cls:
                nested.append((field.name, _object_view(kind.cls, node.fields, inside, root=root)))
            else:
                nested.append((field.name, _field_view(kind, node.fields, inside, root=root, of=of)))
    first = dict(computed)
    computed = [(name, source) for name, source in computed if name not in {each for each, _ in nested}]

    def view(value: Any, whole: Any) -> Any:
        changes = absent.copy()
        for attribute, inner in nested:
            source = first.get(attribute)
            changes[attribute] = inner(getattr(value, attribute) if source is None else source(whole), whole)
        for attribute, source in computed:
            changes[attribute] = source(whole)
        older = _replace(value, **changes)
        if not added:
            return older
        present = _encode(older)[:-1]
        more = {name: each for name, source in added if (each := source(whole)) is not UNSET}
        if not more:
            return older
        return msgspec.Raw(present + (b"," if len(present) > 1 else b"") + _encode(more)[1:])

    def smaller(value: Any, _whole: Any) -> Any:
        return _replace(value, **absent)

    return view if nested or computed or added else smaller


_NO_CHANGE = _Node()


def _structs(kind: inspect.Type) -> frozenset[type]:
    """The structs of a field's type, and those that occur in them."""
    if isinstance(kind, inspect.StructType):
        return structs_in(kind.cls) | {kind.cls}
    if isinstance(kind, inspect.UnionType):
        return frozenset().union(*map(_structs, kind.types))
    if isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        return _structs(kind.item_type)
    return _structs(kind.value_type) if isinstance(kind, inspect.DictType) else frozenset()


def _object_view(of: type, tree: _Tree, inside: Mapping[type, Fields], *, root: bool) -> _View:
    """The view of a struct in another one: first the rows of the outer struct, then its own."""
    own = _struct_view(of, _tree(inside[of]), {}, root=True) if of in inside else None
    outer = None
    if tree or not structs_in(of).isdisjoint(inside):
        outer = _struct_view(of, tree, inside, root=root)
    if own is None:
        assert outer is not None
        return outer
    if outer is None:
        return lambda value, _whole: own(value, value)
    names = {field.encode_name for field in msgspec.structs.fields(of)}
    if any(node.source is not None and name not in names for name, node in tree.items()):
        raise ValueError(f"{of.__name__}: an outer struct cannot add fields beside the struct's own rows")
    return lambda value, whole: own(outer(value, whole), value)


def _field_view(kind: inspect.Type, tree: _Tree, inside: Mapping[type, Fields], *, root: bool, of: type) -> _View:
    """The view of a field that holds an object, or a list or map of objects. null stays, and so
    does UNSET.
    """
    if isinstance(kind, inspect.UnionType):
        structured = [each for each in kind.types if not isinstance(each, _SCALARS)]
        if len(structured) == 1:
            return _field_view(structured[0], tree, inside, root=root, of=of)
    elif isinstance(kind, inspect.StructType):
        inner = _object_view(kind.cls, tree, inside, root=root)
        return lambda value, whole: value if value is None or value is UNSET else inner(value, whole)
    elif isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        element = _field_view(kind.item_type, tree, inside, root=False, of=of)
        return lambda value, whole: (
            value if value is None or value is UNSET else [element(item, whole) for item in value]
        )
    elif isinstance(kind, inspect.DictType):
        element = _field_view(kind.value_type, tree, inside, root=False, of=of)
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
