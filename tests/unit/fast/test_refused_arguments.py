"""An object that refuses its arguments is freed with all its fields 0, and 0 is standard input."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import engine._fast

WRONG: list[tuple[Any, ...]] = [
    (),
    (None,),
    (None, None),
    (None, None, None),
    (b"", None),
    ("x",),
    (10**30,),
    (object(),) * 4,
]


def classes() -> Iterator[type]:
    for found in pkgutil.iter_modules(engine._fast.__path__):
        module = importlib.import_module(f"engine._fast.{found.name}")
        yield from (
            each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__
        )


@pytest.mark.parametrize(
    "made", list(classes()), ids=lambda made: f"{made.__module__.rpartition('.')[2]}.{made.__name__}"
)
def test_standard_input_stays_open(made: type) -> None:
    kept = os.dup(0)
    try:
        for arguments in WRONG:
            with contextlib.suppress(Exception):
                made(*arguments)
        gc.collect()
        assert os.path.sameopenfile(0, kept)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
