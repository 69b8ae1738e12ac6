"""The text forms of answers to `docker build --call`, and their documents."""

from __future__ import annotations

import json

import pytest

from engine.builder import calls
from engine.builder.dialect import BUILDKIT
from engine.builder.dockerfile import lines, stages
from engine.builder.dockerfile.scope import Platforms
from engine.builder.dockerfile.walk import Base, Walk
from engine.builder.lint import Check, Request

PLATFORMS = Platforms(build="linux/amd64", target="linux/amd64")

TEXT = b"""# V is the version
ARG V=1
# one is the first
FROM scratch:$V AS one
ARG V
RUN --mount=type=secret,id=s,required --mount=type=ssh x
FROM one
"""


def asked(target: str, raw: bytes) -> dict[str, bytes]:
    file = stages.read(lines.parse(raw), {}, PLATFORMS, target, dialect=BUILDKIT)
    return calls.outline(raw, file, target, Walk(file, lambda _: Base()))


def outline(target: str) -> str:
    return asked(target, TEXT)["result.txt"].decode()


def test_outlines() -> None:
    assert outline("one") == (
        "TARGET:      one\nDESCRIPTION: is the first\n\n"
        "BUILD ARG   VALUE   DESCRIPTION\nV           1       is the version\n\n"
        "SECRET   REQUIRED\ns        true\n\n"
        "SSH       REQUIRED\ndefault   \n\n"
    )
    assert outline("").startswith("BUILD ARG")


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("kind", ["secret", "ssh"])
def test_the_first_mount_of_a_stage_says_whether_a_secret_is_required(kind: str, required: bool) -> None:
    mounts = [f"RUN --mount=type={kind},id=s,required={str(each).lower()} x" for each in (required, not required)]
    document = json.loads(asked("", "\n".join(["FROM scratch", *mounts]).encode())["result.json"])
    (needed,) = document["secrets" if kind == "secret" else "ssh"]
    assert needed.get("required", False) is required
    assert needed["location"]["ranges"][0]["start"] == {"line": 2}


def test_targets() -> None:
    document = lines.parse(TEXT)
    read = [stages.read_line(line, document.escape, BUILDKIT) for line in document.lines]
    answer = calls.targets(TEXT, document, read)
    assert answer["result.txt"] == b"TARGET    DESCRIPTION\none       is the first\n(default) \n"
    assert answer["version"] == b"1.0.0"


def test_the_calls_that_there_are() -> None:
    answer = calls.describe()
    found = json.loads(answer["result.json"])
    assert [each["name"] for each in found] == [calls.OUTLINE, calls.TARGETS, calls.DESCRIBE]
    assert found[0] == {
        "name": "frontend.outline",
        "version": "1.0.0",
        "type": "rpc",
        "description": "List all parameters current build target supports",
        "opts": [{"name": "target", "description": "Target build stage"}],
        "inputs": None,
        "metadata": [{"name": "result.json", "description": ""}, {"name": "result.txt", "description": ""}],
        "refs": None,
    }
    assert answer["result.txt"].decode().splitlines()[0] == "NAME                 VERSION DESCRIPTION"


def test_warnings() -> None:
    raw = b"FROM scratch\nCMD a\nENV a b\n"
    findings = Check(raw, Request(arguments={}, platforms=PLATFORMS)).findings(lambda _: Base())
    answer = calls.lint(raw, "sub/Dockerfile", findings)
    assert answer["result.statuscode"] == b"1"
    rule = "-" * 20
    assert answer["result.txt"].decode().split("\nWARNING: ")[2] == (
        "LegacyKeyValueFormat - https://docs.docker.com/go/dockerfile/rule/legacy-key-value-format/\n"
        '"ENV key=value" should be used instead of legacy "ENV key value" format\n'
        f"sub/Dockerfile:3\n{rule}\n"
        f"   1 |     FROM scratch\n   2 |     CMD a\n   3 | >>> ENV a b\n   4 |     \n{rule}\n"
    )
    empty = Check(b"", Request(arguments={}, platforms=PLATFORMS)).findings(lambda _: None)
    assert calls.lint(b"", "Dockerfile", empty)["result.statuscode"] == b"1"


def test_places_of_many_lines_are_bounded() -> None:
    text = b"FROM scratch\nCOPY <<A /a\n" + b"$x\n" * 500 + b"A\n"
    findings = Check(text, Request(arguments={}, platforms=PLATFORMS)).findings(lambda _: Base())
    (warning,) = json.loads(calls.lint(text, "Dockerfile", findings)["result.json"])["warnings"]
    assert warning["location"]["ranges"] == [{"start": {"line": 2}, "end": {"line": 503}}]
