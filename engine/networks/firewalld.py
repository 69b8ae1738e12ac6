"""firewalld: the engine's bridges are in its zone `docker`, which lets everything pass.

firewalld rejects what a host forwards between links of which it knows nothing. Docker's answer is
the zone `docker` with the target ACCEPT, and the policy `docker-forwarding`, which lets other zones
in; the engine's own table still decides. Zone and policy are made if they are missing, in
firewalld's permanent configuration, and stay. The links are in the zone at runtime only: they are
put into it again when firewalld has reloaded or restarted.

Rules: firewalld.dbus(5). Owns: a task, once firewalld's table was seen. Runs on the event loop.
Raises nothing; failures are logged, and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from typing import Any

from engine.errors import words
from engine.system.system_bus import BUS, BusError, Peer, Signal, SystemBus, Variant
from engine.system.tasks import spawn
from engine.system.threads import cancelled

_log = logging.getLogger(__name__)

ZONE, POLICY = "docker", "docker-forwarding"
_NAME, _PATH = "org.fedoraproject.FirewallD1", "/org/fedoraproject/FirewallD1"
_LOST = (Signal(BUS.name, BUS.path, "NameOwnerChanged", _NAME), Signal(_NAME, _PATH, "Reloaded"))
"""Signals after which links have left the zone."""

SETTLED = 20.0
"""Most seconds that a network's creator waits for firewalld, which takes some for each link."""
AGAIN = 10.0
"""Seconds until a failure is tried again."""


class Firewalld:
    """Of one engine."""

    def __init__(self, bus: SystemBus, links: Callable[[], Collection[str]], told: Callable[[bool], None]) -> None:
        """`links`: the names of those that belong into the zone. `told(True)` when they are in it,
        `told(False)` when that is not known.
        """
        self._links = links
        self._told = told
        self._bus = bus
        self._given: set[str] = set()
        """Links that are in the zone."""
        self._wanted = asyncio.Event()
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        """firewalld runs, as it seems: begin, or look again."""
        self._settled.clear()
        self._wanted.set()
        if self._task is None:
            for signal in _LOST:
                self._bus.listen(signal, self._lost)
            self._task = spawn(self._run(), "firewalld")

    def changed(self) -> None:
        """The links have changed."""
        if self._task is not None:
            self.look()

    async def settled(self) -> None:
        """Wait until the links of now are in the zone, or an attempt has failed, for some seconds
        at most. Does not wait on a host without firewalld.
        """
        if self._task is None or self._given.issuperset(self._links()):
            return
        self.look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLED):
                await self._settled.wait()

    async def close(self, remove: bool) -> None:
        """With `remove` take the links out of the zone."""
        for signal in _LOST:
            self._bus.forget(signal)
        if self._task is not None:
            await cancelled(self._task)
            self._task = None
        try:
            for link in self._given if remove else ():
                await self._call("zone", "removeInterface", "ss", ZONE, link)
        except BusError as error:
            _log.warning("firewalld: links stay in the zone %s: %s", ZONE, words(error))

    # --- the task ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        failed = ""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                self._told(await self._give())
                failed = ""
                self._settled.set()
                continue
            except Exception as error:  # of the library, which has no common base
                self._told(False)
                self._settled.set()  # nobody waits for the next attempt
                if (text := words(error)) != failed:
                    _log.warning("firewalld: %s", text)
                failed = text
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN):
                    await self._wanted.wait()
            self._wanted.set()

    async def _give(self) -> bool:
        """Put the links into the zone. Returns False if firewalld is not on the bus, which reports
        when it comes.
        """
        if not await self._bus.call(BUS, "NameHasOwner", "s", _NAME):
            self._given.clear()
            return False
        if ZONE not in await self._call("zone", "getZones") or POLICY not in await self._call("policy", "getPolicies"):
            await self._make_zone()
        links = set(self._links())
        for link in links - self._given:
            if await self._call("zone", "getZoneOfInterface", "s", link) != ZONE:
                await self._call("zone", "changeZoneOfInterface", "ss", ZONE, link)
                _log.info("firewalld: link %s is in the zone %s", link, ZONE)
            self._given.add(link)
        for link in self._given - links:
            with contextlib.suppress(BusError):  # firewalld has noticed that it is gone
                await self._call("zone", "removeInterface", "ss", ZONE, link)
            self._given.discard(link)
        return True

    async def _make_zone(self) -> None:
        if ZONE not in await self._call("config", "getZoneNames", path=f"{_PATH}/config"):
            zone = {
                "description": Variant("s", "Bridges of containers"),
                "target": Variant("s", "ACCEPT"),
            }
            await self._call("config", "addZone2", "sa{sv}", ZONE, zone, path=f"{_PATH}/config")
        if POLICY not in await self._call("config", "getPolicyNames", path=f"{_PATH}/config"):
            policy = {
                "description": Variant("s", "Allow forwarding to containers"),
                "ingress_zones": Variant("as", ["ANY"]),
                "egress_zones": Variant("as", [ZONE]),
                "target": Variant("s", "ACCEPT"),
            }
            await self._call("config", "addPolicy", "sa{sv}", POLICY, policy, path=f"{_PATH}/config")
        _log.info("firewalld: made the zone %s and the policy %s", ZONE, POLICY)
        self._given.clear()
        await self._call("", "reload")

    def _lost(self) -> None:
        """The links have left the zone, or may have."""
        self._given.clear()
        self.look()

    async def _call(self, part: str, member: str, signature: str = "", *body: Any, path: str = _PATH) -> Any:
        interface = f"{_NAME}.{part}" if part else _NAME
        return await self._bus.call(Peer(_NAME, path, interface), member, signature, *body)
