"""System calls that the kernel lacks, shown by a filter that answers them as such a kernel does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.errors import ServerError
from engine.system import calls
from tests.support import ROOT
from tests.support.engine import without_calls

NAMES = [call.name for call in calls.CALLS]


def test_this_kernel_has_all_of_them() -> None:
    assert list(calls.missing()) == []
    calls.check()


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_is_missing_is_found(name: str) -> None:
    program = "from engine.system import calls; print(*(call.name for call in calls.missing()))"
    command = [sys.executable, "-m", without_calls.__name__, name, sys.executable, "-c", program]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == f"{name}\n"


def test_numbers() -> None:
    assert {call.name: call.number for call in calls.CALLS}.items() <= without_calls.NUMBERS.items()


def test_the_start_is_refused_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "missing", lambda: iter(calls.CALLS))
    with pytest.raises(ServerError, match=r"open_tree, .*mount_setattr; boot Linux 5\.12 or newer") as refused:
        calls.check()
    assert "clone3" not in refused.value.message
    monkeypatch.setattr(calls, "missing", lambda: (call for call in calls.CALLS if call.name == "clone3"))
    calls.check()
