"""Stages gone through without running them: the variables at each place."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from engine.builder.dialect import BUILDKIT
from engine.builder.dockerfile import lines, stages
from engine.builder.dockerfile.scope import Platforms
from engine.builder.dockerfile.walk import Base, Variables, Walk

PLATFORMS = Platforms(build="linux/amd64", target="linux/amd64")
LINES = st.lists(st.sampled_from(["ARG A", "ARG A=1", "ARG B=$A", "ENV A=2", "ENV B=$B.$A C=3", "ARG C=$C$B D"]))


@given(LINES, st.sampled_from([(), ("A=base",), ("A=base", "C=base")]))
def test_each_place_sees_what_a_copy_of_its_variables_says(below: list[str], env: tuple[str, ...]) -> None:
    document = lines.parse("\n".join(["FROM x", *below]).encode())
    file = stages.read(document, {"D": "given"}, PLATFORMS, dialect=BUILDKIT)
    (stage,) = file.stages
    place = Walk(file, lambda _: Base(env)).enter(stage)
    assert place is not None
    for instruction in stage.instructions:
        seen = place.variables()
        whole = place.scope.variables([f"{name}={value}" for name, value in place.env.items()])
        assert dict(seen) == whole and len(seen) == len(whole)
        assert [name in seen for name in "ABCD"] == [name in whole for name in "ABCD"]
        place.take(instruction)


def test_what_was_looked_up() -> None:
    seen = Variables({"a": "1"})
    other = copy.copy(seen)
    other["b"] = "2"
    assert (other.get("b"), other.get("a"), seen.get("b"), seen.get("c", "x")) == ("2", "1", None, "x")
    assert "b" not in seen and other.missing == ["b", "c"] and seen.found == {"a", "b"}


def test_directory_and_platform() -> None:
    """A stage begins with those of the stage that it continues."""
    text = "FROM x AS a\nWORKDIR b\nWORKDIR ../c\nFROM a\nWORKDIR /d\nFROM --platform=linux/arm64 scratch\n"
    file = stages.read(lines.parse(text.encode()), {}, PLATFORMS, dialect=BUILDKIT)
    walk = Walk(file, lambda _: Base(platform="linux/arm/v7", directory="/base"))
    seen = []
    for stage in file.stages:
        place = walk.enter(stage)
        assert place is not None
        for instruction in walk.instructions(stage, place):
            place.take(instruction)
        seen.append((place.directory, place.architecture))
    assert seen == [("/base/b/../c", "arm"), ("/d", "arm"), ("", "arm64")]
