"""What single calls of the kernel cost beside many objects of one kind: `make micro-kernel`.

    python -m bench.micro.kernel [--objects N] [--tries N] [ROW …]

Beside thousands of containers a start takes longer where the kernel walks a list of all objects of
a kind. Each row holds objects of its kind and no others, and takes the CPU time of the calling
thread for one call. So a row needs neither containers nor a quiet machine, and tells which list
grows. A row of what the engine avoids stands beside that of what it does instead.

Prints p10 and median of the tries without the objects and with them, in us, and the growth of the
median for each object in ns. Where they are far apart, the kernel has found entries of namespaces
that are gone, in memory that it has used again. Each row runs in a fork with network, mount and
procfs instances of its own, and needs root. The kernel keeps tables of cgroups that it has once
enlarged until it boots.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from engine.runtime.cgroups import Cgroups
from engine.system import mounts, namespaces, sysctls
from engine.system.namespaces import CLONE_NEWNET, new_network
from engine.system.netlink import rtnl
from engine.system.netlink.rtnl import RouteSocket
from tests.support.forks import fork

SETTING = "ipv4/ip_unprivileged_port_start"
HERE = Path("/tmp")
"""Each row has a tmpfs of its own there."""
MOST_PORTS = 1000
CLONE_NEWNS = 0x20000
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

T = TypeVar("T", int, list[int])
_libc = ctypes.CDLL(None, use_errno=True)


class Row(NamedTuple):
    """`call` returns the CPU time of one call in ns. `missing` says why this host has no such row.
    `most`: objects that the kernel permits.
    """

    name: str
    what: str
    hold: Callable[[int], AbstractContextManager[None]]
    call: Callable[[], int]
    missing: Callable[[], str] = lambda: ""
    most: int = sys.maxsize


def timed(call: Callable[[], object]) -> int:
    """The thread's CPU time for this, in ns."""
    begin = time.thread_time_ns()
    call()
    return time.thread_time_ns() - begin


def checked(outcome: int) -> None:
    """Raises OSError with errno if a call of libc has failed."""
    if outcome < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# --- network namespaces ---------------------------------------------------------------------------


@contextlib.contextmanager
def network_namespaces(count: int, prepare: Callable[[int], object] = lambda _: None) -> Iterator[None]:
    with ExitStack() as stack:
        for number in range(count):
            with new_network() as made:
                stack.callback(os.close, made)
                prepare(number)
        yield


def with_settings(count: int) -> AbstractContextManager[None]:
    return network_namespaces(count, lambda _: Path("/proc/sys/net", SETTING).read_bytes())


def in_new_network(call: Callable[[], object]) -> int:
    with new_network() as made:
        spent = timed(call)
    os.close(made)
    return spent


def unshare() -> int:
    home = namespaces.network()
    spent = timed(lambda: checked(_libc.unshare(CLONE_NEWNET)))
    namespaces.enter_network(home)
    os.close(home)
    return spent


@contextlib.contextmanager
def with_sysfs(count: int) -> Iterator[None]:
    def mount(number: int) -> None:
        directory = HERE / str(number)
        directory.mkdir()
        mounts.mount("sysfs", directory, "sysfs")

    with network_namespaces(count, mount):
        yield
    for number in range(count):
        mounts.unmount(HERE / str(number))
        (HERE / str(number)).rmdir()


def mount_sysfs() -> int:
    directory = HERE / "one"
    directory.mkdir(exist_ok=True)
    spent = in_new_network(lambda: mounts.mount("sysfs", directory, "sysfs"))
    mounts.unmount(directory)
    return spent


@contextlib.contextmanager
def bridge_ports(count: int) -> Iterator[None]:
    with RouteSocket() as links:
        links.apply(rtnl.create_bridge("b", mac="02:00:00:00:00:01"), rtnl.change_link("b", up=True))
        bridge = links.link("b")
        assert bridge is not None
        here = namespaces.network()
        for number in range(count):
            links.apply(rtnl.create_veth(f"p{number}", f"q{number}", here))
            links.apply(rtnl.change_link(f"p{number}", master=bridge.ifindex, up=True))
        os.close(here)
        yield
        changes = [rtnl.delete_link(f"p{number}") for number in range(count)]
        links.apply(*changes, rtnl.delete_link("b"))


def add_port() -> int:
    with RouteSocket() as links:
        bridge = links.link("b")
        assert bridge is not None
        here = namespaces.network()
        links.apply(rtnl.create_veth("one", "other", here))
        os.close(here)
        spent = timed(lambda: links.apply(rtnl.change_link("one", master=bridge.ifindex)))
        links.apply(rtnl.delete_link("one"))
    return spent


# --- processes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def children(count: int) -> Iterator[None]:
    made = []
    for _ in range(count):
        child = fork()
        if not child:
            signal.pause()
            os._exit(0)
        made.append(child)
    try:
        yield
    finally:
        for child in made:
            os.kill(child, signal.SIGKILL)
        for child in made:
            os.waitpid(child, 0)


def wait_for_any() -> int:
    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    return timed(wait)


def wait_for_one() -> int:
    child = fork()
    if not child:
        signal.pause()
        os._exit(0)
    spent = min(timed(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)) for _ in range(2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return spent


def pivot_root() -> int:
    number = PIVOT_ROOT[platform.machine()]

    def call() -> int:
        checked(_libc.unshare(CLONE_NEWNS))
        mounts.mount("tmpfs", HERE, "tmpfs")
        os.chdir(HERE)
        return timed(lambda: checked(_libc.syscall(number, b".", b".")))

    return in_fork(call)


# --- cgroups --------------------------------------------------------------------------------------


def group_of(controller: str) -> Path:
    """A cgroup for those of a row, with a controller for them."""
    found = Cgroups.detect()
    if controller in found.controllers:
        return Path(found.controllers[controller], f"kernel-{os.getpid()}")
    return Path(found.unified, f"kernel-{os.getpid()}")


def lacks_cpusets() -> str:
    return "" if "cpuset" in Cgroups.detect().controllers else "not with cgroup v2"


def limit_cpus(group: Path) -> None:
    for name in ("cpuset.cpus", "cpuset.mems"):
        (group / name).write_bytes((group.parent / name).read_bytes())


@contextlib.contextmanager
def cgroups(controller: str, count: int) -> Iterator[None]:
    parent = group_of(controller)
    parent.mkdir()
    made = [parent / str(number) for number in range(count)]
    try:
        if controller == "cpuset":
            limit_cpus(parent)
        elif (parent / "cgroup.subtree_control").exists():
            (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        for group in made:
            group.mkdir()
            if controller == "cpuset":
                limit_cpus(group)
        yield
    finally:
        for group in (*made, parent):
            with contextlib.suppress(FileNotFoundError):
                group.rmdir()


def make_memory_group() -> int:
    group = group_of("memory") / "one"
    spent = timed(group.mkdir)
    group.rmdir()
    return spent


def set_cpus() -> int:
    group = group_of("cpuset") / "one"
    group.mkdir()
    spent = timed(lambda: limit_cpus(group))
    group.rmdir()
    return spent


# --- the table ------------------------------------------------------------------------------------

ROWS = (
    Row("netns", "a new network namespace, beside others", network_namespaces, unshare),
    Row(
        *("sysctl-shared", "a sysctl of a network namespace, by a procfs that others use", with_settings),
        lambda: in_new_network(lambda: Path("/proc/sys/net", SETTING).write_text("0")),
    ),
    Row(
        *("sysctl-own", "the same, by the engine's procfs", with_settings),
        lambda: in_new_network(lambda: sysctls.write({SETTING: "0"})),
    ),
    Row("sysfs", "mount of a network namespace's sysfs, beside others", with_sysfs, mount_sysfs),
    Row("bridge-port", f"a port of a bridge, beside {MOST_PORTS:,} at most", bridge_ports, add_port, most=MOST_PORTS),
    Row("pivot-root", "pivot_root beside processes", children, pivot_root),
    Row("wait-any", "a look for children that ended, among children", children, wait_for_any),
    Row("wait-one", "a look at one child, among children", children, wait_for_one),
    Row("memory-cgroup", "a new memory cgroup beside others", lambda n: cgroups("memory", n), make_memory_group),
    Row(
        *("cpuset-v1", "CPUs and memory nodes of a cpuset, beside others", lambda n: cgroups("cpuset", n), set_cpus),
        lacks_cpusets,
    ),
)


def in_fork(call: Callable[[], T]) -> T:
    """What a call returns, made in a fork. Raises RuntimeError if it fails."""
    reading, writing = os.pipe()
    child = fork()
    if not child:
        status = 1
        try:
            os.write(writing, json.dumps(call()).encode())
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        found = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("a row has failed, see above")
    return cast(T, json.loads(found))


def samples(row: Row, count: int, tries: int) -> list[int]:
    """ns of each try beside `count` objects."""
    checked(_libc.unshare(CLONE_NEWNS | CLONE_NEWNET))
    mounts.mount("none", "/", flags=mounts.MS_REC | mounts.MS_PRIVATE)
    mounts.mount("tmpfs", HERE, "tmpfs")
    mounts.mount("proc", "/proc", "proc")  # an instance of its own
    with row.hold(count):
        return [row.call() for _ in range(tries)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.kernel", description="Calls beside many objects.")
    parser.add_argument("--objects", type=int, default=1000, help="how many are held [default: 1000]")
    parser.add_argument("--tries", type=int, default=40, help="calls that are timed [default: 40]")
    parser.add_argument("names", nargs="*", metavar="ROW", help="only these rows")
    options = parser.parse_args()
    if unknown := {*options.names} - {row.name for row in ROWS}:
        parser.error(f"no row {', '.join(sorted(unknown))}: there are {', '.join(row.name for row in ROWS)}")
    if options.objects < 1 or options.tries < 2:
        parser.error("--objects: at least one; --tries: at least two")
    print(f"Linux {platform.release()}; p10/median in us of the CPU time of a call")
    print(f"{'':<14}{'beside none':>14}{f'{options.objects}':>16}{'ns each':>9}")
    for row in ROWS:
        if options.names and row.name not in options.names:
            continue
        if reason := row.missing():
            print(f"{row.name:<14}  {reason}")
            continue
        texts, medians = [], []
        objects = min(options.objects, row.most)
        for count in (0, objects):
            found = sorted(in_fork(functools.partial(samples, row, count, options.tries)))
            medians.append(statistics.median(found))
            texts.append(f"{found[len(found) // 10] / 1000:.1f}/{medians[-1] / 1000:.1f}")
        print(f"{row.name:<14}{texts[0]:>14}{texts[1]:>16}{(medians[1] - medians[0]) / objects:>9.0f}  {row.what}")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
