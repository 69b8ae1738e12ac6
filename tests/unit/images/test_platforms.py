"""Platforms: their texts, and which images suit them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError, InvalidParameter, NotFound
from engine.images import platforms
from engine.images.platforms import HOST, best, from_json, normal, parse, suits, text_of
from engine.wire.images import ImageConfig, Platform


def of(text: str) -> Platform:
    system, architecture, variant = [*text.split("/"), ""][:3]
    return Platform(os=system, architecture=architecture, variant=variant)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("linux/amd64", "linux/amd64"),
        ("Linux/x86_64", "linux/amd64"),
        ("linux/amd64/v1", "linux/amd64"),
        ("linux/amd64/v3", "linux/amd64/v3"),
        ("linux/aarch64", "linux/arm64"),
        ("linux/arm64/v8", "linux/arm64"),
        ("linux/arm64/8", "linux/arm64"),
        ("linux/arm64/v9", "linux/arm64/v9"),
        ("linux/arm", "linux/arm/v7"),
        ("linux/arm/6", "linux/arm/v6"),
        ("linux/armhf", "linux/arm/v7"),
        ("linux/armel", "linux/arm/v6"),
        ("linux/i386", "linux/386"),
        ("macos/arm64", "darwin/arm64"),
        ("windows/amd64", "windows/amd64"),
        ("arm64", "linux/arm64"),
        ("s390x", "linux/s390x"),
        ("linux", text_of(HOST)),
        ("windows", f"windows/{HOST.architecture}"),
        ("plan10/pdp11", "plan10/pdp11"),
    ],
)
def test_parse(text: str, expected: str) -> None:
    assert text_of(parse(text)) == expected


@pytest.mark.parametrize(
    "text", ["", "a/b/c/d", "linux/", "/amd64", "li nux/amd64", "pdp11", "linux/amd64,linux/arm64"]
)
def test_what_is_no_platform(text: str) -> None:
    with pytest.raises(InvalidParameter, match="invalid argument"):
        parse(text)


@given(st.text(max_size=40) | st.from_regex(r"[a-zA-Z0-9]{1,8}(/[a-zA-Z0-9]{1,8}){0,2}", fullmatch=True))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except EngineError as error:
        assert len(error.message) < 1000
    else:
        assert parse(text_of(found)) == found == normal(found) and suits(found, found)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("", "failed to parse platform"),
        ("{", "failed to parse platform"),
        ("[]", "failed to parse platform"),
        ('{"os":1}', "failed to parse platform: os"),
        ("{}", "both OS and Architecture"),
        ('{"os":"linux"}', "both OS and Architecture"),
        ('{"variant":"v8"}', "optional platform fields"),
        ("\ud800", "failed to parse platform"),
    ],
)
def test_json_that_is_refused(document: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        from_json(document)


def test_json() -> None:
    given = {"architecture": "arm64", "os": "linux", "os.version": "1", "os.features": ["a"], "variant": "v8", "x": 1}
    assert from_json(json.dumps(given)) == Platform(
        os="linux", architecture="arm64", variant="v8", os_version="1", os_features=("a",)
    )


def on_level_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is of amd64, whose CPU has level 3."""
    monkeypatch.setattr(platforms, "HOST", of("linux/amd64"))
    monkeypatch.setattr(platforms, "_host_level", lambda: 3)


@pytest.mark.parametrize(
    ("wanted", "found", "expected"),
    [
        ("linux/amd64", "linux/amd64", True),
        ("linux/amd64", "linux/386", True),
        ("linux/amd64", "linux/amd64/v3", True),
        ("linux/amd64", "linux/amd64/v4", False),
        ("linux/amd64/v2", "linux/amd64/v3", False),
        ("linux/amd64/v3", "linux/amd64/v2", True),
        ("linux/amd64/v3", "linux/amd64", True),
        ("linux/386", "linux/amd64", False),
        ("linux/arm64", "linux/arm64/v8", True),
        ("linux/arm64/v8", "linux/arm64", True),
        ("linux/arm64", "linux/arm/v7", True),
        ("linux/arm/v6", "linux/arm/v7", False),
        ("linux/arm/v7", "linux/arm/v5", True),
        ("linux/arm/v6", "linux/arm", True),
        ("linux/amd64", "windows/amd64", False),
        ("linux/s390x", "linux/s390x", True),
    ],
)
def test_suits(wanted: str, found: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_level_3(monkeypatch)
    assert suits(of(wanted), of(found)) is expected


@pytest.mark.parametrize(
    ("wanted", "offered", "expected"),
    [
        ("linux/amd64", ["linux/386", "linux/amd64"], 1),
        ("linux/arm/v7", ["linux/arm/v5", "linux/arm/v6", "linux/arm/v8"], 1),
        ("linux/arm64", ["linux/amd64", "linux/arm64/v8"], 1),
        ("linux/amd64", ["unknown/unknown", "linux/arm64"], None),
        ("linux/amd64", [None, "linux/amd64"], 1),
        ("linux/amd64", [None, "linux/arm64"], 0),
        ("linux/amd64", ["linux/amd64", "linux/amd64"], 0),
        ("linux/amd64", ["linux/amd64", "linux/amd64/v2", "linux/amd64/v3", "linux/amd64/v4"], 2),
        ("linux/amd64", ["linux/386", "linux/amd64/v4", "linux/amd64/v2"], 2),
        ("linux/amd64/v2", ["linux/amd64", "linux/amd64/v2", "linux/amd64/v3"], 1),
        ("linux/amd64", ["linux/amd64/v4"], None),
        ("windows/amd64", ["windows/amd64/v2"], None),
        ("linux/amd64", [], None),
    ],
)
def test_the_best_of_an_index(
    wanted: str, offered: list[str | None], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_level_3(monkeypatch)
    assert best(of(wanted), [(of(each) if each else None, at) for at, each in enumerate(offered)]) == expected


def test_the_level_of_a_cpu() -> None:
    second = {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
    third = second | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
    fourth = third | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    assert [platforms.level_of(flags | {"fpu"}) for flags in (set(), second, third, fourth)] == [1, 2, 3, 4]
    assert platforms.level_of(fourth - {"popcnt"}) == 1
    assert platforms.level_of(fourth - {"fma"}) == 2


def test_an_image_of_another_platform() -> None:
    config = ImageConfig(os="linux", architecture="amd64")
    platforms.check("x:1", config, None)
    platforms.check("x:1", config, of("linux/x86_64"))
    with pytest.raises(NotFound) as refused:
        platforms.check("x:1", config, of("linux/arm64/v8"))
    assert refused.value.message == (
        "image with reference x:1 was found but its platform (linux/amd64) "
        "does not match the specified platform (linux/arm64/v8)"
    )
    platforms.check("x:1", ImageConfig(), HOST)
