"""A client without a certificate attacks port 2377 of a manager:

    strangers.py ADDRESS CA.CRT

It runs in another network namespace. It prints `refused` after each verb was refused, then `flood`
while it holds `FLOOD` silent connections, and ends at the end of stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
import time
from pathlib import Path

from engine.errors import Forbidden, InvalidParameter
from engine.manager import keys, tls
from engine.manager.certificates import Root, Subject, new_root, request_key
from engine.swarm_session import frames, messages
from engine.swarm_session.states import Role
from engine.wire.nodes import NodeDescription

PORT = 2377
FLOOD = 1000
FOR_NODES = (
    messages.Hello(description=NodeDescription()),
    messages.Statuses(of=()),
    messages.LeaveSwarm(),
    messages.AddMember(peer_url="https://192.0.2.1:7946"),
    messages.PromoteMember(member=1),
    messages.RemoveMember(force=True),
    messages.ReadLogs(tasks=("x",)),
    messages.Call(verb="services.list"),
    messages.Begin(how="force", node="", listen="", advertise=""),
    messages.Stop(force=True),
)
GARBAGE = (b"\xff" * 64, b"\0\0\0\1\xc1", b"\0\0\0\0", b"\0\0\1\0" + b"\x91" * 256, os.urandom(4096))


def anonymous(roots: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols([frames.ALPN])
    context.load_verify_locations(cadata=roots)
    return context


async def verbs(address: str, roots: str) -> None:
    connection = await tls.dial(f"{address}:{PORT}", anonymous(roots))
    assert (await connection.ask(messages.FetchRoot(), timeout=10)).body.decode() == roots
    for message in FOR_NODES:
        with contextlib.suppress(Forbidden):
            raise AssertionError(await connection.ask(message, timeout=10))
    for message in (messages.Join(csr="x", token="x"), messages.Renew(csr="x", certificate=roots, signature=b"x")):
        with contextlib.suppress(Forbidden, InvalidParameter):
            raise AssertionError(await connection.ask(message, timeout=10))
    await connection.close()


async def forged(address: str, roots: str) -> None:
    """A manager's certificate of another CA."""
    root, key, now = Root(*new_root(time.time_ns())), keys.new_key(), time.time_ns()
    subject = Subject("n" * 25, Role.MANAGER, "s" * 25)
    certificate = root.issue(request_key(keys.request(key)), subject, address="", now=now, lifetime=10**12)
    file = os.memfd_create("forged")
    os.write(file, (certificate + key).encode())
    context = anonymous(roots)
    context.load_cert_chain(f"/proc/self/fd/{file}")
    with contextlib.suppress(ConnectionError, TimeoutError, ssl.SSLError):
        connection = await tls.dial(f"{address}:{PORT}", context)
        raise AssertionError(await connection.ask(messages.FetchRoot(), timeout=10))


async def garbage(address: str, roots: str) -> None:
    for context in (None, anonymous(roots)):
        for data in GARBAGE:
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                name = "swarm-manager" if context else None
                reader, writer = await asyncio.open_connection(address, PORT, ssl=context, server_hostname=name)
                writer.write(data)
                writer.write_eof() if writer.can_write_eof() else None
                assert b"PRIVATE" not in await asyncio.wait_for(reader.read(), 60)
                writer.close()


async def play(address: str, roots: str) -> None:
    await verbs(address, roots)
    await forged(address, roots)
    await garbage(address, roots)
    print("refused", flush=True)
    silent = []
    for _ in range(FLOOD):
        each = socket.socket()
        each.setblocking(False)
        each.connect_ex((address, PORT))
        silent.append(each)
    await asyncio.sleep(1)  # the kernel connects them
    print("flood", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(play(sys.argv[1], Path(sys.argv[2]).read_text()))
