"""The addresses on the swarm's networks: which are taken, and which is given next.

An address is taken by a task from when its record has it until the task's end is confirmed: until
its status is final, or its record is gone. It is taken by a service as long as the service's status
has it as a virtual address, and by an attached container as long as the attachment exists. Nothing
else counts: what a service's spec says of networks may have changed since.

Addresses that were never used come first, then those that were free for the longest time. Within a
minute after its release an address is not given to a task or service, as nodes may still have
routes and connections of its last holder. Nor is it to an attached container, unless no other is
free: a task waits, but the start of a container fails.

Each manager keeps this index up to date from the store's events, and so a new leader knows what is
taken and what was released. Only loops of the leader give addresses (`add`, `give`); what they have
given counts as taken at once. When the record is not written, `forget` takes it back.

A manager that has just started knows no earlier releases. It gives the addresses behind the newest
known one first.

Not here: who gets addresses, and when (`scheduler.py`, `allocator.py`).

Threads: the event loop's.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import socket
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network

from engine.errors import Forbidden, InvalidParameter, NotFound
from engine.manager import tasks as rules
from engine.manager.loops import Acting
from engine.manager.records import (
    ATTACHMENTS,
    NETWORKS,
    SERVICE_STATUS,
    TASK_STATUS,
    TASKS,
    Attached,
    AttachmentRecord,
    NetworkRecord,
    ServiceStatus,
    Task,
)
from engine.manager.store import Event, Store
from engine.swarm_session.clock import SECOND, Clock
from engine.wire.services import ServiceSpec

WAIT = 60.0
"""Seconds after a release in which the address is not given again."""
MANY = 65536
"""Released addresses that are remembered. Beyond, they are used before those that never were."""
NODE_LOCAL = frozenset({"host", "none", "bridge"})
"""Targets of a service that are networks of each node, without addresses of the swarm."""

_log = logging.getLogger(__name__)


def number_of(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


def text_of(number: int) -> str:
    return socket.inet_ntoa(number.to_bytes(4, "big"))


class Pool:
    """The addresses of one network. Until `define`, which may come later than its tasks, none is
    given.
    """

    __slots__ = (
        "_ahead",
        "_holders",
        "_newest",
        "_reserved",
        "_spans",
        "_unused",
        "doubles",
        "freed",
        "record",
        "size",
    )

    def __init__(self) -> None:
        self.record: NetworkRecord | None = None
        self.size = 0
        """Addresses that tasks, services and containers can have."""
        self.doubles: set[int] = set()
        """Addresses with several holders. Should be empty whenever all records are read."""
        self.freed: OrderedDict[int, float] = OrderedDict()
        """Released addresses and when, the oldest first."""
        self._holders: dict[int, str | set[str]] = {}
        self._spans: tuple[range, ...] = ()
        self._reserved: frozenset[int] = frozenset()
        self._newest = (0, 0)
        """The address of the youngest record, behind the record's revision."""
        self._unused: Iterator[int] | None = None
        """Goes once through all spans."""
        self._ahead: int | None = None
        """The last one of `_unused`, which may have been taken since."""

    def define(self, record: NetworkRecord) -> None:
        self.record = record
        spans, reserved = [], set()
        for subnet in record.subnets:
            whole = IPv4Network(subnet.subnet)
            part = IPv4Network(subnet.range) if subnet.range else whole
            spans.append(range(int(part.network_address), int(part.broadcast_address) + 1))
            if whole.prefixlen < 31:
                reserved |= {int(whole.network_address), int(whole.broadcast_address)}
            reserved |= {number_of(text) for text in (subnet.gateway, *subnet.reserved.values()) if text}
        self._spans, self._reserved = tuple(spans), frozenset(reserved)
        self.size = sum(len(span) for span in spans) - sum(self._in_spans(number) for number in reserved)

    @property
    def is_empty(self) -> bool:
        return not self._holders

    def holds(self, number: int) -> bool:
        """True if the address is taken."""
        return number in self._holders

    def prefix(self, number: int) -> int:
        """The prefix length of the subnet that the address is in; 0 when it is in none."""
        for subnet in self.record.subnets if self.record is not None else ():
            network = IPv4Network(subnet.subnet)
            if IPv4Address(number) in network:
                return network.prefixlen
        return 0

    def may_have(self, number: int) -> bool:
        """True if the address is in a subnet and not reserved."""
        return bool(self.prefix(number)) and number not in self._reserved

    def _in_spans(self, number: int) -> bool:
        return any(number in span for span in self._spans)

    # --- taking and releasing ---------------------------------------------------------------------

    def take(self, number: int, holder: str, revision: int) -> None:
        before = self._holders.get(number)
        if before is None:
            self._holders[number] = holder
            self.freed.pop(number, None)
        elif isinstance(before, set):
            before.add(holder)
        elif before != holder:
            self._holders[number] = {before, holder}
            self.doubles.add(number)
        self._newest = max(self._newest, (revision, number))

    def release(self, number: int, holder: str, now: float, *, unused: bool) -> None:
        """`unused`: the holder never had it, so it is given again at once."""
        before = self._holders.get(number)
        if isinstance(before, set):
            before.discard(holder)
            if len(before) == 1:
                self._holders[number] = before.pop()
                self.doubles.discard(number)
        elif before == holder:
            del self._holders[number]
            if self._in_spans(number) and number not in self._reserved:
                self.freed[number] = -math.inf if unused else now
                self.freed.move_to_end(number, last=not unused)

    # --- giving -----------------------------------------------------------------------------------

    def next(self, now: float, started: int, wait: float = WAIT) -> int | None:
        """The address to give; None when all are taken or were released in the last `wait` seconds.
        `started`: nanoseconds since the epoch, before which releases are not known.
        """
        if len(self.freed) > MANY and (number := self._oldest(now)) is not None:
            return number
        number = self._never_used(started)
        return self._oldest(now, wait) if number is None else number

    def free_at(self, now: float, started: int) -> float | None:
        """When an address will be free (monotonic), 0 for now; None when all are taken."""
        if self.next(now, started) is not None:
            return 0
        return None if not self.freed else next(iter(self.freed.values())) + WAIT

    def _oldest(self, now: float, wait: float = WAIT) -> int | None:
        for number, since in self.freed.items():
            return number if since + wait <= now else None
        return None

    def _never_used(self, started: int) -> int | None:
        if self._unused is None:
            self._unused = self._in_order(started)
        while (number := self._ahead) is None or number in self._holders or number in self.freed:
            self._ahead = next(self._unused, None)
            if self._ahead is None:
                return None
        return number

    def _in_order(self, started: int) -> Iterator[int]:
        """All addresses, from where releases before `started` are least likely."""
        spans = self._spans
        total = sum(len(span) for span in spans)
        first = 0
        revision, newest = self._newest
        if revision and self._in_spans(newest):
            for span in spans:
                if newest in span:
                    first += newest - span.start + 1
                    break
                first += len(span)
        elif self.record is not None and self.record.created < started and total:
            first = random.randrange(total)
        every = itertools.chain(*spans)
        again = itertools.chain(*spans)
        turned = itertools.chain(_skipping(spans, first), itertools.islice(again, first)) if first else every
        return (number for number in turned if number not in self._reserved)


def _skipping(spans: Sequence[range], count: int) -> Iterator[int]:
    """All numbers of `spans` but the first `count`."""
    for span in spans:
        yield from span[count:]
        count = max(0, count - len(span))


class Addresses:
    """Those of all networks. Not a loop that does anything: the others ask it."""

    name = "addresses"

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._started = clock.now()
        self._pools: dict[str, Pool] = {}
        self._held: dict[str, tuple[Attached, ...]] = {}
        """By id of the task, service or attachment."""
        self.ingress = ""
        """Id of the network ingress; "" when there is none."""

    # --- events -----------------------------------------------------------------------------------

    def changed(self, event: Event) -> None:
        kind = event.kind
        if kind is TASKS:
            if event.new is None:
                if event.key in self._held:
                    self._hold(event.key, ())
            elif event.new.record.networks or event.key in self._held:
                self._hold(event.key, self._of_task(event.key, event.new.record), event.new.created)
        elif kind is TASK_STATUS:
            if event.key in self._held and event.new is not None and event.new.record.state.ended:
                self._hold(event.key, ())
        elif kind is SERVICE_STATUS:
            if event.new is not None:
                self._hold(event.key, of_service(event.new.record), event.new.created)
            else:
                self._hold(event.key, ())
        elif kind is ATTACHMENTS:
            if event.new is not None:
                self._hold(event.key, _of_attachment(event.new.record), event.new.created)
            else:
                self._hold(event.key, ())
        elif kind is NETWORKS:
            self._network(event)

    def _network(self, event: Event) -> None:
        if event.new is not None:
            self._pools.setdefault(event.key, Pool()).define(event.new.record)
            if event.new.record.ingress:
                self.ingress = event.key
        else:
            self._pools.pop(event.key, None)
            if self.ingress == event.key:
                others = (key for key, entry in self._store.all(NETWORKS).items() if entry.record.ingress)
                self.ingress = next(others, "")

    def _of_task(self, key: str, task: Task) -> tuple[Attached, ...]:
        status = self._store.record(TASK_STATUS, key)
        return () if status is not None and status.state.ended else task.networks

    def _hold(self, holder: str, new: tuple[Attached, ...], revision: int = 0, *, unused: bool = False) -> None:
        """The holder has these addresses and no others."""
        old = self._held.get(holder, ())
        if old == new:
            return
        if new:
            self._held[holder] = new
        else:
            del self._held[holder]
        for each in new:
            if each not in old:
                self._pools.setdefault(each.network, Pool()).take(number_of(each.address), holder, revision)
        now = self._clock.monotonic()
        for each in old:
            if each not in new and (pool := self._pools.get(each.network)) is not None:
                pool.release(number_of(each.address), holder, now, unused=unused)
                if pool.record is None and pool.is_empty:
                    del self._pools[each.network]

    # --- asking -----------------------------------------------------------------------------------

    def networks_of(self, spec: ServiceSpec) -> tuple[str, ...]:
        """Ids of the networks on which tasks of this spec have an address."""
        targets = spec.task_template.networks
        ingress = bool(self.ingress) and rules.publishes(spec)
        if not targets and not ingress:
            return ()
        found = dict.fromkeys([self.ingress] if ingress else [])
        found |= dict.fromkeys(each.target for each in targets if each.target not in NODE_LOCAL)
        return tuple(found)

    def features_of(self, spec: ServiceSpec) -> frozenset[str]:
        """What the kernel of a node needs for tasks of this spec."""
        networks = self.networks_of(spec)
        if not networks:
            return frozenset()
        records = [pool.record for network in networks if (pool := self._pools.get(network)) is not None]
        encrypted = any(record is not None and record.encrypted for record in records)
        return frozenset({"overlay", "esp"} if encrypted else {"overlay"})

    def free_at(self, network: str) -> float | None:
        """When the network has a free address (monotonic), 0 for now; None when that is not
        known.
        """
        pool = self._pools.get(network)
        return None if pool is None else pool.free_at(self._clock.monotonic(), self._started - _SINCE)

    def exhausted(self, networks: Sequence[str]) -> str:
        """The first of these networks that has no free address now; "" when all have one."""
        now = self._clock.monotonic()
        for network in networks:
            pool = self._pools.get(network)
            if pool is None or pool.next(now, self._started - _SINCE) is None:
                return network
        return ""

    def reason(self, network: str) -> str:
        """Why a task waits for an address of this network."""
        pool = self._pools.get(network)
        if pool is None or pool.record is None:
            return f"network {network} not found"
        return f"network {pool.record.name}: no free address of {pool.size}"

    def cidr(self, each: Attached) -> str:
        """The address with the length of its subnet's prefix."""
        pool = self._pools.get(each.network)
        prefix = 0 if pool is None else pool.prefix(number_of(each.address))
        return f"{each.address}/{prefix or 32}"

    def held(self, holder: str) -> tuple[Attached, ...]:
        return self._held.get(holder, ())

    def doubles(self) -> list[str]:
        """Networks and addresses that several tasks, services or containers have."""
        return [
            f"{text_of(number)} on network {pool.record.name if pool.record is not None else network}"
            for network, pool in self._pools.items()
            for number in sorted(pool.doubles)
        ]

    # --- giving -----------------------------------------------------------------------------------

    def add(self, holder: str, network: str, wait: float = WAIT) -> Attached | None:
        """Give one more address to the holder; None when there is none. One that was released in
        the last `wait` seconds is not given.
        """
        pool = self._pools.get(network)
        number = None if pool is None else pool.next(self._clock.monotonic(), self._started - _SINCE, wait)
        if number is None:
            return None
        given = Attached(network, text_of(number))
        self._hold(holder, (*self.held(holder), given))
        return given

    def give(self, holder: str, networks: Sequence[str]) -> tuple[Attached, ...] | None:
        """One address on each of the networks; None when one of them has none: nothing is given
        then.
        """
        for network in networks:
            if self.add(holder, network) is None:
                self.forget(holder)
                return None
        return self.held(holder)

    def want(self, holder: str, network: str, address: str) -> Attached:
        """Give this address to the holder. The minute after a release does not count: a container
        that is started again keeps its address.

        Raises the kinds that networks of one engine raise (`networks/ipam.py`): InvalidParameter
        for an address outside of the subnets, Forbidden for one that is taken; NotFound without the
        network.
        """
        pool = self._pools.get(network)
        if pool is None or pool.record is None:
            raise NotFound(self.reason(network))
        try:
            number = int(IPv4Address(address))
        except ValueError:
            raise InvalidParameter(f"IPv4Address: {address!r} is no IPv4 address") from None
        name = pool.record.name
        if not pool.prefix(number):
            raise InvalidParameter(
                f"invalid address {address}: it does not belong to any of the subnets of network {name}"
            )
        if not pool.may_have(number) or pool.holds(number):
            raise Forbidden(f"address already in use: {address} on network {name}")
        given = Attached(network, text_of(number))
        self._hold(holder, (*self.held(holder), given))
        return given

    def forget(self, holder: str) -> None:
        """What was given was not written: the holder has what its record says."""
        if holder not in self._held:
            return
        task = self._store.record(TASKS, holder)
        status = self._store.record(SERVICE_STATUS, holder)
        attachment = self._store.record(ATTACHMENTS, holder)
        recorded: tuple[Attached, ...] = ()
        if task is not None:
            recorded = self._of_task(holder, task)
        elif status is not None:
            recorded = of_service(status)
        elif attachment is not None:
            recorded = _of_attachment(attachment)
        self._hold(holder, recorded, unused=True)

    # --- the loop ---------------------------------------------------------------------------------

    def take_over(self) -> None:
        for double in self.doubles():
            _log.error("address %s is taken more than once", double)

    def due(self) -> float | None:
        return None

    async def step(self, acting: Acting) -> None:
        pass


_SINCE = int(WAIT) * SECOND
"""A network that is younger than this when a manager starts has hardly had releases before."""


def of_service(status: ServiceStatus) -> tuple[Attached, ...]:
    """The virtual addresses of a service."""
    if status.endpoint is None:
        return ()
    return tuple(Attached(each.network_id, each.addr.partition("/")[0]) for each in status.endpoint.virtual_ips)


def _of_attachment(record: AttachmentRecord) -> tuple[Attached, ...]:
    return (Attached(record.network, record.address),) if record.address else ()
