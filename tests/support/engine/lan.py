"""An engine beside a LAN: a host in a namespace of the test, and containers that tell their
clients' addresses.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyroute2

from engine.system import namespaces
from tests.support.engine.harness import TempEngine, links, until

T = TypeVar("T")

_LINK = 1 + os.getpid() % 250
"""Part of the addresses, so that other runs of these tests on this host use other ones. It is not
0, which can be written in two ways in an IPv6 address.
"""
HOST, LAN = f"198.18.{_LINK}.1", f"198.18.{_LINK}.2"
HOST6, LAN6 = f"fd98:{_LINK}::1", f"fd98:{_LINK}::2"


class Lan:
    """A host on its own link to this host, which is its router. Its namespace has no name in
    /run/netns, so the kernel removes it however the test ends.
    """

    def __init__(self, host: int | None = None) -> None:
        """`host`: the network namespace of its router, instead of this process's."""
        self.name = f"lan{secrets.token_hex(3)}"
        with namespaces.new_network() as self.descriptor:
            pass
        self._place = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self.host_command = () if host is None else ("nsenter", f"--net=/proc/{os.getpid()}/fd/{host}")
        self.on_host(f"ip link add {self.name} type veth peer name eth0 netns {self._place}")
        self.on_host(f"ip address add {HOST}/24 dev {self.name}")
        self.on_host(f"ip -6 address add {HOST6}/64 dev {self.name} nodad")
        # without duplicate address detection, its link-local address is usable at once
        self.on_host(f"sysctl -qw net.ipv6.conf.{self.name}.accept_dad=0")
        self.on_host(f"ip link set {self.name} up")
        self("ip link set lo up")
        self("ip link set eth0 up")
        self(f"ip address add {LAN}/24 dev eth0")
        self(f"ip -6 address add {LAN6}/64 dev eth0 nodad")
        self(f"ip route add default via {HOST}")
        self(f"ip -6 route add default via {HOST6}")

    def __call__(self, command: str) -> None:
        run(f"nsenter --net={self._place} {command}")

    def on_host(self, command: str) -> str:
        return run(" ".join([*self.host_command, command]))

    def inside(self, action: Callable[[], T]) -> T:
        return within(self.descriptor, action)

    def raw(self, destination: str, port: int, payload: bytes) -> None:
        """A UDP datagram for any address, sent to this host's MAC regardless of routing tables."""

        mac = bytes.fromhex(links()[self.name]["address"].replace(":", ""))

        def send() -> None:
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as wire:
                wire.bind(("eth0", 0x0800))
                udp = struct.pack(">HHHH", 4242, port, 8 + len(payload), 0) + payload
                head = struct.pack(
                    ">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0,
                    socket.inet_aton(LAN), socket.inet_aton(destination),
                )  # fmt: skip
                total = sum(struct.unpack(">10H", head))
                total = ~((total >> 16) + (total & 0xFFFF)) & 0xFFFF
                wire.send(mac + bytes(6) + b"\x08\0" + head[:10] + total.to_bytes(2, "big") + head[12:] + udp)

        self.inside(send)

    def link_local(self) -> str:
        """This host's link-local address on the link, assigned by the kernel."""
        with pyroute2.IPRoute() as kernel:
            (index,) = kernel.link_lookup(ifname=self.name)
            (found,) = kernel.get_addr(family=socket.AF_INET6, index=index, scope=253)
            return str(found.get_attr("IFA_ADDRESS"))

    def close(self) -> None:
        self.on_host(f"ip link delete {self.name}")
        os.close(self.descriptor)


def run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def within(namespace: int, action: Callable[[], T]) -> T:
    """Run the action in a thread that is in that network namespace."""
    found: list[Any] = []

    def body() -> None:
        try:
            namespaces.enter_network(namespace)
            found.append((action(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    value, error = found[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def answer(host: str, port: int, seconds: float = 5) -> str:
    """The line that a service sends, or the name of the error."""
    try:
        with socket.create_connection((host, port), seconds) as connection:
            return connection.makefile().readline().strip()
    except OSError as error:
        return type(error).__name__


_TELL = """
i=$(readlink /proc/self/fd/0)
p=$(awk -v i=$i '"socket:[" $10 "]" == i {print substr($3, 34)}' /proc/net/tcp6)
netstat -tn | awk -v p=":$((0x$p))$" '$5 ~ p {print $5}'
"""
"""The peer of this process's stdin socket, among several connections, including one that has just
ended."""
WHO = ("nc", "-ll", "-p", "80", "-e", "sh", "-c", _TELL)
"""Sends each client its address, at port 80."""


def serving(engine: TempEngine, bindings: Any, *, command: tuple[str, ...] = WHO, **keywords: Any) -> str:
    host = {"PortBindings": bindings} | keywords.pop("host", {})
    made = engine.started(*command, network=keywords.pop("network", "bridge"), host=host, **keywords)
    if command == WHO:
        namespace = os.open(f"/proc/{engine.inspect(made)['State']['Pid']}/ns/net", os.O_RDONLY)
        try:
            until(
                "it listens",
                lambda: within(namespace, lambda: ":0050 " in Path("/proc/thread-self/net/tcp6").read_text()),
            )
        finally:
            os.close(namespace)
    return made


def ports_of(engine: TempEngine, container: str) -> dict[str, list[tuple[str, int]]]:
    found = engine.inspect(container)["NetworkSettings"]["Ports"]
    return {key: [(each["HostIp"], int(each["HostPort"])) for each in value or ()] for key, value in found.items()}


def one_port(engine: TempEngine, container: str, key: str = "80/tcp", ip: str = "0.0.0.0") -> int:
    return next(port for host_ip, port in ports_of(engine, container)[key] if host_ip == ip)


def address_of(engine: TempEngine, container: str, network: str = "bridge") -> str:
    return str(engine.inspect(container)["NetworkSettings"]["Networks"][network]["IPAddress"])


def asks(engine: TempEngine, network: str, host: str, port: int) -> str:
    """The response that a container on that network receives."""
    return engine.docker(
        "run", "--rm", f"--network={network}", "busybox", "nc", "-w", "3", host, str(port), status=None
    ).out


@contextlib.contextmanager
def host_of_its_own(*arguments: str, ipv6: bool) -> Iterator[tuple[TempEngine, int]]:
    """An engine with these arguments in a network namespace of its own, without foreign rules or
    addresses; and the namespace.
    """
    with namespaces.new_network() as namespace:
        run("ip link set lo up")
        if not ipv6:
            Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    try:
        where = f"--net=/proc/{os.getpid()}/fd/{namespace}"
        with TempEngine(*arguments, within=("nsenter", where)) as made:
            made.load_busybox()
            yield made, namespace
    finally:
        os.close(namespace)
