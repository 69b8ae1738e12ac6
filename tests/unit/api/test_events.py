"""GET /events on a log of its own: past and live events, filters, and the forms of older
versions.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from engine.api import events
from engine.api.engine import Engine
from engine.api.events import EventFeed
from engine.errors import InvalidParameter
from engine.http.messages import Headers, StreamReply
from tests.unit.api.parts import engine, request


def answer(parts: Engine, query: str = "", version: str | None = None, accept: str = "") -> StreamReply:
    asked = request("/events", query=query, version=version)
    if accept:
        asked.headers = Headers([(b"Accept", accept.encode())])
    reply = events.list_all(parts, asked)
    assert isinstance(reply, StreamReply) and reply.status == 200
    return reply


def feed(parts: Engine, query: str = "", version: str | None = None, accept: str = "") -> EventFeed:
    chunks = answer(parts, query, version, accept).chunks
    assert isinstance(chunks, EventFeed)
    return chunks


def lines(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n")
    return [msgspec.json.decode(line) for line in data.splitlines()]


def test_events_live() -> None:
    async def scenario() -> None:
        parts = engine()
        parts.events.publish("container", "create", "c1")
        chunks = feed(parts)  # subscribes at once, before the head of the reply is sent
        assert parts.events.listeners == 1
        parts.events.publish("container", "start", "c1")
        parts.events.publish("container", "die", "c1", {"exitCode": "3"})
        assert [event["Action"] for event in lines(await anext(chunks))] == ["start", "die"]
        parts.events.publish("container", "destroy", "c1")
        assert [event["Action"] for event in lines(await anext(chunks))] == ["destroy"]
        await chunks.aclose()
        assert parts.events.listeners == 0
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)

    asyncio.run(scenario())


def test_events_without_since_begin_with_the_containers_that_have_just_started() -> None:
    async def scenario() -> None:
        parts = engine()
        running = {"c1", "c2"}
        parts.containers.runs = running.__contains__  # type: ignore[method-assign, assignment]
        now = time.time_ns()
        for container, action, age in (
            *(("c2", "start", 0.9), ("c1", "start", 0.2), ("c1", "die", 0.15)),
            *(("c3", "start", 0.1), ("c1", "start", 0.05), ("c1", "exec_start: sh", 0.04)),
        ):
            parts.events.publish("container", action, container, {"n": str(age)}, at_ns=now - int(age * 1e9))
        found = parts.events.just_started(running.__contains__)
        assert [(message.actor.id, message.actor.attributes["n"]) for message in found] == [("c1", "0.05")]
        assert parts.events.just_started(running.__contains__, {"event": ["die"]}) == []
        assert parts.events.just_started(running.__contains__, {"container": ["c2"]}) == []
        parts.events.publish("container", "start", "c2")
        chunks = feed(parts, 'filters={"event":["start"],"container":["c2"]}')
        assert [event["Actor"]["ID"] for event in lines(await anext(chunks))] == ["c2"]
        parts.events.publish("container", "start", "c2")
        assert len(lines(await anext(chunks))) == 1  # once, live
        await chunks.aclose()
        chunks = feed(parts, f"since={time.time() + 1:.6f}")
        parts.events.publish("container", "kill", "c1", at_ns=time.time_ns() + 2 * 10**9)
        assert [event["Action"] for event in lines(await anext(chunks))] == ["kill"]
        await chunks.aclose()

    asyncio.run(scenario())


def test_events_since() -> None:
    async def scenario() -> None:
        parts = engine()
        for second in (10, 20, 30):
            parts.events.publish("container", f"at{second}", "c1", at_ns=second * 10**9)
        for query, expected in (("since=20", ["at20", "at30"]), ("since=0", ["at10", "at20", "at30", "pull"])):
            chunks = feed(parts, query)
            assert [event["Action"] for event in lines(await anext(chunks))] == expected
            parts.events.publish("image", "pull", "i", at_ns=30 * 10**9)
            assert [event["Action"] for event in lines(await anext(chunks))] == ["pull"]  # live
            await chunks.aclose()
        chunks = feed(parts, "since=15&until=25.5")
        assert [event["Action"] for event in lines(await anext(chunks))] == ["at20"]
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
        await chunks.aclose()
        chunks = feed(parts, "until=25")  # without `since` all remembered events, as in Docker
        assert [event["Action"] for event in lines(await anext(chunks))] == ["at10", "at20"]
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
        await chunks.aclose()

    asyncio.run(scenario())


def test_events_until_a_time_to_come() -> None:
    async def scenario() -> None:
        parts = engine()
        chunks = feed(parts, f"until={time.time() + 1:.6f}")
        parts.events.publish("container", "start", "c1")
        assert len(lines(await anext(chunks))) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
        await chunks.aclose()
        assert parts.events.listeners == 0

    asyncio.run(scenario())


def test_events_filtered_as_docker_run_does() -> None:
    async def scenario() -> None:
        parts = engine()
        chunks = feed(parts, 'filters={"container":{"c1":true},"type":{"container":true}}', version="1.24")
        parts.events.publish("container", "start", "c2")
        parts.events.publish("network", "connect", "n", {"container": "c1"})
        parts.events.publish("container", "die", "c1", {"exitCode": "7"})
        (event,) = lines(await anext(chunks))
        assert event["Actor"]["Attributes"]["exitCode"] == "7" and event["status"] == "die" and event["id"] == "c1"
        await chunks.aclose()

    asyncio.run(scenario())


def test_events_at_older_versions() -> None:
    async def scenario() -> None:
        for version, there in (("1.24", True), ("1.22", True), ("1.21", False), ("1.18", False)):
            parts = engine()
            chunks = feed(parts, version=version)
            parts.events.publish("container", "start", "c1", {"image": "busybox"})
            (event,) = lines(await anext(chunks))
            assert ("Action" in event) is there and event["status"] == "start" and event["from"] == "busybox"
            await chunks.aclose()

    asyncio.run(scenario())


def test_events_of_images_that_are_made() -> None:
    async def scenario() -> None:
        for version, there in (("1.46", True), ("1.45", False), ("1.24", False)):
            parts = engine()
            parts.events.publish("image", "create", "i1", at_ns=10**9)
            parts.events.publish("image", "tag", "i1", at_ns=10**9)
            chunks = feed(parts, "since=1&until=3", version=version)
            found = [event["Action"] for event in lines(await anext(chunks))]
            assert found == (["create", "tag"] if there else ["tag"])
            with pytest.raises(StopAsyncIteration):
                await anext(chunks)

    asyncio.run(scenario())


def test_a_stream_goes_on_after_events_that_the_version_does_not_have() -> None:
    async def scenario() -> None:
        parts = engine()
        chunks = feed(parts, version="1.45")
        parts.events.publish("image", "create", "i1")
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0)
        parts.events.publish("image", "tag", "i1")
        assert [event["Action"] for event in lines(await waiting)] == ["tag"]
        await chunks.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("version", "accept", "expected"),
    [
        ("1.55", "", "application/jsonl"),
        ("1.52", "*/*", "application/jsonl"),
        ("1.51", "", "application/json"),
        ("1.51", "*/*, application/*", "application/json"),
        ("1.24", "application/json", "application/json"),
        ("1.24", "application/jsonl", "application/jsonl"),
        ("1.55", "application/x-ndjson", "application/x-ndjson"),
        ("1.55", "application/json-seq;q=0.9, application/x-ndjson;q=0.5", "application/json-seq"),
        # of docker CLI 29
        ("1.55", "application/jsonl, application/x-ndjson, application/json-seq", "application/jsonl"),
        ("1.55", "application/json-seq;q=0", "application/jsonl"),
        ("1.55", "application/json", "application/jsonl"),
    ],
)
def test_the_media_type(version: str, accept: str, expected: str) -> None:
    async def scenario() -> None:
        parts = engine()
        parts.events.publish("container", "start", "c1", at_ns=10**9)
        reply = answer(parts, "since=1&until=3", version, accept)
        assert reply.content_type == expected
        chunk = await anext(reply.chunks)
        assert chunk.startswith(b"\x1e{" if expected == "application/json-seq" else b"{")
        assert msgspec.json.decode(chunk.removeprefix(b"\x1e"))["Action"] == "start"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("since=x", "invalid value for since"),
        ("until=x", "invalid value for until"),
        ("since=20&until=10", "cannot be after"),
        ('filters={"nope":["x"]}', "Invalid filter 'nope'"),
        ("filters=x", "not JSON"),
    ],
)
def test_bad_events(query: str, message: str) -> None:
    parts = engine()
    with pytest.raises(InvalidParameter, match=message):
        feed(parts, query)
    assert parts.events.listeners == 0
