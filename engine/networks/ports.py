"""Published ports: parses a container's configuration, and assigns ports of the host.

Rules: Docker Engine API, HostConfig (PortBindings, PublishAllPorts). An empty HostPort or 0 is the
next free port of the kernel's ephemeral range; a range for one port is its first free one; an empty
HostIp is every address of the host. Neighbouring ports are one `Published`, so a range of 200 costs
as much as one port.

Owns: `Listeners` owns the sockets that hold ports against other programs. Threads: `Ports` is used
on the event loop alone; `Listeners` in any thread, one at a time for one owner. Locks:
`Listeners._lock` guards its count, for an instant. Not here: rules of the kernel (`filter.py`).
Raises: InvalidParameter for bad input, PortTaken in Docker's words.
"""

from __future__ import annotations

import bisect
import errno
import functools
import itertools
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine._fast import ports as sockets
from engine.common.network_rules import parsed_address
from engine.errors import InvalidParameter
from engine.wire.containers import Port, PortBinding

PROTOCOLS = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP, "sctp": socket.IPPROTO_SCTP}
ANY = ("0.0.0.0", "::")
"""Every address of the host, of either IP version."""
AT_LOOPBACK = ("0.0.0.0", "::", "::1")
"""A port published on one of these is expected at `localhost`, which is ::1 to most programs."""

EPHEMERAL = (49153, 65535)
"""Docker's and IANA's range, used if the kernel does not say its own."""
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_LOOPBACK6 = ip_address("::1")
_ANY6 = bytes(16)
_IPV6_TRANSPARENT = 75
"""linux/in6.h"""

_PORT = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?(?:/(tcp|udp|sctp))?", re.IGNORECASE)


class PortTaken(Exception):
    """A port of the host that is not available, in Docker's words."""


class Published(msgspec.Struct, frozen=True, gc=False, array_like=True, order=True):
    """`count` ports of the host from `host_port` on, led to as many of the container from `port`
    on.

    `host_ip` is never empty.
    """

    protocol: str
    host_ip: str
    host_port: int
    port: int
    count: int = 1

    @property
    def version(self) -> int:
        """IP version."""
        return 6 if ":" in self.host_ip else 4

    @property
    def host_ports(self) -> range:
        return range(self.host_port, self.host_port + self.count)


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """A port of a container, and the range of host ports that it may get on these addresses.

    `first` 0 means any ephemeral port. `count` is more than 1 for neighbours from `port` on that
    each have exactly one possible host port, from `first` on.
    """

    port: int
    protocol: str
    host_ips: tuple[str, ...]
    first: int
    last: int
    count: int = 1


# --- configuration --------------------------------------------------------------------------------


@functools.lru_cache(2048)
def parse(text: str, field: str, least: int = 1) -> tuple[int, int, str]:
    """Read `80`, `80/tcp` or `8000-8010/udp`; returns first, last, protocol. `least`: the first
    port that there may be.

    Raises InvalidParameter that names the field.
    """
    found = _PORT.fullmatch(text)
    if found is not None:
        first = int(found[1])
        last = int(found[2] or first)
        if least <= first <= last <= 65535:
            return first, last, (found[3] or "tcp").lower()
    rule = (
        "it must be <port>/<tcp|udp|sctp>"
        if found is None
        else f"ports are {least} to 65535, the first one not above the last"
    )
    raise InvalidParameter(f"{field}: Invalid port specification: {text!r}: {rule}")


@functools.lru_cache(2048)
def parse_host_port(text: str) -> tuple[int, int]:
    """Read HostPort: empty, `8080` or `8000-8010`. Returns (0, 0) for any port. Raises
    InvalidParameter.
    """
    if not text:
        return 0, 0
    found = _PORT.fullmatch(text)
    if found is not None and found[3] is None:
        first = int(found[1])
        last = int(found[2] or first)
        if first <= last <= 65535 and (first or not last):
            return first, last
    raise InvalidParameter(f"PortBindings: Invalid port specification: {text!r}")


def check(exposed: Iterable[str], bindings: Mapping[str, Sequence[PortBinding] | None]) -> None:
    """Raises InvalidParameter for settings that a client may not give. Port 0 may be exposed, as
    with Docker.
    """
    for text in exposed:
        parse(text, "ExposedPorts", 0)
    for _ in each_binding(bindings):
        pass


def wanted(
    exposed: Iterable[str],
    bindings: Mapping[str, Sequence[PortBinding] | None],
    *,
    publish_all: bool,
    default_ip: str = "",
    ipv4: bool = True,
    ipv6: bool = False,
) -> list[Wanted]:
    """The requested ports of a container, neighbours merged.

    Explicit ports come first, so that no ephemeral one takes them. `default_ip` replaces an empty
    HostIp; `ipv4`, `ipv6`: the container has an address of that version.
    """
    anywhere = (default_ip,) if default_ip else ANY[not ipv4 : 2 if ipv6 else 1]
    asked = [
        Wanted(port, protocol, (host_ip,) if host_ip else anywhere, first, last)
        for port, protocol, host_ip, first, last in each_binding(bindings)
    ]
    if publish_all:
        bound = {(each.port, each.protocol) for each in asked}
        asked += [
            Wanted(port, protocol, anywhere, 0, 0)
            for port, protocol in each_exposed(exposed)
            if port and (port, protocol) not in bound
        ]
    asked.sort(
        key=lambda each: (not each.first, each.last > each.first, each.protocol, each.host_ips, each.port, each.first)
    )
    return [_run([each for _, each in run]) for _, run in itertools.groupby(enumerate(asked), _line)]


def _line(numbered: tuple[int, Wanted]) -> object:
    """Merge neighbours with neighbouring host ports, in a sorted list of their numbers."""
    number, each = numbered
    if each.first and each.first == each.last:
        return each.protocol, each.host_ips, each.port - number, each.first - number
    return number


def _run(neighbours: list[Wanted]) -> Wanted:
    first = neighbours[0]
    return first if len(neighbours) == 1 else msgspec.structs.replace(first, count=len(neighbours))


def each_binding(bindings: Mapping[str, Sequence[PortBinding] | None]) -> Iterator[tuple[int, str, str, int, int]]:
    """(port, protocol, host_ip, first, last) of each.

    Ranges of equal length are paired one by one.
    """
    for text, several in bindings.items():
        first, last, protocol = parse(text, "PortBindings")
        for binding in several or ():
            if binding.host_ip:
                address = parsed_address(binding.host_ip, "PortBindings HostIp")
                if address == _LOOPBACK6 and protocol != "tcp":
                    raise InvalidParameter(
                        f"PortBindings HostIp: {text} at {binding.host_ip}: only TCP ports can be published at ::1, "
                        "others at 127.0.0.1"
                    )
            host_first, host_last = parse_host_port(binding.host_port)
            if first == last or not host_first:
                for port in range(first, last + 1):
                    yield port, protocol, binding.host_ip, host_first, host_last
            elif host_last - host_first == last - first:
                for port in range(first, last + 1):
                    yield port, protocol, binding.host_ip, host_first + port - first, host_first + port - first
            else:
                raise InvalidParameter(
                    f"PortBindings: Invalid ranges specified for container and host Ports: "
                    f"{text} and {binding.host_port}"
                )


# --- assignment -----------------------------------------------------------------------------------


class _Taken:
    """Ports of one protocol and address: non-overlapping intervals, sorted."""

    __slots__ = ("firsts", "lasts")

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.lasts: list[int] = []

    def overlap(self, first: int, last: int) -> int:
        """The lowest port of `first` to `last` that is taken; 0 when none is."""
        place = bisect.bisect_left(self.lasts, first)
        if place < len(self.firsts) and self.firsts[place] <= last:
            return max(first, self.firsts[place])
        return 0

    def add(self, first: int, last: int) -> None:
        place = bisect.bisect_left(self.firsts, first)
        self.firsts.insert(place, first)
        self.lasts.insert(place, last)

    def remove(self, first: int) -> None:
        place = bisect.bisect_left(self.firsts, first)
        del self.firsts[place], self.lasts[place]


class Ports:
    """Ports of the host that the engine's containers have. Derived from them, never stored."""

    def __init__(self, ephemeral: tuple[int, int] | None = None) -> None:
        self._ephemeral = ephemeral or _ephemeral()
        self._taken: dict[tuple[str, str], _Taken] = {}
        self._last: dict[str, int] = {}
        self._of: dict[str, tuple[Published, ...]] = {}

    def __len__(self) -> int:
        """The ports of each owner that has any."""
        return len(self._of)

    def allocate(
        self, owner: str, asked: Sequence[Wanted], without: Iterable[tuple[str, int]] = ()
    ) -> tuple[Published, ...]:
        """Choose ports, all or none.

        `without` are (protocol, port) of other programs, avoided if possible. Raises PortTaken.
        """
        refused = frozenset(without)
        given: list[Published] = []
        try:
            for each in asked:
                port = self._choose(each, refused)
                for host_ip in each.host_ips:
                    one = Published(each.protocol, host_ip, port, each.port, each.count)
                    self._take(one)
                    given.append(one)
        except BaseException:
            for one in given:
                self._give(one)
            raise
        for one in given:
            self._give(one)
        merged = joined(given)
        for one in merged:
            self._take(one)
        if merged:
            self._of[owner] = merged
        return merged

    def claim(self, owner: str, ports: Iterable[Published]) -> None:
        """Restore the ports of a container that ran on without a daemon, except ports that another
        container has.
        """
        kept = []
        for each in ports:
            if not self._conflict(each.protocol, each.host_ip, each.host_port, each.host_port + each.count - 1):
                self._take(each)
                kept.append(each)
        if kept:
            self._of[owner] = tuple(kept)

    def give(self, owner: str) -> tuple[Published, ...]:
        """Give an owner's ports back; returns them. An owner without any is fine."""
        ports = self._of.pop(owner, ())
        for each in ports:
            self._give(each)
        return ports

    def of(self, owner: str) -> tuple[Published, ...]:
        """The owner's ports."""
        return self._of.get(owner, ())

    def _choose(self, each: Wanted, refused: frozenset[tuple[str, int]]) -> int:
        if each.first and each.first == each.last:
            for host_ip in each.host_ips:
                if taken := self._conflict(each.protocol, host_ip, each.first, each.first + each.count - 1):
                    raise PortTaken(f"Bind for {shown(host_ip, taken)} failed: port is already allocated")
            return each.first
        if each.first:
            candidates: Iterable[int] = range(each.first, each.last + 1)
        else:
            low, high = self._ephemeral
            begin = min(max(low, self._last.get(each.protocol, low - 1) + 1), high + 1)
            candidates = itertools.chain(range(begin, high + 1), range(low, begin))
        for port in candidates:
            if (each.protocol, port) not in refused and not any(
                self._conflict(each.protocol, host_ip, port, port) for host_ip in each.host_ips
            ):
                if not each.first:
                    self._last[each.protocol] = port
                return port
        where = f"{shown(each.host_ips[0], each.first)}-{each.last}" if each.first else each.host_ips[0]
        raise PortTaken(f"Bind for {where} failed: all ports are allocated")

    def _conflict(self, protocol: str, host_ip: str, first: int, last: int) -> int:
        anywhere = ANY[":" in host_ip]
        if host_ip != anywhere:
            addresses: Iterable[str] = (host_ip, anywhere)
        else:
            addresses = [ip for of, ip in self._taken if of == protocol and (":" in ip) == (":" in host_ip)]
        for address in addresses:
            taken = self._taken.get((protocol, address))
            if taken is not None and (found := taken.overlap(first, last)):
                return found
        return 0

    def _take(self, each: Published) -> None:
        taken = self._taken.setdefault((each.protocol, each.host_ip), _Taken())
        taken.add(each.host_port, each.host_port + each.count - 1)

    def _give(self, each: Published) -> None:
        key = each.protocol, each.host_ip
        taken = self._taken[key]
        taken.remove(each.host_port)
        if not taken.firsts:
            del self._taken[key]


def joined(ports: Iterable[Published]) -> tuple[Published, ...]:
    """The same ports, neighbours merged."""
    merged: list[Published] = []
    for each in sorted(ports):
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.protocol, last.host_ip) == (each.protocol, each.host_ip)
            and each.host_port == last.host_port + last.count
            and each.port == last.port + last.count
        ):
            merged[-1] = msgspec.structs.replace(last, count=last.count + each.count)
        else:
            merged.append(each)
    return tuple(merged)


def single(ports: Iterable[Published]) -> Iterator[Published]:
    """The same ports, one by one."""
    for each in ports:
        if each.count == 1:
            yield each
        else:
            for offset in range(each.count):
                yield Published(each.protocol, each.host_ip, each.host_port + offset, each.port + offset)


def shown(host_ip: str, port: int) -> str:
    """`0.0.0.0:80`, `[::]:80`."""
    return f"[{host_ip}]:{port}" if ":" in host_ip else f"{host_ip}:{port}"


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return EPHEMERAL
    return (low, high) if 0 < low < high <= 65535 else EPHEMERAL


# --- as clients see them --------------------------------------------------------------------------


def listed(exposed: Iterable[str], ports: Sequence[Published]) -> list[Port]:
    """`Ports` of the container list: exposed and published ports."""
    found = [
        Port(ip=each.host_ip, private_port=each.port, public_port=each.host_port, type=each.protocol)
        for each in single(ports)
    ]
    published = {(each.private_port, each.type) for each in found}
    for number, protocol in each_exposed(exposed):
        if (number, protocol) not in published:
            found.append(Port(private_port=number, type=protocol))
    return sorted(found, key=lambda each: (each.private_port, each.type, each.public_port, each.ip))


def bound(exposed: Iterable[str], ports: Sequence[Published]) -> dict[str, list[PortBinding] | None]:
    """`NetworkSettings.Ports` of inspect."""
    found: dict[str, list[PortBinding] | None] = {
        f"{number}/{protocol}": None for number, protocol in each_exposed(exposed)
    }
    for each in single(ports):
        key = f"{each.port}/{each.protocol}"
        bindings = found.get(key)
        if bindings is None:
            bindings = found[key] = []
        bindings.append(PortBinding(host_ip=each.host_ip, host_port=str(each.host_port)))
    return found


def each_exposed(exposed: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Number and protocol of each. What an image names and is no port is left out."""
    for text in exposed:
        try:
            first, last, protocol = parse(text, "ExposedPorts", 0)
        except InvalidParameter:
            continue
        for number in range(first, last + 1):
            yield number, protocol


# --- against the host's own programs --------------------------------------------------------------


class Relayed(NamedTuple):
    """TCP ports that the owner serves by IPv6, whether its container has an IPv6 address or not."""

    anywhere: frozenset[int] = frozenset()
    """On every IPv6 address of the host."""
    at_loopback: frozenset[int] = frozenset()
    """On ::1 alone."""


class Listeners:
    """Holds published ports as a listening program would, so that no other program gets them.

    A socket is bound to each port and never read, as packets for it are rewritten before they reach
    it. Each takes 4 KB of kernel memory. At most a quarter of the process's descriptors is used for
    this; ports beyond that are tried and released. The sockets are closed with the daemon, and the
    next daemon opens them again. A port that another program has taken by then stays published all
    the same.

    A TCP port of every IPv4 address is held on the IPv6 ones too, by the same socket, unless a
    program has it there. Blocks for some microseconds a port.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[str, list[int]] = {}
        self._count = 0
        self._lock = threading.Lock()

    def hold(self, owner: str, ports: Sequence[Published]) -> Relayed:
        """Hold an owner's ports; returns those that it serves by IPv6.

        Raises PortTaken, with nothing held, when a program of this host has one of them.
        """
        anywhere: set[int] = set()
        at_loopback: set[int] = set()
        for each in ports:
            if each.protocol == "tcp" and each.host_ip in ("::", "::1"):
                (anywhere if each.host_ip == "::" else at_loopback).update(each.host_ports)
        known = anywhere | at_loopback
        held: list[int] = []
        try:
            for each in ports:
                if each.protocol != "tcp" or each.host_ip != ANY[0]:
                    self._hold(each, held)
                elif known.isdisjoint(each.host_ports):
                    anywhere.update(self._hold_for_both(each, held))
                else:
                    for one in single((each,)):
                        if one.host_port in known:
                            self._hold(one, held)
                        else:
                            anywhere.update(self._hold_for_both(one, held))
        except BaseException:
            self._let_go(held)
            raise
        if held:
            self._held[owner] = held
        return Relayed(frozenset(anywhere), frozenset(at_loopback))

    def _hold_for_both(self, ports: Published, held: list[int]) -> list[int]:
        """Hold TCP ports of every IPv4 address, and on every IPv6 one if free there; returns the
        latter.
        """
        for_both: list[int] = []
        begin, end = ports.host_port, ports.host_port + ports.count
        while begin < end:
            made, failure = sockets.bind(socket.AF_INET6, socket.SOCK_STREAM, 0, _ANY6, begin, end - begin, both=True)
            self._keep(made, held)
            for_both += range(begin, begin + len(made))
            begin += len(made)
            if failure:
                alone = end - begin if failure == errno.EAFNOSUPPORT else 1
                self._hold(msgspec.structs.replace(ports, host_port=begin, count=alone), held)
                begin += alone
        return for_both

    def _hold(self, ports: Published, held: list[int]) -> None:
        family = socket.AF_INET6 if ports.version == 6 else socket.AF_INET
        kind = socket.SOCK_DGRAM if ports.protocol == "udp" else socket.SOCK_STREAM
        address = ip_address(ports.host_ip).packed
        begin, end = ports.host_port, ports.host_port + ports.count
        while begin < end:
            made, failure = sockets.bind(family, kind, PROTOCOLS[ports.protocol], address, begin, end - begin)
            self._keep(made, held)
            begin += len(made)
            if failure in (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT, errno.ESOCKTNOSUPPORT):
                return  # this kernel has no such sockets, so no program holds the port
            if failure:
                where = shown(ports.host_ip, begin)
                words = f"listen {ports.protocol}{ports.version} {where}: bind: {os.strerror(failure).lower()}"
                if failure != errno.EADDRINUSE:  # another port would do no better
                    raise PortTaken(words)
                raise PortInUse(words, (ports.protocol, begin))

    def _keep(self, made: list[int], held: list[int]) -> None:
        with self._lock:
            room = max(0, min(len(made), self._most - self._count))
            self._count += room
        held += made[:room]
        sockets.close_all(made[room:])

    def release(self, owner: str) -> None:
        """Release an owner's ports. Idempotent."""
        self._let_go(self._held.pop(owner, []))

    def _let_go(self, held: list[int]) -> None:
        sockets.close_all(held)
        with self._lock:
            self._count -= len(held)

    def close(self) -> None:
        for owner in [*self._held]:
            self.release(owner)


class PortInUse(PortTaken):
    """The port is taken by a program of this host; `at` is (protocol, port)."""

    def __init__(self, words: str, at: tuple[str, int]) -> None:
        super().__init__(words)
        self.at = at


def relay_socket() -> socket.socket | None:
    """A socket that listens on ::1, on a port of the kernel's choice, for connections that rules
    give it.

    TPROXY keeps their original address and port. None if this kernel has no IPv6.
    """
    try:
        made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    except OSError:
        return None
    try:
        made.setsockopt(socket.IPPROTO_IPV6, _IPV6_TRANSPARENT, 1)
        # The ports of its connections are published ones, which must not prevent holding those
        # again.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("::1", 0))
        made.listen(socket.SOMAXCONN)
    except OSError:
        made.close()
        return None
    return made
