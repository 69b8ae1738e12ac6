"""Instructions of `changes`: the effect of each on a configuration, and shell words in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.images.instructions import changes
from engine.wire.containers import Config

VARIABLES = ["A=one", "B=two words", "EMPTY=", "PATH=/bin"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A", "one"),
        ("${A}", "one"),
        ("x${A}y$A-$A", "xoneyone-one"),
        ("$AB", ""),
        ("$", "$"),
        ("$/x", "$/x"),
        (r"\$A", "$A"),
        ("'$A'", "$A"),
        ('"$A"', "one"),
        (r'"\$A \"q\" \n \\"', r'$A "q" \n \ '[:-1]),
        (r"a\ b", "a b"),
        (r"'a\b'", r"a\b"),
        ("\"a\"'b'c", "abc"),
        ("$B", "two words"),
        ("${NONE:-else}", "else"),
        ("${EMPTY:-else}", "else"),
        ("${A:-else}", "one"),
        ("${A:+set}", "set"),
        ("${NONE:+set}", ""),
        ("${NONE:-${A}x}", "onex"),
        ("${NONE:-'}'}", "}"),
        ("${A:?why}", "one"),
        ("$1$@", ""),
        ("$PATH:/x", "/bin:/x"),
    ],
)
def test_words_of_a_shell(text: str, expected: str) -> None:
    found = changes.apply(Config(), [f"ENV K={text}" if " " not in text else f"ENV K {text}"], VARIABLES)
    assert found.env == [f"K={expected}"]


@pytest.mark.parametrize("text", ["'a", '"a', "${A", "${", "${}", "${A:=x}", "${NONE:?why}", "${A:-${B}", "${A:-'}"])
def test_words_that_are_none(text: str) -> None:
    with pytest.raises(InvalidParameter):
        changes.apply(Config(), [f"ENV K={text}"], VARIABLES)


def test_each_line_sees_those_before_it() -> None:
    config = changes.apply(
        Config(env=["A=body"]),
        [
            "ENV A=$A-1 C=$A",
            "ENV D=$C\tE='$C'",
            "LABEL $A=${D}x 'k 2'=\"v $D\"",
            "EXPOSE $PORTS 1",
            "USER ${U:-nobody}",
            "WORKDIR /w/$A",
            "WORKDIR $D",
            "VOLUME $D '/v'",
            'VOLUME ["/$D", "/x y"]',
            "STOPSIGNAL $S",
            "CMD echo $A",
            'ENTRYPOINT ["$A"]',
            "HEALTHCHECK CMD test $A",
            "ONBUILD ENV X=$A",
        ],
        ["A=container", "PORTS=80 81/udp", "S=SIGINT"],
    )
    assert config.env == ["A=body-1", "C=body", "D=body", "E=$C"]
    assert config.labels == {"body-1": "bodyx", "k 2": "v body"}
    assert isinstance(config.exposed_ports, dict) and set(config.exposed_ports) == {"80/tcp", "81/udp", "1/tcp"}
    assert (config.user, config.working_dir, config.stop_signal) == ("nobody", "/w/body-1/body", "SIGINT")
    assert set(config.volumes or ()) == {"body", "/v", "/body", "/x y"}
    assert (config.cmd, config.entrypoint) == (["/bin/sh", "-c", "echo $A"], ["$A"])
    assert config.healthcheck is not None and config.healthcheck.test == ["CMD-SHELL", "test $A"]
    assert config.on_build == ["ENV X=$A"]


def test_what_grows_without_end_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="characters"):
        changes.apply(Config(env=["A=0123456789"]), ["ENV A=$A$A"] * 60)
    with pytest.raises(InvalidParameter, match="deep"):
        changes.apply(Config(), ["ENV A=" + "${X:-" * 100_000])


@given(st.text(alphabet="ab$ {}:-+?'\"\\=\n\t1/", max_size=60))
def test_any_text(text: str) -> None:
    """Parsed or refused; no other exception."""
    for name in ("ENV", "LABEL", "EXPOSE", "WORKDIR", "VOLUME", "USER", "HEALTHCHECK", "ONBUILD"):
        try:
            changes.apply(Config(), [f"{name} {text}"], VARIABLES)
        except InvalidParameter as error:
            assert error.message
