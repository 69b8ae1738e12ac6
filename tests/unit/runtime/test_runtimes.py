"""Runtimes by name: what a create takes, and which one a container's record means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from engine.errors import InvalidParameter
from engine.runtime import runtimes as module
from engine.runtime.oci import Runtime, words_of_version
from engine.runtime.runtimes import Runtimes

CRUN = Runtime(name="crun", path="/usr/bin/crun", version="1", reason="", root="/r")
RUNC = Runtime(name="runc", path="/usr/bin/runc", version="1", reason="", root="/r")
KATA = Runtime(name="kata", path="/opt/kata", version="1", reason="", root="/r")


@pytest.mark.parametrize(
    ("name", "found"),
    [("", CRUN), ("crun", CRUN), ("kata", KATA), ("runc", CRUN), ("io.containerd.runc.v2", CRUN)],
)
def test_names_that_a_create_takes(name: str, found: Runtime) -> None:
    """`runc` is Docker's default, and means the engine's where it is not installed."""
    runtimes = Runtimes(CRUN, {"kata": KATA})
    assert runtimes.named(name) is runtimes.of(found.name) is found
    runtimes.check_configured(found.name)
    assert name in ("", *runtimes.programs())


def test_runc_where_it_is_installed() -> None:
    runtimes = Runtimes(CRUN, {"runc": RUNC})
    assert runtimes.named("runc") is RUNC and runtimes.named("") is CRUN


def test_the_default_for_clients() -> None:
    """Docker's, unless the operator has named another one."""
    assert Runtimes(CRUN).default_name == Runtimes(RUNC).default_name == "runc"
    assert Runtimes(CRUN, chosen=True).default_name == "crun"
    assert Runtimes(KATA, chosen=True).default_name == "kata"


@pytest.mark.parametrize(("older", "shown"), [("", "runc"), ("crun", "runc"), ("runc", "runc"), ("kata", "kata")])
def test_records_of_earlier_versions(older: str, shown: str) -> None:
    """They had one name, the client's or that of the engine's choice."""
    assert Runtimes(CRUN).shown(older) == shown
    assert Runtimes(CRUN, chosen=True).shown("crun") == "crun"


def test_an_unknown_name() -> None:
    runtimes = Runtimes(CRUN)
    for refusing in (runtimes.named, runtimes.check_configured):
        with pytest.raises(InvalidParameter, match="unknown or invalid runtime name: kata"):
            refusing("kata")
    assert runtimes.of("kata") is CRUN, "what is left of its containers must go all the same"


def test_the_engines_own_choice_may_change() -> None:
    """A record of an engine that chose crun, on a host that has runc alone."""
    runtimes = Runtimes(RUNC)
    runtimes.check_configured("crun")
    assert runtimes.of("crun") is RUNC
    with pytest.raises(InvalidParameter):
        runtimes.named("crun")


def program(path: Path, says: str) -> str:
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


def test_what_is_found_on_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = program(tmp_path / "wrapper", "runc version 1.1.5")
    monkeypatch.setattr(module, "SEARCH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path / "runc", "")
    chosen: list[tuple[object, ...]] = []

    def probe(choice: str, run: Path, arguments: Sequence[str], *, no_pivot: bool) -> Runtime:
        chosen.append((choice, *arguments, no_pivot))
        return CRUN

    monkeypatch.setattr(Runtime, "probe", probe)
    found = Runtimes.find("", [f"slow={wrapper}", "gone=/not/there", "named=wrapper --debug 'a b'"], tmp_path)
    assert found.programs() == {
        "crun": (CRUN.path,),
        "gone": ("/not/there",),
        "io.containerd.runc.v2": (CRUN.path,),
        "named": (wrapper, "--debug", "a b"),
        "runc": (f"{tmp_path}/runc",),
        "slow": (wrapper,),
    }
    assert found.default_name == "runc"
    assert (found.of("slow").family, found.of("slow").version) == ("runc", "1.1.5")
    found = Runtimes.find("slow", [f"slow={wrapper} --no-pivot -x"], tmp_path)
    assert chosen == [("", False), (wrapper, "-x", True)] and found.default.name == found.default_name == "slow"


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("crun version 1.8.1\ncommit: x", ("crun", "1.8.1")),
        ("runsc version release-20240101.0\nspec: 1.1.0", ("runsc", "release-20240101.0")),
        ("NVIDIA Container Runtime version 1.14.6\ncommit: x\n\nrunc version 1.1.12", ("runc", "1.1.12")),
        ("kata-runtime  : 3.2.0", ("", "")),
        ("", ("", "")),
    ],
)
def test_name_and_version_of_a_program(tmp_path: Path, says: str, words: tuple[str, str]) -> None:
    assert words_of_version(program(tmp_path / "program", says)) == words
    assert words_of_version(str(tmp_path / "missing")) == ("", "")


def test_options_that_only_some_runtimes_have() -> None:
    assert "--no-new-keyring" in CRUN.run_argv("id", bundle=Path("/b"))
    assert "--no-new-keyring" not in KATA.run_argv("id", bundle=Path("/b"))
    assert "--no-new-keyring" in msgspec.structs.replace(KATA, family="runc").run_argv("id", bundle=Path("/b"))


def test_arguments_of_the_program() -> None:
    """Those of `run` come after it."""
    runtime = msgspec.structs.replace(RUNC, arguments=("--debug", "--systemd-cgroup=false"), no_pivot=True)
    argv = runtime.run_argv("id", bundle=Path("/b"))
    assert argv[:5] == ("/usr/bin/runc", "--debug", "--systemd-cgroup=false", "--root", "/r")
    assert argv.index("--no-pivot") > argv.index("run")
    assert "--no-pivot" not in runtime.exec_argv("id")
    assert runtime.exec_argv("id")[:3] == argv[:3]
