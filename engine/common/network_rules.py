"""Rules of networks that hold for those of this engine and for those of a swarm alike: names,
addresses and their pools, driver options, filters of the list; and rules of the texts that end up
in hosts, hostname and resolv.conf of containers.

Rules: Docker Engine API, "Networks", with Docker's error words. Pure.
Raises: InvalidParameter and Forbidden that name the network and the value.
Not here: records and drivers (`engine/networks`), networks of a swarm (`engine/manager`).
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import (
    AddressValueError,
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    NetmaskValueError,
    ip_address,
    ip_interface,
    ip_network,
)
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from engine.common import booleans, labels, patterns
from engine.errors import Forbidden, InvalidParameter
from engine.wire.networks import IPAMConfig

Address = IPv4Address | IPv6Address
Subnet = IPv4Network | IPv6Network
AnySubnet = TypeVar("AnySubnet", bound=Subnet)

PREDEFINED_NAMES = frozenset(("bridge", "host", "none"))
"""The networks that every engine has, and so every node of a swarm."""
OVERLAY, SWARM = "overlay", "swarm"
"""Driver and scope of the networks that the engines of a swarm share."""
FILTERS = frozenset(("dangling", "driver", "id", "label", "name", "scope", "type"))
"""Filters of the list in API 1.24, and `dangling` and `scope`, which Docker added later."""

SWARM_ID = 25
"""Characters of the id of an object of a swarm; ids of an engine's own networks have 64."""

_LONGEST_NAME = 255
"""Bytes, the same limit as for a file's name."""
_LONGEST_HOSTNAME = 64
"""Bytes that the kernel keeps (uname(2))."""
_HOST_LABEL = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_WORD = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]+")
_POOL = re.compile(r"\s*base=(?P<base>[^\s,]+)\s*,\s*size=(?P<size>[0-9]{1,3})\s*")
LINK_NAME = re.compile(r"[!-$&-.0-9;-~]{1,15}")
"""The name of a network interface."""
_OPTION_PREFIXES = ("com.docker.network.", "engine.network.")


class Listed(Protocol):
    """What the filters of a list look at."""

    @property
    def name(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def driver(self) -> str: ...
    @property
    def scope(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def predefined(self) -> bool: ...


def check_hostname(hostname: str) -> None:
    """Raises InvalidParameter unless a container can have it: what sethostname(2) accepts, but no
    control characters, which would add lines to hosts and hostname.
    """
    if len(hostname.encode()) > _LONGEST_HOSTNAME or _CONTROL.search(hostname):
        raise InvalidParameter(
            f"invalid hostname format: {hostname[:100]!r}: at most {_LONGEST_HOSTNAME} bytes, no control characters"
        )


def check_rfc_1123(hostname: str) -> None:
    """Raises InvalidParameter unless the name has labels of letters, digits and inner hyphens, with
    at most 63 characters each.
    """
    if not all(_HOST_LABEL.fullmatch(label) for label in hostname.split(".")):
        raise InvalidParameter(
            f"invalid hostname format: {hostname[:100]!r}: Hostname must be a valid RFC 1123 host name"
        )


def is_word(text: str) -> bool:
    """True if it is one word of a line of hosts or resolv.conf: no white space, no control
    characters.
    """
    return _WORD.fullmatch(text) is not None


def is_swarm_id(network_id: str) -> bool:
    """True for the id of a network of a swarm, which may not be on this node."""
    return len(network_id) == SWARM_ID


def checked_name(name: str) -> str:
    """Raises InvalidParameter for a name that no network may have, Forbidden for a predefined
    one.
    """
    # Docker takes any name that is not blank. Names are written to logs, and are a part of paths
    # and of URLs.
    if not name.strip() or "/" in name or name in (".", "..") or not name.isprintable():
        raise InvalidParameter(
            f"invalid network name {name[:100]!r}: it must not be blank, '.' or '..', nor have slashes or control "
            "characters"
        )
    if len(name.encode()) > _LONGEST_NAME:
        raise InvalidParameter(f"invalid network name {name[:100]!r}: it is longer than {_LONGEST_NAME} bytes")
    if name in (*PREDEFINED_NAMES, "default"):
        raise Forbidden(f"operation is not permitted on predefined {name} network")
    return name


# --- options --------------------------------------------------------------------------------------


def own_options(options: Mapping[str, str]) -> dict[str, str]:
    """The options that have one of the prefixes, without it."""
    return {
        key.removeprefix(prefix): value
        for key, value in options.items()
        for prefix in _OPTION_PREFIXES
        if key.startswith(prefix)
    }


def boolean(text: str | None, default: bool, what: str) -> bool:
    """Parses as Go's ParseBool."""
    if text is None or text == "":
        return default
    if text not in booleans.WORDS:
        raise InvalidParameter(f"{what}: {text[:100]!r} is not a boolean")
    return booleans.WORDS[text]


def mtu(given: Mapping[str, str], where: str) -> int:
    """The MTU of `own_options`; 0 for none."""
    text = given.get("driver.mtu", "")
    if text and not (text.isascii() and text.isdigit() and len(text) < 6 and (text == "0" or 68 <= int(text) <= 65535)):
        raise InvalidParameter(f"{where}: mtu {text[:100]!r} is not a number from 68 to 65535")
    return int(text or 0)


def parsed_mark(text: str) -> tuple[int, int]:
    """Mark and mask of `MARK[/MASK]`, decimal or 0x…; two zeros for an empty text. Raises
    ValueError.
    """
    if not text:
        return 0, 0
    mark, slash, mask = text.partition("/")
    found = int(mark, 0), int(mask, 0) if slash else 0xFFFFFFFF
    if not (0 <= found[0] < 1 << 32 and 0 < found[1] < 1 << 32) or found[0] & ~found[1]:
        raise ValueError("not a mark of 32 bits within its mask")
    return found


# --- pools ----------------------------------------------------------------------------------------


def span(subnet: Subnet) -> tuple[int, int]:
    """Its first and last number."""
    return int(subnet.network_address), int(subnet.broadcast_address)


class Pool(NamedTuple):
    """An entry of dockerd's default-address-pools: networks get subnets of `size` bits from it."""

    base: Subnet
    size: int

    @classmethod
    def parse(cls, text: str) -> Pool:
        """`base=CIDR,size=BITS`, as dockerd's option. Raises ValueError that says what is wrong."""
        given = _POOL.fullmatch(text)
        if given is None:
            raise ValueError("must be base=CIDR,size=BITS")
        size = int(given["size"])
        try:
            base = ip_network(given["base"])
        except ValueError as error:
            raise ValueError(f"base is not a subnet: {error}") from error
        if base.is_multicast or base.is_loopback or base.is_link_local or base.is_unspecified:
            raise ValueError("base has addresses that containers cannot have")
        most = base.max_prefixlen - 2
        if not base.prefixlen <= size <= most:
            raise ValueError(f"size must be a prefix length from {base.prefixlen}, that of its base, to {most}")
        return cls(base, size)


def free_subnet(taken: Iterable[tuple[int, int]], pools: Iterable[AnySubnet], prefix: int = 0) -> AnySubnet | None:
    """The first subnet of the pools that overlaps no span of `taken`; None when there is none.

    It has `prefix` bits, or is a whole pool when that is 0. All are of one IP version.
    """
    occupied = sorted(taken)
    starts: list[int] = []
    ends: list[int] = []
    for start, end in occupied:
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    for pool in pools:
        size = 1 << pool.max_prefixlen - (prefix or pool.prefixlen)
        first = int(pool.network_address)
        while first + size - 1 <= int(pool.broadcast_address):
            before = bisect.bisect_right(starts, first + size - 1) - 1
            if before < 0 or ends[before] < first:
                return type(pool)((first, prefix or pool.prefixlen))
            first = (ends[before] // size + 1) * size
    return None


def bridge_interface(text: str, version: int) -> IPv4Interface | IPv6Interface:
    """The address of the default bridge in its subnet: `172.30.0.5/16`, or `172.30.0.0/16` for the
    first host. Raises InvalidParameter.
    """
    try:
        interface = ip_interface(text)
    except ValueError as error:
        raise InvalidParameter(f"{text}: is not an IPv{version} subnet: {error}") from error
    subnet = interface.network
    if interface.version != version or "%" in text:
        raise InvalidParameter(f"{text}: is not an IPv{version} subnet")
    if subnet.prefixlen > subnet.max_prefixlen - 2:
        raise InvalidParameter(f"{text}: has no room for containers")
    if subnet.is_multicast or subnet.is_loopback or subnet.prefixlen == 0:
        raise InvalidParameter(f"{text}: is not one of hosts")
    if version == 4 and interface.ip == subnet.broadcast_address:
        raise InvalidParameter(f"{text}: the gateway can't be the broadcast address")
    return ip_interface(f"{subnet[1]}/{subnet.prefixlen}") if interface.ip == subnet.network_address else interface


def hosts(subnet: Subnet) -> tuple[int, int]:
    """First and last number that a host of the subnet may have."""
    first, last = int(subnet.network_address), int(subnet.broadcast_address)
    if subnet.prefixlen > subnet.max_prefixlen - 2:
        return first, last
    return first + 1, last - (subnet.version == 4)


def parsed_address(text: str, what: str, *, zone: bool = False) -> Address:
    """Raises InvalidParameter naming `what` was given. `zone`: an IPv6 address may have one, the
    name or number of an interface (RFC 4007, section 11). ipaddress accepts any text there.
    """
    try:
        if "%" in text and not (zone and LINK_NAME.fullmatch(text.partition("%")[2])):
            raise ValueError("it has a zone that is not one")
        return ip_address(text)
    except ValueError as error:
        raise InvalidParameter(f"{what}: invalid IP address: {text[:100]!r}") from error


def checked_pool(name: str, config: IPAMConfig) -> IPAMConfig:
    where = f"network {name}"
    auxiliary = excluded(config)
    if not config.subnet:
        if config.ip_range or config.gateway or auxiliary:
            raise InvalidParameter(
                f"{where}: every ip-range, gateway or auxiliary address must have a corresponding subnet"
            )
        return config
    subnet = _network(config.subnet, f"{where}: subnet")
    if subnet.prefixlen == subnet.max_prefixlen:
        raise InvalidParameter(f"{where}: subnet {subnet} has no room for containers")
    if subnet.prefixlen == 0 or subnet.is_multicast or subnet.is_loopback:
        raise InvalidParameter(f"{where}: subnet {subnet} is not one of hosts")
    if is_size(subnet) and (config.ip_range or config.gateway or auxiliary):
        raise InvalidParameter(
            f"{where}: subnet {subnet} is only the size of one: it has no ip-range, gateway or auxiliary addresses"
        )
    ip_range = ""
    if config.ip_range:
        part = _network(config.ip_range, f"{where}: IPRange")
        if part.version != subnet.version or not _within(part, subnet):
            raise InvalidParameter(f"{where}: IPRange {part} is not within the subnet {subnet}")
        ip_range = str(part)
    gateway = str(_host(config.gateway, subnet, f"{where}: gateway")) if config.gateway else ""
    seen = {gateway}
    for device, text in auxiliary.items():
        address = str(_host(text, subnet, f"{where}: auxiliary address {device[:100]}"))
        if address in seen:
            raise InvalidParameter(f"{where}: auxiliary address {device[:100]}: {address} is given twice")
        seen.add(address)
    return IPAMConfig(
        subnet=str(subnet),
        ip_range=ip_range,
        gateway=gateway,
        auxiliary_addresses=config.auxiliary_addresses,
        aux_address=config.aux_address,
    )


def is_size(subnet: Subnet) -> bool:
    """True for a subnet such as 0.0.0.0/24, which asks for any one of this size."""
    return int(subnet.network_address) == 0


def excluded(config: IPAMConfig) -> dict[str, str]:
    """Reserved addresses of a pool, by device name, under either of the field's names."""
    return config.auxiliary_addresses | config.aux_address


def _network(text: str, what: str) -> Subnet:
    try:
        if "/" not in text or "%" in text:
            raise ValueError("it has no prefix length, or a zone")
        found = ip_network(text, strict=False)
    except (AddressValueError, NetmaskValueError, ValueError) as error:
        raise InvalidParameter(f"{what}: invalid CIDR address: {text[:100]!r}") from error
    if ip_interface(text).ip != found.network_address:
        raise InvalidParameter(f"{what}: invalid subnet {text}: it should be {found}")
    return found


def _within(part: Subnet, whole: Subnet) -> bool:
    return part.prefixlen >= whole.prefixlen and part.network_address in whole


def _host(text: str, subnet: Subnet, what: str) -> Address:
    # The CLI shows gateways of automatic pools with a prefix length and may send them back.
    address = parsed_address(text.partition("/")[0], what)
    first, last = hosts(subnet)
    if address not in subnet or not first <= int(address) <= last:
        raise InvalidParameter(f"{what}: {address} is not a host address of the subnet {subnet}")
    return address


def with_gateway(name: str, pool: IPAMConfig) -> IPAMConfig:
    """The checked pool of the network of that name with a gateway: by default the first host that
    is not excluded.
    """
    if pool.gateway:
        return pool
    subnet = ip_network(pool.subnet)
    taken = {int(parsed_address(text, "auxiliary address")) for text in excluded(pool).values()}
    first, last = hosts(subnet)
    for number in range(first, min(last, first + len(taken)) + 1):
        if number not in taken:
            return msgspec.structs.replace(pool, gateway=str(subnet[number - int(subnet.network_address)]))
    raise InvalidParameter(f"network {name}: subnet {subnet} has no address left for a gateway")


# --- the list -------------------------------------------------------------------------------------


def matches(record: Listed, filters: Mapping[str, Sequence[str]], in_use: bool) -> bool:
    """True if a list with these filters shows the network. It must match any value of each filter,
    but all labels.

    Raises InvalidParameter for a bad value.
    """
    for name, values in filters.items():
        if name == "name":
            found = patterns.match(values, record.name)
        elif name == "id":
            found = patterns.match(values, record.id)
        elif name == "driver":
            found = record.driver in values
        elif name == "scope":
            found = record.scope in values
        elif name == "label":
            found = labels.have_all(record.labels, values)
        elif name == "type":
            for value in values:
                if value not in ("custom", "builtin"):
                    raise InvalidParameter(f"Invalid filter: 'type'='{value}'")
            found = ("builtin" if record.predefined else "custom") in values
        elif name == "dangling":
            if len(set(values)) > 1 or values[0] not in booleans.WORDS:
                raise InvalidParameter(f"Invalid filter: 'dangling'='{values[-1]}'")
            found = not record.predefined and in_use != booleans.WORDS[values[0]]
        else:
            raise InvalidParameter(f"Invalid filter '{name}'")
        if not found:
            return False
    return True
