"""libnftables called from a process with thousands of descriptors, in the caller's namespace, while
signals arrive."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import threading
from collections.abc import Iterator

import pytest

from engine.system import namespaces, netfilter

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """No descriptor below 1,200 is free. libnftables waits with select(2), which aborts the process
    beyond 1,023."""
    held: list[int] = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        while not held or held[-1] < 1200:
            held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def inside(text: str) -> str:
    """Run `text` in a new namespace, in a thread of its own."""
    printed: list[str] = []

    def act() -> None:
        with namespaces.new_network() as namespace:
            try:
                netfilter.run(text)
                printed.append(netfilter.run("list ruleset"))
            finally:
                os.close(namespace)

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    return printed[0]


def test_in_the_callers_namespace() -> None:
    assert "table ip of-a-test" not in netfilter.run("list tables")
    assert "table ip of-a-test" in inside("add table ip of-a-test")
    assert "table ip of-a-test" not in netfilter.run("list tables")


def test_a_process_with_many_descriptors() -> None:
    with many_descriptors():
        assert "chain one" in inside("add table ip of-a-test\nadd chain ip of-a-test one")


def test_descriptors_stay_as_they_are() -> None:
    gc.collect()  # frees leftovers of earlier tests
    before = sorted(os.listdir("/proc/self/fd"))
    inside("add table ip of-a-test")
    with pytest.raises(netfilter.NetfilterError, match=r"Could not process rule|No such file"):
        netfilter.run("delete table ip there-is-none-of-that-name")
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_signals_reach_python() -> None:
    """The library's thread has none of the process's descriptors, so a signal handler that writes
    to one must run elsewhere."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    came: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    wakeup = signal.set_wakeup_fd(writer)
    done = threading.Event()

    def send() -> None:
        for _ in range(200):
            os.kill(os.getpid(), signal.SIGUSR1)
            done.wait(0.0005)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with namespaces.new_network() as namespace:
            os.close(namespace)
            while sender.is_alive():
                netfilter.run("list tables")
        sender.join()
        assert len(os.read(reader, 1000)) >= len(came) > 0
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGUSR1, previous)
        os.close(reader)
        os.close(writer)
