"""The connection to the system bus, on a real one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from dbus_fast import BusType, Message
from dbus_fast import Variant as Typed
from dbus_fast.aio import MessageBus

from engine.system.system_bus import BUS, BusError, Peer, Signal, SystemBus, Variant
from tests.support import PATIENCE
from tests.support.dbus.bus import Bus

ECHO = Peer("org.example.Echo", "/org/example", "org.example.Echo")


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[SystemBus]:
    bus = SystemBus()
    try:
        async with asyncio.timeout(30 * PATIENCE):
            yield bus
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[MessageBus]:
    """A service whose answer is the body; that does not answer `Silence`."""
    service = await MessageBus(bus_type=BusType.SYSTEM).connect()

    def received(message: Message) -> Message | bool:
        if message.interface != ECHO.interface:
            return False
        if message.member == "Silence":
            return True
        if message.member == "Fail":
            return Message.new_error(message, "org.example.Failed", "it has failed")
        return Message.new_method_return(message, message.signature, message.body)

    service.add_message_handler(received)
    await service.request_name(ECHO.name)
    try:
        yield service
    finally:
        service.disconnect()


def test_the_first_call_connects_and_others_use_the_connection(bus: Bus) -> None:
    async def scenario() -> None:
        async with connected() as client:
            names = await asyncio.gather(*(client.call(BUS, "ListNames") for _ in range(5)))
            assert names == [["org.freedesktop.DBus", ":1.0"]] * 5

    asyncio.run(scenario())


def test_values_keep_their_types(bus: Bus) -> None:
    async def scenario() -> None:
        async with connected() as client, echo():
            body = {"a": Variant("t", 1 << 63), "b": Variant("a(sv)", [("c", Variant("ay", b"\x05"))])}
            answer = await client.call(ECHO, "Same", "a{sv}", body)
            assert answer == {"a": Typed("t", 1 << 63), "b": Typed("a(sv)", [("c", Typed("ay", b"\x05"))])}
            assert await client.call(ECHO, "Nothing") is None

    asyncio.run(scenario())


def test_errors_of_a_service(bus: Bus) -> None:
    async def scenario() -> None:
        async with connected() as client:
            with pytest.raises(BusError, match=r"^Same: ") as absent:
                await client.call(ECHO, "Same")
            assert absent.value.away
            async with echo() as service:
                with pytest.raises(BusError, match=r"^Fail: it has failed$") as failed:
                    await client.call(ECHO, "Fail")
                assert (failed.value.name, failed.value.away) == ("org.example.Failed", False)
                with pytest.raises(BusError, match=r"Silence: org\.example\.Echo has not answered for 0\.05 s") as late:
                    await client.call(ECHO, "Silence", limit=0.05)
                assert not late.value.away
                waiting = asyncio.ensure_future(client.call(ECHO, "Silence"))
                await client.call(ECHO, "Same")  # sent after it, and answered
                service.disconnect()
                with pytest.raises(BusError) as left:
                    await waiting
                assert left.value.away

    asyncio.run(scenario())


def test_a_call_after_a_restart_of_the_bus_connects_again(bus: Bus) -> None:
    async def scenario() -> None:
        async with connected() as client:
            await client.call(BUS, "ListNames")
            for _ in range(3):
                await asyncio.to_thread(bus.stop)
                with pytest.raises(BusError, match=r"^the system bus: ") as error:
                    await client.call(BUS, "ListNames")
                assert error.value.away
                bus.start()
                assert await client.call(BUS, "ListNames")

    asyncio.run(scenario())


def test_calls_fail_when_the_bus_ends(bus: Bus) -> None:
    async def scenario() -> None:
        async with connected() as client, echo():
            waiting = [asyncio.ensure_future(client.call(ECHO, "Silence")) for _ in range(3)]
            await client.call(ECHO, "Same")
            await asyncio.to_thread(bus.stop)
            for each in waiting:
                with pytest.raises(BusError, match="the connection to the system bus has ended") as error:
                    await each
                assert error.value.away

    asyncio.run(scenario())


def test_there_is_no_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/none")

    async def scenario() -> None:
        async with connected() as client:
            with pytest.raises(BusError, match=r"^the system bus: .*[Nn]o such file"):
                await client.call(BUS, "ListNames")

    asyncio.run(scenario())


def test_signals_are_heard_and_so_is_the_end_of_the_connection(bus: Bus) -> None:
    async def scenario() -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        async with connected() as client:
            await client.call(BUS, "ListNames")
            client.listen(Signal(BUS.name, BUS.path, "NameOwnerChanged", ECHO.name), lambda: heard.put_nowait("owner"))
            client.listen(Signal(ECHO.name, ECHO.path, "Changed"), lambda: heard.put_nowait("changed"))
            await client.call(BUS, "ListNames")
            async with echo() as service:
                assert await heard.get() == "owner"
                await service.send(Message.new_signal(ECHO.path, ECHO.interface, "Changed"))
                assert await heard.get() == "changed"
            assert await heard.get() == "owner"
            assert heard.empty()
            client.forget(Signal(ECHO.name, ECHO.path, "Changed"))
            await asyncio.to_thread(bus.stop)
            assert await heard.get() == "owner"
            bus.start()
            await client.call(BUS, "ListNames")
            async with echo():
                assert await heard.get() == "owner", "of the new connection"
        assert heard.qsize() <= 1, "nothing is heard of the end by `close`"

    asyncio.run(scenario())


def test_what_another_user_sends_to_the_connection_is_neither_a_signal_nor_an_answer(bus: Bus) -> None:
    async def scenario() -> None:
        heard: list[str] = []
        async with connected() as client, echo() as service:
            client.listen(Signal(ECHO.name, ECHO.path, "Changed"), lambda: heard.append("changed"))
            names = await client.call(BUS, "ListNames")
            (destination,) = {name for name in names if name.startswith(":")} - {service.unique_name}
            waiting = asyncio.ensure_future(client.call(ECHO, "Silence"))
            await client.call(ECHO, "Same")
            stranger = await MessageBus(bus_type=BusType.SYSTEM).connect()
            for serial in (None, *range(1, 20)):
                forged = Message.new_signal(ECHO.path, ECHO.interface, "Changed", "s", ["forged"])
                forged.destination, forged.reply_serial = destination, serial or 0
                await stranger.send(forged)
            await stranger.send(Message.new_signal(ECHO.path, ECHO.interface, "Changed"))
            await stranger.call(Message(destination=BUS.name, path=BUS.path, interface=BUS.interface, member="GetId"))
            await client.call(ECHO, "Same")  # sent after them, and answered
            assert not heard and not waiting.done()
            await service.send(Message.new_signal(ECHO.path, ECHO.interface, "Changed"))
            await client.call(ECHO, "Same")
            assert heard == ["changed"]
            waiting.cancel()
            stranger.disconnect()

    asyncio.run(scenario())


def test_a_connection_that_is_being_made_is_closed(bus: Bus) -> None:
    async def scenario() -> None:
        async with connected() as first:  # the library is loaded, and the pool's threads run
            await first.call(BUS, "ListNames")
        gc.collect()
        before = os.listdir("/proc/self/fd")
        client = SystemBus()
        calls = [asyncio.ensure_future(client.call(BUS, "ListNames")) for _ in range(3)]
        for _ in range(1000):
            await asyncio.sleep(0)
            if os.listdir("/proc/self/fd") != before:
                break
        assert os.listdir("/proc/self/fd") != before and not calls[0].done(), "it has a socket, and no answer"
        await client.close()
        for call in (*calls, client.call(BUS, "ListNames")):
            with pytest.raises(BusError, match="no longer used"):
                await call
        assert os.listdir("/proc/self/fd") == before
        later = asyncio.ensure_future(client.call(BUS, "ListNames"))
        while not later.done():
            assert os.listdir("/proc/self/fd") == before, "it does not connect"
            await asyncio.sleep(0)
        with pytest.raises(BusError, match="no longer used"):
            await later

    asyncio.run(scenario())


def test_a_call_that_is_cancelled_leaves_the_connection(bus: Bus) -> None:
    async def scenario() -> None:
        async with connected() as client, echo():
            waiting = asyncio.ensure_future(client.call(ECHO, "Silence"))
            await client.call(ECHO, "Same")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await client.call(ECHO, "Same", "s", "x") == "x"

    asyncio.run(scenario())


def test_close_leaves_no_descriptor_and_no_task(bus: Bus) -> None:
    async def scenario() -> None:
        async with connected() as first:  # the library is loaded, and the pool's threads run
            await first.call(BUS, "ListNames")
        gc.collect()
        before = os.listdir("/proc/self/fd")
        tasks = asyncio.all_tasks()
        for _ in range(5):
            async with connected() as client:
                await client.call(BUS, "ListNames")
        assert os.listdir("/proc/self/fd") == before
        assert asyncio.all_tasks() == tasks

    asyncio.run(scenario())
