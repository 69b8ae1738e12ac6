"""A network plugin and an IPAM plugin for the tests. The network plugin works: it has a bridge for
each network, and a veth pair for each endpoint, made with ip(8).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from ipaddress import ip_address, ip_interface, ip_network

from tests.support.engine.harness import links
from tests.support.plugins.protocol import Answer, Plugin

Calls = dict[str, Callable[[Answer], Answer]]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class NetworkPlugin(Plugin):
    """`prefix` begins the names of its links, so that leftovers are found."""

    def __init__(self, prefix: str) -> None:
        super().__init__("NetworkDriver")
        self.prefix = prefix
        self.scope = "local"
        self.networks: dict[str, Answer] = {}
        self.endpoints: dict[str, Answer] = {}
        self.joined: dict[str, str] = {}
        """Endpoints with their sandbox's path."""
        self.key_was_there: list[bool] = []
        self.fills: Answer = {}
        """What CreateEndpoint answers as Interface."""
        self.more: Answer = {}
        """Fields of the answers to Join, over its own."""

    def methods(self) -> Calls:
        return {
            "NetworkDriver.GetCapabilities": lambda _: {"Scope": self.scope},
            "NetworkDriver.CreateNetwork": self._create_network,
            "NetworkDriver.DeleteNetwork": self._delete_network,
            "NetworkDriver.CreateEndpoint": self._create_endpoint,
            "NetworkDriver.DeleteEndpoint": self._delete_endpoint,
            "NetworkDriver.Join": self._join,
            "NetworkDriver.Leave": self._leave,
        }

    def called(self, *but: str) -> list[str]:
        """Names of the calls so far, without activation and questions."""
        quiet = ("Plugin.Activate", "NetworkDriver.GetCapabilities", *but)
        return [method.partition(".")[2] for method, _ in self.calls if method not in quiet]

    def bodies(self, method: str) -> list[Answer]:
        return [body for called, body in self.calls if called.endswith(f".{method}")]

    def links(self) -> list[str]:
        """Its links on the host."""
        return [name for name in links() if name.startswith(self.prefix)]

    def remove_all(self) -> None:
        for name in self.links():
            subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)

    def bridge(self, network: str) -> str:
        return f"{self.prefix}b{network[:8]}"

    def _create_network(self, body: Answer) -> Answer:
        name = self.bridge(body["NetworkID"])
        ip("link", "add", name, "type", "bridge")
        ip("link", "set", name, "up")
        for data in (*body["IPv4Data"], *body["IPv6Data"]):
            if "Gateway" in data:
                ip("address", "add", data["Gateway"], "dev", name, "nodad") if ":" in data["Gateway"] else ip(
                    "address", "add", data["Gateway"], "dev", name
                )
        self.networks[body["NetworkID"]] = body
        return {}

    def _delete_network(self, body: Answer) -> Answer:
        del self.networks[body["NetworkID"]]
        ip("link", "delete", self.bridge(body["NetworkID"]))
        return {"Err": ""}

    def _create_endpoint(self, body: Answer) -> Answer:
        self.networks[body["NetworkID"]]  # known
        self.endpoints[body["EndpointID"]] = body
        return {"Interface": self.fills}

    def _delete_endpoint(self, body: Answer) -> Answer:
        del self.endpoints[body["EndpointID"]]
        outer = f"{self.prefix}h{body['EndpointID'][:8]}"
        subprocess.run(["ip", "link", "delete", outer], check=False, capture_output=True)
        return {}

    def _join(self, body: Answer) -> Answer:
        self.endpoints[body["EndpointID"]]  # known
        outer, inner = (f"{self.prefix}{end}{body['EndpointID'][:8]}" for end in "hc")
        ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        ip("link", "set", outer, "master", self.bridge(body["NetworkID"]), "up")
        self.joined[body["EndpointID"]] = body["SandboxKey"]
        self.key_was_there.append(os.path.ismount(body["SandboxKey"]))
        network = self.networks[body["NetworkID"]]
        gateways = [data["Gateway"].partition("/")[0] for data in network["IPv4Data"] if "Gateway" in data]
        sixth = [data["Gateway"].partition("/")[0] for data in network["IPv6Data"] if "Gateway" in data]
        return {
            "InterfaceName": {"SrcName": inner, "DstPrefix": "eth"},
            "Gateway": gateways[0] if gateways else "",
            "GatewayIPv6": sixth[0] if sixth else "",
            "StaticRoutes": None,
        } | self.more

    def _leave(self, body: Answer) -> Answer:
        del self.joined[body["EndpointID"]]
        return {}


class IpamPlugin(Plugin):
    """Gives addresses of its pools in order. Pool ids are `POOL/SUBNET`."""

    def __init__(self, *, mac: bool = False, replay: bool = False) -> None:
        super().__init__("IpamDriver")
        self.capabilities = {"RequiresMACAddress": mac, "RequiresRequestReplay": replay}
        self.pools: dict[str, set[str]] = {}
        """Addresses in use, by pool id."""

    def methods(self) -> Calls:
        return {
            "IpamDriver.GetCapabilities": lambda _: self.capabilities,
            "IpamDriver.GetDefaultAddressSpaces": lambda _: {
                "LocalDefaultAddressSpace": "here",
                "GlobalDefaultAddressSpace": "there",
            },
            "IpamDriver.RequestPool": self._request_pool,
            "IpamDriver.ReleasePool": self._release_pool,
            "IpamDriver.RequestAddress": self._request_address,
            "IpamDriver.ReleaseAddress": self._release_address,
        }

    def bodies(self, method: str) -> list[Answer]:
        return [body for called, body in self.calls if called.endswith(f".{method}")]

    def _request_pool(self, body: Answer) -> Answer:
        pool = body["Pool"] or ("fd77::/64" if body["V6"] else f"10.77.{len(self.pools)}.0/24")
        identifier = f"here/{pool}"
        if identifier in self.pools:
            return {"Error": f"pool {pool} is in use"}
        self.pools[identifier] = set()
        return {"PoolID": identifier, "Pool": pool, "Data": {}}

    def _release_pool(self, body: Answer) -> Answer:
        left = self.pools.pop(body["PoolID"])
        return {"Error": f"addresses in use: {left}"} if left else {}

    def _request_address(self, body: Answer) -> Answer:
        used = self.pools[body["PoolID"]]
        subnet = ip_network(body["PoolID"].partition("/")[2])
        asked = body["Address"]
        found = ip_address(asked) if asked else next(each for each in subnet.hosts() if str(each) not in used)
        if str(found) in used:
            return {"Error": f"address {found} is in use"}
        used.add(str(found))
        return {"Address": str(ip_interface(f"{found}/{subnet.prefixlen}")), "Data": {}}

    def _release_address(self, body: Answer) -> Answer:
        self.pools[body["PoolID"]].remove(body["Address"])
        return {}
