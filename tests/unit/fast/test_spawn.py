"""Processes as `spawn` makes them, and exits of those that another process reaped."""

from __future__ import annotations

import gc
import os
import resource
import signal
from pathlib import Path

import pytest

from engine._fast.spawn import exit_of, sealed, spawn


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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_sealed_program(tmp_path: Path) -> None:
    """Its rights: tests/system/test_sealed.py."""
    tmp_path.chmod(0o755)
    (tmp_path / "file").touch()
    out, stdout = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    rest = (bytes(tmp_path), b"/tmp", null, stdout, stdout, 65534, 65534)
    script = b"echo $$ $NAME $(id -u) $(pwd) $(ls) $(ulimit -c); exit 3"
    argv = [b"/bin/sh", b"-c", script]
    pid, pidfd = sealed(argv, [b"NAME=x", b"PATH=/bin:/usr/bin"], *rest, [(resource.RLIMIT_CORE, 0)])
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    assert result is not None
    assert (result.si_pid, result.si_status) == (pid, 3)
    os.close(pidfd)
    assert os.read(out, 100) == b"1 x 65534 /tmp file 0\n"
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    for words, error in (([b"/nonexistent"], FileNotFoundError), ([b"/etc"], PermissionError)):
        with pytest.raises(error):
            sealed(words, [], *rest)
    with pytest.raises(FileNotFoundError):
        sealed(argv, [], b"/nonexistent", *rest[1:])
    with pytest.raises(OSError, match="Invalid argument"):
        sealed(argv, [], *rest, [(999, 0)])
    with pytest.raises(ValueError, match="at most 8 limits"):
        sealed(argv, [], *rest, [(resource.RLIMIT_CORE, 0)] * 9)
    with pytest.raises(ValueError, match="no program"):
        sealed([], [], *rest)
    with pytest.raises(TypeError):
        sealed(["/bin/true"], [], *rest)  # type: ignore[list-item]
    assert len(os.listdir("/proc/self/fd")) == before
    for descriptor in (null, out, stdout):
        os.close(descriptor)


def test_exit_of_a_process_that_another_has_reaped() -> None:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 42"], {})
    pidfd = os.pidfd_open(pid)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    status = exit_of(pidfd)
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert status == (42 << 8 if release >= (6, 15) else None)
    os.close(pidfd)
