"""Which files of its context a build asks its client for."""

from __future__ import annotations

import pytest

from engine.builder import followed
from engine.builder.dialect import BUILDKIT
from engine.builder.dockerfile import lines, stages
from engine.builder.dockerfile.scope import Platforms
from engine.builder.dockerfile.stages import Stage
from engine.builder.dockerfile.walk import Base

PLATFORMS = Platforms(build="linux/amd64", target="linux/amd64")
NOTHING = Base((), ())


def paths(
    text: str, target: str = "", given: dict[str, str | None] | None = None, base: Base | None = NOTHING
) -> tuple[str, ...] | None:
    file = stages.read(lines.parse(text.encode()), given or {}, PLATFORMS, target, dialect=BUILDKIT)

    def find(_: Stage) -> Base | None:
        return base

    return followed.paths(file, target, find)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM a\nRUN x", ()),
        ("FROM scratch\nCOPY a b/c ../d /e/ ./f /x/", ("a", "b/c", "d", "e", "f")),
        ("FROM a\nCOPY . /x", None),
        ("FROM a\nCOPY a/.. /x", None),
        ("FROM a\nCOPY / /x", None),
        ("FROM a\nCOPY *.py src/*/x?.c a/b/[c] /x/", ("*.py", "a/b", "src")),
        ("FROM a\nCOPY [ab]/z /x/", None),
        ('FROM a\nCOPY ["a b", "c", "/x/"]', ("a b", "c")),
        ("FROM a\nCOPY a\\*b /x/", ("a*b",)),  # the quoting is the language's
        ("FROM a\nCOPY a\\\\*b /x/", None),
        ("FROM a\nCOPY --parents src/**/x.py ./y/./z /x/", ("src", "y/z")),
        ("FROM a\nCOPY **/x.py /x/", None),
        ("FROM a\nCOPY <<one two /x/\ncontent\none\n", ("two",)),
        ("FROM a\nADD a.tar https://h/b git@h:c.git#d e /x/", ("a.tar", "e")),
        ("FROM a\nADD https://h/b /x/", ()),
        ("FROM a AS b\nFROM a\nCOPY --from=b c /x/", ()),
        ("FROM a\nRUN --mount=type=bind,source=s,target=/t x", ("s",)),
        ("FROM a\nRUN --mount=target=/t x", None),
        ("FROM a\nRUN --mount=from=b,source=s,target=/t --mount=type=cache,target=/c x", ()),
        ("FROM a AS one\nCOPY one /\nFROM a AS two\nCOPY two /\nFROM a\nCOPY --from=two /two /", ("two",)),
        ("FROM a AS one\nCOPY one /\nFROM one\nCOPY two /", ("one", "two")),
        ("FROM a AS one\nONBUILD COPY one /\nFROM one AS two\nFROM two\nCOPY x /", ("one", "x")),
        ("FROM a AS one\nONBUILD COPY one /", ()),
        ("ARG D=d\nFROM a\nARG D\nARG E=e\nENV F=$E/f\nCOPY $D ${F} $F.x /", ("d", "e/f", "e/f.x")),
        ("FROM a AS one\nARG X=x\nENV Y=y\nFROM one\nCOPY $X $Y /", ("x", "y")),
        ("FROM a\nARG X\nCOPY ${X:?must} /", None),
        ("FROM a\nCOPY $NONE /x", None),
        ("FROM a\nCOPY caf\u00e9 /x", ("caf\u00e9",)),
        ("FROM a\nCOPY a\u202eb /x", None),
    ],
)
def test_paths(text: str, expected: tuple[str, ...] | None) -> None:
    assert paths(text) == expected


def test_given_arguments_and_the_variables_and_triggers_of_the_base() -> None:
    text = "FROM a\nARG JAR=x.jar\nCOPY $JAR $HOME_OF/y /"
    assert paths(text, base=Base(("HOME_OF=h",), ())) == ("h/y", "x.jar")
    assert paths(text, given={"JAR": "target/app.jar"}, base=Base(("HOME_OF=h",), ())) == ("h/y", "target/app.jar")
    assert paths("FROM a\nRUN x", base=Base((), ("COPY package.json ./", "RUN y"))) == ("package.json",)
    assert paths("FROM a\nRUN x", base=Base((), ("COPY . .",))) is None


def test_an_unknown_base_may_have_triggers() -> None:
    assert paths("FROM a\nCOPY x /", base=None) is None
    assert paths("FROM scratch\nCOPY x /", base=None) == ("x",)
    # a stage that is not needed is not asked for
    assert paths("FROM a AS one\nFROM scratch\nCOPY x /", base=None) == ("x",)


def test_a_target() -> None:
    text = "FROM a AS one\nCOPY one /\nFROM a AS two\nCOPY two /"
    assert (paths(text, "one"), paths(text, "0"), paths(text)) == (("one",), ("one",), ("two",))


def test_a_trigger_that_uses_a_stage_of_its_own() -> None:
    """The stage's instructions are carried out too."""
    text = "FROM a AS files\nCOPY one /\nFROM a\nCOPY two /"
    assert paths(text, base=Base((), ("COPY --from=files / /",))) is None
    assert paths(f"{text}\nCOPY --from=files /x /", base=Base((), ("COPY --from=files / /",))) == ("one", "two")


@pytest.mark.parametrize(
    ("text", "base", "expected"),
    [
        ("FROM a\nRUN x", NOTHING, {"a"}),
        (
            "FROM a AS one\nCOPY --from=no / /\nFROM b\nCOPY --from=x / /\nRUN --mount=from=y,target=/y z",
            NOTHING,
            {"b", "x", "y"},
        ),
        ("FROM a AS one\nONBUILD COPY --from=x / /\nFROM one", NOTHING, {"a", "one", "x"}),
        ("ARG A=a\nFROM $A AS b\nFROM b", NOTHING, {"a", "b"}),
        ("FROM a", Base((), ("COPY --from=x / /",)), {"a", "x"}),
        ("FROM a", None, None),
        ("FROM scratch\nCOPY --from=x / /", None, {"scratch", "x"}),
        ("FROM b AS x\nFROM a", Base((), ("COPY --from=x / /",)), None),
    ],
)
def test_names(text: str, base: Base | None, expected: set[str] | None) -> None:
    file = stages.read(lines.parse(text.encode()), {}, PLATFORMS, dialect=BUILDKIT)
    assert followed.names(file, "", lambda _: base) == expected


def test_too_many_are_not_named() -> None:
    names = " ".join(f"f{number}" for number in range(followed.MOST + 1))
    assert paths(f"FROM a\nCOPY {names} /x/") is None
