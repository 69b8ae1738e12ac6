"""A process list as ps(1) of the host would print it, without running ps.

Serves `GET /containers/{id}/top?ps_args=`. `ps_args` is parsed as procps parses it: POSIX, BSD and
long options, its own output formats and `-o`. Options that select by session or terminal have no
effect, because the caller has selected the processes. Process ids, users and terminals are the
host's; user names come from the host's /etc/passwd. Columns are not truncated to a width, except
long user names (`systemd+`), which clients know that way. A process that ends during the call is
left out.

Rules: ps(1) of procps-ng 4, proc(5).
Owns nothing. Not here: which processes a container has (`Cgroups.processes`), the wire struct
(`wire/stats.py`).
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from engine.errors import InvalidParameter
from engine.wire.stats import ProcessList

DEFAULT = "-ef"

_HZ = os.sysconf("SC_CLK_TCK")
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
_NAME_WIDTH = 8
"""Letters of a user or group name that ps shows before it truncates."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


# --- one process ----------------------------------------------------------------------------------


class Host:
    """Data shared by all rows of one reply."""

    def __init__(self) -> None:
        self.now = time.time()
        with open("/proc/uptime") as file:
            self.uptime = float(file.read().split()[0])
        with open("/proc/stat") as file:
            self.boot = next((int(line.split()[1]) for line in file if line.startswith("btime ")), 0)
        self.memory_kib = os.sysconf("SC_PHYS_PAGES") * _PAGE_KIB
        self.terminals = dict(_terminal_drivers())

    @functools.cached_property
    def users(self) -> dict[int, str]:
        return _accounts("/etc/passwd")

    @functools.cached_property
    def groups(self) -> dict[int, str]:
        return _accounts("/etc/group")


def _accounts(path: str) -> dict[int, str]:
    """Names by id from a file in the form of passwd(5) or group(5); as in the C library the
    first line of an id counts.
    """
    names: dict[int, str] = {}
    try:
        with open(path, errors="replace") as file:
            for line in file:
                fields = line.split(":")
                if len(fields) > 2 and fields[2].isdecimal():
                    names.setdefault(int(fields[2]), fields[0])
    except OSError:
        pass
    return names


def _terminal_drivers() -> Iterator[tuple[int, tuple[range, str]]]:
    """(major, (minors, name)) from /proc/tty/drivers; only drivers of numbered devices."""
    try:
        with open("/proc/tty/drivers") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) == 5 and fields[2].isdecimal() and "-" in fields[3] and fields[0] != "pty_master":
            first, _, last = fields[3].partition("-")
            name = {"unknown": "tty"}.get(fields[0], fields[1].removeprefix("/dev/"))
            yield int(fields[2]), (range(int(first), int(last) + 1), name)


class Process:
    """One process or thread; each file of /proc is read when first needed.

    Raises OSError when it has ended.
    """

    def __init__(self, pid: int, host: Host, tid: int = 0) -> None:
        self.pid = pid
        self.host = host
        self.tid = tid or pid
        self.place = f"/proc/{pid}/task/{tid}" if tid else f"/proc/{pid}"
        self.branch = ""
        text = self.read("stat")
        begin, end = text.index("("), text.rindex(")")
        self.name = _printable(text[begin + 1 : end])
        self.fields = text[end + 2 :].split()

    def read(self, name: str) -> str:
        with open(f"{self.place}/{name}", "rb") as file:
            return file.read().decode(errors="replace")

    def number(self, field: int) -> int:
        """A field of stat by its number in proc(5)."""
        return int(self.fields[field - 3])

    @property
    def zombie(self) -> bool:
        return self.fields[0] == "Z"

    @functools.cached_property
    def status(self) -> dict[str, str]:
        return {
            key: value.strip() for key, _, value in (line.partition(":") for line in self.read("status").split("\n"))
        }

    def ids(self, key: str) -> list[int]:
        """`Uid` or `Gid`: real, effective, saved, file system."""
        return [int(word) for word in self.status[key].split()]

    @functools.cached_property
    def pages(self) -> list[int]:
        """statm: size, resident, shared, text, 0, data."""
        return [int(word) for word in self.read("statm").split()]

    @functools.cached_property
    def command(self) -> str:
        if self.zombie:
            return f"[{self.name}] <defunct>"
        arguments = self.read("cmdline").rstrip("\0")
        return _printable(arguments.replace("\0", " ").replace("\n", " ")) if arguments else f"[{self.name}]"

    @property
    def short(self) -> str:
        return f"{self.name} <defunct>" if self.zombie else self.name

    @property
    def ticks(self) -> int:
        return self.number(14) + self.number(15)

    @property
    def started(self) -> int:
        """Seconds since the epoch."""
        return self.host.boot + self.number(22) // _HZ

    @property
    def elapsed(self) -> float:
        return max(self.host.uptime - self.number(22) / _HZ, 0.0)

    @property
    def cpu_permille(self) -> int:
        return int(self.ticks * 1000 / _HZ / self.elapsed) if self.elapsed > 0 else 0

    @property
    def terminal(self) -> str:
        device = self.number(7) & 0xFFFFFFFF
        if device == 0:
            return "?"
        major, minor = (device >> 8) & 0xFFF, (device & 0xFF) | (device >> 12 & 0xFFF00)
        if 136 <= major <= 143:  # the number within the container's own devpts
            return f"pts/{(major - 136) * 256 + minor}"
        minors, name = self.host.terminals.get(major, (range(0), ""))
        if major == 4:
            return f"tty{minor}" if minor < 64 else f"ttyS{minor - 64}"
        if major == 5:
            return {0: "tty", 1: "console"}.get(minor, "?")
        return f"{name}{minor - minors.start}" if minor in minors else "?"

    @property
    def state(self) -> str:
        text = self.fields[0]
        nice = self.number(19)
        text += "<" if nice < 0 else "N" if nice > 0 else ""
        text += "L" if self.status.get("VmLck", "0").split()[0] != "0" else ""
        text += "s" if self.number(6) == self.pid else ""
        text += "l" if self.number(20) > 1 else ""
        return text + ("+" if self.number(8) == self.number(5) else "")

    @property
    def cgroups(self) -> str:
        lines = [line for line in self.read("cgroup").splitlines() if not line.endswith(":/")]
        return ",".join(lines) or "-"

    def channel(self) -> str:
        try:
            text = self.read("wchan")
        except PermissionError:
            return "-"
        return text if text not in ("", "0") else "-"

    def namespace(self, name: str) -> str:
        return os.readlink(f"{self.place}/ns/{name}").partition("[")[2].rstrip("]")


def _printable(text: str) -> str:
    return _CONTROL.sub("?", text)


# --- columns --------------------------------------------------------------------------------------

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
    minute, second = divmod(process.ticks // _HZ, 60)
    return f"{minute}:{second:02d}"


def _percent(permille: int) -> str:
    return f"{permille // 10}.{permille % 10}" if permille <= 999 else str(permille // 10)


def _memory_permille(process: Process) -> int:
    return min(process.pages[1] * _PAGE_KIB * 1000 // process.host.memory_kib, 999)


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
    return str(process.pages[1] * _PAGE_KIB)


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
        "time": Column("TIME", lambda process: _clock(process.ticks // _HZ, True), ticks),
        "times": Column("TIME", lambda process: str(process.ticks // _HZ), ticks),
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
    "uname": "user", "%cpu": "pcpu", "%mem": "pmem", "vsize": "vsz", "rssize": "rss", "rsz": "rss", "tsiz": "trs", "dsiz": "drs",
    "tty": "tt", "state": "s", "flag": "f", "flags": "f", "cputime": "time", "atime": "time", "cputimes": "times", "nice": "ni",
    "intpri": "opri", "session": "sess", "ucomm": "comm", "command": "args", "majflt": "maj_flt", "minflt": "min_flt",
    "sig": "pending", "sigmask": "blocked", "sigignore": "ignored", "sigcatch": "caught", "wname": "wchan", "class": "cls",
}  # fmt: skip


def _code(process: Process) -> int:
    return max(process.number(27) - process.number(26), 0)


def _label(process: Process) -> str:
    try:
        return process.read("attr/current").strip("\n\0 ") or "-"
    except (PermissionError, IsADirectoryError, FileNotFoundError):
        return "-"
    except OSError as error:  # EINVAL: no security module
        if error.errno in (3,):
            raise
        return "-"


COLUMNS = _columns()
"""Format specifiers by name, as `ps L` lists them."""

_WIDE: dict[str, Callable[[int, int], Render]] = {
    "user": _user, "uname": _user, "euser": _user, "ruser": _user, "suser": _user, "fuser": _user,
    "group": _group, "egroup": _group, "rgroup": _group, "sgroup": _group, "fgroup": _group,
}  # fmt: skip
_WHOSE = {"r": 0, "s": 2, "f": 3}
"""Which of the four ids the first letter of a name selects; by default the effective one."""


# --- ps_args --------------------------------------------------------------------------------------


class Wanted:
    """The parsed `ps_args`."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self.sort: list[tuple[Column, bool]] = []
        self.threads = False
        self.forest = ""
        """`\\_` draws the tree, a space indents by it."""
        self.pids: set[int] = set()
        self.parents: set[int] = set()
        self.users: set[str] = set()
        self.everyone = False


def parse(ps_args: str) -> Wanted:
    """Parses `ps_args`. Raises InvalidParameter with the word that is not understood."""
    return _Reader(ps_args).wanted


def _refused(what: str) -> InvalidParameter:
    return InvalidParameter(f"invalid ps_args: {what}")


def _specifier(name: str) -> Column:
    base, colon, width = name.partition(":")
    column = COLUMNS.get(base)
    if column is None or base == "uid_hack":
        raise _refused(f"unknown format specifier {base!r}")
    if not colon:
        return column
    if not width.isdecimal() or not 0 < int(width) < 10_000:
        raise _refused(f"bad width in {name!r}")
    if base in _WIDE:
        index = _WHOSE.get(base[0], 1)
        return column._replace(render=_WIDE[base](index, int(width)))
    return column


def format_list(text: str) -> Iterator[Column]:
    """The argument of -o: names by commas or spaces; `name=Header` takes the rest as its header,
    empty when nothing follows.
    """
    while text:
        match = re.match(r"[ ,]*([^ ,=]+)", text)
        if match is None:
            raise _refused(f"bad format list {text!r}")
        column, text = _specifier(match[1]), text[match.end() :]
        if text.startswith("="):
            column, text = column._replace(header=text[1:]), ""
        text = text.removeprefix(",") if text.startswith(",") else text.lstrip(" ")
        yield column


class _Reader:
    """Parses the words of one `ps_args`.

    Distinguishes POSIX, BSD and long options as procps does.
    """

    def __init__(self, ps_args: str) -> None:
        self.wanted = Wanted()
        self.words = ps_args.split() or [DEFAULT]
        self.chosen: list[Column] = []
        self.flags: set[str] = set()
        self.bsd = ""
        """The BSD output format: u, j, l, v or s."""
        bsd = False
        while self.words:
            word = self.words.pop(0)
            if word.startswith("--"):
                self._long(word)
            elif word.startswith("-") and len(word) > 1:
                bsd |= self._posix(word)
            elif word[:1].isdecimal() or word[:1] == ",":
                self.wanted.pids |= _numbers(word)
            else:
                bsd = True
                self._bsd(word)
        self.wanted.columns = self.chosen or [COLUMNS[name] for name in self._preset(bsd)]

    def _argument(self, option: str, rest: str) -> str:
        if rest:
            return rest
        if not self.words:
            raise _refused(f"{option} needs an argument")
        return self.words.pop(0)

    def _posix(self, word: str) -> bool:
        """True if it was read as BSD options after all, such as `-aux`: there is no user `x`."""
        flags: set[str] = set()
        for at, letter in enumerate(word[1:], 2):
            rest = word[at:]
            if letter in "oO":
                self.flags |= flags
                if letter == "O":
                    raise _refused("-O is not supported, use -o")
                self.chosen += format_list(self._argument("-o", rest))
                return False
            if letter in "pqgstuU":
                if letter in "uU":
                    users = set((rest or next(iter(self.words), "")).split(","))
                    known = set(_accounts("/etc/passwd").values())
                    if not all(user in known or user.isdecimal() for user in users):
                        if rest or not self.words:
                            self._bsd(word[1:])
                            return True
                        raise _refused(f"no such user in {word}: {','.join(sorted(users))}")
                    self.wanted.users |= set(self._argument(word, rest).split(","))
                elif letter in "pq":
                    self.wanted.pids |= _numbers(self._argument(f"-{letter}", rest))
                else:
                    raise _refused(f"option -{letter} is not supported: the container chooses the processes")
                self.flags |= flags
                return False
            if letter not in "eAadxfFljyLTHwc":
                raise _refused(f"unsupported option -{letter}")
            flags.add(letter)
        self.flags |= flags
        self.wanted.everyone |= bool(flags & {"e", "A", "x"})
        self.wanted.threads |= bool(flags & {"L", "T"})
        if "H" in flags:
            self.wanted.forest = " "
        return False

    def _bsd(self, word: str) -> None:
        for at, letter in enumerate(word, 1):
            rest = word[at:]
            if letter == "o":
                self.chosen += format_list(self._argument("o", rest))
                return
            if letter == "k":
                self._sort(self._argument("k", rest))
                return
            if letter == "p":
                self.wanted.pids |= _numbers(self._argument("p", rest))
                return
            if letter == "U":
                self.wanted.users |= set(self._argument("U", rest).split(","))
                return
            if letter in "ujlvs":
                self.bsd = letter
            elif letter == "f":
                self.wanted.forest = "\\_"
            elif letter == "c":
                self.flags.add("BSD c")
            elif letter in "ax":
                self.wanted.everyone = True
            elif letter not in "gwSTn":
                raise _refused(f"unsupported option {letter!r} in {word!r}")

    def _long(self, word: str) -> None:
        name, equals, value = word[2:].partition("=")
        if name == "forest":
            self.wanted.forest = "\\_"
        elif name in ("cumulative", "headers"):
            pass
        elif name in ("cols", "columns", "width", "lines", "rows"):
            _numbers(value if equals else self._argument(word, ""))
        elif name in ("format", "sort", "pid", "ppid", "user", "quick-pid"):
            value = value if equals else self._argument(word, "")
            if name == "format":
                self.chosen += format_list(value)
            elif name == "sort":
                self._sort(value)
            elif name == "ppid":
                self.wanted.parents |= _numbers(value)
            elif name == "user":
                self.wanted.users |= set(value.split(","))
            else:
                self.wanted.pids |= _numbers(value)
        else:
            raise _refused(f"unsupported option --{name}")

    def _sort(self, text: str) -> None:
        for name in filter(None, text.split(",")):
            self.wanted.sort.append((_specifier(name.lstrip("+-")), name.startswith("-")))

    def _preset(self, bsd: bool) -> list[str]:
        """The names of the columns of an output format."""
        flags = self.flags
        if self.bsd or (bsd and not flags & set("fFlj")):
            names = {
                "u": "user pid pcpu pmem vsz rss tname stat bsdstart bsdtime args",
                "j": "ppid pid pgid sid tname tpgid stat uid bsdtime args",
                "l": "f uid pid ppid priority ni vsz rss wchan stat tname bsdtime args",
                "v": "pid tname stat bsdtime maj_flt trs drs rss pmem args",
                "s": "uid pid pending blocked ignored caught stat tname bsdtime args",
                "": "pid tname stat bsdtime args",
            }[self.bsd].split()
            return ["comm" if name == "args" and "BSD c" in flags else name for name in names]
        full = bool(flags & {"f", "F"})
        names = ["uid_hack" if full else "uid"] if full or "l" in flags else []
        names += ["pid"]
        if "l" in flags:
            names = ["s", *names, "ppid", "c", "opri", "ni", *(["rss"] if "y" in flags else ["addr"]), "sz", "wchan"]
            names = names if "y" in flags else ["f", *names]
        elif full:
            names += [
                "ppid",
                *(["pgid", "sid"] if "j" in flags else []),
                "c",
                *(["sz", "rss", "psr"] if "F" in flags else []),
            ]
        elif "j" in flags:
            names += ["pgid", "sid"]
        names += [*(["stime"] if full else []), "tname", "time", "cmd" if full else "ucmd"]
        if "T" in flags:
            names.insert(names.index("pid") + 1, "spid")
        if "L" in flags:
            names.insert(names.index("ppid" if "ppid" in names else "pid") + 1, "lwp")
            if full:
                names.insert(names.index("c") + 1, "nlwp")
        return names


def _numbers(text: str) -> set[int]:
    words = [word for word in re.split("[ ,]", text) if word]
    if not words or not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise _refused(f"{text!r} is not a list of numbers")
    return {int(word) for word in words}


# --- the reply ------------------------------------------------------------------------------------


def process_list(pids: Iterable[int], wanted: Wanted) -> ProcessList:
    """Titles, and one row for each selected process of `pids` that still exists.

    Reads /proc: not for the loop.
    """
    host = Host()
    rows: list[Process] = []
    for pid in pids:
        try:
            process = Process(pid, host)
            if _chosen(process, wanted):
                rows += _threads(process) if wanted.threads else [process]
        except (OSError, ValueError):
            continue
    for column, reverse in reversed(wanted.sort):
        keys = {id(process): _sort_key(column, process) for process in rows}
        rows.sort(key=lambda process: keys[id(process)], reverse=reverse)
    if wanted.forest:
        rows = list(_tree(rows, wanted.forest))
    processes = []
    for process in rows:
        try:
            processes.append([_cell(column, process) for column in wanted.columns])
        except (OSError, KeyError, IndexError):  # it ended between one file and the next
            continue
    return ProcessList([column.header for column in wanted.columns], processes)


def _cell(column: Column, process: Process) -> str:
    text = column.render(process)
    return process.branch + text if column.tree else text


def _chosen(process: Process, wanted: Wanted) -> bool:
    if wanted.everyone or not (wanted.pids or wanted.users or wanted.parents):
        return True
    if process.pid in wanted.pids or process.number(4) in wanted.parents:
        return True
    uid = process.ids("Uid")[1]
    return str(uid) in wanted.users or process.host.users.get(uid) in wanted.users


def _threads(process: Process) -> list[Process]:
    found = []
    for tid in sorted(int(name) for name in os.listdir(f"/proc/{process.pid}/task")):
        try:
            found.append(Process(process.pid, process.host, tid))
        except (OSError, ValueError):
            continue
    return found


def _sort_key(column: Column, process: Process) -> tuple[int, float, str]:
    try:
        value = column.key(process) if column.key is not None else column.render(process)
    except (OSError, KeyError, IndexError):
        value = ""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return 1, 0.0, str(value)
    return 0, value, ""


def _tree(rows: Sequence[Process], art: str) -> Iterator[Process]:
    """Sorts children under their parents, with the branches that ps draws before a command."""
    present = {process.pid for process in rows}
    below: dict[int, list[Process]] = {}
    roots = []
    for process in rows:
        parent = process.number(4)
        if parent in present and parent != process.pid and process.tid == process.pid:
            below.setdefault(parent, []).append(process)
        else:
            roots.append(process)
    waiting = [(process, "", "") for process in reversed(roots)]
    while waiting:
        process, process.branch, deeper = waiting.pop()
        yield process
        children = below.pop(process.pid, [])
        for child in reversed(children):
            if art == " ":
                waiting.append((child, deeper + "  ", deeper + "  "))
            else:
                last = child is children[-1]
                waiting.append((child, deeper + " \\_ ", deeper + ("    " if last else " |  ")))
