"""The history of images in BuildKit's words."""

from __future__ import annotations

import msgspec

from engine.builder.dockerfile import created_by
from engine.images.instructions import records
from engine.images.instructions.records import Copy


def test_names_that_are_no_text() -> None:
    """A document of an image cannot hold them."""
    instruction = records.read_text("COPY a\udcff b /d/")
    assert isinstance(instruction, Copy) and instruction.sources == ("a\udcff", "b")
    text = created_by.copied(instruction)
    assert msgspec.json.decode(msgspec.json.encode(text)) == "COPY a\ufffd b /d/ # buildkit"
