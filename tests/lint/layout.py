"""Where a test and its helpers lie: tests/unit mirrors engine/, what several levels import lies in
tests/support, and every file of tests is collected. A helper of one directory may lie there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from tests.support import ROOT

LEVELS = {"unit", "contract", "simulated", "api", "system", "clients", "soak"}
"""Directories of tests."""

OTHERS = {"support", "lint", "fuzz", "vm", "data"}
"""Directories of tests/ without tests."""

PROGRAMS = {"__init__.py", "conftest.py", "demo.py", "durations.json"}
"""Files at the top of tests/."""

NOT_OF_THE_ENGINE = {"bench", "lint", "support"}
"""Directories of tests/unit that test the programs of these names."""


def check(root: Path = ROOT) -> Iterator[str]:
    """What lies at the wrong place in a working tree."""
    tests = root / "tests"
    for path in sorted(tests.iterdir()):
        if path.name == "__pycache__":
            continue
        if path.name not in (LEVELS | OTHERS if path.is_dir() else PROGRAMS):
            yield f"tests/{path.name}: only levels and programs lie here; what tests import lies in tests/support"
    for directory in sorted((tests / "unit").rglob("*/")):
        name = str(directory.relative_to(tests / "unit"))
        if "__pycache__" in name or name.split("/", maxsplit=1)[0] in NOT_OF_THE_ENGINE:
            continue
        if not (root / "engine" / name.replace("fast", "_fast")).is_dir():
            yield f"tests/unit/{name}: engine/ has no such package, whose tests these could be"
    ignored = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["norecursedirs"]
    for path in sorted(tests.rglob("*.py")):
        name = path.relative_to(tests)
        if "__pycache__" in name.parts:
            continue
        if path.name.startswith("test_") and name.parts[0] not in LEVELS:
            yield f"tests/{name}: a test outside of {', '.join(sorted(LEVELS))}"
        if any(fnmatch(part, each) for part in name.parts for each in ignored):
            yield f"tests/{name}: pytest does not collect it, because of norecursedirs"
        if (
            not (path.parent / "__init__.py").exists()
            and name.parts[0] in LEVELS | {"support"}
            and name.parts[1:2] != ("scripts",)
        ):
            yield f"tests/{name.parent}: no __init__.py"
