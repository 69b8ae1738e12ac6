"""The history of builds over POST /grpc: the calls that `docker buildx history` makes, and what a
crash leaves of a build."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.builds.buildx import CONTROL, Build, Built, dockerfile, shown
from tests.support.builds.sessions import Caller, Failure, every, fields, mapping
from tests.support.builds.sessions import field as part
from tests.support.engine.harness import TempEngine, until

pytestmark = pytest.mark.own

CONTENT = "/containerd.services.content.v1.Content/"
STARTED, COMPLETE, DELETED = range(3)
PINNED, DELETE, FINALIZE = 2, 3, 4
"""Fields of UpdateBuildHistoryRequest."""

Event = tuple[int, dict[int, Any]]


def event(message: bytes) -> Event:
    """Type and record."""
    found = fields(message)
    return found.get(1, STARTED), fields(found[2])


def listed(caller: Caller, ref: str = "", *filters: str, limit: int = 0) -> list[Event]:
    asked = caller.call(f"{CONTROL}ListenBuildHistory")
    request = part(2, ref) + part(3, 1) + b"".join(part(4, text) for text in filters) + part(5, limit)
    asked.send(request, last=True)
    return [event(message) for message in asked.all()]


def record(caller: Caller, ref: str) -> dict[int, Any]:
    ((kind, found),) = listed(caller, ref)
    assert kind == COMPLETE
    return found


def update(caller: Caller, ref: str, kind: int) -> None:
    caller.ask(f"{CONTROL}UpdateBuildHistory", part(1, ref) + part(kind, 1))


def blob(caller: Caller, descriptor: bytes) -> bytes:
    """The content that a descriptor names, checked."""
    wanted = fields(descriptor)
    info = fields(fields(caller.ask(f"{CONTENT}Info", part(1, wanted[2])))[1])
    assert (info[1], info[2]) == (wanted[2], wanted[3])
    reading = caller.call(f"{CONTENT}Read")
    reading.send(part(1, wanted[2]), last=True)
    content = b"".join(fields(message)[2] for message in reading.all())
    assert wanted[2] == b"sha256:" + hashlib.sha256(content).hexdigest().encode()
    return content


def built(engine: TempEngine, text: str, **given: Any) -> tuple[str, Built]:
    """The reference of a build, and the build."""
    build = Build(engine.socket, dockerfile(text), **given)
    return build.ref, build.result()


def test_a_build_that_has_ended(builder: TempEngine) -> None:
    options = {"filename": "Dockerfile", "build-arg:X": "yes"}
    word = secrets.token_hex(8)
    ref, made = built(builder, f"FROM busybox\nRUN echo {word}", names="one", options=options, direct=True)
    with Caller(builder.socket) as caller:
        found = record(caller, ref)
        assert found[1] == ref.encode() and 5 not in found
        assert {fields(value)[1]: fields(value)[2] for number, value in every_of(caller, ref) if number == 3} == {
            key.encode(): value.encode() for key, value in options.items()
        }
        exporter = fields(found[4])
        assert exporter[1] == b"moby" and fields(exporter[2]) == {1: b"name", 2: b"one"}
        assert fields(found[6])[1] <= fields(found[7])[1]
        assert (found[16], found[17]) == (len(made.vertices), len(made.vertices))
        configuration = blob(caller, fields(found[10])[1])
        assert f"sha256:{hashlib.sha256(configuration).hexdigest()}" == made.image_id
        assert json.loads(configuration)["os"] == "linux"
        assert fields(found[8])[1] == b"application/vnd.buildkit.status.v0"
        log = blob(caller, found[8])
        assert word.encode() in log and int.from_bytes(log[:4], "little") < len(log)
        status = caller.call(f"{CONTROL}Status")
        status.send(part(1, ref), last=True)
        vertices = shown(status.all())
        assert [vertex.name for vertex in vertices] == [vertex.name for vertex in made.vertices]
        assert [vertex.log for vertex in vertices] == [vertex.log for vertex in made.vertices]
        assert all(vertex.done for vertex in vertices)


def every_of(caller: Caller, ref: str) -> list[tuple[int, Any]]:
    """The fields of a record in their order."""
    asked = caller.call(f"{CONTROL}ListenBuildHistory")
    asked.send(part(2, ref) + part(3, 1), last=True)
    (message,) = asked.all()
    return every(fields(message)[2])


def test_a_build_that_has_failed(builder: TempEngine) -> None:
    word = secrets.token_hex(8)
    ref, made = built(builder, f"FROM busybox\nRUN echo {word}; exit 7")
    assert made.failure is not None
    with Caller(builder.socket) as caller:
        found = record(caller, ref)
        error = fields(found[5])
        assert (error[1], error[2].decode()) == (2, made.failure.message)
        status = every(blob(caller, found[18]))
        assert dict(status[:2]) == {1: 2, 2: made.failure.message.encode()}
        details = {fields(each)[1].decode().rpartition(".")[2]: json.loads(fields(each)[2]) for _, each in status[2:]}
        assert details["Source+json"]["ranges"] == [{"start": {"line": 2}, "end": {"line": 2}}]
        status_call = caller.call(f"{CONTROL}Status")
        status_call.send(part(1, ref), last=True)
        digests = [fields(value)[1] for each in status_call.all() for number, value in every(each) if number == 1]
        assert details["Vertex+json"]["digest"].encode() == digests[-1]
        assert 10 not in found


def test_a_build_that_runs_is_listed(builder: TempEngine) -> None:
    build = Build(builder.socket, dockerfile(f"FROM busybox\nRUN sleep 100 # {secrets.token_hex(8)}"))
    while b"RUN sleep" not in (build.status.receive() or b""):
        pass
    with Caller(builder.socket) as caller, Caller(builder.socket) as listener:
        ((kind, found),) = listed(caller, build.ref)
        assert kind == STARTED and 7 not in found
        assert listed(caller, build.ref, "status==running") and not listed(caller, build.ref, "status==completed")
        events = listener.call(f"{CONTROL}ListenBuildHistory")
        events.send(part(2, build.ref), last=True)
        first = events.receive()
        assert first is not None and event(first)[0] == STARTED
        build.solving.cancel()
        second = events.receive()
        assert second is not None and event(second)[0] == COMPLETE
        error = fields(event(second)[1][5])
        assert (error[1], error[2]) == (1, b"context canceled")
        update(caller, build.ref, DELETE)
        third = events.receive()
        assert third is not None and event(third)[0] == DELETED
        events.cancel()
        assert not listed(caller, build.ref)
    build.result()


def test_records_are_pinned_and_removed(builder: TempEngine) -> None:
    ref, _ = built(builder, "FROM busybox")
    with Caller(builder.socket) as caller:
        assert 14 not in record(caller, ref)
        update(caller, ref, PINNED)
        assert record(caller, ref)[14] == 1
        update(caller, ref, FINALIZE)
        logs = record(caller, ref)[8]
        update(caller, ref, DELETE)
        assert not listed(caller, ref)
        calls: list[tuple[Callable[[], object], int, str]] = [
            (lambda: update(caller, ref, DELETE), 5, f"no build record for ref {ref}"),
            (lambda: update(caller, ref, PINNED), 5, f"no build record for ref {ref}"),
            (lambda: blob(caller, logs), 5, f"content digest {fields(logs)[2].decode()}: not found"),
            (lambda: caller.ask(f"{CONTENT}Info", part(1, "sha256:x")), 2, "'sha256:x': invalid digest"),
            (lambda: listed(caller, "", "duration>x"), 2, "invalid duration 'x'"),
            (lambda: listed(caller, "", limit=(1 << 64) - 1), 2, "invalid limit -1"),
        ]
        for call, status, message in calls:
            with pytest.raises(Failure) as caught:
                call()
            assert (caught.value.status, caught.value.message) == (status, message)


def test_the_newest_builds(builder: TempEngine) -> None:
    refs = [built(builder, "FROM busybox")[0] for _ in range(3)]
    with Caller(builder.socket) as caller:
        assert [found[1].decode() for _, found in listed(caller, limit=3)] == refs[::-1]
        assert [found[1].decode() for _, found in listed(caller, "", f"ref~={refs[0][:20]}")] == refs[:1]
        assert len(listed(caller, "", "completedAt>=1h")) >= 3
        # how buildx asks whether there is a history
        assert listed(caller, "buildx-test-history-api-feature") == []


def test_an_internal_build_leaves_nothing(builder: TempEngine) -> None:
    ref = secrets.token_hex(12)
    with Caller(builder.socket) as caller:
        request = part(1, ref) + part(3, "moby") + part(6, "dockerfile.v0") + mapping(7, {"requestid": "x"})
        with pytest.raises(Failure):
            caller.ask(f"{CONTROL}Solve", request + part(11, 1))
        assert listed(caller, ref) == []
        with pytest.raises(Failure):
            caller.ask(f"{CONTROL}Solve", request)
        assert len(listed(caller, ref)) == 1


def test_a_crash_in_a_build(own_engine: TempEngine) -> None:
    """What has ended stays, and of the build that was cut nothing does."""
    kept, _ = built(own_engine, "FROM busybox\nRUN echo kept")
    with Caller(own_engine.socket) as caller:
        log = blob(caller, record(caller, kept)[8])
    cut = Build(own_engine.socket, dockerfile("FROM busybox\nRUN while echo line; do sleep 0.005; done"))
    directory = own_engine.base / "root/build/history"
    until("a log that is being written", lambda: any(file.name.startswith(".") for file in directory.iterdir()))
    own_engine.kill9()
    assert cut.result().failure is not None
    own_engine.start()
    with Caller(own_engine.socket) as caller:
        assert [found[1].decode() for _, found in listed(caller)] == [kept]
        assert blob(caller, record(caller, kept)[8]) == log
    assert len(list(directory.iterdir())) == 1
