"""Our parser agrees with two others from PyPI: with BuildKit's own on every Dockerfile, with
dockerfile-parse on plain ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.builder.dockerfile import lines
from engine.errors import InvalidParameter
from engine.images.instructions import records, words
from engine.images.instructions.words import Line
from tests.unit.builder.dockerfile import second

KEYWORDS = (
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER"),
    *("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "WORKDIR", "from", "Run", "oNbUiLd"),
)

PIECES = (
    *(
        "a",
        "b=c",
        "k='v w'",
        'k="v w"',
        "$x",
        "${x:-y}",
        "/p/",
        "=",
        "-",
        "--f",
        "--f=v",
        "--from=x",
        "--",
        "--f='a b'",
    ),
    *('["a", "b"]', '["a"', "[", "]", '"', "'", "\\", "\\\\", "\\n", "`", "#", "# c", " ", "  ", "\t", ",", "{}", "80"),
    *("<<E", "<<-E", '<<"E"', "<<'F'", "3<<E", "<<<", "<", "E", "é", "\u2003", "CMD", "NONE", "as", '["a", 1]', "\\ "),
    *("\\\n", "\\ \n", "`\n", "\n", "\n\n", "\r\n", "\\\r\n", "\n# c\n", "\\\n  # c\n  ", "\nE\n", "\n\tE\n", "\nF\n"),
)

dockerfiles = st.builds(
    lambda head, body: head + "FROM a\n" + "".join(body),
    st.sampled_from(["", "", "# escape=`\n", "# escape = \\\n# c\n", "\n", "# syntax=docker/dockerfile:1\n"]),
    st.lists(
        st.one_of(
            st.sampled_from([f"\n{keyword} " for keyword in KEYWORDS]),
            st.sampled_from(PIECES),
            st.sampled_from(PIECES),
            st.text(alphabet="ab \\\n\t\"'$={}<-[],E#", max_size=4),
        ),
        max_size=30,
    ),
)


@pytest.fixture(scope="module")
def peer() -> Iterator[second.BuildKit]:
    with second.buildkit() as process:
        yield process


def words_of(line: Line, escape: str) -> tuple[str, ...] | None:
    """The words as BuildKit's parser has them. None: there an error, or a matter of taste."""
    array = words.array(line.rest)
    match line.keyword:
        case "RUN" | "CMD" | "ENTRYPOINT" | "SHELL":
            return (line.rest,) if array is None and line.rest else tuple(array or ())
        case "ADD" | "COPY":
            return tuple(words.plain_words(line.rest) if array is None else array)
        case "FROM" | "EXPOSE":
            return tuple(words.plain_words(line.rest))
        case "MAINTAINER" | "STOPSIGNAL" | "USER" | "WORKDIR":
            return (line.rest,) if line.rest else ()
        case "ARG":
            return tuple(words.words(line.rest, escape))
        case "ENV" | "LABEL":
            found = records.read(line, escape)
            assert isinstance(found, records.Env | records.Label)
            return tuple(word for pair in found.pairs for word in pair)
        case _:
            return None


def compare(text: str, theirs: list[second.Command] | str) -> None:
    try:
        document = lines.parse(text.encode())
    except InvalidParameter as error:
        assert isinstance(theirs, str), error
        return
    if isinstance(theirs, str):
        if "unterminated heredoc" in theirs and re.search(r"<<-?[^<]*[^\w<]", text):
            return  # ours takes it for a shift, see Heredoc.doubtful
        # An instruction's own error: here it is found when the line is read or checked.
        with pytest.raises(InvalidParameter):
            for line in document.lines:
                records.check(records.read(line, document.escape), document.escape)
        return
    assert [(line.keyword, line.number) for line in document.lines] == [(one.keyword, one.start) for one in theirs]
    for line, one in zip(document.lines, theirs, strict=True):
        flags = tuple(f"--{name}" + ("" if value is None else f"={value}") for name, value in line.flags)
        # there, bytes are characters
        assert flags == tuple(flag.encode("latin-1").decode() for flag in one.flags)
        if line.keyword != "ONBUILD":  # the other package leaves them out
            assert tuple((body.name, body.content) for body in line.heredocs) == one.heredocs
        try:
            found = words_of(line, document.escape)
        except InvalidParameter:
            continue
        if found is not None:
            assert found == one.value, line


if second.HAS_BUILDKIT:

    @settings(max_examples=600, deadline=None)
    @given(dockerfiles)
    @example("FROM a\nRUN a\\\n\n\n# c\n  b\\\\\n")
    @example("FROM a\nCOPY <<E <<-F /x\nF\nE\n\tE\n\tF\n")
    @example("FROM a\nENV a b c\nENV a=b\\ c d='e f'\\\n g=\"h\"\\\n")
    @example("FROM a\nONBUILD RUN cat <<E\nx\nE\n")
    @example('FROM a\nRUN ["a", "b"] c\nCMD [ "x" , "\\u00e9" ]\nRUN [1]')
    @example("# escape=`\nFROM a\nRUN a `\n b\\\n ENV x=a` b")
    @example("\ufeff# escape=`\nFROM a\nRUN a `\n b")
    def test_it_agrees_with_buildkit(peer: second.BuildKit, text: str) -> None:
        if re.search(r"<<-?[ \t]", text):  # newer than that package
            return
        compare(text, peer.parse(text))

    def test_a_whole_dockerfile(peer: second.BuildKit) -> None:
        compare(WHOLE, peer.parse(WHOLE))


WHOLE = r"""# syntax=docker/dockerfile:1.7
# escape=\

# a comment
ARG VERSION=3.12 \
    VARIANT="slim"
FROM --platform=$BUILDPLATFORM docker.io/library/python:${VERSION}-${VARIANT} AS build
LABEL org.example.a="x y" \
      # between
      org.example.b='z'

ENV PATH=/app/bin:$PATH \
    LANG=C.UTF-8
RUN --mount=type=cache,target=/root/.cache \
    --mount=type=bind,source=x,target=/x \
    set -eux; \
	apt-get update; \

    rm -rf /var/lib/apt/lists/*
RUN <<EOF
#!/bin/sh
echo "hi" > /x
EOF
COPY --chown=1:1 --chmod=0755 --from=build /a /b/
COPY ["a b", "/c/"]
COPY <<-"one" <<two /etc/
	one $x
	one
two $x
two
HEALTHCHECK --interval=5m --timeout=3s CMD curl -f http://localhost/ || exit 1
ONBUILD ADD . /app/src
EXPOSE 80/tcp 443
VOLUME ["/data"]
STOPSIGNAL SIGTERM
USER nobody:nogroup
WORKDIR /a b
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENTRYPOINT ["/bin/x"]
CMD exec "$@" \
  end
"""

plain_words = st.lists(st.text(alphabet="abc./=-", min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.sampled_from(["RUN", "env", "Copy", "USER"]), plain_words, st.booleans()), max_size=8))
def test_it_agrees_with_dockerfile_parse(instructions: list[tuple[str, list[str], bool]]) -> None:
    text = "FROM a\n" + "".join(
        f"# c\n\n{keyword} " + (" \\\n# c\n  " if folded else " ").join(found) + "\n"
        for keyword, found, folded in instructions
    )
    ours = [(line.keyword, line.number, line.text.split()) for line in lines.parse(text.encode()).lines]
    assert ours == [(keyword, start, value.split()) for keyword, start, value in second.lines(text)]
