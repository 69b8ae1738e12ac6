"""The rules of all bridges in one own nftables table: what is let out, what is masqueraded, what stays apart.

Sets of names and subnets, and a handful of rules over them: a network more is an element more. One call is one transaction. Blocks on the kernel
and is called in threads. Raises: NetfilterError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network, IPv6Network
from typing import NamedTuple

from engine.system import netfilter


class BridgeRules(NamedTuple):
    """What holds for the traffic of one bridge network."""

    bridge: str
    subnets: tuple[IPv4Network | IPv6Network, ...]
    internal: bool = False
    icc: bool = True
    masquerade: bool = True


class Filter:
    """The table of one engine."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._rules: dict[str, BridgeRules] = {}

    def open(self, rules: Iterable[BridgeRules]) -> None:
        """The whole table anew, with these networks."""
        self._rules = {each.bridge: each for each in rules}
        elements = "\n".join(line for each in self._rules.values() for line in self._elements("add", each))
        netfilter.run(f"""
            add table inet {self._table}
            delete table inet {self._table}
            table inet {self._table} {{
                set bridges {{ type ifname; }}
                set inside {{ type ifname . ifname; }}
                set internal {{ type ifname; }}
                set masqueraded {{ type ipv4_addr; flags interval; }}
                chain postrouting {{
                    type nat hook postrouting priority srcnat; policy accept;
                    ip saddr @masqueraded oifname != @bridges masquerade
                }}
                chain forward {{
                    type filter hook forward priority filter; policy accept;
                    iifname . oifname @inside accept
                    iifname @internal drop
                    oifname @internal drop
                    oifname @bridges ct state established,related accept
                    oifname @bridges drop
                    iifname @bridges accept
                }}
            }}
            {elements}
            """)

    def _elements(self, verb: str, rules: BridgeRules) -> Iterator[str]:
        name = f'"{rules.bridge}"'
        yield f"{verb} element inet {self._table} bridges {{ {name} }}"
        if rules.icc:
            yield f"{verb} element inet {self._table} inside {{ {name} . {name} }}"
        if rules.internal:
            yield f"{verb} element inet {self._table} internal {{ {name} }}"
        elif rules.masquerade:
            for subnet in rules.subnets:
                if subnet.version == 4:
                    yield f"{verb} element inet {self._table} masqueraded {{ {subnet} }}"

    def add_network(self, rules: BridgeRules) -> None:
        netfilter.run("\n".join(self._elements("add", rules)))
        self._rules[rules.bridge] = rules

    def remove_network(self, bridge: str) -> None:
        rules = self._rules.pop(bridge, None)
        if rules is not None:
            netfilter.run("\n".join(self._elements("delete", rules)))

    def close(self, remove: bool) -> None:
        """With `remove` the table goes; else it stays for the containers that run on."""
        if remove and netfilter.available():
            netfilter.run(f"add table inet {self._table}\ndelete table inet {self._table}")
