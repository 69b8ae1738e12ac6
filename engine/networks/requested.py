"""The requested settings of an endpoint: its addresses, its MAC and the options of its driver.

Rules: Docker Engine API, EndpointSettings and EndpointIPAMConfig, with Docker's error words. Pure.
Raises: InvalidParameter that names the network.
Not here: addresses in use (`ipam.py`), the endpoint itself (`endpoints.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from engine.common.network_rules import LINK_NAME, Address, own_options, parsed_address
from engine.errors import InvalidParameter
from engine.networks.network import IPVLAN, NetworkRecord
from engine.wire.containers import EndpointSettings

_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")

IFNAME, SYSCTLS, DATAGRAMS = "endpoint.ifname", "endpoint.sysctls", "endpoint.datagrams"
"""Driver options, behind one of the prefixes of options."""
DATAGRAMS_OPTION = f"engine.network.{DATAGRAMS}"

# The docker CLI sends options of `--network` in lower case.
_SYSCTL = re.compile(
    r"net\.((?:ipv4|ipv6)\.(?:conf|neigh)|mpls\.conf)\.(?:IFNAME|ifname)"
    r"\.([A-Za-z0-9_]{1,64})=([^\x00-\x1f\x7f]{1,256})"
)
"""ASCII without blanks and `/`, `:` and `%`, which the kernel refuses or takes for a number; 15
bytes as of IFNAMSIZ.
"""

PLACE = "IFNAME"
"""Stands for the interface's name in the paths of `DriverOptions.sysctls`."""


class DriverOptions(NamedTuple):
    """The parsed options of an endpoint's driver."""

    name: str = ""
    """Name of the interface in the container. Empty: the next free one."""
    sysctls: tuple[tuple[str, str], ...] = ()
    """Settings of the interface: paths below /proc/sys/net with `PLACE`, and values."""
    datagrams: bool = False
    """On a swarm's ingress network: the container serves ports of UDP or SCTP."""


def has_ipv6(options: DriverOptions) -> bool:
    """False if the endpoint's own sysctls switch IPv6 off."""
    return dict(options.sysctls).get(f"ipv6/conf/{PLACE}/disable_ipv6", "0").strip() in ("", "0")


def driver_options(name: str, given: Mapping[str, str] | None) -> DriverOptions:
    """DriverOpts of an endpoint on the network of that name. Unknown options are ignored, as in
    Docker.
    """
    found = own_options(given or {})
    link = found.get(IFNAME, "")
    if link and not is_link_name(link):
        raise InvalidParameter(f"network {name}: {IFNAME}: {link[:100]!r} is not a name for an interface")
    return DriverOptions(link, tuple(_sysctls(name, found.get(SYSCTLS, ""))), bool(found.get(DATAGRAMS)))


def is_link_name(text: str) -> bool:
    """True if a container's interface may have this name."""
    return LINK_NAME.fullmatch(text) is not None and text not in (".", "..", "lo", "all", "default")


def _sysctls(name: str, text: str) -> Iterator[tuple[str, str]]:
    for each in text.split(",") if text else ():
        match = _SYSCTL.fullmatch(each.strip())
        if match is None:
            raise InvalidParameter(
                f"network {name}: {SYSCTLS}: {each[:100]!r} is not of the form net.ipv4.conf.{PLACE}.NAME=VALUE "
                "(families ipv4, ipv6 and mpls; conf or neigh)"
            )
        family, setting, value = match.groups()
        yield f"{family.replace('.', '/')}/{PLACE}/{setting}", value


def mac_address(text: str, what: str) -> str:
    """A MAC address, normalised; "" stays."""
    mac = text.lower().replace("-", ":")
    if text and (not _MAC.fullmatch(mac) or int(mac[:2], 16) & 1):
        raise InvalidParameter(
            f"{what}: invalid MacAddress {text[:100]!r}: not a unicast MAC address such as 02:42:ac:11:00:02"
        )
    return mac


def static_addresses(name: str, settings: EndpointSettings) -> dict[int, Address]:
    """IPv4Address and IPv6Address for the network of that name, by IP version."""
    asked = settings.ipam_config
    found: dict[int, Address] = {}
    if asked is not None:
        for version, text in ((4, asked.ipv4_address), (6, asked.ipv6_address)):
            if text:
                address = parsed_address(text, f"network {name}: IPv{version}Address")
                if address.version != version:
                    raise InvalidParameter(f"network {name}: invalid IPv{version} address: {text}")
                found[version] = address
    return found


def wanted_addresses(record: NetworkRecord, settings: EndpointSettings) -> dict[int, Address]:
    """`static_addresses`. Raises InvalidParameter also where the network allows none."""
    found = static_addresses(record.name, settings)
    if record.predefined:
        if found:
            raise InvalidParameter(
                f"network {record.name}: user specified IP address is supported on user defined networks only"
            )
        if settings.aliases:
            raise InvalidParameter(
                f"network {record.name}: network-scoped alias is supported only for containers in user defined networks"
            )
    if record.driver == IPVLAN and settings.mac_address:
        raise InvalidParameter(f"network {record.name}: ipvlan interfaces do not support custom mac address assignment")
    for version, address in found.items():
        if version not in record.chosen_by_user or version not in record.versions:
            raise InvalidParameter(
                f"network {record.name}: user specified IP address {address} is supported only when connecting to "
                "networks with user configured subnets"
            )
    return found


def link_local_addresses(name: str, settings: EndpointSettings) -> list[Address]:
    """The addresses of LinkLocalIPs for the network of that name."""
    found = []
    for text in settings.ipam_config.link_local_ips if settings.ipam_config is not None else ():
        address = parsed_address(text, f"network {name}: LinkLocalIPs")
        if not address.is_link_local:
            raise InvalidParameter(f"network {name}: LinkLocalIPs: {address} is not a link-local address")
        found.append(address)
    return found


def checks(name: str, settings: EndpointSettings) -> tuple[Callable[[], object], ...]:
    """The checks of these settings that do not depend on the network. Each raises
    InvalidParameter.
    """
    return (
        partial(static_addresses, name, settings),
        partial(link_local_addresses, name, settings),
        partial(mac_address, settings.mac_address, f"network {name}"),
        partial(driver_options, name, settings.driver_opts),
    )
