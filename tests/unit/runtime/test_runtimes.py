"""Runtimes by name: what a create takes, and which one a container's record means."""

from __future__ import annotations

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
    ("name", "kept", "found"),
    [
        ("", "crun", CRUN),
        ("crun", "crun", CRUN),
        ("kata", "kata", KATA),
        ("runc", "runc", CRUN),
        ("io.containerd.runc.v2", "io.containerd.runc.v2", CRUN),
    ],
)
def test_names_that_a_create_takes(name: str, kept: str, found: Runtime) -> None:
    """`runc` is Docker's default, and means the engine's where it is not installed."""
    runtimes = Runtimes(CRUN, {"kata": KATA})
    assert runtimes.checked(name) == kept
    assert runtimes.of(kept) is found
    runtimes.check_configured(kept)


def test_runc_where_it_is_installed() -> None:
    assert Runtimes(CRUN, {"runc": RUNC}).of("runc") is RUNC


def test_an_unknown_name() -> None:
    runtimes = Runtimes(CRUN)
    for refusing in (runtimes.checked, runtimes.check_configured):
        with pytest.raises(InvalidParameter, match="unknown or invalid runtime name: kata"):
            refusing("kata")
    assert runtimes.of("kata") is CRUN, "what is left of its containers must go all the same"


def test_the_engines_own_choice_may_change() -> None:
    """A record of an engine that chose crun, on a host that has runc alone; and one of a version
    that kept no name.
    """
    runtimes = Runtimes(RUNC)
    for name in ("crun", msgspec.UNSET):
        runtimes.check_configured(name)
        assert runtimes.of(name) is RUNC
    with pytest.raises(InvalidParameter):
        runtimes.checked("crun")


def program(path: Path, says: str) -> str:
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


def test_what_is_found_on_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = program(tmp_path / "wrapper", "runc version 1.1.5")
    monkeypatch.setattr(module, "SEARCH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path / "runc", "")
    chosen: list[str] = []

    def probe(choice: str, run: Path) -> Runtime:
        chosen.append(choice)
        return CRUN

    monkeypatch.setattr(Runtime, "probe", probe)
    found = Runtimes.find("", [f"slow={wrapper}", "gone=/not/there"], tmp_path)
    assert found.paths() == {"crun": CRUN.path, "gone": "/not/there", "runc": f"{tmp_path}/runc", "slow": wrapper}
    assert (found.of("slow").family, found.of("slow").version) == ("runc", "1.1.5")
    found = Runtimes.find("slow", [f"slow={wrapper}"], tmp_path)
    assert chosen == ["", wrapper] and found.default.name == "slow"


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
