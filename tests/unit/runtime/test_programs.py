"""What programs say about themselves: when they are executed, and answers that are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.facts import ProgramFacts
from engine.errors import InvalidParameter
from engine.runtime import features, init
from engine.runtime.programs import Programs


def program(path: Path, said: str) -> str:
    """A program that counts its executions in the file `PATH.runs`."""
    temporary = path.with_suffix(".new")
    temporary.write_text(f"#!/bin/sh\necho \"$1\" >> {path}.runs\ncat <<'END'\n{said}\nEND\n")
    temporary.chmod(0o755)
    temporary.replace(path)
    return str(path)


def runs(path: str) -> list[str]:
    return Path(f"{path}.runs").read_text().split()


@pytest.fixture
def tini(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = program(tmp_path / "tini", "tini version 0.19.0")
    monkeypatch.setattr(init, "program", lambda configured: configured or path)
    return path


def test_each_is_executed_once(tmp_path: Path, tini: str) -> None:
    crun = program(tmp_path / "crun", '{\n  "ociVersionMin": "1.0.0"\n}')
    old = program(tmp_path / "old", "unknown command features")
    found = Programs(lambda: {"crun": (crun,), "old": (old,), "gone": (str(tmp_path / "gone"),)})
    expected = ProgramFacts(init_version="0.19.0", features={"crun": '{"ociVersionMin":"1.0.0"}'})
    assert found.read() == found.read() == expected
    assert (runs(crun), runs(old), runs(tini)) == (["features"], ["features"], ["--version"])


def test_one_that_is_installed_again_is_executed_again(tmp_path: Path, tini: str) -> None:
    found = Programs(lambda: {"crun": (str(tmp_path / "crun"),)})
    assert found.read().features == {}
    program(tmp_path / "crun", '{"a":1}')
    assert found.read().features == {"crun": '{"a":1}'}
    program(tmp_path / "crun", '{"b":1}')
    os.utime(tmp_path / "crun", ns=(1, 1))
    assert found.read().features == {"crun": '{"b":1}'}


def test_the_configured_init_program(tmp_path: Path, tini: str) -> None:
    other = program(tmp_path / "catatonit", "catatonit version 9.9.9")
    assert Programs(dict, other).read().init_version == "9.9.9"


def test_without_an_init_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(configured: str) -> str:
        raise InvalidParameter("none")

    monkeypatch.setattr(init, "program", missing)
    assert Programs(dict).read() == ProgramFacts()


@pytest.mark.parametrize("said", [b"", b"[]", b"1", b'"x"', b"{", b"\xff", b"[" * 100_000, b"{}" + b" " * (1 << 20)])
def test_features_that_are_none(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(features, "output", lambda path, argument: said)
    assert features.read("crun") == ""


@given(st.binary())
def test_any_output_is_an_object_or_nothing(said: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "output", lambda path, argument: said)
        found = features.read("crun")
    assert found == "" or (found[0], found[-1]) == ("{", "}")
