"""Placement constraints: `node.labels.disk == ssd`. Pure.

Keys and values are compared without regard to case, names of labels with. A key that is unknown
matches no node. A node without the label passes `!=` and fails `==`.

Raises: InvalidParameter for a text that is no constraint.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

from engine.errors import InvalidParameter
from engine.manager.records import NodeData, NodeRecord

_KEY = re.compile(r"[a-z_][a-z0-9\-_./]*", re.I)
_VALUE = re.compile(r"[a-z0-9:\-_\s.*()?+\[\]\\^$|/@,=]+", re.I)
_NODE_LABELS = "node.labels."
_ENGINE_LABELS = "engine.labels."
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "i386": "386", "i686": "386", "armv7l": "arm", "armv6l": "arm"}


class Constraint(NamedTuple):
    key: str
    """In lower case, but for the name of a label."""
    equal: bool
    value: str


def parse(text: str) -> Constraint:
    """One constraint: a key, `==` or `!=`, and a value."""
    found = re.search("[!=]=", text)
    if found is None:
        raise InvalidParameter(f"constraint {text!r} has no operator: == or != is expected")
    key, value = text[: found.start()].strip(), text[found.end() :].strip()
    if not _KEY.fullmatch(key):
        raise InvalidParameter(f"constraint {text!r}: key {key!r} is invalid")
    if not _VALUE.fullmatch(value):
        raise InvalidParameter(f"constraint {text!r}: value {value!r} is invalid")
    return Constraint(_folded(key), found[0] == "==", value)


def parse_all(texts: Iterable[str]) -> tuple[Constraint, ...]:
    return tuple(parse(text) for text in texts)


def matches(constraints: Iterable[Constraint], node: str, record: NodeRecord, data: NodeData | None) -> bool:
    """True if the node fulfils every constraint."""
    return all(_matches(constraint, node, record, data) for constraint in constraints)


def architecture(name: str) -> str:
    """The name that images use: amd64 for x86_64."""
    name = name.lower()
    return _ARCHITECTURES.get(name, name)


def label_value(key: str, record: NodeRecord, data: NodeData | None) -> str | None:
    """The value of `node.labels.X` or `engine.labels.X`; None for another key, "" without it."""
    if key.startswith(_NODE_LABELS):
        return record.labels.get(key[len(_NODE_LABELS) :], "")
    if key.startswith(_ENGINE_LABELS):
        labels = data.description.engine.labels if data is not None and data.description is not None else {}
        return labels.get(key[len(_ENGINE_LABELS) :], "")
    return None


def spread_key(text: str) -> str:
    """The key of a spread preference, as `label_value` takes it.

    Raises InvalidParameter for another one than `node.labels.X` and `engine.labels.X`.
    """
    key = _folded(text.strip())
    for prefix in (_NODE_LABELS, _ENGINE_LABELS):
        if key.startswith(prefix) and len(key) > len(prefix):
            return key
    raise InvalidParameter(f"spread preference {text!r}: node.labels.NAME or engine.labels.NAME is expected")


def _folded(key: str) -> str:
    lower = key.lower()
    for prefix in (_NODE_LABELS, _ENGINE_LABELS):
        if lower.startswith(prefix):
            return prefix + key[len(prefix) :]
    return lower


def _matches(constraint: Constraint, node: str, record: NodeRecord, data: NodeData | None) -> bool:
    key, equal, value = constraint
    description = data.description if data is not None else None
    has = label_value(key, record, data)
    if has is None:
        match key:
            case "node.id":
                has = node
            case "node.hostname":
                has = description.hostname if description is not None else ""
            case "node.role":
                has = record.role.label
            case "node.platform.os":
                has = description.platform.os if description is not None else ""
            case "node.platform.arch":
                has = architecture(description.platform.architecture) if description is not None else ""
                value = architecture(value)
            case "node.ip":
                return _in_network(data.address if data is not None else "", value) is equal
            case _:
                return False
    return (has.casefold() == value.casefold()) is equal


def _in_network(address: str, value: str) -> bool:
    network = _network(value)
    try:
        return network is not None and ipaddress.ip_address(address) in network
    except ValueError:
        return False


@functools.lru_cache(256)
def _network(value: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(value, strict=False)
    except ValueError:
        return None
