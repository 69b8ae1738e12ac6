"""Checks of Dockerfiles, outlines and lists of targets: the answers of dockerd 28.5.2 to the same
files, as `tests/support/builds/checks.py` has recorded them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder import calls, lint
from engine.builder.dialect import BUILDKIT
from engine.builder.dockerfile import lines, stages
from engine.builder.dockerfile.scope import Platforms
from engine.builder.dockerfile.stages import Stage
from engine.builder.dockerfile.walk import Base, Walk
from engine.builder.errors import AtLine
from engine.builder.lint import Check, Findings, Request
from engine.builder.state import DEFAULT_PATH
from engine.errors import InvalidParameter
from tests.support.builds.checks import Case, cases, comparable

PLATFORMS = Platforms(build="linux/amd64", target="linux/amd64")
BASE = Base(env=(DEFAULT_PATH,), platform="linux/amd64")


def base(_: Stage) -> Base | None:
    return BASE


def found(text: str, *, base: Base | None = BASE, **request: Any) -> Findings:
    asked = Request(**{"arguments": {}, "platforms": PLATFORMS, "every": True, **request})
    return Check(text.encode(), asked).findings(lambda _: base)


def names(findings: Findings) -> list[tuple[str, int]]:
    return [(each.rule.name, each.first) for each in findings.warnings]


def answer(case: Case) -> dict[str, Any]:
    raw = case.text.encode()
    arguments = dict(each.split("=", 1) for each in case.arguments)
    if case.call == "check":
        ignored = tuple(filter(None, case.ignored.split("\n")))
        findings = found(case.text, arguments=arguments, target=case.target, ignored=ignored)
        documents = calls.lint(raw, "Dockerfile", findings)
    elif case.call == "targets":
        document = lines.parse(raw)
        read = [stages.read_line(line, document.escape, BUILDKIT) for line in document.lines]
        documents = calls.targets(raw, document, read)
    else:
        file = stages.read(lines.parse(raw), arguments, PLATFORMS, case.target, dialect=BUILDKIT)
        documents = calls.outline(raw, file, case.target, Walk(file, base))
    loaded: dict[str, Any] = json.loads(documents["result.json"])
    return loaded


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.call} {case.text}"[:80])
def test_answers_as_dockerd(case: Case) -> None:
    ours = comparable(answer(case), own_words=case.own_words)
    assert ours == comparable(case.answer, own_words=case.own_words)


def test_every_rule_is_among_the_cases() -> None:
    rules = {each.name for each in vars(lint).values() if isinstance(each, lint.Rule)}
    seen = {each["ruleName"] for case in cases() for each in case.answer.get("warnings") or ()}
    assert len(rules) == 22
    assert rules - seen == {"InvalidBaseImagePlatform"}


def test_an_image_of_another_platform() -> None:
    findings = found("FROM --platform=$BUILDPLATFORM a\nFROM b", base=Base(platform="linux/arm64"))
    assert names(findings) == [("InvalidBaseImagePlatform", 1), ("InvalidBaseImagePlatform", 2)]
    assert findings.warnings[1].detail == (
        'Base image b was pulled with platform "linux/arm64", expected "linux/amd64" for current build'
    )
    assert findings.warnings[0].rule.url == ""


def test_what_the_base_has() -> None:
    text = "FROM a\nCOPY $HOME_OF/x $OTHER /\nCMD x"
    assert names(found(text)) == [("UndefinedVar", 2), ("UndefinedVar", 2), ("JSONArgsRecommended", 3)]
    known = Base(env=("HOME_OF=h",), shell=("/bin/bash",), triggers=("ENV OTHER=1",))
    assert names(found(text, base=known)) == []
    assert names(found(text, base=None)) == []  # it is not known what the base has


def test_triggers_have_the_line_of_from() -> None:
    findings = found("FROM scratch\nFROM a\nCMD x\n", base=Base(triggers=("CMD y", "RUN <<A\nx\nA")))
    assert names(findings) == [
        ("JSONArgsRecommended", 2),
        ("MultipleInstructionsDisallowed", 2),
        ("JSONArgsRecommended", 3),
    ]
    failed = found("FROM a", base=Base(triggers=("COPY x",)))
    assert failed.error.startswith("COPY requires at least two arguments")


def test_a_build_checks_what_its_target_needs() -> None:
    text = "FROM scratch AS a\nENV x $y\nFROM scratch AS b\nENV x $y\nFROM a"
    assert names(found(text, every=False)) == [("UndefinedVar", 2), ("LegacyKeyValueFormat", 2)]
    assert names(found(text, every=False, target="b")) == [("UndefinedVar", 4), ("LegacyKeyValueFormat", 4)]


def test_a_named_context_in_place_of_a_stage() -> None:
    assert names(found("FROM a AS one\nENV x y\nFROM one", replaced="one".__eq__)) == []


def test_the_first_warnings_are_kept() -> None:
    findings = found("FROM scratch\n" + "ENV a b\n" * (lint.MOST + 5))
    assert len(findings.warnings) == lint.MOST


def test_work_is_bounded() -> None:
    """The time of a file grows with the square of its instructions and variables."""
    many = found("FROM scratch\n" + "ENV a=b\n" * (lint.MOST_INSTRUCTIONS + 1))
    assert many.error == "the Dockerfile has 2001 instructions of at most 2000"
    misspelt = found("FROM scratch\nENV aa=b\n" + "ENV aa=$ab\n" * 200)
    hints = [each for each in misspelt.warnings if each.detail.endswith("(did you mean $aa?)")]
    assert len(misspelt.warnings) == 200 and len(hints) == 100


def test_errors_keep_their_own_words_for_builds() -> None:
    check = Check(b"FROM a\nBADCMD", Request(arguments={}, platforms=PLATFORMS))
    assert isinstance(check.failure, AtLine) and check.file is None
    assert check.failure.message == "dockerfile parse error on line 2: unknown instruction: BADCMD"
    assert check.findings(base).error == "dockerfile parse error on line 2: unknown instruction: BADCMD"
    assert check.findings(base).place == (2, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("foo", 'invalid check option "foo"'),
        ("skip=a;foo=b", 'invalid check option "foo"'),
        ("skip=a;error=maybe", 'failed to parse check option "error=maybe": strconv.ParseBool'),
        ("skip=a;error=1;experimental=b;skip=c", "strconv.ParseBool"),
    ],
)
def test_options_that_are_none(text: str, words: str) -> None:
    if words == "strconv.ParseBool":  # only three are separated
        assert lint.choice(text).experimental == {"b;skip=c"}
        return
    with pytest.raises(InvalidParameter) as raised:
        lint.choice(text)
    assert words in raised.value.message


def test_options() -> None:
    chosen = lint.choice(" skip = A , B ;error=true;experimental=C")
    assert chosen.skipped == {"A", "B"} and chosen.fails and chosen.experimental == {"C"}
    assert lint.choice("") == lint.Choice()


parts = st.sampled_from(
    ["FROM a AS b", "FROM $x", "ARG x=$y", "ENV a b", "ENV a=$x", "CMD x", "WORKDIR y", "EXPOSE 1:2/T", "# x y", "#",
     "COPY a \\", "", "ONBUILD CMD $x", "RUN <<A", "A", "LABEL a b", "from b as C", "USER ${x", "VOLUME $x",
     "COPY --from=b a b", "# check=error=true", "HEALTHCHECK NONE", "SHELL [\"a\"]", "MAINTAINER a", "\udcff"]
)  # fmt: skip


@given(st.lists(parts, max_size=12), st.sampled_from(["", "b", "1"]))
def test_any_file_has_an_answer(text: Sequence[str], target: str) -> None:
    raw = "\n".join(text).encode(errors="surrogateescape")
    findings = Check(raw, Request(arguments={"x": "1"}, platforms=PLATFORMS, target=target, every=True)).findings(base)
    document = json.loads(calls.lint(raw, "Dockerfile", findings)["result.json"])
    assert ("buildError" in document) == bool(findings.error)
    last = raw.count(b"\n") + 1
    for each in findings.warnings:
        assert 1 <= each.first <= each.last <= last
        assert each.detail


FAULTS = [
    ("FROM a\nRUNN b", "dockerfile parse error on line 2: unknown instruction: RUNN (did you mean RUN?)", (2, 2)),
    ("FROM a\n\nFOO \\\n b \\\n c\nRUN d", "dockerfile parse error on line 3: unknown instruction: FOO ", (3, 5)),
    ("FROM a\nRUN <<E\nb\nc\n", "unterminated heredoc", (2, 4)),
    ("FROM a\nCOPY b <<E\nE\n", "dockerfile parse error on line 2: COPY cannot accept a heredoc", (2, 3)),
    ("FROM a\nCOPY b", "dockerfile parse error on line 2: COPY requires at least two arguments, but only one", (2, 2)),
    (
        "FROM a\nCOPY --chonw=1 b c",
        "dockerfile parse error on line 2: unknown flag: --chonw (did you mean chown?)",
        (2, 2),
    ),
    ("FROM a\nRUN --mount=typ=cache b", "unexpected key 'typ' in 'typ=cache' (did you mean type?)", (2, 2)),
    ("FROM a\nRUN --mount=type=foo b", 'unsupported mount type "foo"', (2, 2)),
    (
        "FROM a\nRUN --mount=from=$b c",
        "dockerfile parse error on line 2: 'from' doesn't support variable expansion",
        (2, 2),
    ),
    ("FROM a\nRUN --network=foo b", 'dockerfile parse error on line 2: invalid network mode "foo"', (2, 2)),
    ("FROM a\nRUN [1]", "when using JSON array syntax, arrays must be comprised of strings only", (2, 2)),
    ("FROM a\nENV b", "ENV must have two arguments", (2, 2)),
    ("FROM a\nENV b=c d", 'Syntax error - can\'t find = in "d". Must be of the form: name=value', (2, 2)),
    ("FROM a\nENV =b", "dockerfile parse error on line 2: ENV names can not be blank", (2, 2)),
    ("FROM a\nEXPOSE b", "invalid containerPort: b", (2, 2)),
    ("FROM a\nSTOPSIGNAL FOO", "invalid signal: FOO", (2, 2)),
    ('FROM a\nVOLUME [""]', "dockerfile parse error on line 2: VOLUME specified can not be an empty string", (2, 2)),
    ("FROM a\nHEALTHCHECK --timeout=b CMD c", 'dockerfile parse error on line 2: time: invalid duration "b"', (2, 2)),
    ("FROM localhost/A/b:1", 'failed to parse stage name "localhost/A/b:1": invalid reference format: ', (1, 1)),
    (
        "FROM AA",
        'failed to parse stage name "AA": invalid reference format: repository name (library/AA) must be',
        (1, 1),
    ),
    ("ARG b\nFROM $b", "base name ($b) should not be blank", (2, 2)),
    ("RUN a", "no build stage in current context", (1, 1)),
    ("\n# a\n", "file with no instructions", (1, 1)),
    ("#escape=`\n#escape=`\nFROM a", "only one escape parser directive can be used", (1, 1)),
    ("# escape=b\nFROM a", "invalid escape token 'b' does not match ` or \\", None),
    ("FROM a AS b\nCOPY --from=b /c /d", "circular dependency detected on stage: b", (2, 2)),
]


@pytest.mark.parametrize(("text", "error", "place"), FAULTS)
def test_faults_have_buildkits_words_and_lines(text: str, error: str, place: tuple[int, int] | None) -> None:
    """As dockerd 28.5.2 shows them in a build."""
    found = Check(text.encode(), Request(arguments={}, platforms=PLATFORMS)).findings(lambda _: Base())
    assert found.error.startswith(error) and found.place == place


@pytest.mark.parametrize(("target", "meant"), [("buid", " (did you mean build?)"), ("zz", "")])
def test_a_target_that_is_missing(target: str, meant: str) -> None:
    check = Check(b"FROM a AS build\nFROM b", Request(arguments={}, platforms=PLATFORMS, target=target))
    assert check.failure is not None
    assert check.failure.message == f'target stage "{target}" could not be found{meant}'


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (
            "FROM a AS first\nRUN b\nCOPY --from=Later / /\nFROM a AS later",
            3,
            'cannot copy from stage "Later", it needs to be defined before current stage "first"',
        ),
        (
            "FROM a\nCOPY --from=1 / /\nFROM a AS x\nCMD a",
            2,
            'cannot copy from stage "1", it needs to be defined before current stage "stage-0"',
        ),
        (
            "FROM a AS x\nRUN --mount=from=y,target=z b\nFROM a AS y",
            2,
            'cannot mount from stage "y" to "z", stage needs to be defined before current command',
        ),
        # two of a name
        (
            "FROM a AS x\nFROM a AS first\nCOPY --from=x / /\nFROM a AS x",
            3,
            'cannot copy from stage "x", it needs to be defined before current stage "first"',
        ),
    ],
)
def test_sources_that_are_later_stages(text: str, line: int, words: str) -> None:
    findings = found(text)
    assert (findings.error, findings.place) == (words, (line, line))


def test_triggers_whose_source_is_a_later_stage() -> None:
    """Nobody asks of a stage that is not built."""
    text = "FROM a AS x\nONBUILD COPY --from=y / /\nFROM x AS z\nFROM a AS y"
    findings = found(text, target="z", every=False)
    assert findings.error == 'cannot copy from stage "y", it needs to be defined before current stage "z"'
    assert findings.place == (3, 3) and not found(text).error


def test_an_image_may_stand_for_a_later_stage() -> None:
    text = "FROM a\nCOPY --from=x / /\nRUN --mount=from=x,target=/y b\nFROM a AS x"
    assert found(text).error and not found(text, replaced=lambda name: name == "x").error


def test_a_later_stage_is_no_source_only_where_it_is_needed() -> None:
    assert not found("FROM a\nCOPY --from=x / /\nFROM a AS x", every=False).error
