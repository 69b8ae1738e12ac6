"""How a field of a wire struct is encoded, where its default alone does not say it."""

from __future__ import annotations

import copy
from typing import TypeVar

import msgspec

T = TypeVar("T")


def shown(default: T) -> T:
    """A field that is sent even when it has its default, in a struct whose other fields are omitted
    then. msgspec omits defaults, and what a factory makes only if the factory is a builtin.
    """
    field: T = msgspec.field(default_factory=lambda: copy.copy(default))
    return field
