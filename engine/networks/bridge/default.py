"""The default network as the operator has configured it: dockerd's `bip`, `fixed-cidr`,
`default-gateway`, `mtu`, `icc`, `ip`, `ip-masq`, `ipv6` and their like.

The record of the default network on disk has its id alone. Subnets, gateways and options follow
from the configuration and from the bridge, at each start of the daemon.

Pure. Not here: the bridge (`bridge.py`). Raises: InvalidParameter that names the option.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from ipaddress import IPv4Interface, IPv6Interface, ip_interface, ip_network
from typing import NamedTuple

import msgspec

from engine.common.network_rules import Address, Subnet, bridge_interface, parsed_address
from engine.config import Config
from engine.errors import InvalidParameter
from engine.networks.network import NetworkRecord, Options
from engine.wire.networks import IPAM, IPAMConfig

NO_BRIDGE = "none"
"""As the name of the bridge: there is no default network."""
DEFAULT_MTU = 1500

Interface = IPv4Interface | IPv6Interface


class DefaultNetwork(NamedTuple):
    """What the configuration says of the default network."""

    options: Options = Options()
    own: Mapping[int, Interface] = {}
    """By IP version, the bridge's address with its subnet's prefix, where the operator gives it."""
    ranges: Mapping[int, Subnet] = {}
    """Parts of the subnets that containers get addresses of."""
    gateways: Mapping[int, Address] = {}
    """Gateways of the containers, where these are not the bridge's addresses."""
    ipv6: bool = False
    key: str = ""
    """Names what is one engine's on a host: its table is `engined-KEY`."""

    @property
    def absent(self) -> bool:
        """True if there is no default network."""
        return self.options.bridge == NO_BRIDGE

    def wanted(self, version: int) -> Interface | None:
        """The bridge's address, unless it has one already: given, or the first of the part that
        containers get addresses of. None if the engine chooses.
        """
        part = self.ranges.get(version)
        if version in self.own or part is None:
            return self.own.get(version)
        return ip_interface(f"{part[1]}/{part.prefixlen}")

    def record(self, record: NetworkRecord, own: Mapping[int, Interface]) -> NetworkRecord:
        """The record with the subnets of these addresses of the bridge. Raises InvalidParameter for
        a part or a gateway that is in another subnet.
        """
        config = []
        for version, interface in sorted(own.items()):
            subnet, part, gateway = interface.network, self.ranges.get(version), self.gateways.get(version)
            if part is not None and not (part.prefixlen >= subnet.prefixlen and part.network_address in subnet):
                raise InvalidParameter(
                    f"--fixed-cidr{_suffix(version)} {part}: must be a part of the default network's subnet {subnet}"
                )
            if gateway is not None and gateway not in subnet:
                raise InvalidParameter(
                    f"--default-gateway{_suffix(version)} {gateway}: must be in the default network's subnet {subnet}"
                )
            others = {f"DefaultGatewayIPv{version}": str(gateway)} if gateway not in (None, interface.ip) else {}
            config.append(
                IPAMConfig(
                    subnet=str(subnet),
                    ip_range=str(part or ""),
                    gateway=str(interface.ip),
                    auxiliary_addresses=others,
                )
            )
        return msgspec.structs.replace(record, enable_ipv6=6 in own, ipam=IPAM(config=config))

    def shown_options(self) -> dict[str, str]:
        """Options as inspect shows them."""
        options = self.options
        known = {
            "bridge.default_bridge": "true",
            "bridge.enable_icc": str(options.icc).lower(),
            "bridge.enable_ip_masquerade": str(options.masquerade).lower(),
            "bridge.host_binding_ipv4": options.host_binding or "0.0.0.0",
            "bridge.name": options.bridge,
            "driver.mtu": str(options.mtu or DEFAULT_MTU),
        }
        return {
            f"{prefix}.{key}": value
            for prefix in ("com.docker.network", "engine.network")
            for key, value in known.items()
        }


def configured(config: Config) -> DefaultNetwork:
    """Raises InvalidParameter."""
    own: dict[int, Interface] = {}
    ranges: dict[int, Subnet] = {}
    gateways: dict[int, Address] = {}
    texts = {4: (config.bridge_subnet, config.fixed_cidr, config.gateway)}
    if config.ipv6:
        texts[6] = config.bridge_subnet6, config.fixed_cidr6, config.gateway6
    for version, (subnet, part, gateway) in texts.items():
        if subnet:
            own[version] = bridge_interface(subnet, version)
        if part:
            ranges[version] = ip_network(part, strict=False)
        if gateway:
            gateways[version] = parsed_address(gateway, f"--default-gateway{_suffix(version)}")
    options = Options(
        bridge=config.bridge,
        icc=config.icc,
        masquerade=config.ip_masq and config.firewall != "none",
        host_binding="" if config.host_ip == "0.0.0.0" else config.host_ip,
        mtu=0 if config.mtu == DEFAULT_MTU else config.mtu,
    )
    key = config.bridge
    if key == NO_BRIDGE:
        key += f"-{hashlib.sha256(os.fsencode(config.run)).hexdigest()[:8]}"
    return DefaultNetwork(options, own, ranges, gateways, config.ipv6, key)


def default_options(entries: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """By driver, the options of networks whose create does not name them: `DRIVER=KEY=VALUE`."""
    found: dict[str, dict[str, str]] = {}
    for entry in entries:
        driver, _, option = entry.partition("=")
        key, _, value = option.partition("=")
        found.setdefault(driver, {})[key] = value
    return found


def _suffix(version: int) -> str:
    return "-v6" if version == 6 else ""
