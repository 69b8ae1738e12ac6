"""Facts and settings of this host that all networks share: addresses in use, forwarding, links left
by a crash.

Everything blocks on the kernel and is called in threads. Owns nothing; forwarding stays on when the
engine ends. Raises: OSError.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import socket
from collections.abc import Collection, Iterable
from ipaddress import ip_address
from pathlib import Path

from engine.networks.dns.forwarding import HostServers
from engine.networks.ipam import Occupied
from engine.system import sysctls
from engine.system.netlink import rtnl
from engine.system.netlink.rtnl import Link, RouteSocket

_log = logging.getLogger(__name__)

MADE = ("bridge", "dummy", "vlan")
"""Kinds of links that carry the engine's alias: bridges, and the parents of macvlan networks."""
TRUNK = "tr"
"""Names of the ends of trunks in bridges begin with it.

Other veths with the alias are overlays'.
"""

_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_IPV6 = Path("/proc/sys/net/ipv6")
_SELF_CONFIGURATION = ("accept_ra", "autoconf", "accept_redirects")

_LEAST_MTU_OF_IPV6 = 1280
"""RFC 8200, 5: a link with a smaller MTU has no IPv6, and the kernel refuses attributes of that
family.
"""

HAS_IPV6 = _IPV6.exists()
"""True if this kernel has IPv6."""

ALIAS = "engined"
"""ifalias of a default bridge that the engine made.

That of other links has the engine's id behind it.
"""


def occupied(links: RouteSocket, version: int = 4) -> Occupied:
    """By its links, routes and name servers."""
    here = [(first, last) for first, last, _ in links.address_spans(version)]
    servers = (ip_address(server.address) for server in HostServers().read())
    here += [(int(each), int(each)) for each in servers if each.version == version and not each.is_loopback]
    beyond: list[tuple[int, int]] = []
    for first, last, elsewhere in links.route_spans(version):
        (beyond if elsewhere else here).append((first, last))
    return Occupied(here, sorted(beyond))


def is_there(link: Link | None) -> bool:
    """True if the link still exists under its name and index.

    Does not take the kernel's lock of links.
    """
    try:
        return link is not None and socket.if_nametoindex(link.name) == link.ifindex
    except OSError:
        return False


def bridge_address(name: str, alias: str) -> str:
    """The MAC of a bridge that the engine makes.

    It is the same at every start, so that ARP entries of containers outlive the daemon. It also
    tells whose the bridge is before it has its alias, which the kernel takes only afterwards.
    """
    return "02:42:" + hashlib.sha256(f"{name} {alias}".encode()).digest()[:4].hex(":")


def unfinished(link: Link, alias: str) -> bool:
    """True if an engine was killed after it had made this bridge and before it set the alias."""
    return not link.alias and link.kind == "bridge" and link.address == bridge_address(link.name, alias)


def sweep(links: RouteSocket, present: Iterable[Link], alias: str, names: Collection[str] = ()) -> None:
    """Remove those of the host's links with this engine's alias except `names`: what a crash left,
    or all at the end.
    """
    orphans = [
        link.name
        for link in present
        if link.name not in names
        and (link.kind in MADE or (link.kind == "veth" and link.name.startswith(TRUNK)))
        and (link.alias == alias or unfinished(link, alias))
    ]
    if not orphans:
        return
    # Deleted one by one each takes the kernel tens of milliseconds.
    group = secrets.randbelow(1 << 30) + 1
    links.outcomes([rtnl.set_group(name, group) for name in orphans])
    links.apply(rtnl.delete_group(group))


def has_ipv6(mtu: int) -> bool:
    """True if a link of this MTU has IPv6; 0 is the kernel's default of 1500."""
    return HAS_IPV6 and (mtu == 0 or mtu >= _LEAST_MTU_OF_IPV6)


def switch_on_ipv6(name: str) -> None:
    """Let a link take IPv6 addresses, even if the host disables them by default."""
    (_IPV6 / "conf" / name / "disable_ipv6").write_text("0")


def ignore_router_advertisements(name: str) -> None:
    """Make the host ignore router advertisements and redirects from containers on an engine's link
    (CVE-2020-13401).

    Router advertisements would give the host addresses and a default route, redirects other routes.
    Call it before the link is up. Only for links that the engine made: on an adopted bridge the
    host may get its own addresses this way.
    """
    if HAS_IPV6:
        # the MTU is below IPv6's minimum, so the link has no IPv6
        with contextlib.suppress(FileNotFoundError):
            sysctls.write({f"ipv6/conf/{name}/{setting}": "0" for setting in _SELF_CONFIGURATION})


def forward(links: RouteSocket, *, ipv6: bool = False) -> None:
    """Switch on forwarding for this host.

    With IPv6 forwarding a link ignores router advertisements unless its accept_ra is 2
    (ip-sysctl). That is set where they were accepted until now, so that the host keeps its own
    default route. Never on links of the engine, nor on ports of bridges.
    """
    if _FORWARD.read_text().strip() == "0":
        _FORWARD.write_text("1")
        _log.info("net.ipv4.ip_forward switched on for this host")
    if not ipv6:
        return
    switch = _IPV6 / "conf" / "all" / "forwarding"
    if switch.read_text().strip() == "0":
        for link in links.links():
            accept = _IPV6 / "conf" / link.name / "accept_ra"
            with contextlib.suppress(FileNotFoundError):
                if not link.master and not link.alias.startswith(ALIAS) and accept.read_text().strip() == "1":
                    accept.write_text("2")
        switch.write_text("1")
        _log.info("net.ipv6.conf.all.forwarding switched on for this host")
