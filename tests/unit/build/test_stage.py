"""What all stages of a build share: limits of the documents that they make, and the epoch."""

from __future__ import annotations

from typing import Any

import pytest

from engine.build import stage
from engine.build.options import Options
from engine.build.stage import Site
from engine.build.state import State
from engine.errors import InvalidParameter
from engine.images.archive import MAX_DOCUMENT

ABSENT: Any = None


def site(**arguments: str | None) -> Site:
    return Site(ABSENT, Options(arguments=arguments), ABSENT, ABSENT, ABSENT)


def test_one_document_has_a_limit() -> None:
    site().charge(State(key="", raw=bytes(MAX_DOCUMENT)))
    with pytest.raises(InvalidParameter, match="more than 4 MiB"):
        site().charge(State(key="", raw=bytes(MAX_DOCUMENT + 1)))


def test_all_documents_together_have_a_limit() -> None:
    charged, one = site(), State(key="", raw=bytes(MAX_DOCUMENT))
    for _ in range(stage.MAX_DOCUMENTS // MAX_DOCUMENT):
        charged.charge(one)
    with pytest.raises(InvalidParameter, match="all steps more than 256 MiB"):
        charged.charge(one)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "9" * 13, "\u0663"])
def test_an_epoch_that_is_none(text: str) -> None:
    with pytest.raises(InvalidParameter, match="SOURCE_DATE_EPOCH"):
        site(SOURCE_DATE_EPOCH=text)


def test_an_epoch() -> None:
    assert site(SOURCE_DATE_EPOCH="1700000000").epoch == 1_700_000_000
    assert site(SOURCE_DATE_EPOCH=None).epoch is site().epoch is None
