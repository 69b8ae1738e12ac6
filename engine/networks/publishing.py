"""Published ports of the containers that run: chosen, held against other programs, led to their containers, and kept so.

Ports of a container lead to one endpoint, that of the network it reaches the world by (Docker's gateway endpoint). What is chosen here is the
container's record to keep: after a restart of the daemon `restore` and `settle` take it up again, and traffic has never stopped.

Owns: the choice (`ports.Ports`), the sockets (`ports.Listeners`), the watch over the table. Not here: rules and elements (`filter.py`). Raises:
ServerError in Docker's words; nothing is published then.
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

from engine.errors import ServerError
from engine.networks import ports as choice
from engine.networks.filter import Filter
from engine.networks.ports import Listeners, PortInUse, Ports, PortTaken, Published, Relayed
from engine.system.netfilter import NetfilterError
from engine.system.nfnetlink import Generations
from engine.wire.containers import PortBinding

logger = logging.getLogger(__name__)

BURST = 0.1
"""Seconds that other people's changes of the rule set may go on before the own table is looked at."""
COMPARED = 10.0
"""Seconds between two readings of all elements, while others change the rule set all the time; missing rules are seen at once."""

_BRIDGE_CALLS_NETFILTER = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


class Request(NamedTuple):
    """What a container's configuration says of ports."""

    exposed: Sequence[str] = ()
    bindings: Mapping[str, Sequence[PortBinding] | None] = {}
    publish_all: bool = False


class Target(NamedTuple):
    """The endpoint that published ports lead to."""

    endpoint_id: str
    addresses: tuple[IPv4Address | None, IPv6Address | None]
    host_binding: str
    """The address of the host that stands for an empty HostIp; empty: every one."""


class Publishing:
    """One engine's."""

    def __init__(
        self,
        table: Filter,
        in_thread: Callable[..., Awaitable[Any]],
        reflect: Callable[[str], None],
    ) -> None:
        """`in_thread` runs what blocks. `reflect`, called there, lets the host end of an endpoint give frames back to where they came from."""
        self._filter = table
        self._in_thread = in_thread
        self._reflect = reflect
        self._ports = Ports()
        self._listeners = Listeners(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._targets: dict[str, Target] = {}
        self._withdrawing: set[asyncio.Future[None]] = set()
        self._forgetting: asyncio.Task[None] | None = None
        self._notices: Generations | None = None
        self._noticed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    # --- a container's ports -------------------------------------------------------------------------------------------

    async def publish(self, owner: str, name: str, target: Target, request: Request) -> tuple[Published, ...]:
        """Ports for what is asked, open when this returns. Raises ServerError; `name` is the container's, for its words."""
        asked = choice.wanted(
            request.exposed,
            request.bindings,
            publish_all=request.publish_all,
            default_ip=target.host_binding,
            ipv6=target.addresses[1] is not None,
        )
        if not asked:
            return ()
        try:
            if target.addresses[1] is None:
                _check_ipv4_alone(asked)
            return await self._publish(owner, target, asked)
        except (PortTaken, NetfilterError, OSError) as error:
            raise ServerError(
                f"driver failed programming external connectivity on endpoint {name} ({target.endpoint_id}): {error}"
            ) from error

    async def _publish(self, owner: str, target: Target, asked: Sequence[choice.Wanted]) -> tuple[Published, ...]:
        refused: set[tuple[str, int]] = set()
        try:
            given = self._ports.allocate(owner, asked, refused)
        except PortTaken:
            if not self._withdrawing:
                raise
            # Perhaps by one that has ended: its client knows that before its ports are closed.
            await asyncio.wait(self._withdrawing)
            given = self._ports.allocate(owner, asked, refused)
        while True:
            self._targets[owner] = target
            opening = asyncio.ensure_future(self._in_thread(self._open, owner, target, given))
            try:
                await asyncio.shield(opening)
                break
            except PortInUse as error:
                self._forget(owner)
                if error.at in refused:
                    raise
                refused.add(error.at)  # another one may do
                given = self._ports.allocate(owner, asked, refused)
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):
                    await opening
                await self.withdraw(owner)
                raise
            except BaseException:
                self._forget(owner)
                raise
        self._forget_connections()
        return given

    async def withdraw(self, owner: str) -> None:
        """Take back what a container had. One that has nothing is fine."""
        target = self._targets.pop(owner, None)
        if target is None:
            return
        ended = asyncio.get_running_loop().create_future()
        self._withdrawing.add(ended)
        try:
            await self._in_thread(self._close, owner, target)
        except NetfilterError as error:
            logger.warning("container %s: its ports stay open: %s", owner, error)
        finally:
            # Who waits for it is woken in a later turn, when the ports are given back.
            self._withdrawing.discard(ended)
            ended.set_result(None)
        self._ports.give(owner)
        self._forget_connections()

    def restore(self, owner: str, target: Target, given: Sequence[Published]) -> None:
        """Know again the ports of a container that ran on; `settle` opens them, should they not be open."""
        if given:
            self._ports.claim(owner, given)
            self._targets[owner] = target

    async def settle(self) -> None:
        """Every container that runs is known again: open what is missing, close what belongs to nobody."""
        restored = [(owner, target, self._ports.of(owner)) for owner, target in self._targets.items()]
        await self._in_thread(self._settle, restored)
        for owner, target, _ in restored:
            if self._targets.get(owner) is not target:  # it ended meanwhile
                await self._in_thread(self._close, owner, target)

    def of(self, owner: str) -> tuple[Published, ...]:
        """What a container has."""
        return self._ports.of(owner)

    def _forget(self, owner: str) -> None:
        self._ports.give(owner)
        self._targets.pop(owner, None)

    # --- in threads ------------------------------------------------------------------------------------------------------

    def _open(self, owner: str, target: Target, given: Sequence[Published]) -> None:
        relayed = self._listeners.hold(owner, given)
        try:
            if bridges_call_netfilter():
                # Else a container could not reach its own ports: a rewritten frame goes back by the port that it came from.
                self._reflect(target.endpoint_id)
            self._filter.publish(target.endpoint_id, target.addresses, given, relayed)
        except BaseException:
            self._listeners.release(owner)
            raise

    def _close(self, owner: str, target: Target) -> None:
        self._listeners.release(owner)
        self._filter.unpublish(target.endpoint_id)

    def _settle(self, restored: list[tuple[str, Target, tuple[Published, ...]]]) -> None:
        for owner, target, given in restored:
            relayed = Relayed()
            try:
                relayed = self._listeners.hold(owner, given)
            except (PortTaken, OSError) as error:
                logger.warning("container %s keeps its ports: %s", owner, error)
            try:
                self._filter.publish(target.endpoint_id, target.addresses, given, relayed)
            except NetfilterError as error:
                logger.error("container %s: its ports: %s", owner, error)
        try:
            self._filter.settle()
        except NetfilterError as error:
            logger.error("published ports: %s", error)

    # --- connections that were there before --------------------------------------------------------------------------

    def _forget_connections(self) -> None:
        """Once for all ports that come and go at a time, behind the answer to the client: it takes milliseconds."""
        if self._filter.has_outdated and self._forgetting is None:
            self._forgetting = asyncio.ensure_future(self._forget_outdated())

    async def _forget_outdated(self) -> None:
        try:
            while self._filter.has_outdated:
                await self._in_thread(self._filter.forget_outdated)
        finally:
            self._forgetting = None

    # --- the watch ---------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """From now on put back what others take out of the table."""
        try:
            self._notices = Generations()
        except OSError as error:
            logger.warning("rules that somebody removes will not be noticed: %s", error)
            return
        asyncio.get_running_loop().add_reader(self._notices.fileno(), self._changed)
        self._watching = asyncio.ensure_future(self._watch())

    def _changed(self) -> None:
        assert self._notices is not None
        if self._notices.by_others(self._filter.port):
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
                    logger.warning("somebody has changed the engine's nftables table: it is as it was again")
            except (NetfilterError, OSError) as error:
                logger.error("the engine's nftables table is not whole: %s", error)
            pending = not due
            if due:
                compared = loop.time()

    async def close(self) -> None:
        """End the watch, let go of the sockets; what is open stays open."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._notices is not None:
            asyncio.get_running_loop().remove_reader(self._notices.fileno())
            self._notices.close()
        if self._forgetting is not None:
            await self._forgetting
        self._listeners.close()


def _check_ipv4_alone(asked: Sequence[choice.Wanted]) -> None:
    """Raises PortTaken for an IPv6 address of the host that leads nowhere: the container has none. `::` and `::1` are relayed."""
    for each in asked:
        for host_ip in each.host_ips:
            if ":" in host_ip and host_ip not in choice.AT_LOOPBACK:
                raise PortTaken(
                    f"Bind for {choice.shown(host_ip, each.first)} failed: the container has no IPv6 address, its network no IPv6"
                )


def bridges_call_netfilter() -> bool:
    """Whether frames that a bridge passes on go through netfilter as if they were routed: where Docker or Kubernetes runs, they do."""
    try:
        return _BRIDGE_CALLS_NETFILTER.read_text().strip() == "1"
    except OSError:
        return False
