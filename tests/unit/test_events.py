"""The event log: the history, the delivery to listeners, and slow listeners."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from engine.events import BACKLOG, EVENT_FILTERS, HISTORY, HISTORY_SIZE, EventLog, matches
from engine.wire.events import Message

A, B = "a" * 64, "b" * 64


def test_wire_shape_of_a_container_event() -> None:
    message = EventLog().publish(
        "container", "die", A, {"name": "n", "image": "busybox", "exitCode": "0"}, 5_000_000_007
    )
    assert msgspec.json.decode(msgspec.json.encode(message)) == {
        "Type": "container",
        "Action": "die",
        "Actor": {"ID": A, "Attributes": {"name": "n", "image": "busybox", "exitCode": "0"}},
        "scope": "local",
        "time": 5,
        "timeNano": 5_000_000_007,
    }


def test_times_never_run_backwards() -> None:
    log = EventLog()
    stamps = [log.publish("container", "x", A, at_ns=at).time_nano for at in (50, 40, 50, 60)]
    assert stamps == [50, 51, 52, 60]
    assert log.publish("container", "x", A).time_nano > 10**18
    assert log.publish("container", "the clock was set", A, at_ns=90).time_nano == 90


def test_history() -> None:
    log = EventLog()
    for at in range(1, HISTORY + 11):
        log.publish("container", "x", A, at_ns=at)
    assert [message.time_nano for message in log.history(0)] == list(range(11, HISTORY + 11))
    assert [message.time_nano for message in log.history(20, 22)] == [20, 21, 22]
    assert log.history(20, 22, {"type": ["image"]}) == []


def test_subscriptions() -> None:
    async def scenario() -> None:
        log = EventLog()
        log.publish("container", "before", A)
        with log.subscribe({"event": ["start"]}) as some, log.subscribe() as every:
            assert log.listeners == 2
            log.publish("container", "create", A)
            log.publish("container", "start", A)
            assert [message.action for message in await every.take()] == ["create", "start"]
            waiting = asyncio.create_task(every.take())
            await asyncio.sleep(0)
            log.publish("container", "die", A)
            assert [message.action for message in await waiting] == ["die"]
            assert (await anext(some)).action == "start"
            every.close()
            assert await every.take() == []
            with pytest.raises(StopAsyncIteration):
                await anext(every)
            ended = asyncio.create_task(some.take())
            await asyncio.sleep(0)
            some.close()
            assert await ended == []
        assert log.listeners == 0

    asyncio.run(scenario())


def test_cancelled_reader_loses_nothing() -> None:
    async def scenario() -> None:
        log = EventLog()
        subscription = log.subscribe()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await subscription.take()
        log.publish("container", "x", A)
        assert len(await subscription.take()) == 1

    asyncio.run(scenario())


def test_slow_listener_is_ended_and_slows_nobody() -> None:
    async def scenario() -> None:
        log = EventLog()
        slow, fast = log.subscribe(), log.subscribe()
        heard = 0
        for _ in range(BACKLOG + 5):
            log.publish("container", "x", A)
            heard += len(await fast.take())
        assert heard == BACKLOG + 5
        assert slow.overrun and slow.ended and not fast.ended and log.listeners == 1
        assert len([message async for message in slow]) == BACKLOG
        fast.close()

    asyncio.run(scenario())


CONTAINER = EventLog().publish(
    "container", "exec_create: sh -c true", A, {"name": "web", "image": "reg:5000/app:v1", "tier": "front"}
)
IMAGE = EventLog().publish("image", "pull", "sha256:12", {"name": "busybox:latest"})
NETWORK = EventLog().publish("network", "connect", "n123", {"name": "front", "container": A})


@pytest.mark.parametrize(
    ("message", "filters", "expected"),
    [
        (CONTAINER, {}, True),
        (CONTAINER, {"container": []}, True),
        (CONTAINER, {"container": [A]}, True),
        (CONTAINER, {"container": ["aaaa"]}, True),
        (CONTAINER, {"container": ["web"]}, True),
        (CONTAINER, {"container": ["/web"]}, True),
        (CONTAINER, {"container": [B, "web"]}, True),
        (CONTAINER, {"container": [B]}, False),
        (CONTAINER, {"type": ["container"], "container": [A]}, True),
        (CONTAINER, {"type": ["image"], "container": [A]}, False),
        (CONTAINER, {"type": ["image", "container"]}, True),
        (CONTAINER, {"event": ["exec_create"]}, True),
        (CONTAINER, {"event": ["exec_create: sh -c true"]}, True),
        (CONTAINER, {"event": ["exec"]}, False),
        (CONTAINER, {"event": ["start", "exec_create"]}, True),
        (CONTAINER, {"label": ["tier"]}, True),
        (CONTAINER, {"label": ["tier=front"]}, True),
        (CONTAINER, {"label": ["tier=back"]}, False),
        (CONTAINER, {"label": ["tier", "none"]}, False),
        (CONTAINER, {"image": ["reg:5000/app:v1"]}, True),
        (CONTAINER, {"image": ["reg:5000/app"]}, True),
        (CONTAINER, {"image": ["reg"]}, False),
        (CONTAINER, {"network": ["front"]}, False),
        (IMAGE, {"image": ["busybox"]}, True),
        (IMAGE, {"image": ["busybox:latest"]}, True),
        (IMAGE, {"image": ["sha256:12"]}, True),
        (IMAGE, {"image": ["busy"]}, False),
        (IMAGE, {"container": ["busybox"]}, False),
        (NETWORK, {"network": ["n12"]}, True),
        (NETWORK, {"network": ["front"]}, True),
        (NETWORK, {"image": ["front"]}, False),
        (NETWORK, {"daemon": ["front"]}, False),
    ],
)
def test_filters(message: Message, filters: dict[str, list[str]], expected: bool) -> None:
    assert matches(message, filters) is expected


def test_filters_of_later_clients() -> None:
    """Filters for swarm scope, nodes and services are accepted, although this engine has no such
    events."""
    message = EventLog().publish("container", "start", A)
    assert matches(message, {"scope": ["local"]}) and matches(message, {"scope": ["swarm", "local"]})
    assert not matches(message, {"scope": ["swarm"]})
    for name in ("node", "service", "secret", "config"):
        assert name in EVENT_FILTERS and not matches(message, {name: ["x"]})


def test_the_history_is_bounded_in_characters_too() -> None:
    log = EventLog()
    for number in range(10):
        log.publish("container", "create", str(number), {"label": "x" * (HISTORY_SIZE // 4)})
    assert [message.actor.id for message in log.history(0)] == ["7", "8", "9"]
    log.publish("container", "create", "huge", {"label": "x" * (HISTORY_SIZE + 1)})
    assert log.history(0) == []
    log.publish("container", "create", "next", {})
    assert [message.actor.id for message in log.history(0)] == ["next"]
