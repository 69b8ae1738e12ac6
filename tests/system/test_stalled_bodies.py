"""Clients that stall within large request bodies do not keep another process out."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

import pytest

from tests.support.engine.harness import TempEngine, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

CLIENTS = 200
SIZE = 4 << 20


def test_others_get_their_turn() -> None:
    head = b"POST /containers/create HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % SIZE
    with TempEngine() as engine, ExitStack() as stack:
        engine.load_busybox()
        stalled = []
        for _ in range(CLIENTS):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(engine.socket)
            client.setblocking(False)
            client.send(head + b"{" + b" " * 100_000)
            stalled.append(client)
        # The body of this create is larger than what needs no room.
        labels = [f"--label=l{number}=" + "x" * 50_000 for number in range(4)]
        made = engine.docker("create", "--network=none", *labels, "busybox", "true").out.strip()
        assert made in engine.containers()

        def refused() -> list[bytes]:
            found = []
            for client in stalled:
                try:
                    found.append(client.recv(4096, socket.MSG_PEEK))
                except BlockingIOError:
                    continue
            return found

        answers = until("some of the stalled are refused", refused)
        assert all(b"HTTP/1.1 408 " in each and b"came too slowly" in each for each in answers), answers
        assert "Traceback" not in engine.log()
        for client in stalled:
            client.close()
        engine.remove_all()
