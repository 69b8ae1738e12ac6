"""The json-file driver's options, by Docker's rules."""

from __future__ import annotations

import pytest

from engine.errors import InvalidParameter
from engine.logs.jsonfile import FILES_MAX, attributes, rotation


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10m", 10_000_000),
        ("10M", 10_000_000),
        ("10mb", 10_000_000),
        ("10 MiB", 10_000_000),
        ("1.5k", 1500),
        ("200", 200),
        ("7b", 7),
        ("1g", 10**9),
        ("2t", 2 * 10**12),
        ("1p", 10**15),
    ],
)
def test_sizes_are_decimal(text: str, size: int) -> None:
    assert rotation({"max-size": text}) == (size, 1)


@pytest.mark.parametrize(
    "text", ["", "m", "-1", "10x", "10 m b", "1e3", " 10m", "10m\n", "0", "0.1", "0k", "1..5m", "٣m", "9" * 30]
)
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InvalidParameter, match="max-size"):
        rotation({"max-size": text})


def test_files() -> None:
    assert rotation({}) == (0, 1)
    assert rotation({"max-file": "3"}) == (0, 3)
    assert rotation(
        {"max-file": "+3", "max-size": "1k", "compress": "false", "labels": "a", "env": "b", "tag": "c"}
    ) == (1000, 3)
    assert rotation({"max-file": str(FILES_MAX)}).max_file == FILES_MAX


@pytest.mark.parametrize("text", ["0", "-2", "", "three", "1.5", "3 ", "٣", "1_0", str(FILES_MAX + 1), "9" * 40])
def test_numbers_of_files_that_are_none(text: str) -> None:
    with pytest.raises(InvalidParameter, match="max-file"):
        rotation({"max-file": text})


def test_unknown_options_are_named() -> None:
    with pytest.raises(InvalidParameter, match="unknown log opt 'max-sise' for json-file log driver"):
        rotation({"max-sise": "1m"})
    for text in ("true", "1", "maybe"):
        with pytest.raises(InvalidParameter, match="compress"):
            rotation({"compress": text})


def test_attributes_are_those_named_and_there() -> None:
    labels = {"tier": "front", "HOME": "label", "other": "x"}
    environment = ["HOME=/root", "EMPTY=", "MALFORMED", "A=b=c"]
    assert attributes({}, labels, environment) == {}
    assert attributes({"labels": "tier,nothing"}, labels, environment) == {"tier": "front"}
    assert attributes({"labels": "tier,HOME", "env": "HOME,EMPTY,MALFORMED,A,"}, labels, environment) == {
        "tier": "front",
        "HOME": "/root",
        "EMPTY": "",
        "A": "b=c",
    }
