"""The names of images that are here."""

from __future__ import annotations

from typing import Any

import pytest

from engine.builder.dialect import BUILDKIT, CLASSIC
from engine.builder.options import Options
from engine.builder.steps import base
from engine.errors import InvalidParameter

ID = "sha256:" + "cafe" * 16


class Images:
    """Says what it is asked for."""

    def get(self, name: str, platform: object = None) -> tuple[str, object]:
        return name, platform


def test_a_part_of_an_id_is_a_name_to_the_classic_builder_alone() -> None:
    images: Any = Images()
    platform: Any = "linux/arm64"

    def asked(name: str, **options: Any) -> Any:
        return base.local(name, platform, Options(**options), images)

    assert asked("cafe", dialect=CLASSIC) == ("cafe", platform)
    assert asked("cafe", dialect=BUILDKIT) == ("docker.io/library/cafe:latest", platform)
    assert asked("cafe:1", dialect=BUILDKIT) == ("docker.io/library/cafe:1", platform)
    assert asked(f"cafe@{ID}", dialect=BUILDKIT) == (f"docker.io/library/cafe@{ID}", platform)
    for dialect in (CLASSIC, BUILDKIT):  # the image of a named context
        assert asked(ID, dialect=dialect) == (ID, None)
    with pytest.raises(InvalidParameter, match="Cafe"):
        asked("Cafe", dialect=BUILDKIT)
