from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from engine.errors import InvalidParameter, NotFound, ServerError
from engine.runtime import oci
from engine.runtime.oci import Runtime

RUNTIME = Runtime(name="crun", path="/usr/bin/crun", version="1", reason="", root="/run/e/runtime")


def line(message: str, level: str = "error") -> str:
    return f'{{"msg":"{message}","level":"{level}","time":"2026-01-02T03:04:05Z"}}\n'


def lines(message: str, level: str = "error") -> str:
    """As crun 1.28 writes it."""
    return f'{{\n  "msg": "{message}",\n  "level": "{level}",\n  "time": "2026-01-02T03:04:05Z"\n}}\n'


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (line("cannot x"), "cannot x"),
        (line("first") + line("second"), "second"),
        ('{"msg":"no a\u2028b","level":"error"}\n', "no a\u2028b"),
        (lines("no `\\/x`"), "no `/x`"),
        (lines("first") + lines("second") + lines("later", "warning"), "second"),
        (lines("first") + "plain\n" + lines("later", "warning"), "plain"),
        (lines("bad") + "{\n", "{"),
        (lines("cut")[:-3], '{ "msg": "cut", "level": "error", "time": "2026-01-02T03:04:05Z"'),
        (line("cgroup v1 is deprecated", "warning"), ""),
        (line("bad") + line("later", "warning"), "bad"),
        ("plain words\n\n", "plain words"),
        (line("runc run failed: unable to start container process: error during container init: x"), "x"),
        ("", ""),
        ('{"level":"error"}\n', ""),
        ('{"msg": 5}\n', '{"msg": 5}'),
    ],
)
def test_reason(log: str, reason: str) -> None:
    assert oci.failure_reason(log) == reason


@pytest.mark.parametrize(
    ("message", "kind", "code", "words"),
    [
        (
            "executable file `x` not found in $PATH: No such file or directory",
            NotFound,
            127,
            'exec: "x": executable file not found in $PATH',
        ),
        (
            "executable file `/x` not found in $PATH: No such file or directory",
            NotFound,
            127,
            'exec: "/x": stat /x: no such file or directory',
        ),
        (
            "executable file `/x` not found: No such file or directory",
            NotFound,
            127,
            'exec: "/x": stat /x: no such file or directory',
        ),
        (
            "the path `/x` exists but it is not executable: Operation not permitted",
            InvalidParameter,
            126,
            'exec: "/x": permission denied',
        ),
        (
            "the path `/x` is not a regular file: Operation not permitted",
            InvalidParameter,
            126,
            'exec: "/x": permission denied',
        ),
        (
            "the path `x` exists but it is not executable: Operation not permitted",
            NotFound,
            127,
            'exec: "x": executable file not found in $PATH',
        ),
        ("open executable: Permission denied", InvalidParameter, 126, 'exec: "prog": permission denied'),
        ("open executable: Operation not permitted", InvalidParameter, 126, 'exec: "prog": permission denied'),
        ("chdir `/f`: Not a directory", InvalidParameter, 126, "chdir `/f`: not a directory"),
        (
            *("mount `/f` to `etc`: Not a directory", InvalidParameter, 126),
            "mount `/f` to `etc`: not a directory: Are you trying to mount a directory onto a file (or vice-versa)? "
            "Check if the specified host path exists and is the expected type",
        ),
        ("mount `/a` to `b`: Invalid argument", ServerError, 128, "mount `/a` to `b`: invalid argument"),
        ("setrlimit `RLIMIT_NOFILE`: Operation not permitted", ServerError, 128, "operation not permitted"),
        ("error stat'ing file `/x`: No such file or directory", NotFound, 127, "`/x`: no such file or directory"),
    ],
)
def test_failures_of_crun(message: str, kind: type[Exception], code: int, words: str) -> None:
    failure = oci.start_failure(line(message), "prog")
    assert type(failure.error) is kind
    assert failure.exit_code == code == oci.failure_code(failure.error.message)
    assert failure.error.message.startswith("OCI runtime create failed: ")
    assert failure.error.message.endswith(words)
    of_exec = oci.start_failure(line(message), "prog", "exec").error.message
    assert of_exec == failure.error.message.replace("create", "exec", 1)


def test_failure_without_words() -> None:
    failure = oci.start_failure("", "prog")
    assert type(failure.error) is ServerError
    assert "gave no reason" in failure.error.message


def test_a_failure_with_few_open_files() -> None:
    message = oci.start_failure(line("writing file `cgroup.procs`: No space left on device"), "prog", files=10)
    assert message.error.message.endswith("needs more than the 10 open files that the ulimit nofile allows)")
    assert "open files" not in oci.start_failure(line("x"), "prog", files=1024).error.message


def test_command_lines() -> None:
    argv = RUNTIME.run_argv("key", bundle=Path("/b"), pid_file=Path("/p"), log=Path("/l"))
    assert argv == (
        *("/usr/bin/crun", "--root", "/run/e/runtime", "--log", "/l", "--log-format", "json"),
        *("run", "--detach", "--no-new-keyring", "--bundle", "/b", "--pid-file", "/p", "key"),
    )
    argv = RUNTIME.exec_argv("key", process=Path("/j"), pid_file=Path("/p"), log=Path("/l"), tty=True)
    assert argv[-5:] == ("/p", "--tty", "--console-socket", oci.CONSOLE, "key")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_probe_program_is_a_static_elf(machine: str) -> None:
    program = oci._elf(machine)
    assert program[:4] == b"\x7fELF"
    assert len(program) < 200
    assert oci._probe_spec(machine, "k", "/p").linux.cgroups_path == "/engined/k"


def test_a_hook_that_reads_nothing_does_not_kill_the_runtime(tmp_path: Path) -> None:
    """crun writes the container's state to a hook. The signal must not reach it."""
    program = tmp_path / "crun"
    program.write_text("#!/bin/sh\nkill -PIPE $$\n")
    program.chmod(0o755)
    asyncio.run(msgspec.structs.replace(RUNTIME, path=str(program)).delete("c1"))
