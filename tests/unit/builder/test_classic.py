"""The stream of the classic builder, by its words."""

from __future__ import annotations

import pytest

from engine.builder.classic import message
from engine.builder.reports import CacheHit, ImageMade, Notice, Output, Report, StepBegun, Transfer
from engine.wire.build import BuildMessage, BuiltImage
from engine.wire.images import ProgressDetail

BEGUN = StepBegun(2, 3, "RUN a", "[2/2] RUN a")


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (BEGUN, BuildMessage(stream="Step 2/3 : RUN a\n")),
        (CacheHit(), BuildMessage(stream=" ---> Using cache\n")),
        (Output(1, "out"), BuildMessage(stream="out")),
        (Output(2, "err\n"), BuildMessage(stream="\x1b[91merr\n\x1b[0m")),
        (Notice("words\n", classic=True), BuildMessage(stream="words\n")),
        (ImageMade("sha256:1"), BuildMessage(aux=BuiltImage(id="sha256:1"))),
        (
            Transfer(status="s", id="i", progress="p", progress_detail=ProgressDetail(1, 2)),
            BuildMessage(status="s", id="i", progress="p", progress_detail=ProgressDetail(1, 2)),
        ),
    ],
)
def test_reports_as_objects(report: Report, expected: BuildMessage) -> None:
    assert message(report, numbered=True) == expected


def test_steps_without_their_number_of_all() -> None:
    assert message(BEGUN, numbered=False).stream == "Step 2 : RUN a\n"
