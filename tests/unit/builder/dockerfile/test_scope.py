"""Build arguments: which value an argument has where, what RUN gets, and what is unconsumed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.dialect import BUILDKIT, CLASSIC
from engine.builder.dockerfile.scope import Arguments, Platforms, Scope, normalized
from engine.errors import InvalidParameter
from engine.images.instructions.records import Arg

PLATFORMS = Platforms(build="linux/amd64", target="linux/arm/v7")


def arg(*pairs: tuple[str, str | None]) -> Arg:
    return Arg(pairs=pairs)


def values(
    given: dict[str, str | None], before: list[Arg], inside: list[Arg], env: list[str] | None = None
) -> dict[str, str]:
    arguments = Arguments(given, PLATFORMS)
    for one in before:
        arguments.declare_global(one)
    scope = Scope(arguments)
    for one in inside:
        scope.declare(one)
    return scope.variables(env)


@pytest.mark.parametrize(
    ("given", "before", "inside", "env", "expected"),
    [
        ({}, [], [], None, {}),
        ({"a": "1"}, [], [], None, {}),
        ({"a": "1"}, [arg(("a", "2"))], [], None, {}),
        ({"a": "1"}, [], [arg(("a", None))], None, {"a": "1"}),
        ({"a": "1"}, [], [arg(("a", "2"))], None, {"a": "1"}),
        ({"a": ""}, [], [arg(("a", "2"))], None, {"a": ""}),
        ({"a": None}, [], [arg(("a", "2"))], None, {"a": "2"}),
        ({"a": None}, [], [arg(("a", None))], None, {}),
        ({}, [], [arg(("a", "2"))], None, {"a": "2"}),
        ({}, [], [arg(("a", None))], None, {}),
        ({}, [], [arg(("a", "2"), ("b", "3"))], None, {"a": "2", "b": "3"}),
        ({}, [], [arg(("a", "2")), arg(("a", "3"))], None, {"a": "3"}),
        ({}, [], [arg(("a", "2")), arg(("a", None))], None, {}),
        # global
        ({}, [arg(("a", "2"))], [arg(("a", None))], None, {"a": "2"}),
        ({}, [arg(("a", "2"))], [arg(("a", "3"))], None, {"a": "3"}),
        ({"a": "1"}, [arg(("a", "2"))], [arg(("a", "3"))], None, {"a": "1"}),
        ({}, [arg(("a", None))], [arg(("a", None))], None, {}),
        ({}, [arg(("a", "2")), arg(("b", "$a-3"))], [arg(("b", None))], None, {"b": "2-3"}),
        ({"a": "1"}, [arg(("a", "2")), arg(("b", "$a-3"))], [arg(("b", None))], None, {"b": "1-3"}),
        # environment
        ({"a": "1"}, [], [arg(("a", None))], ["a=0", "b=x=y"], {"a": "0", "b": "x=y"}),
        # automatic
        ({}, [], [arg(("TARGETARCH", None))], None, {"TARGETARCH": "arm"}),
        ({}, [], [arg(("TARGETVARIANT", None))], None, {"TARGETVARIANT": "v7"}),
        ({}, [], [arg(("BUILDPLATFORM", None))], None, {"BUILDPLATFORM": "linux/amd64"}),
        ({}, [], [arg(("TARGETARCH", "x"))], None, {"TARGETARCH": "x"}),
        ({"TARGETARCH": "y"}, [], [arg(("TARGETARCH", "x"))], None, {"TARGETARCH": "y"}),
        ({"HTTP_PROXY": "p"}, [], [], None, {}),
        ({"HTTP_PROXY": "p"}, [], [arg(("HTTP_PROXY", None))], None, {"HTTP_PROXY": "p"}),
    ],
)
def test_values(
    given: dict[str, str | None], before: list[Arg], inside: list[Arg], env: list[str] | None, expected: dict[str, str]
) -> None:
    assert values(given, before, inside, env) == expected


def test_the_global_scope_has_the_platforms() -> None:
    arguments = Arguments({"TARGETOS": "x", "a": "1"}, PLATFORMS, "final")
    arguments.declare_global(arg(("a", None), ("TARGETARCH", "y"), ("b", None)))
    assert arguments.global_variables() == {
        "BUILDPLATFORM": "linux/amd64",
        "BUILDOS": "linux",
        "BUILDARCH": "amd64",
        "BUILDVARIANT": "",
        "TARGETPLATFORM": "linux/arm/v7",
        "TARGETOS": "x",
        "TARGETARCH": "y",
        "TARGETVARIANT": "v7",
        "TARGETSTAGE": "final",
        "a": "1",
    }


def test_a_default_is_not_read_where_the_client_gives_a_value() -> None:
    line = arg(("a", "${x:?is missing}"), ("b", "$y"))
    arguments = Arguments({"a": "1"}, PLATFORMS, dialect=BUILDKIT)
    assert arguments.expand(line, {"y": "z"}, "\\") == arg(("a", "${x:?is missing}"), ("b", "z"))
    arguments.declare_global(line)
    assert arguments.global_variables()["a"] == "1"
    for name, dialect in (("b", BUILDKIT), ("a", CLASSIC)):
        with pytest.raises(InvalidParameter, match="x: is missing"):
            Arguments({name: "1"}, PLATFORMS, dialect=dialect).expand(line, {}, "\\")


@pytest.mark.parametrize(
    ("given", "line", "buildkit", "classic"),
    [
        ({}, [("a", "1"), ("b", "$a-2")], {"a": "1", "b": "1-2"}, {"a": "1", "b": "e-2"}),
        ({"a": "g"}, [("a", "1"), ("b", "$a")], {"a": "g", "b": "g"}, {"a": "g", "b": "e"}),
        ({"a": ""}, [("a", "1"), ("b", "${a:-x}")], {"a": "", "b": "x"}, {"a": "", "b": "e"}),
        ({}, [("a", None), ("b", "$a")], {"b": "e"}, {"b": "e"}),
        ({}, [("a", "$a$a"), ("b", "$a")], {"a": "ee", "b": "ee"}, {"a": "ee", "b": "e"}),
        ({}, [("$n", "1")], {"$n": "1"}, {"name": "1"}),
    ],
)
def test_names_of_one_line(
    given: dict[str, str | None],
    line: list[tuple[str, str | None]],
    buildkit: dict[str, str],
    classic: dict[str, str],
) -> None:
    for dialect, expected in ((BUILDKIT, buildkit), (CLASSIC, classic)):
        arguments = Arguments(given, PLATFORMS, dialect=dialect)
        scope = Scope(arguments)
        expanded = arguments.expand(arg(*line), {"a": "e", "n": "name"}, "\\")
        assert isinstance(expanded, Arg)
        scope.declare(expanded)
        assert scope.variables(None) == expected
        before = Arguments(given, PLATFORMS, dialect=dialect)
        before._global |= {"a": "e", "n": "name"}
        before.declare_global(arg(*line))
        assert before.global_variables().items() >= expected.items()


def test_which_of_arg_and_env_overrides_the_other() -> None:
    """In BuildKit the later one, and ENV in a stage that begins with this one."""
    for dialect, later in ((BUILDKIT, "arg"), (CLASSIC, "env")):
        scope = Scope(Arguments({}, PLATFORMS, dialect=dialect))
        env = ["a=env"]
        scope.set_by_env(["a"])
        scope.declare(arg(("a", None)))
        assert scope.variables(env) == {"a": "env"} and scope.run_environment(env) == ([], [], ["a=env"])
        scope.declare(arg(("a", "arg")))
        assert scope.variables(env) == {"a": later}
        run = ["a=arg"] if later == "arg" else []
        assert scope.run_environment(env) == (run, run, [f"a={later}"])
        assert scope.following().variables(env) == {"a": "env"}
        scope.set_by_env(["a"])
        assert scope.variables(env) == {"a": "env"} and scope.run_environment(env) == ([], [], ["a=env"])


def test_arguments_of_attestations_are_not_for_run() -> None:
    scope = Scope(Arguments({}, PLATFORMS))
    scope.declare(arg(("BUILDKIT_SBOM_SCAN_STAGE", "true"), ("a", "1")))
    assert scope.run_environment([]) == (["a=1"], ["a=1"], ["BUILDKIT_SBOM_SCAN_STAGE=true", "a=1"])


def test_the_environment_of_a_run() -> None:
    arguments = Arguments(
        {"b": "2", "HTTP_PROXY": "p", "no_proxy": "q", "https_proxy": "r", "unused": "u", "SOURCE_DATE_EPOCH": "0"},
        PLATFORMS,
    )
    scope = Scope(arguments)
    scope.declare(arg(("b", None), ("a", "1"), ("none", None), ("env", "x"), ("https_proxy", None)))
    found = scope.run_environment(["env=y", "no_proxy=z"])
    assert found.variables == ["HTTP_PROXY=p", "a=1", "b=2", "https_proxy=r"]
    assert found.key == ["a=1", "b=2", "https_proxy=r"]
    assert found.declared == ["b=2", "a=1", "none=", "env=y", "https_proxy=r"], "in the order of the lines"
    assert arguments.source_date_epoch == "0"


def test_buildkit_gives_proxies_under_both_spellings() -> None:
    """They override ENV, and are no part of the key unless a stage declares them."""
    given = {"HTTP_PROXY": "p", "no_proxy": "q", "https_proxy": "r", "ftp_proxy": ""}
    scope = Scope(Arguments(given, PLATFORMS, dialect=BUILDKIT))
    scope.declare(arg(("https_proxy", None)))
    found = scope.run_environment(["no_proxy=z", "HTTP_PROXY=z"])
    assert found.variables == [
        *("HTTPS_PROXY=r", "HTTP_PROXY=p", "NO_PROXY=q", "http_proxy=p", "https_proxy=r", "no_proxy=q"),
    ]
    assert found.key == ["https_proxy=r"]


def test_a_stage_that_begins_with_another_one() -> None:
    """In BuildKit it has the arguments of that one, and ARG without a value changes none."""
    for dialect, inherited in ((BUILDKIT, {"a": "1"}), (CLASSIC, {})):
        parent = Scope(Arguments({}, PLATFORMS, dialect=dialect))
        parent.declare(arg(("a", "1")))
        child = parent.following()
        child.declare(arg(("a", None), ("b", "2")))
        assert child.variables(None) == {**inherited, "b": "2"}
        assert parent.variables(None) == {"a": "1"}


def test_unconsumed() -> None:
    given = {
        **dict.fromkeys(("z", "a", "used", "global", "mentioned", "none"), "1"),
        **dict.fromkeys(("HTTP_PROXY", "all_proxy", "TARGETARCH", "SOURCE_DATE_EPOCH", "BUILDKIT_INLINE_CACHE"), "1"),
        "null": None,
    }
    arguments = Arguments(given, PLATFORMS)
    assert arguments.unconsumed() == ["a", "global", "mentioned", "none", "null", "used", "z"]
    arguments.declare_global(arg(("global", None)))
    arguments.mention(["mentioned"])
    Scope(arguments).declare(arg(("used", "x"), ("none", None), ("null", None)))
    assert arguments.unconsumed() == ["a", "z"]


def test_a_nul_in_a_value() -> None:
    with pytest.raises(InvalidParameter, match="build-arg a: a NUL character"):
        Arguments({"a": "x\0"}, PLATFORMS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("linux/amd64", "linux/amd64"),
        ("Linux/x86_64", "linux/amd64"),
        ("arm64", "linux/arm64"),
        ("linux/arm64/v8", "linux/arm64"),
        ("aarch64", "linux/arm64"),
        ("linux/arm", "linux/arm/v7"),
        ("linux/arm/v6", "linux/arm/v6"),
        ("armhf", "linux/arm/v7"),
        ("armel", "linux/arm/v6"),
        ("i686", "linux/386"),
        ("linux/amd64/v1", "linux/amd64"),
        ("linux/amd64/v3", "linux/amd64/v3"),
        ("windows/amd64", "windows/amd64"),
    ],
)
def test_platforms(text: str, expected: str) -> None:
    assert normalized(text) == expected
    assert normalized(expected) == expected


@pytest.mark.parametrize("text", ["", "/", "linux/", "a/b/c/d", "linux/a b", "linux//v7"])
def test_platforms_that_are_none(text: str) -> None:
    with pytest.raises(InvalidParameter, match=r"invalid component|cannot parse platform"):
        normalized(text)


names = st.sampled_from(["a", "b", "c", "HTTP_PROXY"])
pairs = st.tuples(names, st.none() | st.sampled_from(["", "1", "2"]))


@given(
    st.dictionaries(names, st.sampled_from(["", "x", "y"])),
    st.lists(pairs),
    st.lists(pairs),
    st.dictionaries(names, st.just("e")),
)
def test_any_scope(
    given: dict[str, str],
    before: list[tuple[str, str | None]],
    inside: list[tuple[str, str | None]],
    env: dict[str, str],
) -> None:
    """The client's value wins, then the last default; ENV hides all; RUN gets what is not
    hidden.
    """
    arguments = Arguments(given, PLATFORMS)
    for pair in before:
        arguments.declare_global(arg(pair))
    scope = Scope(arguments)
    for pair in inside:
        scope.declare(arg(pair))
    lines = [f"{name}={value}" for name, value in env.items()]
    found = scope.variables(lines)
    run = scope.run_environment(lines)
    for name in ("a", "b", "c"):
        declared = [default for other, default in inside if other == name]
        above = [default for other, default in before if other == name and default is not None]
        expected: str | None = None
        if declared:
            expected = given.get(name, declared[-1])
            if expected is None and above:
                expected = above[-1]
        assert found.get(name) == env.get(name, expected) == scope.value(name, env)
        assert (f"{name}={expected}" in run.key) == (expected is not None and name not in env)
        assert (name in arguments.unconsumed()) == (
            name in given and not declared and not any(o == name for o, _ in before)
        )
    assert set(run.declared) == {f"{name}={found.get(name, '')}" for name, _ in inside}
    assert set(run.key) <= set(run.variables) and run.variables == sorted(run.variables)
