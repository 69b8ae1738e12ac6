"""pyroute2 is imported by the first link that needs it, and by nothing else: it costs 11 MB."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from engine.system import links, namespaces
from engine.system.netlink.codec import NetlinkError
from engine.system.netlink.rtnl import RouteSocket


def test_an_engine_does_not_import_pyroute2() -> None:
    program = (
        "import sys, engine.daemon, engine.commands.check; print([name for name in sys.modules if 'pyroute2' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def alone(body: Callable[[], None]) -> None:
    """Run the body in a thread with a new network namespace; its failure is the test's."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with namespaces.new_network() as descriptor:
                body()
            os.close(descriptor)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_links_are_made_in_the_namespace_of_the_thread() -> None:
    def body() -> None:
        gc.collect()  # frees leftovers of earlier tests
        before = len(os.listdir("/proc/self/fd"))
        links.create("made0", "bridge")
        with RouteSocket() as kernel:
            made = kernel.link("made0")
            assert made is not None and made.kind == "bridge"
        with pytest.raises(NetlinkError, match="bridge made0: File exists") as caught:
            links.create("made0", "bridge")
        assert caught.value.errno == errno.EEXIST
        with pytest.raises(NetlinkError, match="nothing made1: Operation not supported"):
            links.create("made1", "nothing")
        assert len(os.listdir("/proc/self/fd")) == before

    alone(body)
