"""A build before its work begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.builder.build import MAX_STEPS, Build
from engine.builder.dockerfile import lines, stages
from engine.builder.dockerfile.scope import Platforms
from engine.builder.options import Options
from engine.builder.trees import MemoryTree
from engine.errors import InvalidParameter


def test_a_build_with_too_many_steps_claims_no_layers(tmp_path: Path) -> None:
    """Claims are released at the end of a build's work, so one without work must have none."""
    claims: list[str] = []
    parts: Any = SimpleNamespace(
        images=SimpleNamespace(temporary=tmp_path), cache=SimpleNamespace(uses=lambda: claims.append("claim"))
    )

    def build(labels: int) -> Build:
        document = lines.parse(b"FROM scratch\n" + b"LABEL a=b\n" * labels)
        platforms = Platforms(build="linux/amd64", target="linux/amd64")
        return Build(parts, Options(), stages.read(document, {}, platforms), MemoryTree({}))

    with pytest.raises(InvalidParameter, match=f"{MAX_STEPS + 1} steps of at most {MAX_STEPS}"):
        build(MAX_STEPS)
    assert claims == []
    assert len(build(MAX_STEPS - 1).steps) == MAX_STEPS
    assert claims == ["claim"]
