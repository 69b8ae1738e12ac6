"""A daemon whose start fails late, because its port or socket is in use, takes back what it made on
the host. Containers of an earlier daemon are left alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.engine.harness import TempEngine

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@contextmanager
def port_in_use() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def fails(engine: TempEngine, reason: str) -> None:
    """The start fails with these words. It may have said that it listens on a socket before."""
    with pytest.raises(AssertionError, match="engined ended at start"):
        engine.start()
    assert engine.process is not None
    assert engine.process.wait() == 1
    engine.process = None
    assert reason in engine.log()
    assert "Traceback" not in engine.log()


def test_a_first_start_leaves_nothing() -> None:
    with port_in_use() as port:
        engine = TempEngine("--insecure", "--tcp", f"127.0.0.1:{port}")
        try:
            fails(engine, f"cannot listen on 127.0.0.1:{port}: Address already in use")
            engine.assert_gone()
            assert not engine.run.exists()
            assert not os.path.exists(engine.socket)
        finally:
            engine.close()


def test_a_root_that_is_a_file() -> None:
    engine = TempEngine()
    try:
        engine.root.touch()
        fails(engine, f"engined: {engine.root}: is not a directory")
        engine.assert_gone()
    finally:
        engine.close()


def test_files_of_others_in_run_stay() -> None:
    with port_in_use() as port:
        engine = TempEngine("--insecure", "--tcp", f"127.0.0.1:{port}")
        try:
            (engine.run / "plugins").mkdir(parents=True)
            (engine.run / "plugins" / "far.spec").touch()
            with socket.socket(socket.AF_UNIX) as taken:
                taken.bind(engine.socket)
                taken.listen()
                fails(engine, f"cannot listen on {engine.socket}: another process listens there")
            engine.assert_gone()
            assert os.listdir(engine.run) == ["plugins"]
        finally:
            engine.close()


def test_containers_of_the_last_daemon_stay() -> None:
    with TempEngine() as engine, port_in_use() as port:
        engine.load_busybox()
        container = engine.started("sh", "-c", "echo here; sleep 600", network="bridge")
        address = engine.inspect(container)["NetworkSettings"]["IPAddress"]
        engine.terminate()
        engine.arguments = ("--insecure", "--tcp", f"127.0.0.1:{port}")
        fails(engine, f"cannot listen on 127.0.0.1:{port}: Address already in use")
        engine.arguments = ()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
            claim.bind(f"\0engined/bridge/{engine.bridge}")
            fails(engine, f"another engine already uses the bridge {engine.bridge}")
        engine.start()
        found = engine.inspect(container)
        assert found["State"]["Running"] and found["NetworkSettings"]["IPAddress"] == address
        assert engine.docker("exec", container, "echo", "still").out == "still\n"
        assert b"here" in engine.logs(container)
        engine.remove_all()
