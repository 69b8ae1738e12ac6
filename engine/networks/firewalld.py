"""firewalld: the engine's bridges are in its zone `docker`, which lets everything pass.

firewalld rejects what a host forwards between links of which it knows nothing. Docker's answer is
the zone `docker` with the target ACCEPT, and the policy `docker-forwarding`, which lets other zones
in; the engine's own table still decides. Zone and policy are made if they are missing, in
firewalld's permanent configuration, and stay. The links are in the zone at runtime only: they are
put into it again when firewalld has reloaded or restarted.

Rules: firewalld.dbus(5). Owns: a connection to the system bus, once firewalld's table was seen, and
a task. Runs on the event loop. Raises nothing; failures are logged, and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from engine.errors import words
from engine.system.tasks import spawn
from engine.system.threads import cancelled

if TYPE_CHECKING:
    from dbus_fast.aio import MessageBus

_log = logging.getLogger(__name__)

ZONE, POLICY = "docker", "docker-forwarding"
_NAME, _PATH = "org.fedoraproject.FirewallD1", "/org/fedoraproject/FirewallD1"
_BUS, _BUS_PATH = "org.freedesktop.DBus", "/org/freedesktop/DBus"

SETTLED = 20.0
"""Most seconds that a network's creator waits for firewalld, which takes some for each link."""
CALL = 15.0
AGAIN = 10.0
"""Seconds until a failure is tried again."""


class Firewalld:
    """Of one engine."""

    def __init__(self, links: Callable[[], Collection[str]], told: Callable[[bool], None]) -> None:
        """`links`: the names of those that belong into the zone. `told(True)` when they are in it,
        `told(False)` when that is not known.
        """
        self._links = links
        self._told = told
        self._bus: MessageBus | None = None
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
        if self._task is not None:
            await cancelled(self._task)
            self._task = None
        try:
            for link in self._given if remove else ():
                await self._call("zone", "removeInterface", "ss", ZONE, link)
        except RuntimeError as error:
            _log.warning("firewalld: links stay in the zone %s: %s", ZONE, words(error))
        if self._bus is not None:
            self._bus.disconnect()
            self._bus = None

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
        if self._bus is None or not self._bus.connected:
            self._given.clear()
            await self._connect()
        if not await self._call_bus("NameHasOwner", "s", _NAME):
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
            with contextlib.suppress(RuntimeError):  # firewalld has noticed that it is gone
                await self._call("zone", "removeInterface", "ss", ZONE, link)
            self._given.discard(link)
        return True

    async def _make_zone(self) -> None:
        from dbus_fast import Variant

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

    # --- the bus ----------------------------------------------------------------------------------

    async def _connect(self) -> None:
        # takes tens of milliseconds
        await asyncio.to_thread(importlib.import_module, "dbus_fast.aio")
        from dbus_fast import BusType
        from dbus_fast.aio import MessageBus

        bus = MessageBus(bus_type=BusType.SYSTEM)
        async with asyncio.timeout(CALL):
            await bus.connect()
        self._bus = bus
        bus.add_message_handler(self._heard)
        for rule in (
            f"type='signal',sender='{_BUS}',member='NameOwnerChanged',arg0='{_NAME}'",
            f"type='signal',sender='{_NAME}',path='{_PATH}',member='Reloaded'",
        ):
            await self._call_bus("AddMatch", "s", rule)

    def _heard(self, message: Any) -> None:
        if message.member in ("Reloaded", "NameOwnerChanged"):
            self._given.clear()
            self.look()

    async def _call(self, part: str, member: str, signature: str = "", *body: Any, path: str = _PATH) -> Any:
        interface = f"{_NAME}.{part}" if part else _NAME
        return await self._send(_NAME, path, interface, member, signature, body)

    async def _call_bus(self, member: str, signature: str, *body: Any) -> Any:
        return await self._send(_BUS, _BUS_PATH, _BUS, member, signature, body)

    async def _send(self, name: str, path: str, interface: str, member: str, signature: str, body: Any) -> Any:
        """The first value of the answer. Raises RuntimeError with the words of an error."""
        from dbus_fast import Message, MessageType

        if self._bus is None:
            raise RuntimeError(f"{member}: there is no connection to the system bus")
        message = Message(
            destination=name, path=path, interface=interface, member=member, signature=signature, body=[*body]
        )
        try:
            async with asyncio.timeout(CALL):
                reply = await self._bus.call(message)
        except (TimeoutError, EOFError, OSError) as error:
            self._bus.disconnect()
            self._bus = None
            raise RuntimeError(
                f"{member}: {words(error) if not isinstance(error, TimeoutError) else 'no answer'}"
            ) from error
        if reply is None or reply.message_type is MessageType.ERROR:
            said = reply.body[0] if reply is not None and reply.body else "no answer"
            raise RuntimeError(f"{member}: {said}")
        return reply.body[0] if reply.body else None
