"""A process list as ps(1) prints it on the host, for `GET /containers/{id}/top?ps_args=`.

`-ef`, the default, is read from /proc; for all other options procps' ps(1) runs, as dockerd does
it. Process ids, users and terminals are the host's. A process that ends during the call is left
out.

Owns:    nothing; ps has ended when a call returns.
Threads: any; blocks for as long as the kernel delays reading a command line.
Rules:   ps(1) of procps-ng 4, proc(5).
Not here: which processes a container has (`Cgroups.processes`), the wire struct (`wire/stats.py`).
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.errors import InvalidParameter, ServerError
from engine.wire.stats import ProcessList

DEFAULT = "-ef"

_HZ = os.sysconf("SC_CLK_TCK")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_USER_WIDTH = 8
"""Letters of a user's name that ps shows before it truncates."""
_SECONDS = 30
_ARGUMENT = 128 << 10
"""Bytes that one argument of a program may have (execve(2))."""
_LONGEST = 4096
"""Characters of the options: ps gets them as arguments."""
_RENAMED = re.compile(r"=\s*PID\b")


def process_list(pids: Sequence[int], ps_args: str) -> ProcessList:
    """Titles, and one row for each selected process of `pids` that still exists.

    Raises InvalidParameter with what ps says about its options, ServerError if the host has no ps.
    """
    words = ps_args.split() or [DEFAULT]
    if words == [DEFAULT]:
        host = _Host.read()
        return ProcessList(
            ["UID", "PID", "PPID", "C", "STIME", "TTY", "TIME", "CMD"],
            [row for pid in pids for row in _full_row(pid, host)],
        )
    if "\0" in ps_args or len(ps_args) > _LONGEST:
        raise InvalidParameter(f"invalid ps_args {ps_args[:100]!r}: at most {_LONGEST} characters, none of them NUL")
    # As dockerd: another column under this title would choose the processes.
    if _RENAMED.search(ps_args):
        raise InvalidParameter(f"invalid ps_args {ps_args!r}: a column is named PID")
    listed = ",".join(map(str, pids)) or "0"  # no process has 0
    # Without -q it reads all processes of the host: options that choose, sort or draw a tree refuse
    # -q.
    quick = [[f"-q{listed}"]] if len(listed) < _ARGUMENT else []
    for chosen in (*quick, []):
        done = _run([*chosen, *words])
        if not (done.returncode and done.stderr):  # a status alone: it found no process
            break
    else:
        said = done.stderr.strip().partition("\n")[0].removeprefix("error: ")
        raise InvalidParameter(f"invalid ps_args {ps_args!r}: {said}")
    lines = done.stdout.splitlines()
    titles = lines[0].split() if lines else []
    if "PID" not in titles:
        raise InvalidParameter(f"invalid ps_args {ps_args!r}: the output of ps has no column PID")
    at, selected = titles.index("PID"), {str(pid) for pid in pids}
    rows = (line.split(None, len(titles) - 1) for line in lines[1:])  # the last column has the rest
    return ProcessList(titles, [row for row in rows if len(row) > at and row[at] in selected])


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["ps", *words],
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise ServerError("top with ps_args needs the program ps on the host (Debian: procps)") from None
    except subprocess.TimeoutExpired:
        raise ServerError(f"ps {' '.join(words)}: no answer in {_SECONDS} seconds") from None


class _Host(NamedTuple):
    """What all rows of one answer need."""

    now: float
    uptime: float
    boot: int
    """Seconds since the epoch."""
    terminals: dict[int, tuple[range, str]]

    @classmethod
    def read(cls) -> _Host:
        with open("/proc/uptime") as file:
            uptime = float(file.read().split()[0])
        with open("/proc/stat") as file:
            boot = next((int(line.split()[1]) for line in file if line.startswith("btime ")), 0)
        return cls(time.time(), uptime, boot, dict(_terminal_drivers()))


def _terminal_drivers() -> Iterator[tuple[int, tuple[range, str]]]:
    """(major, (minors, name)) from /proc/tty/drivers; only drivers of numbered devices."""
    with open("/proc/tty/drivers") as file:
        lines = file.read().splitlines()
    for line in lines:
        fields = line.split()
        if len(fields) == 5 and fields[2].isdecimal() and "-" in fields[3] and fields[0] != "pty_master":
            first, _, last = fields[3].partition("-")
            name = {"unknown": "tty"}.get(fields[0], fields[1].removeprefix("/dev/"))
            yield int(fields[2]), (range(int(first), int(last) + 1), name)


def _full_row(pid: int, host: _Host) -> Iterator[list[str]]:
    """The row of `ps -ef`; none if the process has ended."""
    try:
        status = _read(pid, "status")
        stat = _read(pid, "stat")
        arguments = _read(pid, "cmdline").rstrip("\0")
        uid = int(status.partition("\nUid:")[2].split()[1])
    except (OSError, IndexError):
        return
    begin, end = stat.index("("), stat.rindex(")")
    name, fields = _printable(stat[begin + 1 : end]), stat[end + 2 :].split()
    ticks, started = int(fields[11]) + int(fields[12]), int(fields[19]) / _HZ
    if fields[0] == "Z":
        command = f"[{name}] <defunct>"
    else:
        command = _printable(arguments.replace("\0", " ").replace("\n", " ")) if arguments else f"[{name}]"
    elapsed = host.uptime - started
    cpu = min(int(ticks * 100 / _HZ / elapsed), 99) if elapsed > 0 else 0
    begun = _begun(host.boot + int(started), host.now)
    terminal = _terminal(int(fields[4]) & 0xFFFFFFFF, host)
    yield [_user(uid), str(pid), fields[1], str(cpu), begun, terminal, _clock(ticks // _HZ), command]


def _read(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read().decode(errors="replace")


def _printable(text: str) -> str:
    return _CONTROL.sub("?", text)


def _user(uid: int) -> str:
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
    return name if len(name) <= _USER_WIDTH else name[: _USER_WIDTH - 1] + "+"


def _begun(started: int, now: float) -> str:
    begin, today = time.localtime(started), time.localtime(now)
    if begin.tm_year != today.tm_year:
        return time.strftime("%Y", begin)
    return time.strftime("%b%d" if begin.tm_yday != today.tm_yday else "%H:%M", begin)


def _clock(seconds: int) -> str:
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hour:02d}:{minute:02d}:{second:02d}"


def _terminal(device: int, host: _Host) -> str:
    if device == 0:
        return "?"
    major, minor = (device >> 8) & 0xFFF, (device & 0xFF) | (device >> 12 & 0xFFF00)
    if 136 <= major <= 143:  # the number within the container's own devpts
        return f"pts/{(major - 136) * 256 + minor}"
    if major == 4:
        return f"tty{minor}" if minor < 64 else f"ttyS{minor - 64}"
    if major == 5:
        return {0: "tty", 1: "console"}.get(minor, "?")
    minors, name = host.terminals.get(major, (range(0), ""))
    return f"{name}{minor - minors.start}" if minor in minors else "?"
