"""Process lists against the real `ps` of this host, on live processes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import InvalidParameter
from engine.runtime.cgroups import Cgroups
from engine.system.ps import columns
from engine.system.ps.columns import COLUMNS
from engine.system.ps.listing import process_list
from engine.system.ps.options import DEFAULT, parse
from engine.system.ps.process import Host, Process, accounts
from engine.wire.stats import ProcessList
from tests.support import PATIENCE
from tests.unit.fast.test_cgroup import LiveCgroup, live

__all__ = ["live"]  # the fixture


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


def real(pids: list[int], *arguments: str) -> list[str]:
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    output = subprocess.run(["ps", *arguments], capture_output=True, text=True, check=True, env=environment).stdout
    return [" ".join(line.split()) for line in output.splitlines()]


@pytest.mark.parametrize("ps_args", ["-f", "-F", "-j", "-fj", "-fL", "-L", "-T", "-fT", "-L -o pid,lwp,comm", ""])
def test_posix_formats(pids: list[int], ps_args: str) -> None:
    asked = ps_args.replace("-", "-ww", 1).split() or ["-wwf"]
    assert _eventually(lambda: lines(process_list(pids, parse(ps_args))), lambda: real(pids, *asked, "-p", _list(pids)))


@pytest.mark.parametrize("ps_args", ["u", "j", "v", "s", "w", "uc"])
def test_bsd_formats(pids: list[int], ps_args: str) -> None:
    ours = lambda: lines(process_list(pids, parse(ps_args)))  # noqa: E731
    assert _eventually(ours, lambda: real(pids, ps_args + "ww", *map(str, pids)))


@pytest.mark.parametrize("ps_args", ["-l", "-ly", "-fl", "l"])
def test_formats_with_a_wait_channel_which_ps_cuts_at_six_letters(pids: list[int], ps_args: str) -> None:
    def ours() -> list[str]:
        found = process_list(pids, parse(ps_args))
        at = found.titles.index("WCHAN")
        for row in found.processes:
            row[at] = row[at][:6]
        return lines(found)

    asked = [ps_args + "ww", *(("-p", _list(pids)) if ps_args.startswith("-") else map(str, pids))]
    assert _eventually(ours, lambda: real(pids, *asked))


@pytest.mark.parametrize("name", sorted(COLUMNS.keys() - {"uid_hack"}))
def test_every_format_specifier(pids: list[int], name: str) -> None:
    ours = lambda: lines(process_list(pids, parse(f"-o {name}")))  # noqa: E731
    assert _eventually(ours, lambda: real(pids, "-ww", "-o", name, "-p", _list(pids)))


def _list(pids: list[int]) -> str:
    return ",".join(map(str, pids))


def _eventually(ours: object, theirs: object) -> bool:
    """Both give the same. Repeated on a mismatch, since the second may change between the two, and
    a young process's C column changes all the time."""
    deadline = time.monotonic() + 60
    while (one := ours()) != (two := theirs()):  # type: ignore[operator]
        if time.monotonic() > deadline:
            pytest.fail(f"{one}\nis not what ps says:\n{two}")
    return True


def test_start_of_another_day_and_year(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(os.getpid(), Host())
    begun = process.started
    for after, stime, bsdstart, start in (
        (0, "%H:%M", "%H:%M", "%H:%M:%S"),
        (86401 * 2, "%b%d", "%b %d", "%b %d"),
        (86400 * 366, "%Y", "%b %d", "%b %d"),
    ):
        process.host.now = begun + after
        local = time.localtime(begun)
        turned = time.localtime(begun + after).tm_year != local.tm_year
        wanted = [time.strftime(form, local) for form in ("%Y" if turned else stime, bsdstart, start)]
        assert [COLUMNS[name].render(process) for name in ("stime", "bsdstart", "start")] == wanted


@pytest.mark.parametrize(
    ("seconds", "etime", "cputime"),
    [
        (0, "00:00", "00:00:00"),
        (59, "00:59", "00:00:59"),
        (3600, "01:00:00", "01:00:00"),
        (86400, "1-00:00:00", "1-00:00:00"),
        (90061, "1-01:01:01", "1-01:01:01"),
    ],
)
def test_clocks(seconds: int, etime: str, cputime: str) -> None:
    assert (columns._clock(seconds, False), columns._clock(seconds, True)) == (etime, cputime)


# --- ps_args --------------------------------------------------------------------------------------

AUX = "USER PID %CPU %MEM VSZ RSS TTY STAT START TIME COMMAND"
EF = "UID PID PPID C STIME TTY TIME CMD"


@pytest.mark.parametrize(
    ("ps_args", "titles"),
    [
        ("", EF),
        ("-ef", EF),
        ("-efww", EF),
        ("-e -f", EF),
        ("-A", "PID TTY TIME CMD"),
        ("-e", "PID TTY TIME CMD"),
        ("aux", AUX),
        ("-aux", AUX),
        ("-auxww", AUX),
        ("-axu", AUX),
        ("auxf --forest", AUX),
        ("ax", "PID TTY STAT TIME COMMAND"),
        ("-eo pid,comm", "PID COMMAND"),
        ("-o pid -o comm", "PID COMMAND"),
        ("-opid,comm", "PID COMMAND"),
        ("axo pid,args", "PID COMMAND"),
        ("-eo pid,user:20,cmd", "PID USER CMD"),
        ("o pid,ucmd", "PID CMD"),
        ("--format=pid,ppid", "PID PPID"),
        ("--format pid,ppid", "PID PPID"),
        ("-o pid=,comm=Name", ",comm=Name"),
        ("-o pid= -o comm=Name", " Name"),
    ],
)
def test_titles(ps_args: str, titles: str) -> None:
    assert " ".join(column.header for column in parse(ps_args).columns) == titles


@pytest.mark.parametrize(
    ("ps_args", "named"),
    [
        ("-o foo", "'foo'"),
        ("-o pid,foo,comm", "'foo'"),
        ("-o uid_hack", "'uid_hack'"),
        ("-Q", "-Q"),
        ("zz", "'z'"),
        ("--bad", "--bad"),
        ("-o", "-o"),
        ("-o =x", "'=x'"),
        ("-o user:x", "'user:x'"),
        ("--sort=foo", "'foo'"),
        ("-p x", "'x'"),
        ("-u nosuchuser -f", "nosuchuser"),
        ("-C sh", "-C"),
        ("--no-headers", "--no-headers"),
        ("-t pts/0", "-t"),
        ("; id", "';'"),
    ],
)
def test_what_is_not_understood_is_named(ps_args: str, named: str) -> None:
    with pytest.raises(InvalidParameter, match="invalid ps_args") as caught:
        parse(ps_args)
    assert named in caught.value.message


def test_selection_and_order(pids: list[int]) -> None:
    def chosen(ps_args: str) -> list[int]:
        return [int(row[0]) for row in process_list(pids, parse(f"{ps_args} -o pid")).processes]

    assert chosen("") == chosen("-u root") == chosen("--user 0") == pids
    assert chosen(f"-p {pids[0]},{pids[2]}") == [pids[0], pids[2]]
    assert chosen(f"-p {pids[0]} -e") == pids
    assert chosen("-u nobody") == []
    assert chosen("--sort=-pid") == chosen("k-pid") == pids[::-1]
    nice = [int(row[0]) for row in process_list(pids, parse("-o ni --sort -ni,pid")).processes]
    assert nice == sorted(nice, reverse=True) and nice[0] == min(19, os.nice(0) + 5) > nice[-1]


def test_forest(pids: list[int]) -> None:
    rows = process_list(pids, parse("axf -o pid,ppid,cmd")).processes
    child = next(row for row in rows if row[2].startswith(" \\_ "))
    assert rows[rows.index(child) - 1][0] == child[1]
    rows = process_list(pids, parse("-eH -o pid,ppid,cmd")).processes
    assert [row[2] for row in rows if row[2].startswith("  ")] == ["  cat"]


def test_long_user_names_are_cut_as_ps_cuts_them() -> None:
    host = Host()
    host.users = {0: "systemd-network"}
    host.groups = {0: "daemon"}
    process = Process(os.getpid(), host)
    assert process.ids("Uid")[1] == 0
    assert parse("-o user").columns[0].render(process) == "systemd+"
    assert parse("-o user:15").columns[0].render(process) == "systemd-network"
    assert parse("-o group").columns[0].render(process) == "daemon"
    host.users = {}
    assert parse("-o user").columns[0].render(process) == "0"


def test_accounts(tmp_path: Path) -> None:
    file = tmp_path / "passwd"
    file.write_bytes(b"root:x:0:0::/:/bin/sh\ntoor:x:0:0:\n+nis\nbad:x:y:\nb\xff:x:7:7:\n")
    assert accounts(str(file)) == {0: "root", 7: "b�"}
    assert accounts(str(tmp_path / "none")) == {}


# --- cgroups --------------------------------------------------------------------------------------


def test_processes_of_a_cgroup_and_below(live: LiveCgroup) -> None:
    first = live.run("sleep", "1000")
    second = live.run("sleep", "1001", below="/inner")
    found = process_list(live.host.processes(live.path), parse(DEFAULT))
    assert found.titles == EF.split()
    assert [(int(row[1]), row[7]) for row in found.processes] == sorted([(first, "sleep 1000"), (second, "sleep 1001")])
    assert found.processes[0][0] == "root" and found.processes[0][2] == str(os.getpid())
    with pytest.raises(InvalidParameter):
        parse("-o nothing")
    live.end()
    assert live.host.processes(live.path) == []


def test_zombies_and_ended_processes(live: LiveCgroup) -> None:
    pid = live.run("sh", "-c", "read line")
    process = live.processes[0]
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    _until(lambda: ") Z " in Path(f"/proc/{pid}/stat").read_text())
    rows = process_list([pid, 0x7FFFFFF0], parse("-ef")).processes
    assert [row[-1] for row in rows] == ["[sh] <defunct>"]
    assert process_list([pid], parse("-o s,comm")).processes == [["Z", "sh <defunct>"]]
    process.wait()
    assert process_list([pid], parse("-ef")).processes == []


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
