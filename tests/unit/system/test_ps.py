"""Process lists against the real `ps` of this host, on live processes."""

from __future__ import annotations

import os
import pty
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import InvalidParameter, ServerError
from engine.runtime.cgroups import Cgroups
from engine.system import ps
from engine.system.ps import DEFAULT, process_list
from engine.wire.stats import ProcessList
from tests.support import PATIENCE
from tests.unit.fast.test_cgroup import LiveCgroup, live

__all__ = ["live"]  # the fixture

EF = "UID PID PPID C STIME TTY TIME CMD"


@pytest.fixture(scope="module")
def pids() -> Iterator[list[int]]:
    """A shell with a child in its own session and at another nice value, a threaded process, and
    one on a terminal.
    """
    master, terminal = pty.openpty()
    threaded = (
        "import threading,sys\n"
        "for n in range(3): threading.Thread(target=sys.stdin.read).start()\n"
        "print('x', flush=True)"
    )
    processes = [
        subprocess.Popen(
            ["nice", "-n", "5", "sh", "-c", "echo x; cat; :"], stdin=-1, stdout=-1, start_new_session=True
        ),
        subprocess.Popen([sys.executable, "-c", threaded, "a  b", ""], stdin=-1, stdout=-1),
        subprocess.Popen(["cat", "-"], stdin=terminal, stdout=-1, start_new_session=True),
    ]
    for process in processes[:2]:
        assert process.stdout is not None and process.stdout.readline() == b"x\n"
    _until(lambda: Path(f"/proc/{processes[2].pid}/comm").read_text() == "cat\n")
    children = f"/proc/{processes[0].pid}/task/{processes[0].pid}/children"
    _until(lambda: bool(Path(children).read_text()))
    child = int(Path(children).read_text())
    _until(lambda: Path(f"/proc/{child}/comm").read_text() == "cat\n")
    found = sorted([*(process.pid for process in processes), child])
    _until(lambda: all(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S" for pid in found))
    yield found
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    os.close(terminal)
    processes[2].kill()
    os.close(master)
    for process in processes:
        process.wait(10 * PATIENCE)
        if process.stdout is not None:
            process.stdout.close()


def _until(condition: object) -> None:
    deadline = time.monotonic() + 10 * PATIENCE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def lines(found: ProcessList) -> list[str]:
    return [" ".join(" ".join(row).split()) for row in (found.titles, *found.processes)]


def real(*arguments: str) -> list[str]:
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}  # without COLUMNS
    output = subprocess.run(["ps", *arguments], capture_output=True, text=True, check=True, env=environment).stdout
    return [" ".join(line.split()) for line in output.splitlines()]


def test_the_default_is_what_ps_shows(pids: list[int]) -> None:
    assert _eventually(lambda: lines(process_list(pids, "")), lambda: real("-wwf", "-p", _list(pids)))


@pytest.mark.parametrize(
    "ps_args", ["-F", "-fL", "aux", "-aux", "-o pid,ppid,user:20,cmd", "-opid,comm", "u", "-l", "o pid,ucmd"]
)
def test_other_options_are_those_of_ps(pids: list[int], ps_args: str) -> None:
    words = ps_args.split()
    assert _eventually(lambda: lines(process_list(pids, ps_args)), lambda: real(*words, "-q", _list(pids)))


@pytest.mark.parametrize(
    "ps_args",
    ["axf -o pid,ppid,cmd", "-eH -o pid,cmd", "-e --sort=-pid", "-u root -o pid,comm", "-e -o ni,pid --sort=ni"],
)
def test_options_that_need_all_processes(pids: list[int], ps_args: str) -> None:
    def theirs() -> list[str]:
        titles, *rows = real(*ps_args.split())
        at = titles.split().index("PID")
        return [titles, *(row for row in rows if int(row.split()[at]) in pids)]

    assert _eventually(lambda: lines(process_list(pids, ps_args)), theirs)


def _list(pids: list[int]) -> str:
    return ",".join(map(str, pids))


def _eventually(ours: object, theirs: object) -> bool:
    """Times go on between the two."""
    deadline = time.monotonic() + 10 * PATIENCE
    while (one := ours()) != (two := theirs()):  # type: ignore[operator]
        if time.monotonic() > deadline:
            pytest.fail(f"{one}\nis not what ps says:\n{two}")
    return True


def test_more_processes_than_an_argument_can_name(pids: list[int]) -> None:
    many = [*range(0x7FF00000, 0x7FF00000 + 15_000), *pids]
    assert [int(row[0]) for row in process_list(many, "-e -o pid").processes] == pids


def test_no_process() -> None:
    assert process_list([], "-o pid,comm") == ProcessList(["PID", "COMMAND"], [])
    assert process_list([0x7FFFFFF0], "aux").processes == []
    assert process_list([], "") == ProcessList(EF.split(), [])


@pytest.mark.parametrize(
    ("ps_args", "said"),
    [
        ("-o pid,foo", 'unknown user-defined format specifier "foo"'),
        ("--bad", "unknown gnu long option"),
        ("-o", "format specification must follow -o"),
        ("-p x", "process ID list syntax error"),
        ("; id", "garbage option"),
        ("-o comm", "the output of ps has no column PID"),
        ("--no-headers", "the output of ps has no column PID"),
        ("--version", "the output of ps has no column PID"),
        ("-eo ppid=PID,pid", "a column is named PID"),
        ("-eo ppid= PID,pid", "a column is named PID"),
    ],
)
def test_options_that_ps_refuses(ps_args: str, said: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        process_list([os.getpid()], ps_args)
    assert caught.value.message == f"invalid ps_args {ps_args!r}: {said}"


@pytest.mark.parametrize("ps_args", ["-o pid,\0x", "-o pid" + " " * 5000, "-o " + "p" * 200_000])
def test_options_that_no_program_can_get(ps_args: str) -> None:
    with pytest.raises(InvalidParameter, match="at most 4096 characters, none of them NUL"):
        process_list([os.getpid()], ps_args)


def test_a_host_without_ps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert process_list([os.getpid()], DEFAULT).processes[0][1] == str(os.getpid())
    with pytest.raises(ServerError, match="needs the program ps on the host"):
        process_list([os.getpid()], "aux")


def test_start_of_another_day_and_year() -> None:
    begun = time.mktime((2024, 2, 28, 12, 30, 0, 0, 0, -1))
    shown = [ps._begun(int(begun), begun + days * 86400) for days in (0, 2, 366)]
    assert shown == ["12:30", "Feb28", "2024"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "00:00:00"), (59, "00:00:59"), (3600, "01:00:00"), (86400, "1-00:00:00"), (90061, "1-01:01:01")],
)
def test_clocks(seconds: int, shown: str) -> None:
    assert ps._clock(seconds) == shown


def test_names_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "systemd-network", 1: "eight888"}

    def named(uid: int) -> object:
        return pwd.struct_passwd((names[uid], "x", uid, uid, "", "/", ""))

    monkeypatch.setattr(pwd, "getpwuid", named)
    assert [ps._user(uid) for uid in (0, 1, 70_000)] == ["systemd+", "eight888", "70000"]


# --- cgroups --------------------------------------------------------------------------------------


def test_processes_of_a_cgroup_and_below(live: LiveCgroup) -> None:
    first = live.run("sleep", "1000")
    second = live.run("sleep", "1001", below="/inner")
    found = process_list(live.host.processes(live.path), DEFAULT)
    assert found.titles == EF.split()
    assert [(int(row[1]), row[7]) for row in found.processes] == sorted([(first, "sleep 1000"), (second, "sleep 1001")])
    assert found.processes[0][0] == "root" and found.processes[0][2] == str(os.getpid())
    live.end()
    assert live.host.processes(live.path) == []


def test_zombies_and_ended_processes(live: LiveCgroup) -> None:
    pid = live.run("sh", "-c", "read line")
    process = live.processes[0]
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    _until(lambda: ") Z " in Path(f"/proc/{pid}/stat").read_text())
    rows = process_list([pid, 0x7FFFFFF0], "-ef").processes
    assert [row[-1] for row in rows] == ["[sh] <defunct>"]
    ((_, state, name),) = process_list([pid], "-o pid,s,comm").processes
    assert (state, name.split()[0]) == ("Z", "sh")
    process.wait()
    assert process_list([pid], "-ef").processes == []


def test_v2_tree(tmp_path: Path) -> None:
    inner = tmp_path / "engined" / "id" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "cgroup.procs").write_text("12\n7\n")
    (inner / "cgroup.procs").write_text("0\n9\n")
    for controllers in ((), ("memory", "pids")):
        host = Cgroups(mode="v2", controllers={}, unified=str(tmp_path), unified_controllers=controllers)
        assert host.processes("/engined/id") == [7, 9, 12]
        assert host.processes("/engined/none") == []
    assert Cgroups(mode="none", controllers={}).processes("/engined/id") == []
