"""Published ports of running containers: chosen, held, led to their containers, and repaired.

A container's ports lead to one endpoint, that of its default route (Docker's gateway endpoint). The
choice is kept in the container's record. After a restart of the daemon `restore` and `settle`
restore it while traffic continues. Where the engine writes no rules, sockets serve the ports
(`serving.py`).

Owns: the choice (`ports.Ports`), the sockets (`ports.Listeners`), the watch over the table. Runs on
the event loop; blocking work goes through `in_thread`. A cancelled `publish` closes the ports that
it opened. Not here: rules and elements (`filter.py`). Raises: ServerError in Docker's words;
nothing is published then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import EngineError, ServerError, words
from engine.networks import ports as choice
from engine.networks.filter import Filter
from engine.networks.firewall import Firewall
from engine.networks.ports import Listeners, PortInUse, Ports, PortTaken, Published, Relayed
from engine.networks.serving import Listening, Serving
from engine.system.netfilter import NetfilterError
from engine.system.netlink.nft import Generations
from engine.system.tasks import shield, spawn
from engine.system.threads import cancelled
from engine.wire.containers import PortBinding

_log = logging.getLogger(__name__)

BURST = 0.1
"""Seconds to wait after another program's change of the rule set, as more of them usually follow.
"""
COMPARED = 10.0
"""Seconds between two readings of all elements while others keep changing the rule set. Missing
rules are seen at once.
"""

_BRIDGE_CALLS_NETFILTER = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


class Request(NamedTuple):
    """The part of a container's configuration about ports."""

    exposed: Sequence[str] = ()
    bindings: Mapping[str, Sequence[PortBinding] | None] = {}
    publish_all: bool = False


class Target(NamedTuple):
    """The endpoint that published ports lead to."""

    endpoint_id: str
    addresses: tuple[IPv4Address | None, IPv6Address | None]
    host_binding: str
    """The host address that replaces an empty HostIp; empty for every address."""
    overlay: str = ""
    """The id of its network if the host needs a route to the endpoint."""


class Publishing:
    """One engine's."""

    def __init__(
        self,
        table: Filter,
        firewall: Firewall,
        serving: Serving,
        in_thread: Callable[..., Awaitable[Any]],
        reflect: Callable[[str], None],
        lead: Callable[[str, IPv4Address, bool], None],
    ) -> None:
        """`in_thread` runs a function that blocks and waits for it even if its caller is cancelled.

        `reflect` lets the bridge send frames back through the port that they came from. `lead`
        gives the host a route to an endpoint on the network of that id, or takes it back.
        """
        self._filter = table
        self._firewall = firewall
        self._serving = serving
        self._in_thread = in_thread
        self._reflect = reflect
        self._lead = lead
        self._ports = Ports()
        self._listeners = Listeners(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._targets: dict[str, Target] = {}
        self._withdrawing: set[asyncio.Future[None]] = set()
        self._forgetting: asyncio.Task[None] | None = None
        self._notices: Generations | None = None
        self._noticed = asyncio.Event()
        self._watching: tuple[asyncio.Task[None], ...] = ()

    # --- a container's ports ----------------------------------------------------------------------

    async def publish(self, owner: str, name: str, target: Target, request: Request) -> tuple[Published, ...]:
        """Choose and open ports; they are open on return.

        Raises ServerError naming the container.
        """
        asked = choice.wanted(
            request.exposed,
            request.bindings,
            publish_all=request.publish_all,
            default_ip=target.host_binding,
            ipv4=target.addresses[0] is not None,
            ipv6=target.addresses[1] is not None,
        )
        if not asked:
            return ()
        try:
            if target.addresses[1] is None and not self._serving.active:
                _check_ipv4_alone(asked)
            if target.addresses[0] is None and not self._serving.active:
                _check_ipv6_alone(asked)
            return await self._publish(owner, target, asked)
        except (PortTaken, NetfilterError, OSError) as error:
            what = f"driver failed programming external connectivity on endpoint {name} ({target.endpoint_id})"
            raise ServerError(f"{what}: {words(error)}") from error

    async def _publish(self, owner: str, target: Target, asked: Sequence[choice.Wanted]) -> tuple[Published, ...]:
        refused: set[tuple[str, int]] = set()
        try:
            given = self._ports.allocate(owner, asked, refused)
        except PortTaken:
            if not self._withdrawing:
                raise
            # The port may belong to a container that has ended: its client may know that before its
            # ports are closed.
            await asyncio.wait(self._withdrawing)
            given = self._ports.allocate(owner, asked, refused)
        while True:
            self._targets[owner] = target
            opening = asyncio.ensure_future(self._in_thread(self._open, owner, target, given))
            try:
                self._serving.begin(await shield(opening))
                break
            except PortInUse as error:
                self._forget(owner)
                if error.at in refused:
                    raise
                refused.add(error.at)  # another port may be free
                given = self._ports.allocate(owner, asked, refused)
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):
                    self._serving.begin(await opening)
                await self.withdraw(owner)
                raise
            except BaseException:
                self._forget(owner)
                raise
        self._forget_connections()
        return given

    async def withdraw(self, owner: str) -> None:
        """Close a container's ports. One without any is fine."""
        target = self._targets.pop(owner, None)
        if target is None:
            return
        ended = asyncio.get_running_loop().create_future()
        self._withdrawing.add(ended)
        try:
            if self._serving.active:
                await self._serving.end(owner)
            await self._in_thread(self._close, owner, target)
        except NetfilterError as error:
            _log.warning("container %s: cannot close its ports: %s", owner, error)
        finally:
            # Tasks that wait for it wake in a later turn, when the ports are given back.
            self._withdrawing.discard(ended)
            ended.set_result(None)
        self._ports.give(owner)
        self._forget_connections()

    def restore(self, owner: str, target: Target, given: Sequence[Published]) -> None:
        """Restore the ports of a container that ran on. `settle` opens the missing ones."""
        if given:
            self._ports.claim(owner, given)
            self._targets[owner] = target

    async def settle(self) -> None:
        """All running containers are restored: open missing ports, close all others."""
        restored = [(owner, target, self._ports.of(owner)) for owner, target in self._targets.items()]
        served = ((owner, target.addresses, ports) for owner, target, ports in restored)
        for owner, failure in await self._serving.settle(served):
            _log.error("container %s: its ports: %s", owner, words(failure))
        await self._in_thread(self._settle, restored)
        for owner, target, _ in restored:
            if self._targets.get(owner) is not target:  # it ended meanwhile
                await self._serving.end(owner)
                await self._in_thread(self._close, owner, target)

    def of(self, owner: str) -> tuple[Published, ...]:
        """A container's published ports."""
        return self._ports.of(owner)

    def _forget(self, owner: str) -> None:
        self._ports.give(owner)
        self._targets.pop(owner, None)

    # --- in threads -------------------------------------------------------------------------------

    def _open(self, owner: str, target: Target, given: Sequence[Published]) -> Sequence[Listening]:
        """Returns the sockets to serve, where the engine writes no rules."""
        if self._serving.active:
            listening = self._serving.listen(owner, target.addresses, given)
            if target.overlay:
                self._route(target, True)
            return listening
        relayed = self._listeners.hold(owner, given)
        try:
            if target.overlay:
                self._route(target, True)
            elif bridges_call_netfilter():
                # Without this a container could not reach its own ports: the frame returns to the
                # port that it came from.
                self._reflect(target.endpoint_id)
            self._filter.publish(target.endpoint_id, target.addresses, given, relayed)
        except BaseException:
            self._listeners.release(owner)
            if target.overlay:
                self._route(target, False)
            raise
        return ()

    def _close(self, owner: str, target: Target) -> None:
        self._listeners.release(owner)
        try:
            self._filter.unpublish(target.endpoint_id)
        finally:
            if target.overlay:
                self._route(target, False)

    def _route(self, target: Target, there: bool) -> None:
        address = target.addresses[0]
        if address is not None:
            self._lead(target.overlay, address, there)

    def _settle(self, restored: list[tuple[str, Target, tuple[Published, ...]]]) -> None:
        for owner, target, given in restored:
            relayed = Relayed()
            try:
                if not self._serving.active:
                    relayed = self._listeners.hold(owner, given)
            except (PortTaken, OSError) as error:
                _log.warning("container %s: cannot hold its ports, which stay published: %s", owner, words(error))
            try:
                if target.overlay and given:
                    self._route(target, True)
                self._filter.publish(target.endpoint_id, target.addresses, given, relayed)
            except (EngineError, NetfilterError, OSError) as error:
                _log.error("container %s: its ports: %s", owner, words(error))
        try:
            self._filter.settle()
        except NetfilterError as error:
            _log.error("published ports: %s", error)

    # --- outdated connections
    # -------------------------------------------------------------------------

    def _forget_connections(self) -> None:
        """Forget outdated connections after the reply to the client: it takes milliseconds, once
        for many ports.
        """
        if self._filter.has_outdated and self._forgetting is None:
            self._forgetting = spawn(self._forget_outdated(), "forgetting outdated UDP connections")

    async def _forget_outdated(self) -> None:
        try:
            while self._filter.has_outdated:
                await self._in_thread(self._filter.forget_outdated)
        finally:
            self._forgetting = None

    # --- the watch --------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Start restoring rules and elements that other programs remove from the table."""
        if self._serving.active:
            return
        try:
            self._notices = Generations()
        except OSError as error:
            _log.warning("rules that other programs remove will not be noticed: %s", words(error))
            return
        asyncio.get_running_loop().add_reader(self._notices.fileno(), self._changed)
        self._watching = (spawn(self._watch(), "watching nftables"), spawn(self._poll(), "looking at iptables"))

    def _changed(self) -> None:
        assert self._notices is not None
        if self._notices.by_others(self._filter.authors):
            self._noticed.set()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        compared, pending = -COMPARED, False
        while True:
            try:
                async with asyncio.timeout(max(0.0, compared + COMPARED - loop.time()) if pending else None):
                    await self._noticed.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(BURST)
            self._noticed.clear()
            due = loop.time() - compared >= COMPARED
            try:
                if await self._in_thread(self._filter.mend, due):
                    _log.warning("rules of the engine were missing in a table of nftables or iptables, and were put in")
            except (EngineError, NetfilterError, OSError) as error:
                _log.error("the engine's nftables table is incomplete: %s", words(error))
            pending = not due
            if due:
                compared = loop.time()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(COMPARED)
            if self._firewall.polled:
                await self._in_thread(self._firewall.poll)

    async def close(self) -> None:
        """End the watch and close the sockets. Rules stay as they are."""
        for watching in self._watching:
            await cancelled(watching)
        if self._notices is not None:
            asyncio.get_running_loop().remove_reader(self._notices.fileno())
            self._notices.close()
        if self._forgetting is not None:
            await self._forgetting
        self._listeners.close()


def _check_ipv4_alone(asked: Sequence[choice.Wanted]) -> None:
    """Raises PortTaken for an IPv6 address of the host if the container has none. `::` and `::1`
    are relayed.
    """
    for each in asked:
        for host_ip in each.host_ips:
            if ":" in host_ip and host_ip not in choice.AT_LOOPBACK:
                raise PortTaken(
                    f"Bind for {choice.shown(host_ip, each.first)} failed: "
                    "the container has no IPv6 address, its network no IPv6"
                )


def _check_ipv6_alone(asked: Sequence[choice.Wanted]) -> None:
    """Raises PortTaken for an IPv4 address of the host, or ::1, which is relayed by IPv4, if the
    container has no IPv4 address.
    """
    for each in asked:
        for host_ip in each.host_ips:
            if ":" not in host_ip or host_ip == "::1":
                raise PortTaken(
                    f"Bind for {choice.shown(host_ip, each.first)} failed: "
                    "the container has no IPv4 address, its network no IPv4"
                )


def bridges_call_netfilter() -> bool:
    """True if frames that a bridge forwards pass through netfilter, as they do where Docker or
    Kubernetes runs.
    """
    try:
        return _BRIDGE_CALLS_NETFILTER.read_text().strip() == "1"
    except OSError:
        return False
