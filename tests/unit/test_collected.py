"""Every file of tests is collected. pytest skips directories that `norecursedirs` matches, without
a message.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent


def test_no_directory_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    skipped = pytestconfig.getini("norecursedirs")
    files = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    assert files
    assert not [str(path) for path in files if any(fnmatch(part, each) for part in path.parts for each in skipped)]
