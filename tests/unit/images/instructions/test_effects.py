"""The configuration after an instruction, and its words in the history as Docker 20.10 writes
them.
"""

from __future__ import annotations

import msgspec
import pytest

from engine.errors import InvalidParameter
from engine.images.instructions import effects, records, words
from engine.wire.containers import Config, Healthcheck

V = {"A": "one"}


def after(config: Config, text: str, *, cmd_set: bool = False) -> tuple[Config, str]:
    instruction = records.expand(records.read(words.line(text, 1)), V)
    found = effects.configured(config, instruction, cmd_set=cmd_set)
    return found, effects.recorded(instruction, found)


BASH = Config(shell=["/bin/bash", "-c"])

ROWS: list[tuple[Config, str, Config, str]] = [
    (Config(), "ENV a=b c='d e'", Config(env=["a=b", "c=d e"]), "ENV a=b c=d e"),
    (Config(env=["a=1", "b=2"]), "ENV b=3 c=4 a=5", Config(env=["a=5", "b=3", "c=4"]), "ENV b=3 c=4 a=5"),
    (Config(), "ENV a $A x", Config(env=["a=one x"]), "ENV a=one x"),
    (Config(labels={"a": "1"}), "LABEL a=2 b='c d'", Config(labels={"a": "2", "b": "c d"}), "LABEL a=2 b=c d"),
    (Config(), "EXPOSE 80 443/udp", Config(exposed_ports={"443/udp": {}, "80/tcp": {}}), "EXPOSE 443/udp 80"),
    (
        Config(exposed_ports={"1/tcp": {}}),
        "EXPOSE 2-3",
        Config(exposed_ports={"1/tcp": {}, "2/tcp": {}, "3/tcp": {}}),
        "EXPOSE 2-3",
    ),
    (
        Config(volumes={"/a": {}}),
        "VOLUME /b '/c'",
        Config(volumes={"/a": {}, "/b": {}, "/c": {}}),
        "VOLUME [/b /c]",
    ),
    (Config(), 'VOLUME ["/$A"]', Config(volumes={"/one": {}}), "VOLUME [/one]"),
    (Config(), "EXPOSE $NONE", Config(exposed_ports={}), "EXPOSE "),
    (Config(user="x"), "USER $A:g", Config(user="one:g"), "USER one:g"),
    (Config(), "WORKDIR a", Config(working_dir="/a"), "WORKDIR /a"),
    (Config(working_dir="/a"), "WORKDIR b/../c", Config(working_dir="/a/c"), "WORKDIR /a/c"),
    (Config(working_dir="/a"), "WORKDIR /b/", Config(working_dir="/b/"), "WORKDIR /b/"),
    (Config(working_dir="/a"), "WORKDIR ../../..", Config(working_dir="/"), "WORKDIR /"),
    (Config(), "WORKDIR /a//b", Config(working_dir="/a//b"), "WORKDIR /a//b"),
    (Config(working_dir="//b"), "WORKDIR c", Config(working_dir="/b/c"), "WORKDIR /b/c"),
    (Config(), "CMD echo x", Config(cmd=["/bin/sh", "-c", "echo x"]), 'CMD ["/bin/sh" "-c" "echo x"]'),
    (Config(), 'CMD ["a", "b c"]', Config(cmd=["a", "b c"]), 'CMD ["a" "b c"]'),
    (Config(cmd=["x"]), "CMD []", Config(cmd=None), "CMD []"),
    (Config(cmd=["x"]), "CMD", Config(cmd=["/bin/sh", "-c"]), 'CMD ["/bin/sh" "-c"]'),
    (
        BASH,
        'CMD "$A"\tx',
        msgspec.structs.replace(BASH, cmd=["/bin/bash", "-c", '"$A"\tx']),
        r'CMD ["/bin/bash" "-c" "\"$A\"\tx"]',
    ),
    (Config(cmd=["x"]), "ENTRYPOINT a", Config(entrypoint=["/bin/sh", "-c", "a"]), 'ENTRYPOINT ["/bin/sh" "-c" "a"]'),
    (Config(entrypoint=["x"]), "ENTRYPOINT []", Config(), "ENTRYPOINT []"),
    (Config(entrypoint=["x"]), "ENTRYPOINT", Config(), "ENTRYPOINT []"),
    (Config(), 'SHELL ["/bin/bash", "-c"]', BASH, "SHELL [/bin/bash -c]"),
    (Config(), "STOPSIGNAL SIGINT", Config(stop_signal="SIGINT"), "STOPSIGNAL SIGINT"),
    (
        Config(),
        "HEALTHCHECK --interval=1m30s --retries=3 CMD a b",
        Config(healthcheck=Healthcheck(test=["CMD-SHELL", "a b"], interval=90 * 10**9, retries=3)),
        r"""HEALTHCHECK &{["CMD-SHELL" "a b"] "1m30s" "0s" "0s" '\x03'}""",
    ),
    (
        Config(),
        'HEALTHCHECK --timeout=1.5s --start-period=2h --retries=39 CMD ["a"]',
        Config(
            healthcheck=Healthcheck(test=["CMD", "a"], timeout=3 * 10**9 // 2, start_period=7200 * 10**9, retries=39)
        ),
        r"""HEALTHCHECK &{["CMD" "a"] "0s" "1.5s" "2h0m0s" '\''}""",
    ),
    (
        Config(),
        "HEALTHCHECK --interval=2.5ms CMD a",
        Config(healthcheck=Healthcheck(test=["CMD-SHELL", "a"], interval=2_500_000)),
        r"""HEALTHCHECK &{["CMD-SHELL" "a"] "2.5ms" "0s" "0s" '\x00'}""",
    ),
    (
        Config(),
        "HEALTHCHECK NONE",
        Config(healthcheck=Healthcheck(test=["NONE"])),
        r"""HEALTHCHECK &{["NONE"] "0s" "0s" "0s" '\x00'}""",
    ),
    (Config(on_build=["RUN a"]), "ONBUILD COPY a b", Config(on_build=["RUN a", "COPY a b"]), "ONBUILD COPY a b"),
    (Config(), "MAINTAINER A <b@c>", Config(), "MAINTAINER A <b@c>"),
    (Config(), "ARG a=$A b", Config(), "ARG a=one b"),
    (Config(), "RUN a", Config(), ""),
    (Config(), "COPY a b", Config(), ""),
]


@pytest.mark.parametrize(
    ("config", "text", "expected", "words_of_history"), ROWS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_effects(config: Config, text: str, expected: Config, words_of_history: str) -> None:
    assert after(config, text) == (expected, words_of_history)


def test_an_entrypoint_removes_the_inherited_command_only() -> None:
    config = Config(cmd=["x"])
    assert after(config, 'ENTRYPOINT ["a"]')[0].cmd is None
    assert after(config, 'ENTRYPOINT ["a"]', cmd_set=True)[0].cmd == ["x"]


def test_the_given_configuration_is_not_changed() -> None:
    config = Config(env=["a=1"], labels={"a": "1"}, volumes={"/a": {}}, exposed_ports={"1/tcp": {}}, on_build=["RUN a"])
    before = msgspec.json.encode(config)
    for text in ("ENV a=2", "LABEL a=2", "VOLUME /b", "EXPOSE 2", "ONBUILD RUN b"):
        after(config, text)
    assert msgspec.json.encode(config) == before


def test_a_signal_is_checked() -> None:
    with pytest.raises(InvalidParameter, match="invalid signal: FOO"):
        effects.configured(Config(), records.StopSignal(signal="FOO"), cmd_set=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a"b\\c', r'"a\"b\\c"'),
        ("\a\b\f\n\r\t\v\x01\x7f", r'"\a\b\f\n\r\t\v\x01\x7f"'),
        ("é😀", '"é😀"'),
        ("\u200b\u2028", r'"\u200b\u2028"'),
        ("\udcff", r'"\xff"'),
        ("\U000e0001", r'"\U000e0001"'),
        ("'", '''"'"'''),
    ],
)
def test_quotes_as_in_go(text: str, expected: str) -> None:
    assert effects.quoted_list([text]) == f"[{expected}]"
