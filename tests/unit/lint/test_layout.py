"""What `tests.lint.layout` finds in a tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lint import layout

RIGHT = (
    *(
        "tests/__init__.py",
        "tests/conftest.py",
        "tests/api/__init__.py",
        "tests/api/test_a.py",
        "tests/fuzz/targets.py",
    ),
    *(
        "tests/unit/__init__.py",
        "tests/unit/fast/__init__.py",
        "tests/unit/fast/test_b.py",
        "tests/unit/lint/__init__.py",
    ),
    *("tests/support/__init__.py", "tests/clients/__init__.py", "tests/clients/scripts/program.py"),
    *("engine/_fast/b.pyx", "tests/api/__pycache__/test_x.py"),
)


def found(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nnorecursedirs = ["build", "data"]\n')
    for name in (*RIGHT, *more):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return [*layout.check(tmp_path)]


def test_what_is_right(tmp_path: Path) -> None:
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests/helpers.py", "tests/helpers.py: only levels and programs lie here"),
        ("tests/more/__init__.py", "tests/more: only levels and programs lie here"),
        ("tests/unit/novel/__init__.py", "tests/unit/novel: engine/ has no such package"),
        ("tests/fuzz/test_c.py", "tests/fuzz/test_c.py: a test outside of api, clients"),
        ("tests/support/builds/a.py", "tests/support/builds: no __init__.py"),
    ],
)
def test_what_is_wrong(name: str, words: str, tmp_path: Path) -> None:
    (what,) = found(tmp_path, name)
    assert what.startswith(words)


def test_what_pytest_does_not_collect(tmp_path: Path) -> None:
    (what,) = found(tmp_path, "tests/api/build/__init__.py")
    assert what == "tests/api/build/__init__.py: pytest does not collect it, because of norecursedirs"
