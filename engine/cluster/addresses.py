"""The addresses of a node: what the operator wrote becomes host:port (API 1.24, "Swarm").

ListenAddr, AdvertiseAddr and DataPathAddr are `IP`, `IP:port`, `interface` or `interface:port`.
Without an AdvertiseAddr it is the only global address of the host's devices, as in dockerd; an
address behind NAT is never guessed. A host without such an address may have one on a link of
another kind (`_RANKS`), but not on the engine's own networks. An address that was given, and is
none of this host's, leads here by NAT. VXLAN needs an address of the host, so the data path has
another one then: the one that is listened on, or else that of the default route.

Pure, but for `of_host` and `outgoing`, which ask the kernel.
Raises:  InvalidParameter that names the field and its value.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Collection, Sequence
from typing import NamedTuple

from engine.cluster.client import PORT, joined, split
from engine.errors import InvalidParameter
from engine.system.netlink.rtnl import RouteSocket

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class HostAddress(NamedTuple):
    """One address of one network interface of the host."""

    interface: str
    address: IPAddress
    kind: str = ""
    """The link's kind; empty for a device."""
    up: bool = True


def of_host() -> list[HostAddress]:
    """All addresses of the host. Blocks shortly on netlink."""
    with RouteSocket() as kernel:
        links = {link.ifindex: link for link in kernel.links()}
        found = [
            HostAddress(link.name, interface.ip, link.kind, link.up)
            for index, interface in kernel.addresses()
            if (link := links.get(index)) is not None
        ]
    by_name = {link.name: link for link in links.values()}
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as lines:  # proc_net(5)
            for line in lines:
                digits, _, _, _, _, name = line.split()
                if (link := by_name.get(name)) is not None:
                    found.append(HostAddress(name, ipaddress.IPv6Address(bytes.fromhex(digits)), link.kind, link.up))
    except OSError:
        pass  # IPv6 is off
    return found


def outgoing() -> list[IPAddress]:
    """The addresses of the host that the default routes use, IPv4 first."""
    found: list[IPAddress] = []
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))  # sends nothing
            found.append(ipaddress.ip_address(probe.getsockname()[0]))
    return found


class Chosen(NamedTuple):
    """host:port of each; "" for what managers tell."""

    listen: str
    advertise: str
    data_path: str


def choose(
    listen: str,
    advertise: str,
    data_path: str,
    host: Sequence[HostAddress],
    own_links: Collection[str],
    *,
    must_advertise: bool,
    outgoing: Sequence[IPAddress] = (),
) -> Chosen:
    """Resolve the addresses of a request. `own_links`: interfaces of the engine's own networks.
    `outgoing`: addresses of the default routes.

    Without `must_advertise` (a join) the advertised address may stay open: the manager tells the
    address that it sees.
    """
    bound, port = _resolve("ListenAddr", listen, host)
    if not bound.is_unspecified:
        _check_own("ListenAddr", listen, bound, host)
    shown = data = ""
    if advertise:
        wanted, its_port = _resolve("AdvertiseAddr", advertise, host, port)
        if wanted.is_unspecified or wanted.is_multicast:
            raise InvalidParameter(
                f"AdvertiseAddr {advertise!r}: advertise address must be a non-zero IP address or network interface "
                "(with optional port number)"
            )
        shown = joined(str(wanted), its_port)
        if not _is_own(wanted, host):
            data = str(_behind(bound, host, own_links, outgoing) if not data_path else "")
    elif not bound.is_unspecified:
        shown = joined(str(bound), port)
    elif must_advertise:
        shown = joined(str(_only(host, own_links)), port)
    if data_path:
        wanted, _ = _resolve("DataPathAddr", data_path, host)
        if wanted.is_unspecified:
            raise InvalidParameter(f"DataPathAddr {data_path!r}: must be a non-zero IP address or network interface")
        data = str(wanted)
    return Chosen(joined(str(bound), port), shown, data)


def _resolve(field: str, text: str, host: Sequence[HostAddress], port: int = PORT) -> tuple[IPAddress, int]:
    """The address and port of `IP[:port]` or `interface[:port]`."""
    if not text:
        raise InvalidParameter(f"{field}: must not be empty")
    try:
        name, port = split(text, port)
    except ValueError:
        raise InvalidParameter(
            f"{field} {text!r}: must be an IP address or network interface (with optional port number)"
        ) from None
    try:
        return ipaddress.ip_address(name), port
    except ValueError:
        pass
    known = [each.address for each in host if each.interface == name and not each.address.is_link_local]
    for version in (4, 6):
        found = [address for address in known if address.version == version]
        if len(found) == 1:
            return found[0], port
        if found:
            listed = ", ".join(map(str, found))
            raise InvalidParameter(f"{field} {text!r}: interface {name} has several addresses ({listed}); name one")
    if any(each.interface == name for each in host):
        raise InvalidParameter(f"{field} {text!r}: interface {name} has no IP address")
    raise InvalidParameter(
        f"{field} {text!r}: must be an IP address or network interface (with optional port number); "
        f"the host has no interface {name}"
    )


def _is_own(address: IPAddress, host: Sequence[HostAddress]) -> bool:
    return address.is_loopback or any(each.address == address for each in host)


def _check_own(field: str, text: str, address: IPAddress, host: Sequence[HostAddress]) -> None:
    if not _is_own(address, host):
        raise InvalidParameter(f"{field} {text!r}: {address} is not an address of this host.")


def _behind(
    bound: IPAddress, host: Sequence[HostAddress], own_links: Collection[str], outgoing: Sequence[IPAddress]
) -> IPAddress:
    """The address of this host that NAT leads an external one to. Raises InvalidParameter."""
    if not bound.is_unspecified:
        return bound
    return next((address for address in outgoing if _is_own(address, host)), None) or _only(host, own_links)


_RANKS = {"": 0, "bridge": 2} | dict.fromkeys(
    ("tun", "wireguard", "ipip", "sit", "gre", "gretap", "ip6gre", "ip6tnl", "vxlan", "geneve", "dummy"), 3
)
"""Of which links an address is chosen: devices, then others that may lead to the network (bonds,
VLANs, a container's veth; 1), then bridges, which other programs have for their guests, then
tunnels.
"""


def _only(host: Sequence[HostAddress], own_links: Collection[str]) -> IPAddress:
    """The one global address that others may reach, of the first of `_RANKS` that has any; IPv4 is
    preferred. Raises InvalidParameter.
    """
    usable = [
        each
        for each in host
        if each.up
        and each.interface not in own_links
        and not (each.address.is_loopback or each.address.is_link_local or each.address.is_multicast)
    ]
    best = min((_RANKS.get(each.kind, 1) for each in usable), default=0)
    for version in (4, 6):
        found = {
            each.address: each
            for each in usable
            if _RANKS.get(each.kind, 1) == best and each.address.version == version
        }
        if len(found) == 1:
            return next(iter(found))
        if found:
            listed = ", ".join(f"{each.address} on {each.interface}" for each in found.values())
            raise InvalidParameter(
                "AdvertiseAddr: could not choose an IP address to advertise since this system has multiple addresses "
                f"({listed})"
            )
    raise InvalidParameter("AdvertiseAddr: could not find the system's IP address")
