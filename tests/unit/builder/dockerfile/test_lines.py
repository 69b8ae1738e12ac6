"""Lines: directives, continuations, comments, heredocs, and errors that name the line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.dockerfile import lines
from engine.errors import InvalidParameter


def texts(raw: bytes) -> list[tuple[int, str, str]]:
    return [(line.number, line.keyword, line.text) for line in lines.parse(raw).lines]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"FROM a", [(1, "FROM", "a")]),
        (b"from  a \n", [(1, "FROM", "a")]),
        (b"\xef\xbb\xbfFROM a\n", [(1, "FROM", "a")]),
        (b"\n\n  # x\n \t FROM a\n", [(4, "FROM", "a")]),
        (b"FROM a\r\nRUN b \\\r\n c\r\n", [(1, "FROM", "a"), (2, "RUN", "b  c")]),
        (b"RUN a \\\n  b\\\nc\nRUN d", [(1, "RUN", "a   bc"), (4, "RUN", "d")]),
        (b"RUN a \\\n# x\n  # y\n\n \n  b\n", [(1, "RUN", "a   b")]),
        (b"RUN a \\  \t\n b", [(1, "RUN", "a  b")]),
        (b"RUN a \\ x\n", [(1, "RUN", "a \\ x")]),
        (b"RUN a\\\\\nRUN b", [(1, "RUN", "a\\\\"), (2, "RUN", "b")]),
        (b"RUN a \\", [(1, "RUN", "a")]),
        (b"RUN a \\\n", [(1, "RUN", "a")]),
        (b"RUN a \\\n\n# x\n", [(1, "RUN", "a")]),
        (b"RUN a # b\n", [(1, "RUN", "a # b")]),
        (b"RUN a \\\n # b\\\n c", [(1, "RUN", "a  c")]),
        (b"\\\nRUN a", [(1, "RUN", "a")]),
        (b"RUN\\\n a", [(1, "RUN", "a")]),
        (b"RUN \\\n a", [(1, "RUN", "a")]),
        (b"RUN\ta", [(1, "RUN", "a")]),
        (b"foo bar", [(1, "FOO", "bar")]),
        (b"RUN a\x0bb\x0c\x1c\n", [(1, "RUN", "a\x0bb\x0c\x1c")]),
        (b"RUN \xff\xfe", [(1, "RUN", "\udcff\udcfe")]),
        (b"RUN <<A\n# no comment\n\n a \\\nA\nRUN b", [(1, "RUN", "<<A"), (6, "RUN", "b")]),
        (b"RUN a \\\n <<A\nx\nA\nRUN b", [(1, "RUN", "a  <<A"), (5, "RUN", "b")]),
        (b"RUN echo $((1 << 3))\nRUN b", [(1, "RUN", "echo $((1 << 3))"), (2, "RUN", "b")]),
    ],
)
def test_lines(raw: bytes, expected: list[tuple[int, str, str]]) -> None:
    assert texts(raw) == expected


def test_the_text_of_a_step_is_the_whole_line() -> None:
    (line,) = lines.parse(b"  run --mount=type=ssh \\\n  a  b  \n").lines
    assert line.original == "run --mount=type=ssh   a  b"
    assert (line.keyword, line.text, line.rest) == ("RUN", "--mount=type=ssh   a  b", "a  b")


def test_comments_before_a_line() -> None:
    raw = (
        b"# escape=`\n# check=a\n# one\n\n#two \nFROM a\n# x\n#\n# three\nRUN b `\n# no\n c\n"
        b"RUN d\n  # odd\nRUN e\n# end"
    )
    assert lines.parse(raw).comments == {6: ("one", "two"), 10: ("three",), 15: ("# odd",)}


def test_empty_lines_within_a_continuation() -> None:
    assert lines.parse(b"RUN a \\\n\n\n b\nRUN c \\\n d\nRUN <<A \\\n\n e\nx\nA\n").gaps == (4, 9)


def test_heredocs_keep_their_bytes() -> None:
    (line,) = lines.parse(b"COPY <<A <<-B /x\r\n\xff\r\n\\\n\nA\r\n\ty\n\tB").lines
    assert [(body.name, body.content) for body in line.heredocs] == [("A", "\udcff\r\n\\\n\n"), ("B", "\ty\n")]


@pytest.mark.parametrize(
    ("raw", "escape", "syntax", "check"),
    [
        (b"FROM a", "\\", "", ""),
        (b"# escape=`\nFROM a", "`", "", ""),
        (b"#ESCAPE = ` \nFROM a", "`", "", ""),
        (b"# escape=\\\nFROM a", "\\", "", ""),
        (b" # escape=`\nFROM a", "`", "", ""),
        (b"# a comment\n# escape=`\nFROM a", "\\", "", ""),
        (b"# unknown=1\n# escape=`\nFROM a", "\\", "", ""),
        (b"\n# escape=`\nFROM a", "\\", "", ""),
        (b"FROM a\n# escape=`\n", "\\", "", ""),
        (
            b"# syntax=docker/dockerfile:1\n# escape=`\n# check=skip=all;error=true\nFROM a",
            "`",
            "docker/dockerfile:1",
            "skip=all;error=true",
        ),
        (b"#!/usr/bin/env docker\n# syntax=docker/dockerfile\nFROM a", "\\", "docker/dockerfile", ""),
        (b"\xef\xbb\xbf# escape=`\r\nFROM a", "`", "", ""),
    ],
)
def test_directives(raw: bytes, escape: str, syntax: str, check: str) -> None:
    found = lines.parse(raw)
    assert (found.escape, found.syntax, found.check) == (escape, syntax, check)


def test_another_escape() -> None:
    assert texts(b"# escape=`\nRUN a `\n b\\\nRUN c") == [(2, "RUN", "a  b\\"), (4, "RUN", "c")]


@pytest.mark.parametrize(
    "name",
    [
        "docker/dockerfile",
        "docker/dockerfile:1",
        "docker/dockerfile:1.7-labs",
        "docker.io/docker/dockerfile:1.4",
        "docker/dockerfile-upstream:master",
        "docker/dockerfile@sha256:" + "a" * 64,
        "docker/dockerfile:1@sha256:" + "a" * 64,
        "docker/dockerfile:1 --opt=x",
        "mirror.gcr.io/docker/dockerfile:1",
        "registry.corp:5000/team/docker/dockerfile:1.4",
    ],
)
def test_frontends_that_this_parser_serves(name: str) -> None:
    assert lines.parse(f"# syntax={name}\nFROM a".encode()).syntax == name
    lines.check_frontend(name)


@pytest.mark.parametrize(
    "name", ["docker/other:1", "r2d4/mockerfile", "tonistiigi/dockerfile:x", "localhost:5000/a", "mydocker/dockerfile"]
)
def test_other_frontends_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"syntax {name}: this frontend is not supported"):
        lines.check_frontend(name)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "No image was generated. Is your Dockerfile empty?"),
        (b"# only\n\n", "No image was generated. Is your Dockerfile empty?"),
        (b"\\\n", "No image was generated. Is your Dockerfile empty?"),
        (b"# escape=x\nFROM a", "invalid escape token 'x' does not match ` or \\"),
        (
            b"# escape=\\\n# escape=`\n",
            "dockerfile parse error on line 2: only one escape parser directive can be used",
        ),
        (b"# syntax=a\n# syntax=b\n", "dockerfile parse error on line 2: only one syntax parser directive can be used"),
        (b"FROM a\n\nRUN <<A\nx\n", "dockerfile parse error on line 3: RUN: unterminated heredoc"),
        (
            b"FROM a\nRUN " + b"x" * 65536,
            "dockerfile parse error on line 2: dockerfile line greater than maximum allowed size of 65535",
        ),
        (b"FROM a\nRUN " + "é".encode() * 32766, "dockerfile parse error on line 2: dockerfile line greater"),
    ],
)
def test_errors(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        lines.parse(raw)
    assert error.value.message.startswith(message)


def test_long_lines_are_allowed_up_to_the_limit() -> None:
    assert len(texts(b"RUN " + b"x" * 65531 + b"\r\n")[0][2]) == 65531
    assert len(texts(b"RUN a \\\n" * 20_000)[0][2]) > 65536


def test_an_empty_line_in_a_continuation_is_a_warning() -> None:
    assert lines.parse(b"FROM a\nRUN a \\\n\n  b\n").warnings == (
        "[WARNING]: Empty continuation line found in:\n    RUN a   b",
        "[WARNING]: Empty continuation lines will become errors in a future release.",
    )
    assert lines.parse(b"RUN a \\\n# x\n b\n").warnings == ()


def test_many_shifts_take_linear_time() -> None:
    """A `<<` without its last line must not be looked for in the whole file each time."""
    assert len(lines.parse(b"RUN a << b\n" * 20_000).lines) == 20_000


@given(
    st.lists(
        st.sampled_from(["FROM a", "RUN", " x", "\\", "\n", "\n", "#", "<<A", "A", "\t", "'", "\r", "\udcff", "`"]),
        max_size=40,
    )
)
def test_any_bytes(pieces: list[str]) -> None:
    raw = "".join(pieces).encode(errors="surrogateescape")
    try:
        document = lines.parse(raw)
    except InvalidParameter as error:
        assert error.message
        return
    numbers = [line.number for line in document.lines]
    assert numbers == sorted(set(numbers))
    assert all(line.keyword == line.keyword.upper() and line.original for line in document.lines)


@given(st.binary(max_size=200))
def test_binary(raw: bytes) -> None:
    try:
        lines.parse(raw)
    except InvalidParameter as error:
        assert error.message
