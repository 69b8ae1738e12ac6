"""A host without a kernel: links, namespaces, rules, names and ports, as far as `Networks` uses
them.

`Host.install` replaces the parts of the package that use the kernel by the fakes. Requests of
rtnetlink are interpreted from their bytes. Every call into the host goes through `Host.step`, where
a test may make it fail.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_address, ip_interface
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import ServerError
from engine.networks import attachments, drivers, filter, host, macvlan, publishing, sandboxes
from engine.networks.bridge import driver as bridge
from engine.networks.bridge import repair
from engine.networks.ports import Published, Relayed
from engine.networks.sandboxes import Interface
from engine.system import links, namespaces, netfilter
from engine.system.netlink import codec, rtnl
from engine.system.netlink.codec import NetlinkError, Request
from engine.system.netlink.nft import Element
from engine.system.netlink.rtnl import Address, Link

NEWLINK, DELLINK, NEWADDR, DELADDR, NEWNEIGH, DELNEIGH = 16, 17, 20, 21, 28, 29
IFNAME, MTU, MASTER, LINKINFO, IFALIAS, GROUP, KIND = 3, 4, 10, 18, 20, 27, 1


class Host:
    """Base of the fakes. `fail` is called before every step and may raise."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self.addresses: dict[int, list[IPv4Interface | IPv6Interface]] = {}
        self.neighbours: dict[tuple[int, IPv4Address | IPv6Address], str] = {}
        """MACs that the host has learned, by its link's index and address."""
        self.groups: dict[str, int] = {}
        self.routes: dict[int, list[str]] = {}
        self.namespaces: dict[int, dict[str, Interface]] = {}
        """Links inside, by the namespace's descriptor."""
        self.ends: dict[str, tuple[int, str]] = {}
        """Namespace and inner name of each host end: the kernel removes it with the namespace."""
        self.served: set[str] = set()
        self.held: dict[str, tuple[Published, ...]] = {}
        self.tables: dict[str, dict[str, dict[bytes, Element]]] = {}
        self.steps: list[str] = []
        self.fail: Callable[[str], None] = lambda _: None
        self.removals: list[Removals] = []
        self._next = 1

    def step(self, what: str) -> None:
        self.steps.append(what)
        self.fail(what)

    def add_link(self, name: str, kind: str, alias: str = "", address: str = "") -> Link:
        self._next += 1
        made = self.links[name] = Link(self._next, name, kind, 0, False, alias, address, 1500)
        return made

    def take_away(self, name: str) -> None:
        """Another program deletes a link; the kernel reports it."""
        gone = self.links.pop(name)
        self.addresses.pop(gone.ifindex, None)
        for each in self.removals:
            each.notice(gone.ifindex)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def kernel() -> Kernel:
            return Kernel(self)

        monkeypatch.setattr(drivers, "RouteSocket", kernel)
        monkeypatch.setattr(attachments, "Resolver", lambda *_: Resolver(self))
        monkeypatch.setattr(drivers, "relay_socket", lambda: None)
        monkeypatch.setattr(host, "HAS_IPV6", False)
        monkeypatch.setattr(host, "switch_on_ipv6", lambda _: None)
        monkeypatch.setattr(host, "forward", lambda *_, **__: self.step("forward"))
        monkeypatch.setattr(
            host,
            "is_there",
            lambda link: (
                link is not None and self.links.get(link.name, link._replace(ifindex=0)).ifindex == link.ifindex
            ),
        )
        monkeypatch.setattr(links, "create", self._create)
        monkeypatch.setattr(bridge, "BridgeStock", lambda *_: Stock(self))
        bare = SimpleNamespace(take=lambda: SimpleNamespace(detach=self._empty), close=lambda: None)
        monkeypatch.setattr(drivers, "BareStock", lambda *_: bare)
        monkeypatch.setattr(bridge, "bridges_call_netfilter", lambda: False)
        monkeypatch.setattr(repair.rtnl, "Removals", lambda: Removals(self))
        monkeypatch.setattr(publishing, "Generations", self._no_notices)
        monkeypatch.setattr(publishing, "Listeners", lambda _: Listeners(self))
        monkeypatch.setattr(filter, "NftSocket", lambda: Nft(self))
        monkeypatch.setattr(filter, "ConntrackSocket", Conntrack)
        monkeypatch.setattr(filter, "_route_localnet", lambda *_: None)
        monkeypatch.setattr(netfilter, "available", lambda: True)
        monkeypatch.setattr(netfilter, "run", self._run)
        monkeypatch.setattr(namespaces, "of_process", lambda *_: self.namespace())
        for name in (
            *("plug", "unplug", "empty", "finish", "route", "macs", "close"),
            *("remove", "remove_by_mac", "remove_by_address", "route_by_link"),
        ):
            monkeypatch.setattr(sandboxes, name, getattr(self, f"_{name}"))
        assert macvlan.sandboxes is sandboxes

    def namespace(self) -> int:
        made = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self.namespaces[made] = {}
        return made

    def veth(self, namespace: int, name: str) -> str:
        endpoint_id = secrets.token_hex(32)
        end = sandboxes.host_end(endpoint_id)
        self.add_link(end, "veth")
        self.ends[end] = namespace, name
        return endpoint_id

    # --- sandboxes.py -----------------------------------------------------------------------------

    def _plug(self, _: Kernel, namespace: int, into: Link, name: str, interface: Interface) -> str:
        self.step(f"plug {into.name}")
        endpoint_id = self.veth(namespace, name)
        self.namespaces[namespace][name] = interface
        return endpoint_id

    def _unplug(self, _: Kernel, endpoint_id: str) -> None:
        self.step("unplug")
        end = sandboxes.host_end(endpoint_id)
        if self.links.pop(end, None) is not None:
            namespace, name = self.ends.pop(end)
            del self.namespaces[namespace][name]

    def _empty(self, *_: object) -> int:
        self.step("empty")
        return self.namespace()

    def _finish(self, namespace: int, name: str, interface: Interface) -> None:
        self.step("finish")
        self.namespaces[namespace][name] = interface

    def _route(self, namespace: int, gateways: Iterable[IPv4Address | IPv6Address]) -> None:
        self.step("route")
        self.routes[namespace] = [str(each) for each in gateways]

    def _macs(self, namespace: int) -> dict[str, str]:
        return {name: interface.mac for name, interface in self.namespaces[namespace].items()}

    def _remove_by_mac(self, namespace: int, mac: str) -> None:
        inner = self.namespaces[namespace]
        for name in [name for name, each in inner.items() if each.mac == mac]:
            del inner[name]

    def _remove_by_address(self, namespace: int, address: IPv4Address | IPv6Address) -> None:
        inner = self.namespaces[namespace]
        for name in [name for name, each in inner.items() if address in [one.ip for one in each.addresses]]:
            del inner[name]

    def _remove(self, namespace: int, name: str) -> None:
        self.namespaces[namespace].pop(name, None)

    def _route_by_link(self, namespace: int, name: str, versions: Iterable[int]) -> None:
        self.step(f"route by {name}: {[*versions]}")

    def _close(self, namespace: int) -> None:
        if namespace >= 0:
            del self.namespaces[namespace]
            for end in [end for end, (inner, _) in self.ends.items() if inner == namespace]:
                del self.ends[end]
                self.links.pop(end, None)
            os.close(namespace)

    # --- others -----------------------------------------------------------------------------------

    def _create(self, name: str, kind: str, **_: object) -> None:
        self.step(f"create {kind}")
        self.add_link(name, kind)

    def _run(self, commands: str) -> str:
        self.step("rules")
        return ""

    def _no_notices(self) -> None:
        raise OSError(errno.EPERM, "no notices here")


class Kernel:
    """`RouteSocket`: the links and addresses of the host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def close(self) -> None:
        pass

    def links(self) -> list[Link]:
        return [*self._host.links.values()]

    def link(self, name: str) -> Link | None:
        return self._host.links.get(name)

    def addresses(self, index: int = 0) -> list[Address]:
        return [
            Address(owner, each)
            for owner, interfaces in self._host.addresses.items()
            for each in interfaces
            if isinstance(each, IPv4Interface) and index in (0, owner)
        ]

    def address_spans(self, version: int = 4) -> list[tuple[int, int, int]]:
        return [
            (int(each.network[0]), int(each.network[-1]), owner)
            for owner, each in self.addresses()
            if each.version == version
        ]

    def route_spans(self, version: int = 4) -> list[tuple[int, int, bool]]:
        return []

    def learned(self) -> list[tuple[int, IPv4Address | IPv6Address]]:
        return [*self._host.neighbours]

    def apply(self, *requests: Request) -> None:
        failure = next((each for each in self.outcomes(requests) if each is not None), None)
        if failure is not None:
            raise failure

    def outcomes(self, requests: Iterable[Request]) -> list[NetlinkError | None]:
        found: list[NetlinkError | None] = []
        for request in requests:
            try:
                self._host.step(request.what)
                self._carry_out(request)
                found.append(None)
            except NetlinkError as error:
                found.append(error)
        return found

    def _carry_out(self, request: Request) -> None:
        world = self._host
        if request.type in (NEWNEIGH, DELNEIGH):
            _, index, *_ = rtnl._NEIGHBOUR.unpack_from(request.body)
            attributes = codec.read_attributes(request.body, rtnl._NEIGHBOUR.size)
            key = index, ip_address(attributes[rtnl._NDA_DST])
            if request.type == NEWNEIGH:
                world.neighbours[key] = attributes[rtnl._NDA_LLADDR].hex(":")
            elif world.neighbours.pop(key, None) is None:
                raise NetlinkError(errno.ENOENT, request.what)
            return
        if request.type in (NEWADDR, DELADDR):
            _, prefix, _, _, index = rtnl._ADDRESS.unpack_from(request.body)
            packed = codec.read_attributes(request.body, rtnl._ADDRESS.size)[1]
            text = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
            interface, own = ip_interface(f"{text}/{prefix}"), world.addresses.setdefault(index, [])
            if (interface in own) == (request.type == NEWADDR):
                raise NetlinkError(errno.EEXIST if interface in own else errno.EADDRNOTAVAIL, request.what)
            (own.append if request.type == NEWADDR else own.remove)(interface)
            return
        _, _, _, flags, _ = rtnl._LINK.unpack_from(request.body)
        attributes = codec.read_attributes(request.body, rtnl._LINK.size)
        if request.type == DELLINK and GROUP in attributes:
            for name in [name for name, group in world.groups.items() if group == _number(attributes[GROUP])]:
                del world.links[name], world.groups[name]
            return
        name = codec.read_text(attributes[IFNAME])
        if request.flags & codec.CREATE:
            if name in world.links:
                raise NetlinkError(errno.EEXIST, request.what)
            kind = codec.read_text(codec.read_attributes(attributes[LINKINFO])[KIND])
            if kind not in ("macvlan", "ipvlan"):  # which comes into being inside a namespace
                world.add_link(name, kind)
            return
        if name not in world.links:
            raise NetlinkError(errno.ENODEV, request.what)
        if request.type == DELLINK:
            world.addresses.pop(world.links.pop(name).ifindex, None)
            return
        if GROUP in attributes:
            world.groups[name] = _number(attributes[GROUP])
        link = world.links[name]
        if IFALIAS in attributes:
            link = link._replace(alias=codec.read_text(attributes[IFALIAS]))
        if MASTER in attributes:
            link = link._replace(master=_number(attributes[MASTER]))
        world.links[name] = link._replace(up=bool(flags & 1))


def _number(value: bytes) -> int:
    return int(struct.unpack("=I", value)[0])


class Ready:
    """`ReadySandbox`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._namespace = host.namespace()
        self.endpoint_id = host.veth(self._namespace, "eth0")

    def configure(self, interface: Interface, gateways: Iterable[IPv4Address | IPv6Address]) -> None:
        self._host.step("configure")
        self._host.namespaces[self._namespace][interface.name or "eth0"] = interface
        self._host.routes[self._namespace] = [str(each) for each in gateways]

    def detach(self) -> int:
        return self._namespace

    def close(self) -> None:
        self._host._close(self._namespace)


class Stock:
    """`SandboxStock`, which makes each sandbox when it is requested."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def take(self, bridge: Link, mtu: int = 0) -> Ready:
        self._host.step(f"take {bridge.name}")
        return Ready(self._host)

    def later(self, changes: Iterable[Request]) -> None:
        for request in changes:
            with contextlib.suppress(NetlinkError):
                Kernel(self._host)._carry_out(request)

    def released(self, endpoint_id: str) -> None:
        pass

    def close(self) -> None:
        pass


class Resolver:
    """`Resolver`, which records the containers that it serves."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def open_for(
        self, container_id: str, namespace: int, *, servers: Sequence[str], forward: bool, again: bool = False
    ) -> None:
        self._host.step("resolver")
        assert namespace in self._host.namespaces
        self._host.served.add(container_id)

    def forward(self, container_id: str, forward: bool) -> None:
        pass

    def close_for(self, container_id: str) -> None:
        self._host.served.discard(container_id)

    async def close(self) -> None:
        self._host.served.clear()


class Listeners:
    """`Listeners`, which records the ports that it holds."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def hold(self, owner: str, ports: Sequence[Published]) -> Relayed:
        self._host.step("hold")
        self._host.held[owner] = tuple(ports)
        return Relayed()

    def release(self, owner: str) -> None:
        self._host.held.pop(owner, None)

    def close(self) -> None:
        self._host.held.clear()


class Nft:
    """`NftSocket`: elements by table and set."""

    port = 1

    def __init__(self, host: Host) -> None:
        self._host = host

    def close(self) -> None:
        pass

    def layout(self, table: str) -> tuple[bytes, ...]:
        return (b"as it was",)

    def change(
        self, table: str, remove: Iterable[tuple[str, Element]], add: Iterable[tuple[str, Element]], what: str
    ) -> None:
        try:
            self._host.step("elements")
        except ServerError as error:
            raise netfilter.NetfilterError(error.message) from error
        sets = self._host.tables.setdefault(table, {})
        for name, each in remove:
            del sets.setdefault(name, {})[each.key]
        for name, each in add:
            sets.setdefault(name, {})[each.key] = each

    def elements(self, table: str, name: str) -> dict[bytes, Element]:
        return dict(self._host.tables.get(table, {}).get(name, {}))


class Conntrack:
    """`ConntrackSocket`."""

    def forget_udp(self, *_: Any) -> int:
        return 0

    def forget_untranslated(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Removals:
    """`rtnl.Removals`, with a socket for the event loop to watch."""

    def __init__(self, host: Host) -> None:
        self._reading, self._writing = socket.socketpair()
        self._gone: set[int] = set()
        host.removals.append(self)

    def notice(self, index: int) -> None:
        self._gone.add(index)
        self._writing.send(b"x")

    def fileno(self) -> int:
        return self._reading.fileno()

    def take(self) -> set[int] | None:
        self._reading.recv(100)
        gone, self._gone = self._gone, set()
        return gone

    def close(self) -> None:
        self._reading.close()
        self._writing.close()
