"""The options in docs/ and README are those of `engine.config`; the files for users in docs/ are
valid."""

import configparser
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from engine.__main__ import _parser
from engine.config import Config, options, parse

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))


@pytest.mark.parametrize("path", GENERATE["files"](), ids=lambda path: path.name)
def test_generated_files_are_current(path: Path) -> None:
    assert path.read_text() == GENERATE["files"]()[path], "run `make docs`"


def test_the_example_file_changes_nothing_until_it_is_edited(tmp_path: Path) -> None:
    assert parse({}, str(ROOT / "docs" / "engined.toml")) == Config()


def test_the_example_file_has_every_option_with_a_value_that_is_accepted(tmp_path: Path) -> None:
    commented = (ROOT / "docs" / "engined.toml").read_text().splitlines()
    file = tmp_path / "engined.toml"
    file.write_text("\n".join(line[1:] for line in commented if line.startswith("#") and not line.startswith("# ")))
    values = tomllib.loads(file.read_text())
    assert values.keys() == {option.name for option in options()}
    for name in ("tls_ca", "tls_cert", "tls_key"):  # such files do not exist here
        values[name] = "/dev/null"
    file.write_text("\n".join(f"{name} = {_toml(value)}" for name, value in values.items()))
    assert parse({}, str(file)).runtime == "/usr/bin/crun"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def test_the_manual_page_is_valid() -> None:
    formatter = shutil.which("man") and shutil.which("groff")
    text = (ROOT / "docs" / "engined.1").read_text()
    assert not any(line.startswith("@") for line in text.splitlines())
    assert all(line.strip() for line in text.splitlines()), "man(7) has no blank lines"
    if formatter:
        done = subprocess.run(
            ["groff", "-man", "-ww", "-z", "-Tutf8"], input=text.encode(), capture_output=True, check=True
        )
        assert not done.stderr, done.stderr


def test_the_unit_starts_the_program_and_spares_the_containers() -> None:
    text = (ROOT / "docs" / "engined.service").read_text()
    (command,) = re.findall(r"ExecStart=\S+/engined (.*) \$ENGINED_OPTIONS", text)
    assert _parser().parse_args(command.split()).command == "serve"
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    service = unit["Service"]
    # The daemon says READY=1; the monitor and the containers outlive it; cgroups are the engine's.
    assert (service["Type"], service["KillMode"], service["Delegate"]) == ("notify", "process", "yes")


@pytest.mark.parametrize(("state", "stops"), [("stopping", True), ("running", False), ("degraded", False), ("", False)])
def test_the_unit_stops_the_containers_when_the_host_goes_down(tmp_path: Path, state: str, stops: bool) -> None:
    text = (ROOT / "docs" / "engined.service").read_text()
    (line,) = re.findall(r"ExecStop=(.*)", text)
    for name, script in ("systemctl", f"echo {state}; exit 1"), ("engined", f'echo "$*" >{tmp_path}/called'):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    # systemd.service(5), "Command lines": $$ is $
    command = shlex.split(line.replace("$$", "$").replace("/opt/engined/bin", str(tmp_path)))
    subprocess.run(command, check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    called = tmp_path / "called"
    assert (called.read_text() if called.exists() else "") == ("stop\n" if stops else "")
