"""Processes as `spawn` makes them, and exits of those that another process reaped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from engine._fast.spawn import exit_of, spawn


def test_spawn_is_as_a_shell_would_do_it(tmp_path: Path) -> None:
    script = "read a; echo $a $FOO $(pwd) $(ulimit -Sn); grep Sig[BI] /proc/self/status >&2"
    stdin, give = os.pipe()
    out, stdout = os.pipe()
    err, stderr = os.pipe()
    before = signal.getsignal(signal.SIGPIPE)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        pid = spawn(
            [b"sh", b"-c", script.encode()],
            [b"FOO=bar", b"PATH=/bin:/usr/bin"],
            bytes(tmp_path),
            stdin,
            stdout,
            stderr,
            512,
        )
    finally:
        signal.signal(signal.SIGPIPE, before)
    for descriptor in (stdin, stdout, stderr):
        os.close(descriptor)
    os.write(give, b"hello\n")
    os.close(give)
    assert os.waitpid(pid, 0)[1] == 0
    with open(out) as text:
        assert text.read() == f"hello bar {tmp_path} 512\n"
    with open(err) as text:
        assert [line.split()[1].strip("0") for line in text] == ["", ""]


def test_spawn_tells_why_not() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    children = Path("/proc/thread-self/children")
    before = children.read_text()
    with pytest.raises(FileNotFoundError, match="/nonexistent"):
        spawn([b"/nonexistent"], [], b"/", null, null, null, 0)
    with pytest.raises(FileNotFoundError):
        spawn([b"sh"], [], b"/nonexistent", null, null, null, 0)
    with pytest.raises(PermissionError):
        spawn([b"/etc"], [], b"/", null, null, null, 0)
    os.close(null)
    assert children.read_text() == before  # no zombie of a failed one


def test_exit_of_a_process_that_another_has_reaped() -> None:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 42"], {})
    pidfd = os.pidfd_open(pid)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    status = exit_of(pidfd)
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert status == (42 << 8 if release >= (6, 15) else None)
    os.close(pidfd)
