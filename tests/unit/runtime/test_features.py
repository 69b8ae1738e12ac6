"""What runtimes say of themselves, with programs that stand in for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.runtime import features
from engine.runtime.oci import Runtime


@pytest.mark.parametrize(
    ("name", "version", "output", "expected"),
    [
        ("runc", "1.1.5", '{"mountOptions": ["ro", "rro"], "linux": {}}', True),
        ("runc", "1.0.0", None, False),
        ("other", "9.9", '{"mountOptions": ["ro"]}', False),
        ("other", "9.9", "{}", False),
        ("other", "9.9", "no JSON", False),
        ("crun", "1.8.1", None, True),
        ("crun", "1.3", None, False),
        ("crun", "1.14", None, True),
        ("crun", "0.17", None, False),
        ("crun", "", None, False),
        ("crun", "1.20", '{"mountOptions": ["ro"]}', False),
    ],
)
def test_recursive_read_only(tmp_path: Path, name: str, version: str, output: str | None, expected: bool) -> None:
    """Without output the program has no command `features`."""
    program = tmp_path / name
    program.write_text("#!/bin/sh\n" + ("exit 1\n" if output is None else f"cat <<'END'\n{output}\nEND\n"))
    program.chmod(0o755)
    runtime = Runtime(name=name, path=str(program), version=version, reason="", root="/run")
    assert features.recursive_read_only(runtime) is expected


def test_a_crun_of_another_name() -> None:
    runtime = Runtime(name="mine", path="/nowhere", version="1.8.1", family="crun", reason="", root="/run")
    assert features.recursive_read_only(runtime)


def test_a_runtime_that_is_gone() -> None:
    assert not features.recursive_read_only(
        Runtime(name="runc", path="/nowhere/runc", version="1.1.5", reason="", root="/run")
    )
