"""POST /build, /build/prune and /build/cancel on a builder of fakes: parameters, and what becomes
of messages and errors.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest

from engine.api import build
from engine.api.application import Application
from engine.api.engine import Engine
from engine.api.versions import CHANGES, Table, Version
from engine.builder.options import DEFAULT_HOST, Options, PruneOptions
from engine.builder.prune import STEP, Entry, Pruned
from engine.builder.reports import ImageMade, Notice, Report, Transfer
from engine.errors import Conflict, InvalidParameter, NotFound, ServerError
from engine.http.messages import Headers, Reply, Request, StreamReply
from engine.images.credentials import Credentials
from engine.wire.containers import Ulimit
from engine.wire.images import Platform, ProgressDetail
from tests.unit.api.parts import engine, request

IMAGE = "sha256:" + "1" * 64


class StepFailed(ServerError):
    exit_code = 3


class FakeBuilder:
    """Reads the body, yields `texts`, then fails with `error` or yields the image."""

    def __init__(self, *texts: str, error: Exception | None = None) -> None:
        self.texts = texts
        self.error = error
        self.options: Options | None = None
        self.pruned: PruneOptions | None = None
        self.read = b""
        self.closed = False

    async def load(self) -> FakeBuilder:
        return self

    async def build(self, body: AsyncIterator[bytes], options: Options, /) -> AsyncGenerator[Report, None]:
        self.options = options
        try:
            async for chunk in body:
                self.read += chunk
            for text in self.texts:
                yield Notice(text)
            if self.error is not None:
                raise copy.copy(self.error)  # the traceback of a parameter would keep the request
            yield ImageMade(IMAGE)
            yield Notice("Successfully built 111111111111\n")
        finally:
            self.closed = True

    async def prune(self, options: PruneOptions, /) -> Pruned:
        self.pruned = options
        return Pruned([Entry(each, "", STEP, "", 1, 1, 1, 1, False, False) for each in "ab"], 7)


def fakes(builder: Any, tmp_path: Path) -> Engine:
    parts: Any = {
        "builder": builder,
        "networks": SimpleNamespace(host_gateway="172.17.0.1"),
        "images": SimpleNamespace(temporary=tmp_path),
    }
    return dataclasses.replace(engine(), **parts)


def asked(parts: Engine, path: str, query: str = "", *, version: str = "1.24", config: str = "") -> Any:
    """The reply: its status, and the objects of its stream or its body's bytes."""
    app = Application(parts)

    async def run() -> Any:
        made = request(f"/v1.24{path}", "POST", query=query, body=b"context")
        made.headers = Headers([(b"X-Registry-Config", config.encode())] if config else [])
        try:
            result = app(made)
            if version != "1.24":  # not served, but its rows are there
                made.version = Version(version, Table(CHANGES))
            reply = await result if isinstance(result, Coroutine) else result
        except Exception as error:
            reply = app.error_reply(error)
        if isinstance(reply, StreamReply):
            body = b"".join([chunk async for chunk in reply.chunks])
            assert body.endswith(b"\r\n")
            return reply.status, [json.loads(line) for line in body.split(b"\r\n")[:-1]]
        assert isinstance(reply, Reply)
        return reply.status, json.loads(reply.body) if reply.body else b""

    return asyncio.run(run())


def decoded(query: str = "", *, at: str | None = None, **parameters: str) -> Options:
    made = request("/build", "POST", query=query or urlencode(parameters), version=at)
    networks: Any = SimpleNamespace(host_gateway="172.17.0.1")
    return build.decode(dataclasses.replace(engine(), networks=networks), made)


def test_the_stream(tmp_path: Path) -> None:
    builder = FakeBuilder("Step 1 : FROM scratch\n", " ---> \n")
    assert asked(fakes(builder, tmp_path), "/build") == (
        200,
        [
            {"stream": "Step 1 : FROM scratch\n"},
            {"stream": " ---> \n"},
            {"stream": "Successfully built 111111111111\n"},
        ],
    )
    assert builder.read == b"context" and builder.closed


def test_aux_is_sent_from_1_30_on(tmp_path: Path) -> None:
    for version, expected in (("1.29", []), ("1.30", [{"aux": {"ID": IMAGE}}])):
        _, found = asked(fakes(FakeBuilder(), tmp_path), "/build", version=version)
        assert found == [*expected, {"stream": "Successfully built 111111111111\n"}]


def test_aux_is_sent_to_clients_that_know_it(tmp_path: Path) -> None:
    """The docker CLI sends `version=1` at any version, and needs the id for --iidfile."""
    for query, expected in (("version=1", [{"aux": {"ID": IMAGE}}]), ("version=", [])):
        _, found = asked(fakes(FakeBuilder(), tmp_path), "/build", query)
        assert found[:-1] == expected


def test_progress(tmp_path: Path) -> None:
    async def messages(*_: Any) -> AsyncGenerator[Report, None]:
        yield Transfer(status="Downloading", progress_detail=ProgressDetail(1, 2), progress="[=>]", id="abc")

    builder = FakeBuilder()
    builder.build = messages  # type: ignore[method-assign]
    status, found = asked(fakes(builder, tmp_path), "/build")
    assert (status, found) == (
        200,
        [
            {
                "status": "Downloading",
                "progressDetail": {"current": 1, "total": 2},
                "progress": "[=>]",
                "id": "abc",
            }
        ],
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidParameter("x"), 400), (NotFound("x"), 404), (Conflict("x"), 409), (StepFailed("x"), 500)],
)
@pytest.mark.parametrize("query", ["", "q=1", "buildid=a"])
def test_an_error_before_the_first_message_is_the_status(
    query: str, error: Exception, status: int, tmp_path: Path
) -> None:
    builder = FakeBuilder(error=error)
    assert asked(fakes(builder, tmp_path), "/build", query) == (status, {"message": "x"})
    assert builder.closed


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (InvalidParameter("x"), {"errorDetail": {"message": "x"}, "error": "x"}),
        (StepFailed("x"), {"errorDetail": {"code": 3, "message": "x"}, "error": "x"}),
    ],
)
@pytest.mark.parametrize("query", ["", "q=1", "buildid=a"])
def test_a_later_error_ends_the_stream(query: str, error: Exception, last: Any, tmp_path: Path) -> None:
    """A quiet build sends the output that it kept."""
    builder = FakeBuilder("a", "b", error=error)
    assert asked(fakes(builder, tmp_path), "/build", query) == (200, [{"stream": "a"}, {"stream": "b"}, last])
    assert builder.closed


@pytest.mark.parametrize("version", ["1.24", "1.30"])
def test_quiet(version: str, tmp_path: Path) -> None:
    found = asked(fakes(FakeBuilder("a"), tmp_path), "/build", "q=1", version=version)
    assert found == (200, [{"stream": f"{IMAGE}\n"}])


def test_a_refused_parameter_starts_no_build(tmp_path: Path) -> None:
    builder = FakeBuilder()
    assert asked(fakes(builder, tmp_path), "/build", "t=A")[0] == 400
    assert builder.options is None and builder.read == b""


def test_defaults() -> None:
    """Go clients send empty values and zeros."""
    for query in (
        "",
        "t=&dockerfile=&remote=&q=&nocache=&pull=&rm=&forcerm=0&memory=0&memswap=0&cpushares=0&cpuperiod=0&cpuquota=0"
        "&cpusetcpus=&cpusetmems=&cgroupparent=&shmsize=0&ulimits=null&buildargs=null&labels=null&cachefrom=null"
        "&isolation=&networkmode=&extrahosts=&target=&platform=&outputs=&version=&session=&buildid=&squash=0",
        "networkmode=default&version=1&rm=1&ulimits=[]&buildargs={}&labels={}&cachefrom=[]",
    ):
        assert decoded(query) == Options(numbered_steps=True, unused_arguments_fail=False)


@pytest.mark.parametrize(
    ("query", "field", "expected"),
    [
        ("dockerfile=a/b", "dockerfile", "a/b"),
        ("buildfile=a/b", "dockerfile", "a/b"),
        ("dockerfile=a&dockerfile=b", "dockerfile", "a"),
        ("dockerfile=a&buildfile=b", "dockerfile", "a"),
        ("remote=http://a/b", "remote", "http://a/b"),
        ("nocache=1", "no_cache", True),
        ("nocache=True", "no_cache", True),
        ("nocache=false", "no_cache", False),
        ("pull=yes", "pull", True),
        ("rm=0", "remove", False),
        ("rm=false", "remove", False),
        ("rm=True", "remove", True),
        ("rm=0&forcerm=1", "remove", True),
        ("rm=0&forcerm=1", "force_remove", True),
        ("rm=1", "force_remove", False),
        ("buildargs=" + '{"a":"b","c":null}', "arguments", {"a": "b", "c": None}),
        ("labels=" + '{"a":"b"}', "labels", {"a": "b"}),
        ('cachefrom=["a","b"]', "cache_from", ("a", "b")),
        ("target=2", "target", "2"),
        ("platform=linux/arm64", "platform", Platform(os="linux", architecture="arm64")),
        ("session=s", "session", "s"),
        ("buildid=i", "build_id", "i"),
    ],
)
def test_each_parameter(query: str, field: str, expected: Any) -> None:
    assert getattr(decoded(query), field) == expected


@pytest.mark.parametrize(
    ("query", "field", "expected"),
    [
        ("memory=8388608", "memory", 8 << 20),
        ("memory=8388608&memswap=16777216", "memory_swap", 16 << 20),
        ("memory=8388608&memswap=-1", "memory_swap", -1),
        ("cpushares=512", "cpu_shares", 512),
        ("cpuperiod=50000", "cpu_period", 50_000),
        ("cpuquota=10000", "cpu_quota", 10_000),
        ("cpusetcpus=0-1", "cpuset_cpus", "0-1"),
        ("cpusetmems=0", "cpuset_mems", "0"),
        ("cgroupparent=/a/b", "cgroup_parent", "/a/b"),
        ("shmsize=1048576", "shm_size", 1 << 20),
        ('ulimits=[{"Name":"nofile","Soft":1,"Hard":2}]', "ulimits", [Ulimit(name="nofile", soft=1, hard=2)]),
        ("isolation=process", "isolation", ""),
        ("networkmode=none", "network_mode", "none"),
        ("networkmode=container:x", "network_mode", "container:x"),
        ("extrahosts=a:1.2.3.4&extrahosts=b:host-gateway", "extra_hosts", ["a:1.2.3.4", "b:172.17.0.1"]),
    ],
)
def test_each_setting_of_containers(query: str, field: str, expected: Any) -> None:
    found = decoded(query).host
    assert getattr(found, field) == expected
    untouched = {name for name in DEFAULT_HOST.__struct_fields__ if name not in (field, "memory")}
    assert all(getattr(found, name) == getattr(DEFAULT_HOST, name) for name in untouched)


def test_tags() -> None:
    assert [tag.familiar for tag in decoded("t=a&t=b:1&t=a:latest").tags] == ["a:latest", "b:1"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("t=a&t=B", "Error parsing reference"),
        ("t=a@sha256:" + "0" * 64, "build tag cannot contain a digest"),
        ("memory=1g", "invalid value for memory"),
        ("memswap=x", "invalid value for memswap"),
        ("cpushares=x", "invalid value for cpushares"),
        ("cpuperiod=x", "invalid value for cpuperiod"),
        ("cpuquota=x", "invalid value for cpuquota"),
        ("shmsize=64m", "invalid value for shmsize"),
        ("shmsize=-1", "SHM size"),
        ("memory=8388608&memswap=4194304", "Minimum memoryswap limit"),
        ("ulimits=x", "ulimits"),
        ("buildargs=x", "buildargs"),
        ("labels=x", "labels"),
        ("cachefrom=x", "cachefrom"),
        ("isolation=hyperv", 'Unsupported isolation: "hyperv"'),
        ("platform=x", "unknown operating system"),
        ("outputs=x", "outputs"),
        ('outputs=[{"Type":"local"}]', "outputs"),
        ("version=7", 'invalid version "7"'),
        ("version=2", "version"),
        ("squash=1", "squash is only supported with experimental mode"),
        ("securityopt=x", "security options are not supported"),
        ("extrahosts=x", "ExtraHosts"),
        ("networkmode=container:", "NetworkMode"),
    ],
)
def test_bad_parameters(query: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        decoded(query)
    assert words in refused.value.message


def test_credentials(tmp_path: Path) -> None:
    builder = FakeBuilder()
    config = base64.urlsafe_b64encode(b'{"https://index.docker.io/v1/":{"username":"me","password":"??>"}}').decode()
    asked(fakes(builder, tmp_path), "/build", config=config)
    assert builder.options is not None
    assert builder.options.credentials == {"docker.io": Credentials(username="me", password="??>")}
    assert "??>" not in repr(builder.options)
    for ignored in ("!!!", "e30=", "bm90IGpzb24="):
        assert asked(fakes(builder, tmp_path), "/build", config=ignored)[0] == 200
        assert builder.options.credentials == {}


def test_rows_of_newer_versions(tmp_path: Path) -> None:
    for version, newer in (("1.24", False), ("1.25", True)):
        builder = FakeBuilder()
        made = request("/build", "POST")
        made.version = Version(version, Table(CHANGES))
        found = build.decode(fakes(builder, tmp_path), made)
        assert (found.numbered_steps, found.unused_arguments_fail) == (newer, not newer)


def test_prune(tmp_path: Path) -> None:
    builder = FakeBuilder()
    assert asked(fakes(builder, tmp_path), "/build/prune") == (
        200,
        {"CachesDeleted": ["a", "b"], "SpaceReclaimed": 7},
    )
    assert builder.pruned == PruneOptions()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("all=1", PruneOptions(all=True)),
        ("keep-storage=5", PruneOptions(reserved_space=5)),
        ("reserved-space=6&keep-storage=5", PruneOptions(reserved_space=6)),
        ("max-used-space=7&min-free-space=8", PruneOptions(max_used_space=7, min_free_space=8)),
        ('filters={"until":["100"]}', PruneOptions(unused_since_ns=100 * 10**9)),
        ('filters={"label!":["x"]}', PruneOptions(filters={"label!": ["x"]})),
        ('filters={"unused-for":{"100":true}}', PruneOptions(unused_since_ns=100 * 10**9)),
        ('filters={"type":["regular"],"id":["x"]}', PruneOptions(filters={"type": ["regular"], "id": ["x"]})),
        (f'filters={{"id":{json.dumps(["x"] * 16)}}}', PruneOptions(filters={"id": ["x"] * 16})),
    ],
)
def test_parameters_of_a_prune(query: str, expected: PruneOptions) -> None:
    assert build.decode_prune(request("/build/prune", "POST", query=query)) == expected


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [
        ("1.48", "reserved-space=6&max-used-space=7", PruneOptions(reserved_space=6, max_used_space=7)),
        ("1.47", "reserved-space=6&max-used-space=7", PruneOptions()),
        ("1.47", "keep-storage=5&min-free-space=x", PruneOptions(reserved_space=5)),
        ("1.25", "max-used-space=7", PruneOptions()),
        ("1.24", "max-used-space=7", PruneOptions(max_used_space=7)),
    ],
)
def test_limits_of_a_prune(version: str, given: str, expected: PruneOptions) -> None:
    assert build.decode_prune(request("/build/prune", "POST", query=given, version=version)) == expected


@pytest.mark.parametrize(("version", "obeyed"), [("1.32", True), ("1.31", False), ("1.25", False), ("1.24", True)])
def test_a_platform_is_ignored_before_1_32(version: str, obeyed: bool) -> None:
    expected = Platform(os="linux", architecture="arm64") if obeyed else None
    assert decoded("platform=linux/arm64", at=version).platform == expected


@pytest.mark.parametrize(("version", "obeyed"), [("1.40", True), ("1.39", False), ("1.25", False), ("1.24", True)])
def test_outputs_are_ignored_before_1_40(version: str, obeyed: bool) -> None:
    if obeyed:
        with pytest.raises(InvalidParameter, match="outputs"):
            decoded('outputs=[{"Type":"local"}]', at=version)
    else:
        decoded('outputs=[{"Type":"local"}]', at=version)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("keep-storage=1g", "keep-storage is in bytes and expects an integer, got 1g"),
        ("reserved-space=-1", "reserved-space is in bytes and expects an integer, got -1"),
        ('filters={"until":["x"]}', "neither a duration nor a timestamp"),
        ('filters={"until":["1h"],"unused-for":["1h"]}', "until and unused-for"),
        ('filters={"nonsense":["1h"]}', "Invalid filter 'nonsense'"),
        ("filters=x", "invalid filters"),
        (f'filters={{"id":{json.dumps([str(each) for each in range(17)])}}}', "more than 16 conditions"),
        ('filters={"id":["a"],"type":{"%s":true}}' % ("b" * 4096), "more than 4096 characters"),
    ],
)
def test_bad_parameters_of_a_prune(query: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        build.decode_prune(request("/build/prune", "POST", query=query))
    assert words in refused.value.message


def test_cancel(tmp_path: Path) -> None:
    assert asked(fakes(FakeBuilder(), tmp_path), "/build/cancel") == (400, {"message": "build ID not provided"})
    assert asked(fakes(FakeBuilder(), tmp_path), "/build/cancel", "id=x") == (200, b"")


def test_cancel_ends_the_build(tmp_path: Path) -> None:
    class Endless(FakeBuilder):
        async def build(self, body: AsyncIterator[bytes], options: Options, /) -> AsyncGenerator[Report, None]:
            try:
                yield Notice("a")
                await asyncio.Event().wait()
            finally:
                self.closed = True

    builder = Endless()
    parts = fakes(builder, tmp_path)

    async def run() -> list[Any]:
        reply = await build.build(parts, _posted("buildid=x"))
        chunks = aiter(reply.chunks)
        found = [json.loads(await anext(chunks))]
        asyncio.get_running_loop().call_soon(build.cancel, parts, _posted("id=x"))
        return found + [json.loads(chunk) async for chunk in chunks]

    expected = {"errorDetail": {"message": "Build cancelled"}, "error": "Build cancelled"}
    assert asyncio.run(run()) == [{"stream": "a"}, expected]
    assert builder.closed


@pytest.mark.parametrize("query", ["", "q=1", "buildid=x"])
@pytest.mark.parametrize("texts", [(), ("a",)])
def test_a_client_that_leaves_closes_the_build(texts: tuple[str, ...], query: str, tmp_path: Path) -> None:
    class Endless(FakeBuilder):
        async def build(self, body: AsyncIterator[bytes], options: Options, /) -> AsyncGenerator[Report, None]:
            try:
                for text in texts:
                    yield Notice(text)
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                self.closed = True

    builder = Endless()

    async def run() -> None:
        working = asyncio.ensure_future(build.build(fakes(builder, tmp_path), _posted(query)))
        await asyncio.wait((working,), timeout=0.01)
        if working.done():
            reply: Any = working.result()
            await reply.chunks.aclose()
        else:
            working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await working
        assert builder.closed

    asyncio.run(run())


def _posted(query: str) -> Request:
    return request("/build", "POST", query=query)
