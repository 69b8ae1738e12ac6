"""Virtual addresses of services, and addresses of containers on attachable networks.

A service has one virtual address on each network that its tasks are on, in the status record
(`ServiceStatus.endpoint`), unless its mode is `dnsrr`. It keeps them until it is removed, or until
neither its spec needs them nor a live task is on their network: an update that takes a network away
may pause, and what has not been updated is reached as before. The loop runs before those that make
tasks, so that a new service has its virtual addresses before its tasks have theirs.

An attachment gets the address that its client wants, or the next one; or the reason why there is
none, which its manager passes on. Attachments of nodes that are gone, or that were refused and not
taken back, are deleted.

Not here: tasks, which get their addresses together with their node (`scheduler.py`); the records of
networks, which are complete when they are created.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from engine.errors import EngineError, ServerError
from engine.manager import tasks as rules
from engine.manager.addresses import Addresses
from engine.manager.loops import Acting
from engine.manager.records import (
    ATTACHMENTS,
    NETWORKS,
    NODE_DATA,
    NODES,
    SERVICE_STATUS,
    SERVICES,
    TASKS,
    AttachmentRecord,
    ServiceStatus,
)
from engine.manager.scheduler import BATCH, SLICE
from engine.manager.store import Change, Compare, Delete, Entry, Event, Put, Store
from engine.swarm_session.clock import SECOND, Clock
from engine.swarm_session.states import NodeState
from engine.wire.services import Endpoint, ServiceSpec, VirtualIP

REFUSED = 60 * SECOND
"""Nanoseconds that an attachment without an address is kept for its manager."""
LOST = 24 * 3600 * SECOND
"""Nanoseconds that a node may be down before its attachments are given up, as its tasks are."""
SWEEP = 30.0
"""Seconds between two looks at all attachments."""

DNSRR = "dnsrr"

_Group = tuple[Sequence[Change], Sequence[Compare]]
_log = logging.getLogger(__name__)


class Allocator:
    name = "allocator"

    def __init__(self, store: Store, clock: Clock, addresses: Addresses) -> None:
        self._store = store
        self._clock = clock
        self._addresses = addresses
        self._services: dict[str, None] = {}
        """To look at."""
        self._on: dict[tuple[str, str], int] = {}
        """By service and network: live tasks with an address there."""
        self._attachments: dict[str, None] = {}
        """Without an address."""
        self._exhausted: dict[str, set[str]] = {}
        """Services that wait for a virtual address, by network."""
        self._sweep_at = 0.0

    # --- events -----------------------------------------------------------------------------------

    def changed(self, event: Event) -> None:
        kind = event.kind
        if kind is SERVICES:
            if event.new is None:
                self._services.pop(event.key, None)
            elif event.old is None or not _alike(event.old.record.spec, event.new.record.spec):
                self._services[event.key] = None
        elif kind is TASKS:
            for entry, change in ((event.new, 1), (event.old, -1)):
                if entry is not None and entry.record.networks and rules.live(entry.record):
                    for each in entry.record.networks:
                        self._count(entry.record.service, each.network, change)
        elif kind is ATTACHMENTS:
            if event.new is not None and _is_open(event.new.record):
                self._attachments[event.key] = None
            else:
                self._attachments.pop(event.key, None)
        elif kind is NETWORKS:
            if event.new is not None and event.new.record.ingress:
                self._services |= dict.fromkeys(self._store.all(SERVICES))
            elif event.new is None:
                for service in self._exhausted.pop(event.key, ()):
                    self._services[service] = None
        elif kind is NODES and event.new is None:
            self._sweep_at = 0.0

    def _count(self, service: str, network: str, change: int) -> None:
        count = self._on.get((service, network), 0) + change
        if count:
            self._on[service, network] = count
        else:
            del self._on[service, network]
            if self._store.get(SERVICES, service) is not None:
                self._services[service] = None

    def take_over(self) -> None:
        self._services |= dict.fromkeys(self._store.all(SERVICES))
        self._attachments |= {
            key: None for key, entry in self._store.all(ATTACHMENTS).items() if _is_open(entry.record)
        }
        self._sweep_at = 0.0

    def due(self) -> float | None:
        if self._services or self._attachments:
            return 0
        times = [time for network in self._exhausted if (time := self._addresses.free_at(network)) is not None]
        if self._store.all(ATTACHMENTS):
            times.append(self._sweep_at)
        return min(times, default=None)

    # --- the loop ---------------------------------------------------------------------------------

    async def step(self, acting: Acting) -> None:
        now = self._clock.monotonic()
        for network in list(self._exhausted):
            if (time := self._addresses.free_at(network)) is not None and time <= now:
                self._services |= dict.fromkeys(self._exhausted.pop(network))
        await self._serve(acting)
        await self._attach(acting)
        if self._sweep_at <= now and self._store.all(ATTACHMENTS):
            await self._sweep(acting)
            self._sweep_at = now + SWEEP

    async def _serve(self, acting: Acting) -> None:
        """Give services the virtual addresses that they lack, and take back what they do not
        need.
        """
        services, self._services = list(self._services), {}
        for begin in range(0, len(services), BATCH):
            groups: list[_Group] = []
            owners: list[str] = []
            try:
                for number, key in enumerate(services[begin : begin + BATCH]):
                    if (group := self._look(key)) is not None:
                        groups.append(group)
                        owners.append(key)
                    if number % SLICE == SLICE - 1:
                        await asyncio.sleep(0)
                written = await acting.commit_many(groups) if groups else []
            except BaseException:
                self._services |= dict.fromkeys(services[begin:])
                self._forget(owners)
                raise
            lost = [key for key, done in zip(owners, written, strict=True) if not done]
            self._forget(lost)
            self._services |= {key: None for key in lost if self._store.get(SERVICES, key) is not None}

    def _look(self, key: str) -> _Group | None:
        """The change of one service's endpoint."""
        entry, status_entry = self._store.get(SERVICES, key), self._store.get(SERVICE_STATUS, key)
        if entry is None:
            return None
        spec = entry.record.spec
        status = ServiceStatus() if status_entry is None else status_entry.record
        has = {each.network_id: each for each in status.endpoint.virtual_ips} if status.endpoint is not None else {}
        networks: dict[str, None] = {}
        if not _is_dnsrr(spec):
            networks |= dict.fromkeys(self._addresses.networks_of(spec))
            networks |= {network: None for network in has if (key, network) in self._on}
        virtual_ips: list[VirtualIP] = []
        for network in networks:
            virtual = has.get(network)
            if virtual is None:
                address = self._addresses.add(key, network)
                if address is None:
                    _log.warning("service %s: %s", spec.name, self._addresses.reason(network))
                    self._exhausted.setdefault(network, set()).add(key)
                    continue
                virtual = VirtualIP(network_id=network, addr=self._addresses.cidr(address))
            virtual_ips.append(virtual)
        if virtual_ips == list(has.values()):
            return None
        changed = replace(status, endpoint=replace(status.endpoint or Endpoint(), virtual_ips=virtual_ips))
        compares = [
            Compare(SERVICES, key, entry.revision),
            Compare(SERVICE_STATUS, key, 0 if status_entry is None else status_entry.revision),
        ]
        return [Put(SERVICE_STATUS, key, changed)], compares

    async def _attach(self, acting: Acting) -> None:
        """Answer attachments."""
        attachments, self._attachments = list(self._attachments), {}
        groups: list[_Group] = []
        owners: list[str] = []
        try:
            for key in attachments:
                entry = self._store.get(ATTACHMENTS, key)
                if entry is not None and _is_open(entry.record):
                    groups.append(self._answer(entry, key))
                    owners.append(key)
            written = await acting.commit_many(groups) if groups else []
        except BaseException:
            self._attachments |= dict.fromkeys(attachments)
            self._forget(owners)
            raise
        lost = [key for key, done in zip(owners, written, strict=True) if not done]
        self._forget(lost)
        self._attachments |= {key: None for key in lost if self._store.get(ATTACHMENTS, key) is not None}

    def _answer(self, entry: Entry[AttachmentRecord], key: str) -> _Group:
        record = entry.record
        try:
            if record.wanted:
                given = self._addresses.want(key, record.network, record.wanted)
            elif (found := self._addresses.add(key, record.network, wait=0)) is not None:
                given = found
            else:
                raise ServerError(self._addresses.reason(record.network))
            answered = replace(record, address=given.address)
        except EngineError as error:
            answered = replace(record, error=error.message, kind=type(error).__name__)
        return [Put(ATTACHMENTS, key, answered)], [Compare(ATTACHMENTS, key, entry.revision)]

    def _forget(self, holders: Sequence[str]) -> None:
        for holder in holders:
            self._addresses.forget(holder)

    async def _sweep(self, acting: Acting) -> None:
        """Delete attachments that nothing can use."""
        groups: list[_Group] = [
            ([Delete(ATTACHMENTS, key)], [Compare(ATTACHMENTS, key, entry.revision)])
            for key, entry in self._store.all(ATTACHMENTS).items()
            if self._is_left(entry.record)
        ]
        if groups:
            await acting.commit_many(groups)

    def _is_left(self, record: AttachmentRecord) -> bool:
        now = self._clock.now()
        if record.error and now - record.created > REFUSED:
            return True
        if self._store.record(NODES, record.node) is None:
            return True
        data = self._store.record(NODE_DATA, record.node)
        return data is not None and data.state is NodeState.DOWN and now - data.since > LOST


def _is_open(record: AttachmentRecord) -> bool:
    return not record.address and not record.error


def _is_dnsrr(spec: ServiceSpec) -> bool:
    return spec.endpoint_spec is not None and spec.endpoint_spec.mode == DNSRR


def _alike(old: ServiceSpec, new: ServiceSpec) -> bool:
    """The specs need the same virtual addresses."""
    return old.task_template.networks == new.task_template.networks and old.endpoint_spec == new.endpoint_spec
