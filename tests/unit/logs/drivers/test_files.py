"""The options of json-file and local."""

from __future__ import annotations

import pytest

from engine.errors import InvalidParameter
from engine.logs.drivers import json_file, local
from engine.logs.drivers.json_file import Files
from engine.logs.options import FILES_MAX, Options


def plain(**options: str) -> Files:
    return json_file.parse(Options("json-file", {k.replace("_", "-"): v for k, v in options.items()}, empty=False))


def compact(**options: str) -> Files:
    return local.parse(Options("local", {k.replace("_", "-"): v for k, v in options.items()}, empty=False))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Files(0, 1, False)),
        ({"max_size": "10m"}, Files(10_000_000, 1, False)),
        ({"max_file": "3"}, Files(0, 3, False)),
        ({"max_file": "+3", "max_size": "1k"}, Files(1000, 3, False)),
        ({"max_file": str(FILES_MAX), "max_size": "1k"}, Files(1000, FILES_MAX, False)),
        ({"compress": "false"}, Files(0, 1, False)),
        ({"compress": "0", "max_size": "1m"}, Files(1_000_000, 1, False)),
        ({"compress": "true", "max_size": "1m", "max_file": "2"}, Files(1_000_000, 2, True)),
        ({"compress": "T", "max_size": "1m", "max_file": "2"}, Files(1_000_000, 2, True)),
    ],
)
def test_json_file(options: dict[str, str], expected: Files) -> None:
    assert plain(**options) == expected


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({"max_size": "x"}, "max-size", "invalid size: 'x'"),
        ({"max_size": ""}, "max-size", "invalid size: ''"),
        ({"max_size": "0"}, "max-size", "max-size must be a positive number"),
        ({"max_size": "0.1"}, "max-size", "max-size must be a positive number"),
        ({"max_size": "-1"}, "max-size", "invalid size: '-1'"),
        ({"max_file": "0"}, "max-file", "max-file cannot be less than 1"),
        ({"max_file": "-2"}, "max-file", "max-file cannot be less than 1"),
        ({"max_file": str(FILES_MAX + 1)}, "max-file", "max-file cannot be more than 1000"),
        ({"max_file": "three"}, "max-file", "not a number"),
        ({"max_file": "1.5"}, "max-file", "not a number"),
        ({"max_file": ""}, "max-file", "not a number"),
        ({"max_file": "9" * 40}, "max-file", "not a number"),
        ({"compress": "maybe"}, "compress", "neither true nor false"),
        ({"compress": ""}, "compress", "neither true nor false"),
        ({"compress": "true"}, "compress", "compress cannot be true when max-file is less than 2 or max-size"),
        ({"compress": "true", "max_size": "1m"}, "compress", "compress cannot be true when"),
        ({"compress": "true", "max_file": "3"}, "compress", "compress cannot be true when"),
        ({"compress": "true", "max_file": "1", "max_size": "1m"}, "compress", "compress cannot be true when"),
    ],
)
def test_json_file_refuses(options: dict[str, str], name: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        plain(**options)
    assert f"for log opt '{name}' for json-file log driver: {words}" in caught.value.message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Files(20 << 20, 5, True)),
        ({"max_size": "1m"}, Files(1_000_000, 5, True)),
        ({"max_file": "2"}, Files(20 << 20, 2, True)),
        ({"compress": "false"}, Files(20 << 20, 5, False)),
        ({"max_file": "1", "compress": "false"}, Files(20 << 20, 1, False)),
    ],
)
def test_local(options: dict[str, str], expected: Files) -> None:
    assert compact(**options) == expected


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({"max_size": "x"}, "max-size", "invalid size"),
        ({"max_size": "0"}, "max-size", "max-size must be a positive number"),
        ({"max_file": "x"}, "max-file", "not a number"),
        ({"max_file": "0"}, "max-file", "max-file cannot be less than 1"),
        ({"max_file": "1"}, "max-file", "compression cannot be enabled when max file count is 1"),
        ({"max_file": "1001"}, "max-file", "max-file cannot be more than 1000"),
        ({"compress": "x"}, "compress", "neither true nor false"),
    ],
)
def test_local_refuses(options: dict[str, str], name: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        compact(**options)
    assert f"for log opt '{name}' for local log driver: {words}" in caught.value.message


def test_the_cache_has_the_options_of_local_with_a_prefix() -> None:
    given = Options("gelf", {"cache-max-size": "1m", "cache-max-file": "7", "cache-compress": "false"}, empty=False)
    assert local.parse(given, "cache-") == Files(1_000_000, 7, False)
    with pytest.raises(InvalidParameter, match="'cache-max-file' for gelf log driver: compression cannot"):
        local.parse(Options("gelf", {"cache-max-file": "1"}, empty=False), "cache-")
