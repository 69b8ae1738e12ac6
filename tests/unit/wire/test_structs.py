"""Rules for every struct on the wire."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import msgspec
import pytest

from engine import wire


def structs() -> Iterator[type[msgspec.Struct]]:
    for found in pkgutil.iter_modules(wire.__path__):
        module = importlib.import_module(f"engine.wire.{found.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__:
                yield value


ALL = sorted(structs(), key=lambda each: (each.__module__, each.__name__))


@pytest.mark.parametrize("of", ALL, ids=lambda each: f"{each.__module__[12:]}.{each.__name__}")
def test_a_struct(of: type[msgspec.Struct]) -> None:
    """Frozen: records and replies share them. No two names differ only in case: bodies are read as
    Go reads them.
    """
    assert of.__struct_config__.frozen
    names = [field.encode_name for field in msgspec.structs.fields(of)]
    assert len({name.lower() for name in names}) == len(names)
    if all(not field.required for field in msgspec.structs.fields(of)):
        assert msgspec.convert(msgspec.to_builtins(of()), of) == of(), "the defaults survive a round trip"


def test_there_are_some() -> None:
    assert len(ALL) > 60
