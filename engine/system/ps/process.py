"""One process or thread as /proc has it: numbers, names and times that columns show.

Each file of /proc is read when first needed. Blocking. Rules: proc(5).
Raises: OSError, also KeyError or IndexError from a file that was cut short, when a process has
ended.
Not here: the text of a column (`columns.py`), which processes are shown (`listing.py`).
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator

HZ = os.sysconf("SC_CLK_TCK")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


class Host:
    """Data shared by all rows of one reply."""

    def __init__(self) -> None:
        self.now = time.time()
        with open("/proc/uptime") as file:
            self.uptime = float(file.read().split()[0])
        with open("/proc/stat") as file:
            self.boot = next((int(line.split()[1]) for line in file if line.startswith("btime ")), 0)
        self.memory_kib = os.sysconf("SC_PHYS_PAGES") * PAGE_KIB
        self.terminals = dict(_terminal_drivers())

    @functools.cached_property
    def users(self) -> dict[int, str]:
        return accounts("/etc/passwd")

    @functools.cached_property
    def groups(self) -> dict[int, str]:
        return accounts("/etc/group")


def accounts(path: str) -> dict[int, str]:
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
        return self.host.boot + self.number(22) // HZ

    @property
    def elapsed(self) -> float:
        return max(self.host.uptime - self.number(22) / HZ, 0.0)

    @property
    def cpu_permille(self) -> int:
        return int(self.ticks * 1000 / HZ / self.elapsed) if self.elapsed > 0 else 0

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
