"""The engine without system calls that older kernels lack, or that a seccomp filter denies."""

from __future__ import annotations

import sys

import pytest

from engine.system import calls
from tests.support.engine import without_calls
from tests.support.engine.harness import TempEngine


def engine(*missing: str) -> TempEngine:
    return TempEngine(within=[sys.executable, "-m", without_calls.__name__, ",".join(missing)])


def test_the_start_without_a_needed_call_is_refused_in_one_line() -> None:
    with pytest.raises(AssertionError) as refused, engine("mount_setattr", "openat2"):
        raise AssertionError("it has started")
    lines = [line for line in str(refused.value).splitlines() if line.startswith("engined: ")]
    assert lines == [f"engined: system calls are missing or denied on this host: openat2, mount_setattr; {calls.FIX}"]


def test_containers_run_without_the_other_calls() -> None:
    needed = {call.name for call in calls.CALLS if not call.use}
    with engine(*(without_calls.NUMBERS.keys() - needed)) as older:
        older.load_busybox()
        assert older.docker("run", "--rm", "-v", "data:/data", "busybox", "echo", "hello").out == "hello\n"
        container = older.started("sleep", "600")
        assert older.docker("exec", container, "echo", "hello").out == "hello\n"
        assert (
            older.docker("run", "--rm", "--ipc", f"container:{container}", "busybox", "echo", "hello").out == "hello\n"
        )
        assert older.docker("cp", f"{container}:/etc/hosts", "-").out.startswith("hosts\0")
        older.docker("rm", "-f", container)
