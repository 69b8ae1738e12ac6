"""A process list as ps(1) of the host would print it, without running ps.

Serves `GET /containers/{id}/top?ps_args=`. Process ids, users and terminals are the host's; user
names come from the host's /etc/passwd. A process that ends during the call is left out.

Rules: ps(1) of procps-ng 4, proc(5).
Owns nothing. Not here: which processes a container has (`Cgroups.processes`), `ps_args`
(`options.py`), the wire struct (`wire/stats.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from engine.system.ps.columns import Column
from engine.system.ps.options import Wanted
from engine.system.ps.process import Host, Process
from engine.wire.stats import ProcessList


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
    # In the kernel's order, the oldest first, as ps(1): the numbers begin again at pid_max.
    for tid in map(int, os.listdir(f"/proc/{process.pid}/task")):
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
