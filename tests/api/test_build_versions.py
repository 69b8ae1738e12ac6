"""Parameters of builds and of prunes of the build cache at their version and just below it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.builds.building import context, post, read, refused
from tests.support.engine import client
from tests.support.engine.harness import TempEngine

OTHER = "linux/arm64" if os.uname().machine == "x86_64" else "linux/amd64"
BASE = "127.0.0.1:1/base"
"""busybox under the name of a registry that does not answer."""


@pytest.fixture
def based(builder: TempEngine) -> Iterator[TempEngine]:
    builder.load_busybox()
    builder.post(f"/images/busybox/tag?repo={BASE}", 201)
    yield builder
    builder.request("DELETE", f"/v1.24/images/{BASE}")


def asked(builder: TempEngine, version: str, **parameters: Any) -> client.Answer:
    return post(builder, context(f"FROM {BASE}\nLABEL a=b\n"), api=f"v{version}", **parameters)


@pytest.mark.parametrize(("version", "obeyed"), [("1.32", True), ("1.31", False), ("1.25", False), ("1.24", True)])
def test_platform(based: TempEngine, version: str, obeyed: bool) -> None:
    """Clients of 1.24 and older that send it mean it."""
    answer = asked(based, version, platform=OTHER)
    if obeyed:
        assert answer.status != 200 or read(answer).error, "an image of that platform is nowhere"
    else:
        assert read(answer).id


@pytest.mark.parametrize(("version", "obeyed"), [("1.40", True), ("1.39", False), ("1.25", False), ("1.24", True)])
def test_outputs(based: TempEngine, version: str, obeyed: bool) -> None:
    answer = asked(based, version, outputs='[{"Type":"local","Attrs":{"dest":"/x"}}]')
    if obeyed:
        assert "outputs" in refused(answer)
    else:
        assert read(answer).id


@pytest.mark.parametrize("name", ["reserved-space", "max-used-space", "min-free-space"])
def test_limits_of_a_prune(builder: TempEngine, name: str) -> None:
    """One that is no number is refused where it has a meaning."""
    for version, status in (("1.48", 400), ("1.47", 200), ("1.31", 200)):
        answer = builder.request("POST", f"/v{version}/build/prune?{name}=1g&filters=%7B%22id%22:[%22none%22]%7D")
        assert answer.status == status, answer
    assert builder.request("POST", "/v1.47/build/prune?keep-storage=1g").status == 400
