"""The system bus: the daemon's one connection to D-Bus, and calls of other services by it.

The first call makes the connection, and so does the first one after its end: dbus was restarted, or
was not there before. No call starts a service that does not run.

Rules: D-Bus Specification, "Message Bus Overview". Not here: what services mean
(`runtime/scope_limits.py`, `networks/firewalld.py`).

Owns:    the connection, and a task that waits for its end.
Threads: the event loop's; the library is loaded in another one, once, at the first call.
Raises:  BusError.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import words
from engine.system.tasks import spawn

if TYPE_CHECKING:
    from dbus_fast import Message
    from dbus_fast.aio import MessageBus

_log = logging.getLogger(__name__)

CALL = 15.0
"""Seconds that a call may take, with the connection that it makes."""

_CLOSE = 1.0
"""Seconds that the end of the connection may take; the event loop has to see it."""
_AWAY = {
    f"org.freedesktop.DBus.Error.{name}"
    for name in ("NoReply", "Disconnected", "NameHasNoOwner", "ServiceUnknown", "NoServer")
}
"""Errors of the bus itself: the service is not there, or has left it before it answered."""


class Peer(NamedTuple):
    """An interface of an object of a service."""

    name: str
    path: str
    interface: str


class Signal(NamedTuple):
    """A signal of an object of a service; `argument`: its first one, if it must have one."""

    sender: str
    path: str
    member: str
    argument: str = ""

    @property
    def rule(self) -> str:
        """D-Bus Specification, "Match Rules"."""
        rule = f"type='signal',sender='{self.sender}',path='{self.path}',member='{self.member}'"
        return f"{rule},arg0='{self.argument}'" if self.argument else rule


class Variant(NamedTuple):
    """A value with its D-Bus type, for bodies."""

    signature: str
    value: Any


class BusError(Exception):
    """A call failed. `name` is D-Bus' of the error that the service has answered.

    `away`: the bus or the service was not there, or was restarted before it answered. The call may
    have had its effect.
    """

    def __init__(self, text: str, name: str = "", *, away: bool = False) -> None:
        super().__init__(text)
        self.name = name
        self.away = away


BUS = Peer("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")
"""The bus itself."""


class SystemBus:
    """The connection of one engine. It is made when it is needed."""

    def __init__(self) -> None:
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._listeners: dict[Signal, Callable[[], None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    def listen(self, signal: Signal, heard: Callable[[], None]) -> None:
        """From the next call on, call `heard` for each such signal, and when the connection has
        ended, as signals are missed then.
        """
        self._listeners[signal] = heard

    def forget(self, signal: Signal) -> None:
        """No longer call its listener, if it has one."""
        self._listeners.pop(signal, None)

    async def call(self, peer: Peer, member: str, signature: str = "", *body: Any, limit: float = CALL) -> Any:
        """The first value of the answer; None if it has none. `limit`: seconds until it fails.

        Raises BusError. The service may still act on a call that has failed by its limit.
        """
        try:
            async with asyncio.timeout(limit):
                connection = await self._connected()
                return await connection.call(peer, member, signature, body)
        except TimeoutError as error:
            raise BusError(f"{member}: {peer.name} has not answered for {limit:.3g} s") from error

    async def close(self) -> None:
        """End the connection, for ever. Calls that wait for it or for an answer fail."""
        self._closed = True
        self._listeners.clear()
        connection, self._connection = self._connection, None
        if connection is not None and self._watching is not None:
            connection.bus.disconnect()
            await asyncio.wait([self._watching], timeout=_CLOSE)

    async def _connected(self) -> _Connection:
        """Raises BusError."""
        async with self._connecting:
            connection = self._connection
            if connection is None or not connection.bus.connected:
                ended = BusError("the system bus: it is no longer used, because the engine ends")
                if self._closed:
                    raise ended
                bus = await _connect()
                connection = _Connection(bus, self._heard)
                if self._closed:
                    bus.disconnect()
                    await connection.ended()
                    raise ended
                self._connection = connection
                self._watching = spawn(self._watch(connection), "the system bus")
            for signal in self._listeners.keys() - connection.signals:
                await connection.call(BUS, "AddMatch", "s", (signal.rule,))
                connection.signals.add(signal)
            return connection

    async def _watch(self, connection: _Connection) -> None:
        await connection.ended()
        if self._connection is connection:
            self._connection = None
        for heard in tuple(self._listeners.values()):
            heard()

    def _heard(self, path: str | None, member: str | None) -> None:
        for signal, heard in tuple(self._listeners.items()):
            if (path, member) == (signal.path, signal.member):
                heard()


class _Connection:
    """A connection until its end. `heard` gets path and member of each signal.

    The library's own way to wait for an answer logs a second error when the connection has ended,
    and keeps what a caller no longer waits for.
    """

    def __init__(self, bus: MessageBus, heard: Callable[[str | None, str | None], None]) -> None:
        self.bus = bus
        self.signals: set[Signal] = set()
        """Those that the bus sends to it."""
        self._heard = heard
        self._answers: dict[int, asyncio.Future[Message]] = {}
        bus.add_message_handler(self._received)

    async def call(self, peer: Peer, member: str, signature: str, body: tuple[Any, ...]) -> Any:
        """Raises BusError."""
        from dbus_fast import Message, MessageFlag, MessageType

        message = Message(
            destination=peer.name,
            path=peer.path,
            interface=peer.interface,
            member=member,
            signature=signature,
            body=_typed(body),
            flags=MessageFlag.NO_AUTOSTART,
            serial=self.bus.next_serial(),
        )
        answer = self._answers[message.serial] = asyncio.get_running_loop().create_future()
        try:
            self.bus.send(message).add_done_callback(_seen)
            reply = await answer
        except (EOFError, OSError) as error:  # OSError: it has ended since the loop last looked
            raise BusError(f"{member}: the connection to the system bus has ended", away=True) from error
        finally:
            del self._answers[message.serial]
        if reply.message_type is MessageType.ERROR:
            name = reply.error_name or ""
            said = reply.body[0] if reply.body and isinstance(reply.body[0], str) else name
            raise BusError(f"{member}: {said}", name, away=name in _AWAY)
        return reply.body[0] if reply.body else None

    async def ended(self) -> None:
        """Wait for its end. Calls then fail."""
        try:
            await self.bus.wait_for_disconnect()  # type: ignore[no-untyped-call]
        except Exception as error:  # of the library, which has no common base
            _log.info("the connection to the system bus has ended: %s", words(error))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EOFError())

    def _received(self, message: Message) -> None:
        """The bus lets any user send a signal to one connection, and the sender may give it a
        reply serial. What a service tells everyone has no destination, and the bus has compared it
        with the rules, which name the service. Only the called service can answer a call.
        """
        from dbus_fast import MessageType

        if message.message_type is MessageType.SIGNAL:
            if message.destination is None:
                self._heard(message.path, message.member)
        elif (answer := self._answers.get(message.reply_serial)) is not None and not answer.done():
            answer.set_result(message)


async def _connect() -> MessageBus:
    # takes tens of milliseconds
    await asyncio.to_thread(importlib.import_module, "dbus_fast.aio")
    from dbus_fast import BusType
    from dbus_fast.aio import MessageBus

    try:
        return await MessageBus(bus_type=BusType.SYSTEM).connect()
    except Exception as error:  # of the library, which has no common base
        raise BusError(f"the system bus: {words(error)}", away=True) from error


def _seen(sent: asyncio.Future[Any]) -> None:
    """What a write has raised ends the connection, which the caller sees."""
    if not sent.cancelled():
        sent.exception()


def _typed(value: Any) -> Any:
    """The same with the library's variants and lists."""
    from dbus_fast import Variant as Typed

    if isinstance(value, Variant):
        return Typed(value.signature, _typed(value.value))
    if isinstance(value, dict):
        return {key: _typed(each) for key, each in value.items()}
    return [_typed(each) for each in value] if isinstance(value, list | tuple) else value
