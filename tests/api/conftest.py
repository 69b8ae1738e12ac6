"""Fixtures of the tests of image builds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.engine.harness import TempEngine, until


@pytest.fixture
def builder(engine: TempEngine) -> Iterator[TempEngine]:
    """The shared engine. Images that a test builds are removed afterwards, with the images of
    their steps.
    """

    def images(all_of_them: int) -> list[str]:
        return [entry["Id"] for entry in engine.request("GET", f"/v1.24/images/json?all={all_of_them}").json()]

    before, leaves = set(images(1)), set(images(0))
    yield engine
    engine.remove_all()
    for identifier in images(0):  # newest first, so that children are removed before their parents
        if identifier not in leaves:
            engine.request("DELETE", f"/v1.24/images/{identifier}?force=1")
    assert set(images(1)) == before
    if engine.process is not None:  # not another engine
        until("no temporary file is left", lambda: not os.listdir(engine.root / "tmp"))
