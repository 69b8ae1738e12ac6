"""Kernel notifications that a control group ran out of memory.

v1 signals an eventfd that is registered with `memory.oom_control` (kernel documentation,
cgroup-v1/memory.rst, "OOM Control"). v2 marks `memory.events` as modified, which inotify(7)
reports. One inotify descriptor serves all groups, and `oom_kill` in the file shows whether a
process was killed.

Not here: which container a group belongs to, and whether a container was killed for its memory
limit (`runtime/cgroups.py`).

Owns: one eventfd for each watched v1 group, or one inotify descriptor. Threads: the event loop's
alone. Nothing here blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.inotify_add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
_IN_MODIFY = 2
_IN_IGNORED = 0x8000
_EVENT = struct.Struct("iIII")


class MemoryEvents:
    """The groups that are watched, each by its own directory of the memory controller."""

    def __init__(self) -> None:
        self._eventfds: dict[Path, int] = {}
        self._inotify = -1
        self._watches: dict[int, tuple[Path, Callable[[], None]]] = {}
        self._kills: dict[Path, int] = {}

    def watch(self, directory: Path, observer: Callable[[], None], *, missed: bool = False) -> None:
        """Call `observer` whenever the group runs out of memory, until `unwatch`.

        `missed`: call it at once if the kernel has killed a process of the group before. A second
        call changes nothing. Raises OSError.
        """
        if directory in self._eventfds or directory in self._kills:
            return
        if (directory / "memory.oom_control").exists():
            self._watch_v1(directory, observer, missed)
        else:
            self._watch_v2(directory, observer, missed)

    def unwatch(self, directory: Path) -> None:
        """Stop the notifications for it. Idempotent."""
        loop = asyncio.get_running_loop()
        eventfd = self._eventfds.pop(directory, None)
        if eventfd is not None:
            loop.remove_reader(eventfd)
            os.close(eventfd)
        if self._kills.pop(directory, None) is not None:
            for number in [number for number, (path, _) in self._watches.items() if path == directory]:
                del self._watches[number]
                # fails if the group has been removed
                _libc.inotify_rm_watch(self._inotify, number)

    def close(self) -> None:
        """Stop all notifications."""
        for directory in [*self._eventfds, *self._kills]:
            self.unwatch(directory)
        if self._inotify >= 0:
            asyncio.get_running_loop().remove_reader(self._inotify)
            os.close(self._inotify)
            self._inotify = -1

    # --- v1 ---

    def _watch_v1(self, directory: Path, observer: Callable[[], None], missed: bool) -> None:
        eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            control = os.open(directory / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                (directory / "cgroup.event_control").write_text(f"{eventfd} {control}")
            finally:
                os.close(control)
        except OSError:
            os.close(eventfd)
            raise
        self._eventfds[directory] = eventfd
        asyncio.get_running_loop().add_reader(eventfd, self._signalled, directory, eventfd, observer)
        # The kernel signals before it kills: a kill is either counted already, or signalled.
        with contextlib.suppress(OSError):  # the group has just been removed
            if missed and oom_kills(directory / "memory.oom_control"):
                self._signalled(directory, eventfd, observer)

    def _signalled(self, directory: Path, eventfd: int, observer: Callable[[], None]) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(eventfd)
        if directory.exists():  # the removal of a group is signalled too
            observer()
        else:
            self.unwatch(directory)

    # --- v2 ---

    def _watch_v2(self, directory: Path, observer: Callable[[], None], missed: bool) -> None:
        if self._inotify < 0:
            inotify = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
            if inotify < 0:
                raise _error("inotify_init1")
            self._inotify = inotify
            asyncio.get_running_loop().add_reader(inotify, self._modified)
        kills = 0 if missed else oom_kills(directory / "memory.events")
        number = _libc.inotify_add_watch(self._inotify, os.fsencode(directory / "memory.events"), _IN_MODIFY)
        if number < 0:
            raise _error(str(directory))
        self._watches[number] = directory, observer
        self._kills[directory] = kills
        self._count(number)

    def _modified(self) -> None:
        try:
            events = os.read(self._inotify, 64 << 10)
        except BlockingIOError:
            return
        touched: set[int] = set()
        while events:
            number, mask, _, length = _EVENT.unpack_from(events)
            events = events[_EVENT.size + length :]
            if mask & _IN_IGNORED:
                directory, _ = self._watches.pop(number, (None, None))
                if directory is not None:
                    self._kills.pop(directory, None)
            else:
                touched.add(number)
        for number in touched & self._watches.keys():
            self._count(number)

    def _count(self, number: int) -> None:
        """Call the observer if processes have been killed since the last look."""
        directory, observer = self._watches[number]
        with contextlib.suppress(OSError):  # it has just been removed
            kills = oom_kills(directory / "memory.events")
            if kills > self._kills[directory]:
                self._kills[directory] = kills
                observer()


def oom_kills(file: Path) -> int:
    """The number of processes that the kernel has killed for memory.

    `file`: `memory.events` of a v2 group, `memory.oom_control` of a v1 group. Raises OSError.
    """
    for line in file.read_text().splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill":
            return int(number)
    return 0


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
