"""`Networks.overlays` in memory: what the kernel of one node has of the swarm's networks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from ipaddress import IPv4Address
from types import SimpleNamespace
from typing import Any

from engine.errors import Forbidden, NotFound
from engine.networks.dns.names import Names
from engine.networks.network import NetworkRecord, Overlay
from engine.storage.records import Change, Table


class FakeOverlays:
    """Checks that nothing is set for a network that is not adopted. Every call is noted."""

    def __init__(self) -> None:
        self.adopted: dict[str, tuple[NetworkRecord, Overlay]] = {}
        self.found: dict[str, Any] = {}
        self.awaited: set[str] = set()
        """Kept for the next attempt."""
        self.peers: dict[str, dict[IPv4Address, IPv4Address]] = {}
        self.services: dict[str, dict[IPv4Address, tuple[IPv4Address, ...]]] = {}
        self.names: dict[str, dict[str, Names]] = {}
        self.ports: dict[tuple[str, int], tuple[int, Sequence[IPv4Address]]] | None = None
        self.nodes: dict[str, IPv4Address] = {}
        self.calls: list[str] = []
        self.trouble: Exception | None = None
        """Raised by every call that changes the kernel."""
        self.busy: dict[tuple[str, int], str] = {}

    async def _point(self, call: str) -> None:
        self.calls.append(call)
        await asyncio.sleep(0)
        if self.trouble is not None:
            raise self.trouble

    def _known(self, network_id: str) -> None:
        if network_id not in self.adopted:
            raise NotFound(network_id)

    async def features(self) -> tuple[str, ...]:
        return ("overlay",)

    def held(self, network_id: str) -> bool:
        return False

    async def adopt(self, record: NetworkRecord, meant: Overlay, *, keep: bool = False) -> Any:
        try:
            await self._point("adopt")
        except Exception:
            if keep:
                self.awaited.add(record.id)
            raise
        self.awaited.discard(record.id)
        assert record.scope == "swarm"
        if record.id not in self.adopted:
            self.peers[record.id], self.services[record.id], self.names[record.id] = {}, {}, {}
            self.found[record.id] = SimpleNamespace(record=record, sandboxes={})
        self.found[record.id].overlay = meant
        self.adopted[record.id] = record, meant
        return self.found[record.id]

    async def drop(self, network_id: str) -> None:
        self.awaited.discard(network_id)
        if network_id not in self.found:
            return
        await self._point("drop")
        if network_id in self.found and self.found[network_id].sandboxes:
            raise Forbidden("active endpoints")
        for each in (self.adopted, self.found, self.peers, self.services, self.names):
            each.pop(network_id, None)  # type: ignore[attr-defined]

    async def set_peers(
        self, network_id: str, put: Mapping[IPv4Address, IPv4Address], gone: Collection[IPv4Address]
    ) -> None:
        self._known(network_id)
        await self._point("peers")
        assert not put.keys() & set(gone)
        self.peers[network_id].update(put)
        for each in gone:
            del self.peers[network_id][each]

    async def set_services(
        self, network_id: str, put: Mapping[IPv4Address, Sequence[IPv4Address]], gone: Collection[IPv4Address]
    ) -> None:
        self._known(network_id)
        await self._point("services")
        assert not put.keys() & set(gone)
        self.services[network_id].update({each: tuple(to) for each, to in put.items()})
        for each in gone:
            del self.services[network_id][each]

    def set_names(self, network_id: str, put: Mapping[str, Names], gone: Collection[str]) -> None:
        self._known(network_id)
        self.calls.append("names")
        self.names[network_id].update(put)
        for each in gone:
            del self.names[network_id][each]

    async def set_ports(
        self, ports: Mapping[tuple[str, int], tuple[int, Sequence[IPv4Address]]]
    ) -> dict[tuple[str, int], str]:
        await self._point("ports")
        self.ports = dict(ports)
        return self.busy

    async def set_nodes(self, nodes: Mapping[str, IPv4Address]) -> None:
        await self._point("nodes")
        self.nodes = dict(nodes)


class MemoryRecords:
    """state.db, of which nothing fails."""

    def __init__(self) -> None:
        self.all: dict[tuple[str, str], bytes] = {}
        self.path = "state.db"

    def table(self, kind: str, record_type: Any) -> Any:
        return Table(self, kind, record_type)  # type: ignore[arg-type]

    def rows(self, kind: str) -> list[tuple[str, bytes]]:
        return sorted((key, value) for (of, key), value in self.all.items() if of == kind)

    async def commit(self, *changes: Change) -> None:
        for kind, key, value in changes:
            if value is None:
                self.all.pop((kind, key), None)
            else:
                self.all[kind, key] = value
        await asyncio.sleep(0)


def fake_networks() -> Any:
    """A part `networks` that has nothing but these."""

    async def local_subnets() -> tuple[str, ...]:
        return ("192.168.5.0/24",)

    return SimpleNamespace(overlays=FakeOverlays(), by_id={}, local_subnets=local_subnets)


__all__ = ["FakeOverlays", "MemoryRecords", "fake_networks"]
