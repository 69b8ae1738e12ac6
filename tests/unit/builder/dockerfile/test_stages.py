"""Stages: bases, names, targets, which are needed, and errors that name line and instruction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.dialect import BUILDKIT, CLASSIC
from engine.builder.dockerfile import lines, stages
from engine.builder.dockerfile.scope import Platforms
from engine.builder.dockerfile.stages import Dockerfile
from engine.builder.errors import Circular
from engine.errors import InvalidParameter
from engine.images.instructions.records import Copy, Entrypoint, Run

PLATFORMS = Platforms(build="linux/amd64", target="linux/arm64")


def read(text: str, **given: str | None) -> Dockerfile:
    return stages.read(lines.parse(text.encode()), given, PLATFORMS)


def names(text: str, target: str = "") -> list[int]:
    return [stage.index for stage in stages.needed(read(text), target)]


def test_a_stage() -> None:
    found = read(
        "# x\nARG V=1\nfrom  busybox:$V as B\nRUN a\nFROM b\nFROM --platform=$BUILDPLATFORM scratch AS c.d\nCMD x\n"
    )
    first, second, third = found.stages
    assert (first.index, first.name, first.base, first.parent, first.platform) == (0, "b", "busybox:1", None, "")
    assert (first.text, first.line) == ("from  busybox:$V as B", 3)
    assert [(one.line, one.text) for one in first.instructions] == [(4, "RUN a")]
    assert (second.name, second.base, second.parent, second.instructions) == ("", "b", 0, ())
    assert (third.name, third.base, third.platform, third.parent) == ("c.d", "scratch", "linux/amd64", None)
    assert [arg.pairs for arg in found.global_arguments] == [(("V", "1"),)]


@pytest.mark.parametrize(
    ("text", "given", "base", "platform"),
    [
        ("FROM a", {}, "a", ""),
        ("ARG V=1\nFROM a:${V}", {}, "a:1", ""),
        ("ARG V=1\nFROM a:${V}", {"V": "2"}, "a:2", ""),
        ("ARG V\nFROM a:${V:-3}", {}, "a:3", ""),
        ("ARG V=1 W=b\nFROM $W:$V", {}, "b:1", ""),
        ("ARG V=1\nARG W=x$V\nFROM a:$W", {}, "a:x1", ""),
        ("FROM a:$V", {"V": "2"}, "a:", ""),
        ("FROM --platform=arm64 a", {}, "a", "linux/arm64"),
        ("FROM --platform=$TARGETPLATFORM a", {}, "a", "linux/arm64"),
        ("ARG P=linux/arm/v6\nFROM --platform=$P a", {}, "a", "linux/arm/v6"),
        ("FROM a-$TARGETARCH", {}, "a-arm64", ""),
        ("FROM 'a'", {}, "a", ""),
        ("FROM sha256:" + "a" * 64, {}, "sha256:" + "a" * 64, ""),
        ("FROM " + "a" * 64, {}, "a" * 64, ""),
        ("FROM localhost:5000/a/b:c@sha256:" + "a" * 64, {}, "localhost:5000/a/b:c@sha256:" + "a" * 64, ""),
        ("ARG V=${X:+1}\nFROM a${V:+:}$V", {}, "a", ""),
    ],
)
def test_bases(text: str, given: dict[str, str | None], base: str, platform: str) -> None:
    if base.endswith(":"):
        with pytest.raises(InvalidParameter, match="FROM: failed to parse stage name"):
            read(text, **given)
        return
    stage = read(text, **given).stages[-1]
    assert (stage.base, stage.platform) == (base, platform)


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("FROM a", "", [0]),
        ("FROM a\nFROM b", "", [1]),
        ("FROM a\nFROM b", "0", [0]),
        ("FROM a AS x\nFROM x\nFROM b", "", [2]),
        ("FROM a AS x\nFROM x AS y\nFROM Y", "", [0, 1, 2]),
        ("FROM a AS x\nFROM x AS y\nFROM y", "Y", [0, 1]),
        ("FROM a AS x\nFROM b AS y\nFROM c\nCOPY --from=y /1 /2", "", [1, 2]),
        ("FROM a AS x\nFROM b AS y\nFROM c\nCOPY --from=X /1 /2\nCOPY --from=1 /1 /2", "", [0, 1, 2]),
        ("FROM a AS x\nFROM b\nRUN --mount=type=bind,from=x,target=/x a", "", [0, 1]),
        ("FROM a AS x\nFROM b\nRUN --mount=type=cache,from=x,target=/x a", "", [0, 1]),
        ("FROM a AS x\nFROM b\nCOPY --from=busybox /1 /2", "", [1]),
        ("FROM a AS x\nFROM b\nADD x /2", "", [1]),
        ("FROM a AS x\nFROM b AS y\nCOPY --from=x / /\nFROM c AS z\nFROM d\nCOPY --from=y / /", "", [0, 1, 3]),
        # two of a name: the nearest one above
        ("FROM a AS x\nFROM b AS x\nFROM x", "", [1, 2]),
        ("FROM a AS x\nFROM x AS x\nFROM x", "", [0, 1, 2]),
        # a later stage
        ("FROM a\nCOPY --from=x / /\nFROM b AS x", "0", [1, 0]),
        ("FROM a AS t\nCOPY --from=x / /\nFROM y\nFROM b AS x", "t", [2, 0]),
        ("FROM x\nFROM b AS x", "", [1]),
        # triggers run in the stage that continues
        ("FROM a AS x\nFROM b AS y\nONBUILD COPY --from=x / /\nFROM y", "", [0, 1, 2]),
        ("FROM a AS x\nFROM b AS y\nONBUILD COPY --from=x / /\nFROM y", "y", [1]),
        # a number is a name first
        ("FROM a AS x\nFROM b\nFROM c\nCOPY --from=0 / /", "", [0, 2]),
    ],
)
def test_needed(text: str, target: str, expected: list[int]) -> None:
    assert names(text, target) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "RUN a",
            "dockerfile parse error on line 1: RUN: no build stage in current context",
        ),
        ("ARG a\n\nENV b=c\nFROM a", "dockerfile parse error on line 3: ENV: no build stage in current context"),
        ("ARG a", "No image was generated. Is your Dockerfile empty?"),
        ("FROM a\n\nFOO b", "dockerfile parse error on line 3: unknown instruction: FOO"),
        ("FROM a\nENV \\\n  b", "dockerfile parse error on line 2: ENV must have two arguments"),
        ("FROM a\nENV b=c d", 'dockerfile parse error on line 2: ENV: Syntax error - can\'t find = in "d".'),
        ("FROM a\nRUN ", "dockerfile parse error on line 2: RUN requires at least one argument"),
        ("FROM a\nRUN --x y", "dockerfile parse error on line 2: RUN: unknown flag: --x"),
        (
            "FROM a\nUSER ${b",
            "dockerfile parse error on line 2: USER: failed to process \"${b\": syntax error: missing '}'",
        ),
        ("FROM a\nARG b=${c?", "dockerfile parse error on line 2: ARG: failed to process"),
        ("FROM $a", "dockerfile parse error on line 1: FROM: base name ($a) should not be blank"),
        (
            "FROM A",
            'dockerfile parse error on line 1: FROM: failed to parse stage name "A": invalid reference format: '
            "repository name (library/A) must be lowercase",
        ),
        ("FROM --platform=$x a", "dockerfile parse error on line 1: FROM: empty platform value from expression $x"),
        (
            "FROM --platform=a/b/c/d a",
            "dockerfile parse error on line 1: FROM: failed to parse platform a/b/c/d: "
            '"a/b/c/d": cannot parse platform specifier: invalid argument',
        ),
        ("ARG V=${W?none given}\nFROM a:$V", "dockerfile parse error on line 1: ARG: failed to process"),
        ("FROM a\nCOPY --from=1 / /", "dockerfile parse error on line 2: COPY: invalid stage index 1"),
        ("FROM a\nRUN --mount=from=7,target=/x a", "dockerfile parse error on line 2: RUN: invalid stage index 7"),
        ("FROM a AS x\nONBUILD foo\nFROM x", "dockerfile parse error on line 2: ONBUILD: unknown instruction: FOO"),
        ("FROM a AS x\nCOPY --from=x / /", "circular dependency detected on stage: x"),
        ("FROM a\nCOPY --from=0 / /", "circular dependency detected on stage: 0"),
        (
            "FROM a AS x\nCOPY --from=z / /\nFROM a AS y\nCOPY --from=x / /\nFROM a AS z\nCOPY --from=y / /",
            "circular dependency detected on stage: x",
        ),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        stages.check(read(text), "")
    assert error.value.message.startswith(message)


@pytest.mark.parametrize("target", ["nosuch", "2", "-1", "1.0"])
def test_a_target_that_is_none(target: str) -> None:
    with pytest.raises(InvalidParameter, match=f"failed to reach build target {target} in Dockerfile"):
        stages.needed(read("FROM a AS b\nFROM c"), target)


def test_what_a_from_means() -> None:
    found = read("FROM a AS x\nFROM b\nCOPY --from=X / /\nFROM c AS y\n")
    second = found.stages[1]
    for name, index in (("x", 0), ("X", 0), ("0", 0), ("1", 1), ("2", 2), ("y", 2), ("busybox", None), ("", None)):
        other = stages.referred(found, second, name)
        assert (other.index if other else None) == index


def test_what_a_from_means_to_buildkit() -> None:
    """The last stage of a name, and mounts take no numbers."""
    document = lines.parse(b"FROM a AS x\nFROM b\nCOPY --from=X / /\nFROM c AS y\nFROM d AS x\n")
    found = stages.read(document, {}, PLATFORMS, dialect=BUILDKIT)
    second = found.stages[1]
    for name, index in (("x", 3), ("X", 3), ("0", 0), ("00", 0), ("+3", 3), ("y", 2), ("busybox", None), ("", None)):
        other = stages.referred(found, second, name)
        assert (other.index if other else None) == index
    for name, index in (("x", 3), ("Y", 2), ("0", None), ("-1", None)):
        other = stages.referred(found, second, name, mount=True)
        assert (other.index if other else None) == index
    for name in ("4", "-1", "12345678901"):
        with pytest.raises(InvalidParameter, match=f"^invalid stage index {name}$"):
            stages.referred(found, second, name)


def test_the_case_of_names_of_stages() -> None:
    assert read("FROM a AS Foo\nFROM Foo").stages[1].parent == 0
    assert stages.read(lines.parse(b"FROM a AS Foo\nFROM foo"), {}, PLATFORMS, dialect=BUILDKIT).stages[1].parent == 0
    with pytest.raises(InvalidParameter, match=r"repository name \(library/Foo\) must be lowercase"):
        stages.read(lines.parse(b"FROM a AS foo\nFROM Foo"), {}, PLATFORMS, dialect=BUILDKIT)


def test_arguments_are_those_of_all_stages() -> None:
    found = read("ARG a\nFROM x AS one\nARG b\nFROM y\nARG c", a="1", b="2", c="3", d="4", http_proxy="5")
    assert found.arguments.unconsumed() == ["d"]


@pytest.mark.parametrize(
    ("text", "argument", "refused"),
    [
        ("", "docker/dockerfile:1", ""),
        ("", "a/b", "a/b"),
        ("# syntax=a/b\n", None, "a/b"),
        ("# syntax=a/b\n", "docker/dockerfile", ""),
        ("# syntax=docker/dockerfile\n", "a/b", "a/b"),
    ],
)
def test_the_frontend_of_a_line_or_an_argument(text: str, argument: str | None, refused: str) -> None:
    """The argument wins. To the classic builder they mean nothing."""
    document, given = lines.parse(f"{text}FROM a".encode()), {"BUILDKIT_SYNTAX": argument}
    assert stages.read(document, given, PLATFORMS).stages
    if refused:
        with pytest.raises(InvalidParameter, match=f"syntax {refused}: this frontend is not supported"):
            stages.read(document, given, PLATFORMS, dialect=BUILDKIT)
    else:
        assert stages.read(document, given, PLATFORMS, dialect=BUILDKIT).stages


def test_the_escape_of_the_file_holds_everywhere() -> None:
    found = read("# escape=`\nFROM a\nRUN x `\n y\nCOPY --chown=a C:\\x /y\\\n")
    assert found.escape == "`"
    run, copy = found.stages[0].instructions
    assert isinstance(run, Run) and run.command == "x  y"
    assert isinstance(copy, Copy) and (copy.sources, copy.destination) == (("C:\\x",), "/y\\")


graphs = st.lists(
    st.tuples(st.none() | st.integers(0, 7), st.lists(st.integers(0, 7), max_size=3)), min_size=1, max_size=8
)


@given(graphs, st.integers(0, 7))
def test_any_graph(graph: list[tuple[int | None, list[int]]], target: int) -> None:
    """Each stage comes after those that it uses, none is missing, and none is needless."""
    target %= len(graph)
    text, uses = "", []
    for index, (parent, origins) in enumerate(graph):
        earlier = parent is not None and parent < index
        text += f"FROM {f's{parent}' if earlier else 'image'} AS s{index}\n"
        others = [other for other in origins if other < index]
        text += "".join(f"COPY --from=s{other} / /\n" for other in others)
        uses.append({*others, *([parent] if earlier else [])})
    found = [stage.index for stage in stages.needed(read(text), f"S{target}")]
    assert found[-1] == target and len(set(found)) == len(found)
    for index in found:
        assert all(found.index(other) < found.index(index) for other in uses[index])
    wanted, waiting = set(), [target]
    while waiting:
        index = waiting.pop()
        wanted.add(index)
        waiting += uses[index]
    assert set(found) == wanted


def test_many_stages_in_a_row() -> None:
    text = "FROM a AS s0\n" + "".join(f"FROM s{index} AS s{index + 1}\n" for index in range(3000))
    assert len(names(text)) == 3001


@pytest.mark.parametrize(
    ("last", "target", "expected"),
    [("FROM b AS Two", "", "two"), ("FROM b AS two", "one", "one"), ("FROM b", "", "default")],
)
def test_the_name_of_the_target(last: str, target: str, expected: str) -> None:
    file = stages.read(lines.parse(f"FROM a AS one\n{last}\n".encode()), {}, PLATFORMS, target)
    assert file.arguments.global_variables()["TARGETSTAGE"] == expected


def test_one_stage() -> None:
    assert stages.is_one(read("FROM a\nRUN x\nCOPY a /\n"))
    assert not stages.is_one(read("FROM a\nRUN --mount=type=cache,target=/c x\n"))
    assert not stages.is_one(read("FROM a\nRUN --mount=type=secret,id=s x\n"))
    assert not stages.is_one(read("FROM a\nCOPY --from=b / /\n"))
    assert not stages.is_one(read("FROM a\nFROM a\n"))


MALFORMED = ["LABEL a=${X", "EXPOSE abc", "COPY --chmod=99 a b", "ARG A=${X:?no end", "WORKDIR '/x", "STOPSIGNAL no"]


@pytest.mark.parametrize("line", MALFORMED)
def test_words_are_checked_in_stages_that_the_target_needs(line: str) -> None:
    file = read(f"FROM a AS one\n{line}\nFROM a AS two\nFROM two\n")
    stages.check(file, "")
    stages.check(stages.replaced(file, lambda name: name == "one"), "one")
    with pytest.raises(InvalidParameter, match=f"^dockerfile parse error on line 2: {line.partition(' ')[0]}: "):
        stages.check(file, "one")


def test_a_default_is_checked_unless_the_client_gives_a_value() -> None:
    for name, dialect, refused in (("B", BUILDKIT, True), ("A", BUILDKIT, False), ("A", CLASSIC, True)):
        text = b"FROM a\nARG $X=${N:?} A=${X:?no\n"
        file = stages.read(lines.parse(text), {name: ""}, PLATFORMS, dialect=dialect)
        if refused:
            with pytest.raises(InvalidParameter, match="line 2: ARG: failed to process"):
                stages.check(file, "")
        else:
            stages.check(file, "")


def test_an_image_is_named_once_by_all_instructions_of_a_stage() -> None:
    file = read(
        "FROM a\nCOPY --from=b x y\nRUN --mount=from=b,target=/x --mount=from=a,target=/y z\nCOPY --from=b x y\n"
    )
    found = [(image.name, image.line, image.is_base) for image in stages.images(file, file.stages[0])]
    assert found == [("a", 1, True), ("b", 2, False), ("a", 3, False)]


def test_images_in_place_of_stages() -> None:
    file = stages.replaced(read("FROM a AS one\nRUN x\nFROM one\nRUN y\n"), lambda name: name == "one")
    first, second = file.stages
    assert (first.base, first.parent, first.instructions) == ("one", None, ())
    assert second.parent == 0 and len(second.instructions) == 1


def test_what_follows_an_array_is_the_dialect_s() -> None:
    text = b'FROM a\nENTRYPOINT ["x"] # y\n'
    for dialect, command in ((CLASSIC, ("x",)), (BUILDKIT, '["x"] # y')):
        (entrypoint,) = stages.read(lines.parse(text), {}, PLATFORMS, dialect=dialect).stages[0].instructions
        assert isinstance(entrypoint, Entrypoint) and entrypoint.command == command


def test_the_lines_that_make_stages_wait_for_one_another() -> None:
    text = "FROM a AS b\nCOPY --from=d /x /x\nFROM b AS c\nFROM a AS d\nRUN --mount=from=c,target=/x e\n"
    with pytest.raises(Circular, match=r"^circular dependency detected on stage: b$") as raised:
        read(text)
    assert raised.value.lines == [3, 5, 2]
