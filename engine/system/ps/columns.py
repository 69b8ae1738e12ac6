"""The columns that ps(1) of procps-ng 4 knows: for each format specifier a header, the text for a
process, and how to sort by it.

Columns are not truncated to a width, except long user names (`systemd+`), which clients know that
way. Not here: which columns an option stands for (`options.py`).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from engine.system.ps.process import HZ, PAGE_KIB, Process

_NAME_WIDTH = 8
"""Letters of a user or group name that ps shows before it truncates."""

Render = Callable[[Process], str]
Key = Callable[[Process], "float | str"]


class Column(NamedTuple):
    """One format specifier: its header, its text, and its sort key (None: the text, as a number
    where it is one).
    """

    header: str
    render: Render
    key: Key | None = None
    tree: bool = False
    """This column shows the branch of a process tree."""


def _user(index: int, width: int = _NAME_WIDTH) -> Render:
    return lambda process: _cut(process.host.users, process.ids("Uid")[index], width)


def _group(index: int, width: int = _NAME_WIDTH) -> Render:
    return lambda process: _cut(process.host.groups, process.ids("Gid")[index], width)


def _cut(names: dict[int, str], number: int, width: int) -> str:
    name = names.get(number, str(number))
    return name if len(name) <= width else name[: width - 1] + "+"


def _id(key: str, index: int) -> Render:
    return lambda process: str(process.ids(key)[index])


def _stat(field: int) -> Render:
    return lambda process: str(process.number(field))


def _signals(key: str) -> Render:
    return lambda process: process.status[key]


def _namespace(name: str) -> Render:
    return lambda process: process.namespace(name)


def _clock(seconds: int, hours: bool) -> str:
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    day, hour = divmod(hour, 24)
    text = f"{minute:02d}:{second:02d}"
    if day or hour or hours:
        text = f"{hour:02d}:{text}"
    return f"{day}-{text}" if day else text


def _minutes(process: Process) -> str:
    minute, second = divmod(process.ticks // HZ, 60)
    return f"{minute}:{second:02d}"


def _percent(permille: int) -> str:
    return f"{permille // 10}.{permille % 10}" if permille <= 999 else str(permille // 10)


def _memory_permille(process: Process) -> int:
    return min(process.pages[1] * PAGE_KIB * 1000 // process.host.memory_kib, 999)


def _stime(process: Process) -> str:
    begin, now = time.localtime(process.started), time.localtime(process.host.now)
    if begin.tm_year != now.tm_year:
        return time.strftime("%Y", begin)
    return time.strftime("%b%d" if begin.tm_yday != now.tm_yday else "%H:%M", begin)


def _bsdstart(process: Process) -> str:
    recent = process.host.now - process.started <= 86400
    return time.strftime("%H:%M" if recent else "%b %d", time.localtime(process.started))


def _start(process: Process) -> str:
    recent = process.host.now - process.started <= 86400
    return time.strftime("%H:%M:%S" if recent else "%b %d", time.localtime(process.started))


def _lstart(process: Process) -> str:
    return time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(process.started))


def _policy(process: Process) -> str:
    names = ("TS", "FF", "RR", "B", "ISO", "IDL", "DLN")
    policy = process.number(41)
    return names[policy] if policy < len(names) else f"#{policy}"


def _resident(process: Process) -> str:
    return str(process.pages[1] * PAGE_KIB)


def _columns() -> dict[str, Column]:
    ticks: Key = lambda process: process.ticks  # noqa: E731
    begun: Key = lambda process: process.number(22)  # noqa: E731
    elapsed: Key = lambda process: process.elapsed  # noqa: E731
    table = {
        "pid": Column("PID", lambda process: str(process.pid)),
        "tgid": Column("TGID", lambda process: str(process.pid)),
        "tid": Column("TID", lambda process: str(process.tid)),
        "lwp": Column("LWP", lambda process: str(process.tid)),
        "spid": Column("SPID", lambda process: str(process.tid)),
        "ppid": Column("PPID", _stat(4)),
        "pgid": Column("PGID", _stat(5)),
        "pgrp": Column("PGRP", _stat(5)),
        "sid": Column("SID", _stat(6)),
        "sess": Column("SESS", _stat(6)),
        "tpgid": Column("TPGID", _stat(8)),
        "user": Column("USER", _user(1)),
        "euser": Column("EUSER", _user(1)),
        "ruser": Column("RUSER", _user(0)),
        "suser": Column("SUSER", _user(2)),
        "fuser": Column("FUSER", _user(3)),
        "uid_hack": Column("UID", _user(1)),
        "uid": Column("UID", _id("Uid", 1)),
        "euid": Column("EUID", _id("Uid", 1)),
        "ruid": Column("RUID", _id("Uid", 0)),
        "suid": Column("SUID", _id("Uid", 2)),
        "fuid": Column("FUID", _id("Uid", 3)),
        "group": Column("GROUP", _group(1)),
        "egroup": Column("EGROUP", _group(1)),
        "rgroup": Column("RGROUP", _group(0)),
        "sgroup": Column("SGROUP", _group(2)),
        "fgroup": Column("FGROUP", _group(3)),
        "gid": Column("GID", _id("Gid", 1)),
        "egid": Column("EGID", _id("Gid", 1)),
        "rgid": Column("RGID", _id("Gid", 0)),
        "sgid": Column("SGID", _id("Gid", 2)),
        "fgid": Column("FGID", _id("Gid", 3)),
        "supgid": Column("SUPGID", lambda process: process.status["Groups"].replace(" ", ",") or "-"),
        "pcpu": Column("%CPU", lambda process: _percent(process.cpu_permille), lambda process: process.cpu_permille),
        "c": Column("C", lambda process: str(min(process.cpu_permille // 10, 99))),
        "cp": Column("CP", lambda process: str(min(process.cpu_permille, 999))),
        "pmem": Column("%MEM", lambda process: _percent(_memory_permille(process)), _memory_permille),
        "vsz": Column("VSZ", lambda process: str(process.number(23) // 1024)),
        "rss": Column("RSS", _resident),
        "sz": Column("SZ", lambda process: str(process.pages[0])),
        "trs": Column("TRS", lambda process: str(_code(process) // 1024)),
        "drs": Column("DRS", lambda process: str(max(process.number(23) - _code(process), 0) // 1024)),
        "tname": Column("TTY", lambda process: process.terminal),
        "tt": Column("TT", lambda process: process.terminal),
        "stat": Column("STAT", lambda process: process.state),
        "s": Column("S", lambda process: process.fields[0]),
        "f": Column("F", lambda process: f"{process.number(9) >> 6 & 7:o}"),
        "start": Column("STARTED", _start, begun),
        "lstart": Column("STARTED", _lstart, begun),
        "stime": Column("STIME", _stime, begun),
        "start_time": Column("START", _stime, begun),
        "bsdstart": Column("START", _bsdstart, begun),
        "etime": Column("ELAPSED", lambda process: _clock(int(process.elapsed), False), elapsed),
        "etimes": Column("ELAPSED", lambda process: str(int(process.elapsed)), elapsed),
        "time": Column("TIME", lambda process: _clock(process.ticks // HZ, True), ticks),
        "times": Column("TIME", lambda process: str(process.ticks // HZ), ticks),
        "bsdtime": Column("TIME", _minutes, ticks),
        "ni": Column("NI", lambda process: str(process.number(19)) if process.number(41) in (0, 3) else "-"),
        "pri": Column("PRI", lambda process: str(39 - process.number(18))),
        "opri": Column("PRI", lambda process: str(60 + process.number(18))),
        "priority": Column("PRI", _stat(18)),
        "rtprio": Column("RTPRIO", lambda process: str(process.number(40)) if process.number(41) in (1, 2) else "-"),
        "cls": Column("CLS", _policy),
        "psr": Column("PSR", _stat(39)),
        "nlwp": Column("NLWP", _stat(20)),
        "thcount": Column("THCNT", _stat(20)),
        "min_flt": Column("MINFL", _stat(10)),
        "maj_flt": Column("MAJFL", _stat(12)),
        "pending": Column("PENDING", _signals("ShdPnd")),
        "blocked": Column("BLOCKED", _signals("SigBlk")),
        "ignored": Column("IGNORED", _signals("SigIgn")),
        "caught": Column("CAUGHT", _signals("SigCgt")),
        "addr": Column("ADDR", lambda _: "-"),
        "wchan": Column("WCHAN", lambda process: process.channel()),
        "oom": Column("OOM", lambda process: process.read("oom_score").strip()),
        "oomadj": Column("OOMADJ", lambda process: process.read("oom_score_adj").strip()),
        "comm": Column("COMMAND", lambda process: process.short, tree=True),
        "ucmd": Column("CMD", lambda process: process.short, tree=True),
        "fname": Column("COMMAND", lambda process: process.name[:8]),
        "args": Column("COMMAND", lambda process: process.command, tree=True),
        "cmd": Column("CMD", lambda process: process.command, tree=True),
        "exe": Column("EXE", lambda process: os.readlink(f"{process.place}/exe")),
        "cgroup": Column("CGROUP", lambda process: process.cgroups),
        "label": Column("LABEL", _label),
    }
    for name, file in (
        ("cgroupns", "cgroup"), ("ipcns", "ipc"), ("mntns", "mnt"), ("netns", "net"), ("pidns", "pid"),
        ("timens", "time"), ("userns", "user"), ("utsns", "uts"),
    ):  # fmt: skip
        table[name] = Column(name.upper(), _namespace(file))
    for name, same in _ALIASES.items():
        table[name] = table[same]
    for name in ("rsz", "tsiz", "dsiz", "majflt", "minflt"):
        table[name] = table[name]._replace(header=name.upper())
    return table


_ALIASES = {
    "uname": "user", "%cpu": "pcpu", "%mem": "pmem", "vsize": "vsz", "rssize": "rss", "rsz": "rss",
    "tsiz": "trs", "dsiz": "drs", "tty": "tt", "state": "s", "flag": "f", "flags": "f",
    "cputime": "time", "atime": "time", "cputimes": "times", "nice": "ni", "intpri": "opri",
    "session": "sess", "ucomm": "comm", "command": "args", "majflt": "maj_flt", "minflt": "min_flt",
    "sig": "pending", "sigmask": "blocked", "sigignore": "ignored", "sigcatch": "caught",
    "wname": "wchan", "class": "cls",
}  # fmt: skip


def _code(process: Process) -> int:
    return max(process.number(27) - process.number(26), 0)


def _label(process: Process) -> str:
    try:
        return process.read("attr/current").strip("\n\0 ") or "-"
    except (PermissionError, IsADirectoryError, FileNotFoundError):
        return "-"
    except OSError as error:  # EINVAL: no security module
        if error.errno == errno.ESRCH:
            raise
        return "-"


COLUMNS = _columns()
"""Format specifiers by name, as `ps L` lists them."""

WIDE: dict[str, Callable[[int, int], Render]] = {
    "user": _user, "uname": _user, "euser": _user, "ruser": _user, "suser": _user, "fuser": _user,
    "group": _group, "egroup": _group, "rgroup": _group, "sgroup": _group, "fgroup": _group,
}  # fmt: skip
"""Columns of names, which take a width (`user:20`)."""
WHOSE = {"r": 0, "s": 2, "f": 3}
"""Which of the four ids the first letter of a name selects; by default the effective one."""
