"""Sockets, names, links and routes in another network namespace, for tests of networks.

A namespace is given by a path such as /proc/1/ns/net. Each call enters it in a thread of its own; a
socket stays in the namespace in which it was made.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from engine.system import namespaces
from tests.support import PATIENCE

T = TypeVar("T")
RESOLVER = "127.0.0.11"


def within(place: str, call: Callable[[], T]) -> T:
    """Returns what `call` returns in that namespace."""

    def entered() -> T:
        with open(place, "rb") as namespace:
            namespaces.enter_network(namespace.fileno())
        return call()

    with ThreadPoolExecutor(1) as thread:  # it ends with the block, so it need not go back
        return thread.submit(entered).result()


def repeated_syns(place: str) -> int:
    """Requests for TCP connections that were sent again there so far, because one was lost."""

    def read() -> str:
        return Path("/proc/thread-self/net/netstat").read_text()

    names, values = (line.split() for line in within(place, read).splitlines() if line.startswith("TcpExt:"))
    return int(values[names.index("TCPSynRetrans")])


def new_socket(place: str, kind: int = socket.SOCK_STREAM, seconds: float = 5.0) -> socket.socket:
    made = within(place, lambda: socket.socket(socket.AF_INET, kind))
    made.settimeout(seconds * PATIENCE)
    return made


def connected(place: str, address: str, port: int, seconds: float = 5.0) -> socket.socket:
    """A TCP connection. Raises OSError."""
    made = new_socket(place, seconds=seconds)
    try:
        made.connect((address, port))
    except BaseException:
        made.close()
        raise
    return made


def get(place: str, address: str, port: int = 80, path: str = "/", seconds: float = 5.0) -> str:
    """The body of one HTTP request. Raises OSError, also for another status than 200."""
    with connected(place, address, port, seconds) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise OSError(f"{address}:{port}: {answer!r}")
    return body.decode().strip()


def got(place: str, address: str, port: int = 80, **more: Any) -> str:
    """As `get`; "" if that fails."""
    with contextlib.suppress(OSError):
        return get(place, address, port, **more)
    return ""


def seen_as(place: str, address: str, port: int = 80) -> str:
    """The address that the server of `clusters.SERVER` sees this client come from."""
    return get(place, address, port, "/cgi-bin/who").removeprefix("[::ffff:").removesuffix("]")


def sweep(place: str, address: str, port: int = 80, times: int = 24) -> set[str]:
    """The different answers of so many requests, all of which must succeed."""
    return {get(place, address, port) for _ in range(times)}


def exchanged(place: str, address: str, port: int, data: bytes, seconds: float = 2.0) -> bytes:
    """The answer to one UDP packet. Raises OSError."""
    with new_socket(place, socket.SOCK_DGRAM, seconds) as made:
        made.connect((address, port))
        made.send(data)
        return made.recv(65536)


def lookup(place: str, name: str, kind: str = "A", server: str = RESOLVER) -> tuple[list[str], int]:
    """Addresses or names of an answer in its order, and its smallest TTL.

    An empty list for none.
    """
    import dnslib  # only for the tests that need it

    question = dnslib.DNSRecord.question(name, kind)
    answer = dnslib.DNSRecord.parse(exchanged(place, server, 53, question.pack(), 5.0))
    if answer.header.tc:
        with connected(place, server, 53) as connection:
            packed = question.pack()
            connection.sendall(len(packed).to_bytes(2, "big") + packed)
            received = b""
            while chunk := connection.recv(65536):
                received += chunk
                if len(received) >= 2 + int.from_bytes(received[:2], "big"):
                    break
        answer = dnslib.DNSRecord.parse(received[2:])
    rows = [row for row in answer.rr if row.rtype == getattr(dnslib.QTYPE, kind)]
    return [str(row.rdata).rstrip(".") for row in rows], min((row.ttl for row in rows), default=0)


def addresses(place: str, name: str) -> list[str]:
    """Sorted addresses of a name."""
    return sorted(lookup(place, name)[0])


def reverse(place: str, address: str) -> list[str]:
    """Names of an address."""
    return lookup(place, ".".join(reversed(address.split("."))) + ".in-addr.arpa", "PTR")[0]


def sending(connection: socket.socket, data: bytes) -> threading.Thread:
    """Send in a thread, which the caller joins."""
    thread = threading.Thread(target=connection.sendall, args=(data,))
    thread.start()
    return thread


def ran(place: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this host there."""
    return subprocess.run(
        ["nsenter", f"--net={place}", *command], capture_output=True, text=True, check=False, timeout=60
    )


# --- the kernel's objects -------------------------------------------------------------------------


def shown(place: str, *arguments: str) -> list[dict[str, Any]]:
    """`ip -j …` there; an empty list if that fails."""
    done = ran(place, "ip", "-d", "-j", *arguments)
    return [each for each in json.loads(done.stdout) if each] if done.stdout.strip() else []


def links(place: str) -> list[dict[str, Any]]:
    return shown(place, "link")


def link_names(place: str) -> set[str]:
    return {str(link["ifname"]) for link in links(place)}


def routes(place: str) -> dict[str, dict[str, Any]]:
    """Routes of the main table by destination."""
    return {str(each["dst"]): each for each in shown(place, "route")}


class Rules:
    """nftables rules of a namespace as text, read again and again. Through libnftables, as the
    program may not be installed. Closed at the end of the block.
    """

    def __init__(self, place: str) -> None:
        self._nft = ctypes.CDLL("libnftables.so.1")
        self._nft.nft_ctx_new.restype = ctypes.c_void_p
        self._nft.nft_ctx_get_output_buffer.restype = ctypes.c_char_p
        # its netlink socket stays in the namespace in which it was made
        self._context = ctypes.c_void_p(within(place, lambda: self._nft.nft_ctx_new(0)))
        self._nft.nft_ctx_buffer_output(self._context)
        self._nft.nft_ctx_buffer_error(self._context)

    def text(self) -> str:
        if self._nft.nft_run_cmd_from_buffer(self._context, b"list ruleset"):
            return ""
        return str(self._nft.nft_ctx_get_output_buffer(self._context).decode())

    def __enter__(self) -> Rules:
        return self

    def __exit__(self, *_: object) -> None:
        self._nft.nft_ctx_free(self._context)


def inode(place: str) -> int:
    """What tells one namespace from another."""
    return os.stat(place).st_ino


def held_namespaces(pid: int) -> list[str]:
    """Paths of the network namespaces that a process has descriptors of, one for each."""
    found: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if (target := os.readlink(f"/proc/{pid}/fd/{name}")).startswith("net:["):
                    found.setdefault(target, f"/proc/{pid}/fd/{name}")
    return list(found.values())


class Echo:
    """A UDP server in a thread, while the block runs: answers each packet with its name and the
    address that it came from.
    """

    def __init__(self, place: str, port: int, name: str) -> None:
        self._socket = new_socket(place, socket.SOCK_DGRAM, 0.1)
        self._socket.bind(("0.0.0.0", port))
        self._name = name
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                _, peer = self._socket.recvfrom(65536)
                self._socket.sendto(f"{self._name} {peer[0]}".encode(), peer)

    def __enter__(self) -> Echo:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()
