"""Clients that stall within large request bodies do not keep another process out, and are bounded
in number.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

import pytest

from engine.system.feed import BODIES
from tests.support.engine.client import Answer
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Node, tar

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


ARCHIVES = {
    "load": ("POST", "/images/load?quiet=1"),
    "import": ("POST", "/images/create?fromSrc=-&repo=late"),
    "build": ("POST", "/build"),
    "copy into a container": ("PUT", "/containers/late/archive?path=/"),
    "plugin": ("POST", "/plugins/create?name=late"),
}


@pytest.mark.parametrize("stalled", ["load", "import"])
def test_one_archive_too_many(stalled: str) -> None:
    """Each request that brings an archive is 503 then, and none changes anything."""
    body = tar([Node("Dockerfile", b"FROM busybox\n")])
    with TempEngine() as engine, ExitStack() as stack:
        engine.load_busybox()
        container = engine.create("true", name="late")
        clients = []
        method, target = ARCHIVES[stalled]
        for _ in range(BODIES):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(engine.socket)
            head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-tar\r\n"
            client.send(head.encode() + b"Content-Length: 1000000\r\n\r\n" + body[:600])
            clients.append(client)

        def ask(what: str) -> Answer:
            method, target = ARCHIVES[what]
            return engine.request(method, f"/v1.51{target}", body, {"Content-Type": "application/x-tar"})

        until("there is no room left", lambda: ask("load").status == 503)
        for what in ARCHIVES:
            answer = ask(what)
            assert answer.status == 503 and answer.headers["retry-after"] == "1", (what, answer)
            assert answer.message.startswith(f"{BODIES} bodies of requests are being received"), (what, answer)
        assert len(engine.request("GET", "/v1.51/images/json").json()) == 1
        for client in clients:
            client.close()
        until("there is room again", lambda: ask("copy into a container").status == 200)
        assert ask("build").status == 200
        assert "Traceback" not in engine.log()
        engine.request("DELETE", f"/v1.51/containers/{container}?force=1")
        engine.remove_all()
