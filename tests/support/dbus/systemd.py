"""A stand-in for systemd on a system bus: the part of its interface that the engine calls.

It checks types and names of properties as systemd does, org.freedesktop.systemd1(5). What systemd
makes of them is in tests/system/test_scopes.py, which needs it as process 1.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from dbus_fast import BusType, DBusError, Message, MessageType, Variant
from dbus_fast.aio import MessageBus

from engine.runtime.scope_limits import SYSTEMD

_TYPES = {
    **dict.fromkeys(("MemoryMax", "MemorySwapMax", "MemoryLow", "TasksMax", "CPUWeight", "IOWeight"), "t"),
    **dict.fromkeys(("CPUQuotaPerSecUSec", "CPUQuotaPeriodUSec"), "t"),
    **dict.fromkeys(("AllowedCPUs", "AllowedMemoryNodes"), "ay"),
    **dict.fromkeys(("IOReadBandwidthMax", "IOWriteBandwidthMax", "IOReadIOPSMax", "IOWriteIOPSMax"), "a(st)"),
}


class Systemd:
    """On the event loop that connects it. `units`: the properties that each unit has been given."""

    def __init__(self, *units: str) -> None:
        self.units: dict[str, dict[str, Any]] = {unit: {} for unit in units}
        self.calls = 0
        self.answers = True
        """False: it hangs. Calls are neither performed nor answered."""
        self.called = asyncio.Event()
        self._bus: MessageBus | None = None

    async def connect(self) -> None:
        self._bus = await MessageBus(bus_type=BusType.SYSTEM).connect()
        self._bus.add_message_handler(self._received)
        await self._bus.request_name(SYSTEMD.name)

    async def leave(self) -> None:
        """As with `systemctl daemon-reexec`: calls that it has not answered fail."""
        assert self._bus is not None
        self._bus.disconnect()
        with contextlib.suppress(OSError, EOFError):  # the bus has ended
            await self._bus.wait_for_disconnect()  # type: ignore[no-untyped-call]

    def _received(self, message: Message) -> Message | bool:
        called = (message.path, message.interface, message.member)
        if message.message_type is not MessageType.METHOD_CALL or called != (*SYSTEMD[1:], "SetUnitProperties"):
            return False
        self.calls += 1
        self.called.set()
        if not self.answers:
            return True
        try:
            assert message.signature == "sba(sv)"
            self._set_properties(*message.body)
        except DBusError as error:
            return Message.new_error(message, error.type, error.text)
        return Message.new_method_return(message)

    def _set_properties(self, unit: str, runtime: bool, properties: list[tuple[str, Variant]]) -> None:
        assert runtime, "a scope ends with the machine"
        if unit not in self.units:
            raise DBusError("org.freedesktop.systemd1.NoSuchUnit", f"Unit {unit} not found.")
        for name, value in properties:
            if name not in _TYPES:
                text = f"Cannot set property {name}, or unknown property."
                raise DBusError("org.freedesktop.DBus.Error.PropertyReadOnly", text)
            if value.signature != _TYPES[name]:
                raise DBusError("org.freedesktop.DBus.Error.InvalidArgs", "Invalid argument")
            if name == "CPUQuotaPerSecUSec" and not value.value:
                raise DBusError("org.freedesktop.DBus.Error.InvalidArgs", f"{name}= value out of range")
        held = self.units[unit]
        for name, value in properties:
            adds = value.signature == "a(st)" and value.value
            held[name] = [*held.get(name, ()), *value.value] if adds else value.value
