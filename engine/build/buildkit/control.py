"""BuildKit's API for builds with `dockerfile.v0`: the services Control and LLBBridge, which buildx
and docker compose use over `POST /grpc`.

A client calls Control/Solve, which lasts as long as the build, and Control/Status beside it. It
names the frontend in LLBBridge/Solve, and LLBBridge/Return says which result Control/Solve is to
export. The build itself runs in Control/Solve, on the engine's own builder. A graph of operations
(LLB) is refused.

Owns:    builds that are asked for, until their Solve ends.
Threads: the event loop's. Not here: the frontend's options (`frontend.py`), gRPC (`grpc.py`).
Raises:  the kinds of `engine/errors.py`, which become the status of the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from engine import __version__
from engine.build import options
from engine.build.buildkit import exporting, frontend, grpc, protobuf
from engine.build.buildkit.control_messages import (
    BuildkitVersion,
    Capability,
    DiskUsageResponse,
    Empty,
    Exporter,
    FrontendSolveRequest,
    FrontendSolveResponse,
    HealthCheckResponse,
    InfoResponse,
    ListWorkersResponse,
    Platform,
    PongResponse,
    PruneRequest,
    Ref,
    Result,
    ReturnRequest,
    SolveRequest,
    SolveResponse,
    StatusRequest,
    Time,
    UsageRecord,
    WorkerRecord,
)
from engine.build.buildkit.exporting import LOCAL, TAR
from engine.build.buildkit.frontend import Builder, Files, Wanted
from engine.build.buildkit.grpc import Connection, Handler, Stream
from engine.build.buildkit.messages import BytesMessage
from engine.build.buildkit.progress import Progress, Steps
from engine.build.buildkit.session import Sessions
from engine.build.options import PruneOptions
from engine.build.prune import Entry
from engine.errors import Conflict, EngineError, InvalidParameter, NotFound, ServerError, Unimplemented
from engine.images.archive import ARCHITECTURE
from engine.images.store import ImageStore

T = TypeVar("T", bound=msgspec.Struct)

_log = logging.getLogger(__name__)

CONTROL = "/moby.buildkit.v1.Control/"
BRIDGE = "/moby.buildkit.v1.frontend.LLBBridge/"
APPEAR_SECONDS = 5.0
"""Seconds for which a call waits for the Solve of its build: clients begin both at once."""

READ_SIZE = 32 << 10

_GATEWAY_LABEL = "org.mobyproject.buildkit.worker.moby.host-gateway-ip"
_CAPABILITIES = ("solve.base", "solve.inlinereturn", "return", "returnmap", "proto.refarray", "frontend.caps")
_EXPORTERS = frozenset(("moby", "image", "", LOCAL, TAR))
_FILTER = re.compile(r"([a-z-]+)(?:(?:==|~=)(.*))?\Z", re.DOTALL)
_FAILED = re.compile(r"The command '(.*)' returned a non-zero code: (\d+)\Z", re.DOTALL)


class Parts(NamedTuple):
    """The parts of the engine that builds of clients use."""

    sessions: Sessions
    builder: Builder
    images: ImageStore
    gateway: Callable[[], str]
    """The address that `host-gateway` stands for."""


class _Job:
    """One build, from the first call that names it to the end of its Solve."""

    def __init__(self, ref: str) -> None:
        self.progress = Progress(ref)
        self.results: dict[str, Wanted] = {}
        """What the frontend was asked for, by the id of the result."""
        self.returned: asyncio.Future[ReturnRequest] = asyncio.get_running_loop().create_future()


class Control:
    """The services of one connection or more."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._jobs: dict[str, _Job] = {}
        self._ended: dict[str, Progress] = {}
        """Of builds that have just ended: their client may ask for it later than for the build."""
        self._changed = asyncio.Event()
        self._worker = secrets.token_hex(12)
        self._connections: set[Connection] = set()
        self.handlers: Mapping[str, Handler] = {
            f"{CONTROL}ListWorkers": self._list_workers,
            f"{CONTROL}Info": self._info,
            f"{CONTROL}Solve": self._solve,
            f"{CONTROL}Status": self._status,
            f"{CONTROL}Session": self._session,
            f"{CONTROL}DiskUsage": self._disk_usage,
            f"{CONTROL}Prune": self._prune,
            f"{BRIDGE}Ping": self._ping,
            f"{BRIDGE}Solve": self._frontend_solve,
            f"{BRIDGE}Return": self._return,
            "/grpc.health.v1.Health/Check": self._health,
        }

    async def serve(self, descriptor: int, head: bytes, early: bytes) -> None:
        """Serve one hijacked connection. Raises OSError when the client has left."""
        ended = False

        def lost() -> None:
            nonlocal ended
            ended = True
            for connection in list(self._connections):
                if not connection.open:
                    self._connections.discard(connection)

        connection = await grpc.join(descriptor, head, early, self.handlers, lost)
        if not ended:
            self._connections.add(connection)

    async def close(self) -> None:
        """End every connection, and the builds with them."""
        connections = list(self._connections)
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.closed()

    # --- the cache --------------------------------------------------------------------------------

    async def _disk_usage(self, stream: Stream) -> bytes:
        await _request(stream, Empty)
        entries = await self._parts.builder.usage()
        return protobuf.encode(DiskUsageResponse(records=[_record(entry) for entry in entries]))

    async def _prune(self, stream: Stream) -> None:
        chosen = prune_options(await _request(stream, PruneRequest))
        builder = self._parts.builder
        known = {entry.id: entry for entry in await builder.usage()}
        report = await builder.prune(chosen)
        for deleted in report.caches_deleted or ():
            if deleted in known:
                await stream.send(protobuf.encode(_record(known[deleted])))

    # --- sessions ---------------------------------------------------------------------------------

    async def _session(self, stream: Stream) -> None:
        """A session within a call, as clients open it for files that several builds share: the
        messages of the call are the bytes of its connection.
        """
        sessions = self._parts.sessions
        await sessions.load()
        prefix = "x-docker-expose-session-"
        offer = sessions.offered(
            stream.metadata(f"{prefix}uuid"),
            stream.metadata(f"{prefix}sharedkey"),
            stream.headers.get(f"{prefix}grpc-method", []),
        )
        ours, theirs = socket.socketpair()
        try:
            await sessions.open(offer, theirs.detach(), b"", b"")
            await relay(stream, ours)
        finally:
            ours.close()

    # --- what the engine is -----------------------------------------------------------------------

    def _version(self) -> BuildkitVersion:
        return BuildkitVersion(package="engined", version=f"v{__version__}")

    def _records(self) -> list[WorkerRecord]:
        return [
            WorkerRecord(
                id=self._worker,
                labels={_GATEWAY_LABEL: self._parts.gateway()},
                platforms=[Platform(os="linux", architecture=ARCHITECTURE)],
                version=self._version(),
            )
        ]

    async def _list_workers(self, stream: Stream) -> bytes:
        await _request(stream, Empty)
        return protobuf.encode(ListWorkersResponse(records=self._records()))

    async def _info(self, stream: Stream) -> bytes:
        await _request(stream, Empty)
        return protobuf.encode(InfoResponse(version=self._version()))

    async def _health(self, stream: Stream) -> bytes:
        await _request(stream, Empty)
        return protobuf.encode(HealthCheckResponse(status=1))

    async def _ping(self, stream: Stream) -> bytes:
        await _request(stream, Empty)
        able = [Capability(id=name, enabled=True) for name in _CAPABILITIES]
        return protobuf.encode(PongResponse(frontend=able, workers=self._records()))

    # --- the frontend -----------------------------------------------------------------------------

    async def _frontend_solve(self, stream: Stream) -> bytes:
        request = await _request(stream, FrontendSolveRequest)
        job = await self._job_of(stream)
        if request.definition is not None and request.definition.operations:
            raise _no_graphs()
        if not request.frontend:
            return protobuf.encode(FrontendSolveResponse(result=Result()))
        result_id = secrets.token_hex(12)
        job.results[result_id] = frontend.read(request.options, request.frontend, self._parts.gateway())
        if not request.allow_result_return:
            return protobuf.encode(FrontendSolveResponse(old_ref=result_id))
        result = Result(ref=Ref(id=result_id)) if request.allow_result_array else Result(old_ref=result_id)
        return protobuf.encode(FrontendSolveResponse(result=result))

    async def _return(self, stream: Stream) -> bytes:
        request = await _request(stream, ReturnRequest)
        job = await self._job_of(stream)
        if not job.returned.done():
            job.returned.set_result(request)
        return b""

    async def _job_of(self, stream: Stream) -> _Job:
        return await self._find(stream.metadata("buildkit-controlapi-buildid"))

    async def _find(self, ref: str) -> _Job:
        """The build with this reference, as soon as its Solve has begun. Raises NotFound."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(APPEAR_SECONDS):
                while ref not in self._jobs:
                    changed = self._changed
                    await changed.wait()
        job = self._jobs.get(ref)
        if job is None:
            raise NotFound(f"no such build: {ref[:200]}")
        return job

    # --- builds -----------------------------------------------------------------------------------

    async def _status(self, stream: Stream) -> None:
        request = await _request(stream, StatusRequest)
        progress = self._ended.get(request.ref) or (await self._find(request.ref)).progress
        async with contextlib.aclosing(progress.read()) as reports:
            async for report in reports:
                await stream.send(protobuf.encode(report))

    async def _solve(self, stream: Stream) -> bytes:
        request = await _request(stream, SolveRequest)
        if request.definition is not None and request.definition.operations:
            raise _no_graphs()
        if not request.ref or request.ref in self._jobs:
            raise Conflict(f"build {request.ref[:200]!r} exists already")
        job = self._jobs[request.ref] = _Job(request.ref)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        try:
            wanted = await self._wanted(job, request)
            found = await self._build(job, request, wanted) if wanted is not None else {}
            return protobuf.encode(SolveResponse(exporter_response=found))
        finally:
            job.progress.close()
            del self._jobs[request.ref]
            self._ended[request.ref] = job.progress
            asyncio.get_running_loop().call_later(APPEAR_SECONDS, self._ended.pop, request.ref, None)

    async def _wanted(self, job: _Job, request: SolveRequest) -> Wanted | None:
        """What is to be built; None for a result without content."""
        if request.frontend:
            return frontend.read(request.attributes, request.frontend, self._parts.gateway())
        returned = await job.returned
        if returned.error is not None and returned.error.code:
            raise grpc.failure(returned.error.code, returned.error.message)
        result = returned.result or Result()
        if result.refs is not None and result.refs.refs:
            raise Unimplemented("a build with several results is not supported")
        result_id = result.ref.id if result.ref is not None else result.old_ref
        if not result_id:
            return None
        if result_id not in job.results:
            raise NotFound(f"no such result: {result_id[:200]}")
        return job.results[result_id]

    async def _build(self, job: _Job, request: SolveRequest, wanted: Wanted) -> dict[str, str]:
        """Build, and tag the image. Returns what the client shows of it."""
        exporter = _exporter(request)
        names = frontend.listed(exporter.attributes, "name")
        files = Files(self._parts.sessions, request.session, wanted, self._parts.images)
        builder, progress = self._parts.builder, job.progress
        chosen = msgspec.structs.replace(
            wanted.options, tags=options.tags(names), session=request.session, credentials=files.credentials
        )
        steps = Steps(progress)
        try:
            chosen = msgspec.structs.replace(chosen, contexts=await files.named(builder, progress))
            async with contextlib.aclosing(files.start(builder, chosen, progress)) as messages:
                async for message in messages:
                    steps.take(message)
                    await progress.room()
        except EngineError as error:
            words = _words(error)
            steps.end(words)
            raise ServerError(words) from error  # clients show the name of any other status
        except asyncio.CancelledError:
            steps.end("context canceled")
            raise
        steps.end()
        if exporter.type in (LOCAL, TAR):
            await self._export_files(job, request, exporter.type, steps.image_id)
            return {}
        exported = job.progress.vertex("exporting to image")
        exported.status(f"writing image {steps.image_id}", complete=True)
        for name in chosen.tags:
            exported.status(f"naming to {name.canonical}", complete=True)
        exported.end()
        found = {"containerimage.digest": steps.image_id, "containerimage.config.digest": steps.image_id}
        if chosen.tags:
            found["image.name"] = ",".join(name.canonical for name in chosen.tags)
        return found

    async def _export_files(self, job: _Job, request: SolveRequest, kind: str, image_id: str) -> None:
        """Send the files of the image to the client."""
        vertex = job.progress.vertex(
            "exporting to client directory" if kind == LOCAL else "exporting to client tarball"
        )
        try:
            session = await self._parts.sessions.find(request.session)
            await exporting.export(kind, 0, session, self._parts.images, image_id)
        except EngineError as error:
            vertex.end(error.message)
            raise ServerError(error.message) from error
        finally:
            vertex.end()


def _words(error: EngineError) -> str:
    """The failure of a command in BuildKit's words, and other messages as they are."""
    failed = _FAILED.match(error.message)
    if failed is None:
        return error.message
    return f'process "{failed[1]}" did not complete successfully: exit code: {failed[2]}'


def _exporter(request: SolveRequest) -> Exporter:
    """The exporter that a client asks for. Raises Unimplemented for all but images of this
    engine.
    """
    exporters = request.exporters
    if not exporters:
        exporters = [Exporter(type=request.exporter, attributes=request.exporter_attributes)]
    for exporter in exporters:
        if exporter.type not in _EXPORTERS:
            raise Unimplemented(f"exporter {exporter.type[:100]!r} is not supported: only images, local and tar")
    if len(exporters) > 1:
        raise Unimplemented("several exporters at once are not supported")
    return exporters[0]


def _no_graphs() -> Unimplemented:
    return Unimplemented("builds of LLB are not supported: only the frontend dockerfile.v0")


def prune_options(request: PruneRequest) -> PruneOptions:
    """The options of a prune. Raises InvalidParameter for a filter that is not known."""
    filters: dict[str, list[str]] = {}
    for text in filter(None, request.filters):
        found = _FILTER.match(text)
        if found is None or found[1] not in options.PRUNE_FILTERS:
            raise InvalidParameter(f"invalid filter {text[:200]!r}")
        filters.setdefault(found[1], []).append(found[2] or "true")
    age = request.keep_duration
    return PruneOptions(
        all=request.all,
        filters=filters,
        unused_since_ns=time.time_ns() - age if age > 0 else 0,
        reserved_space=max(0, request.reserved_space),
        max_used_space=max(0, request.max_used_space),
        min_free_space=max(0, request.min_free_space),
    )


def _record(entry: Entry) -> UsageRecord:
    return UsageRecord(
        id=entry.id,
        in_use=entry.in_use,
        size=entry.size,
        created=Time(*divmod(entry.created, 1_000_000_000)),
        used=Time(*divmod(entry.used, 1_000_000_000)),
        uses=entry.uses,
        description=entry.description,
        kind=entry.type,
        shared=entry.shared,
    )


async def relay(stream: Stream, connection: socket.socket) -> None:
    """Carry a byte stream between a call and a socket, until either side ends it."""
    connection.setblocking(False)
    loop = asyncio.get_running_loop()

    async def outward() -> None:
        while data := await loop.sock_recv(connection, READ_SIZE):
            await stream.send(protobuf.encode(BytesMessage(data=data)))

    async def inward() -> None:
        while (message := await stream.receive()) is not None:
            await loop.sock_sendall(connection, protobuf.decode(message, BytesMessage).data)

    tasks = [asyncio.ensure_future(outward()), asyncio.ensure_future(inward())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, OSError | EngineError):
                _log.error("a session within a call failed", exc_info=result)


async def _request(stream: Stream, of: type[T]) -> T:
    """The call's only message."""
    message = await stream.receive()
    if message is None:
        raise InvalidParameter("the call has no message")
    return protobuf.decode(message, of)


__all__ = ["Control", "Parts"]
