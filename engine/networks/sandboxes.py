"""Sandboxes: network namespaces with a veth pair into a bridge, a few of them kept ready.

Making one takes the kernel 1.5 ms when it is idle and many times that while it tears others down, all under one lock of its own. So a thread keeps a
stock ahead of the demand: 8 at rest, up to 64 when the stock ran empty, back to 8 after quiet seconds. A ready one has its loopback up and
its host end on the bridge; address and route come when it is used (`Sandbox.configure`, 0.2 ms).

Owns: the descriptors of ready sandboxes and the thread. A namespace whose last descriptor and process are gone is removed by the kernel with
both ends of its veth. Raises: OSError from the kernel; BridgeFull.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

from engine.system import namespaces, netlink
from engine.system.netlink import Netlink, NetlinkError

logger = logging.getLogger(__name__)

STOCK, MOST = 8, 64
QUIET = 10.0
"""Seconds without demand after which the stock is halved."""
REST = 0.05
"""Seconds after the last demand before the stock is filled up again, unless it is half empty: filling competes for the kernel's lock."""
LINGER = 5.0
"""Seconds after which the host end of a released sandbox is deleted if the kernel has not done so: somebody holds the namespace."""

INSIDE = "eth0"
PORTS = 1023
"""Ports of one bridge (BR_MAX_PORTS of the kernel, without the one that it does not use)."""

_NO_IPV6 = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")


class BridgeFull(OSError):
    """The bridge has no port left."""


class Sandbox:
    """One namespace, from the stock to a container. `endpoint_id` (64 hex) names it; the host end's name is derived from that."""

    __slots__ = ("_inside", "descriptor", "endpoint_id", "index")

    def __init__(self, descriptor: int, inside: Netlink, endpoint_id: str) -> None:
        self.descriptor = descriptor
        self.endpoint_id = endpoint_id
        self.index = 0
        self._inside: Netlink | None = inside

    @property
    def path(self) -> str:
        """For the OCI runtime, which another process starts: valid while this descriptor is open."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def prepare(self) -> None:
        """Both links up; find the inner end."""
        assert self._inside is not None
        self._inside.apply(netlink.change_link("lo", up=True), netlink.change_link(INSIDE, up=True))
        link = self._inside.link(INSIDE)
        if link is None:
            raise NetlinkError(errno.ENODEV, f"{INSIDE} is not in its namespace")
        self.index = link.ifindex

    def configure(self, interface: IPv4Interface, gateway: IPv4Address, mac: str) -> None:
        """Give the inner end its MAC, address and default route. Once."""
        assert self._inside is not None
        self._inside.apply(
            netlink.change_link(INSIDE, mac=mac),
            netlink.add_address(self.index, interface),
            netlink.add_default_route(gateway, self.index),
        )
        # The socket would keep the namespace alive.
        self._inside.close()
        self._inside = None

    def close(self) -> None:
        """Let go of the namespace. Idempotent."""
        if self._inside is not None:
            self._inside.close()
            self._inside = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def host_end(endpoint_id: str) -> str:
    """Name of the veth's end on the host: 15 characters, the most that the kernel takes."""
    return f"veth{endpoint_id[:11]}"


class Stock:
    """Ready sandboxes of one bridge. `take` from any thread but the event loop's: it may wait for the kernel."""

    def __init__(self, links: Netlink, bridge: str, bridge_index: int) -> None:
        self._links = links
        self._bridge = bridge
        self._index = bridge_index
        self._ready: deque[Sandbox] = deque()
        self._lingering: deque[tuple[float, str]] = deque()
        self._wanted = STOCK
        self._demand = 0.0
        self._pause_until = 0.0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._keep, name="sandboxes", daemon=True)
        self._thread.start()

    def take(self) -> Sandbox:
        """A ready sandbox, or one made now when the stock is empty. Raises OSError; BridgeFull when the bridge has no port left."""
        with self._changed:
            self._demand = time.monotonic()
            sandbox = self._ready.popleft() if self._ready else None
            if sandbox is None:
                self._wanted = min(MOST, self._wanted * 2)
            self._changed.notify()
        return sandbox if sandbox is not None else self._make()

    def released(self, endpoint_ids: Iterable[str]) -> None:
        """Delete the host ends of these later, should they still be there."""
        with self._changed:
            due = time.monotonic() + LINGER
            self._lingering.extend((due, host_end(each)) for each in endpoint_ids)
            self._changed.notify()

    def close(self) -> None:
        """End the thread, let go of the stock, delete what lingers."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        while self._ready:
            self._ready.popleft().close()
        self._delete([name for _, name in self._lingering])
        self._lingering.clear()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while True:
            surplus: list[Sandbox] = []
            due: list[str] = []
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                if self._wanted > STOCK and now - self._demand > QUIET:
                    self._wanted = max(STOCK, self._wanted // 2)
                    self._demand = now
                while len(self._ready) > self._wanted:
                    surplus.append(self._ready.popleft())
                while self._lingering and self._lingering[0][0] <= now:
                    due.append(self._lingering.popleft()[1])
                short = now >= self._due_to_fill(now)
                if not (short or surplus or due):
                    self._changed.wait(self._sleep(now))
                    continue
            for sandbox in surplus:
                sandbox.close()
            self._delete(due)
            if short:
                self._add()

    def _due_to_fill(self, now: float) -> float:
        """When the next sandbox is to be made; infinity while the stock is full."""
        if len(self._ready) >= self._wanted:
            return math.inf
        rested = now if len(self._ready) < self._wanted // 2 else self._demand + REST
        return max(rested, self._pause_until)

    def _sleep(self, now: float) -> float | None:
        """Seconds until something falls due; None while only a demand can change anything."""
        due = self._due_to_fill(now)
        if self._lingering:
            due = min(due, self._lingering[0][0])
        if self._wanted > STOCK:
            due = min(due, self._demand + QUIET)
        return None if due == math.inf else max(0.0, due - now) + 0.001

    def _add(self) -> None:
        try:
            sandbox = self._make()
        except OSError as error:
            # A full bridge stays full until containers end; anything else is told, to be met again by the container that needs one.
            if not isinstance(error, BridgeFull):
                logger.warning("sandbox for bridge %s: %s", self._bridge, error)
            with self._changed:
                self._pause_until = time.monotonic() + 1.0
            return
        with self._changed:
            if not self._closed:
                self._ready.append(sandbox)
                return
        sandbox.close()

    def _make(self) -> Sandbox:
        endpoint_id = secrets.token_hex(32)
        with namespaces.new_network() as descriptor:
            inside = Netlink()
            without_ipv6 = _NO_IPV6.exists()
            if without_ipv6:
                # Docker's default. /proc/sys/net is that of the thread's namespace.
                _NO_IPV6.write_text("1")
        sandbox = Sandbox(descriptor, inside, endpoint_id)
        name = host_end(endpoint_id)
        try:
            created, enslaved = self._links.outcomes(
                (
                    netlink.create_veth(name, INSIDE, descriptor),
                    netlink.change_link(name, master=self._index, up=True, without_ipv6_address=without_ipv6),
                )
            )
            if created is not None:
                raise created
            if enslaved is not None:
                self._delete([name])
                if enslaved.errno == errno.EXFULL:
                    raise BridgeFull(
                        errno.EXFULL, f"all {PORTS} ports of bridge {self._bridge} are in use"
                    ) from enslaved
                raise enslaved
            sandbox.prepare()
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def _delete(self, names: list[str]) -> None:
        if not names:
            return
        for name, outcome in zip(names, self._links.outcomes(netlink.delete_link(name) for name in names), strict=True):
            if outcome is not None and outcome.errno != errno.ENODEV:
                logger.warning("link %s: %s", name, outcome)
