"""BuildKit's API for builds with `dockerfile.v0`: the services Control and LLBBridge, which buildx
and docker compose use over `POST /grpc`.

A client calls Control/Solve, which lasts as long as the build, and Control/Status beside it. It
names the frontend in LLBBridge/Solve, and LLBBridge/Return says which result Control/Solve is to
export. The build itself runs in Control/Solve, on the engine's own builder. Of graphs of operations
(LLB) only those of `graphs.py` are accepted.

Owns:    builds that are asked for, until their Solve ends.
Threads: the event loop's. Not here: the frontend's options (`frontend.py`), gRPC (`rpc/grpc.py`).
Raises:  the kinds of `engine/errors.py`, which become the status of the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from engine import __version__
from engine.builder import options
from engine.builder.buildkit import cache_exports, details, exporting, frontend, graphs, usage
from engine.builder.buildkit.control_messages import (
    BuildkitVersion,
    Capability,
    Definition,
    DiskUsageRequest,
    DiskUsageResponse,
    Empty,
    EvaluateRequest,
    Exporter,
    FileRange,
    FrontendSolveRequest,
    FrontendSolveResponse,
    GCPolicy,
    HealthCheckResponse,
    InfoResponse,
    ListWorkersResponse,
    Platform,
    PongResponse,
    PruneRequest,
    ReadFileRequest,
    ReadFileResponse,
    Ref,
    Result,
    ReturnRequest,
    SolveRequest,
    SolveResponse,
    StatFileRequest,
    StatFileResponse,
    StatusRequest,
    WorkerRecord,
)
from engine.builder.buildkit.exporting import LOCAL, TAR
from engine.builder.buildkit.frontend import Builder, Files, Wanted
from engine.builder.buildkit.graphs import Fetched
from engine.builder.buildkit.history import History, Limits
from engine.builder.buildkit.history_calls import HistoryCalls
from engine.builder.buildkit.messages import BytesMessage
from engine.builder.buildkit.progress import CANCELED, Progress, Steps
from engine.builder.buildkit.session import Sessions
from engine.builder.cache import Uses
from engine.builder.errors import AtLine, Circular, StepFailed, Unresolved
from engine.builder.reports import CheckWarning
from engine.builder.state import State
from engine.common.times import rfc3339
from engine.config.cache import CachePolicy
from engine.errors import BUG, Conflict, EngineError, Forbidden, InvalidParameter, NotFound, ServerError, Unimplemented
from engine.images import reference
from engine.images.archive import ARCHITECTURE
from engine.images.instructions.effects import quoted
from engine.images.record import ImageRecord
from engine.images.reference import Reference
from engine.images.store import ImageStore
from engine.rpc import grpc, protobuf
from engine.rpc.grpc import Connection, Handler, Stream
from engine.rpc.grpc import request as _request
from engine.system.threads import cancelled

T = TypeVar("T", bound=msgspec.Struct)

_log = logging.getLogger(__name__)

CONTROL = "/moby.buildkit.v1.Control/"
BRIDGE = "/moby.buildkit.v1.frontend.LLBBridge/"
APPEAR_SECONDS = 5.0
"""Seconds for which a call waits for the Solve of its build: clients begin both at once."""

READ_SIZE = 32 << 10

FILES = 16
"""Files of URLs that one build may fetch for its client; they are in memory."""

RESULTS = 1000
"""Results that are remembered after their builds."""

_GATEWAY_LABEL = "org.mobyproject.buildkit.worker.moby.host-gateway-ip"
_CAPABILITIES = (
    *("solve.base", "solve.inlinereturn", "return", "returnmap", "proto.refarray"),
    *("frontend.caps", "frontend.inputs", "reference.output", "gateway.evaluate"),
    *("readfile", "statfile"),
)
_GRAPHS = (
    *("source.image", "source.local", "source.local.unique", "source.local.sessionid"),
    *("source.local.includepatterns", "source.local.followpaths", "source.local.excludepatterns"),
    *("source.local.sharedkeyhint", "source.git", "source.git.keepgitdir", "source.git.fullurl"),
    *("source.http", "source.http.checksum", "source.http.perm", "soruce.http.uidgid"),
    *("buildop.llbfilename", "exec.meta.base", "exec.meta.proxyenv", "exec.mount.bind"),
    *("exec.mount.cache", "exec.mount.cache.sharing", "exec.mount.selector", "exec.mount.tmpfs"),
    *("exec.mount.secret", "constraints", "platform", "meta.ignorecache", "meta.description"),
    *("meta.exportcache", "exporter.multiple", "gc.freespacefilter", "history.filter"),
    *("cache.gha", "cache.s3"),
)
"""What clients assume of an engine that says nothing about graphs. The last five are no graphs:
clients ask here, too, for several exporters, limits of a prune and filters of the history. Caches
of GitHub's and of S3 are refused: without these names clients would leave them out and say nothing.
"""
_ABLE = protobuf.encode(
    PongResponse(
        frontend=[Capability(id=name, enabled=True) for name in _CAPABILITIES],
        llb=[Capability(id=name, enabled=True) for name in _GRAPHS],
    )
)
"""The beginning of each PongResponse: its other fields may follow."""
BUILDKIT_VERSION = f"v0.25.2+engined.{__version__}"
"""Clients compare it. It is the BuildKit of dockerd 28.5.2, with which builds are compared here.
What comes after `+` counts for no comparison.
"""
_TERMS = grpc.Terms(headers=lambda: (("buildkit-current-timestamp", rfc3339(time.time_ns())),))
"""Clients of the build history compare its times with this one."""
_EXPORTERS = frozenset(("moby", "image", "", LOCAL, TAR))
_OTHER_EXPORTERS = frozenset(("docker", "oci", "registry"))
"""Those that BuildKit has, too."""


class Parts(NamedTuple):
    """The parts of the engine that builds of clients use."""

    sessions: Sessions
    builder: Builder
    images: ImageStore
    gateway: Callable[[], str]
    """The address that `host-gateway` stands for."""
    history: History


class _Job:
    """One build, from the beginning to the end of its Solve."""

    def __init__(self, request: SolveRequest) -> None:
        self.request = request
        self.progress = Progress(request.ref)
        self.results: set[str] = set()
        self.files: dict[str, Fetched | None] = {}
        """Results that are files of URLs, by id; None until they are fetched."""
        self.returned: asyncio.Future[ReturnRequest] = asyncio.get_running_loop().create_future()

    def fetched(self, result_id: str) -> Fetched:
        """The file that a result is. Raises NotFound, and Unimplemented for the result of a
        Dockerfile.
        """
        if result_id in self.results:
            raise Unimplemented("reading files of a build's result is not supported")
        found = self.files.get(result_id)
        if found is None:
            raise NotFound(f"no such result: {result_id[:200]}")
        return found


class _Result:
    """What a build asked the frontend for."""

    def __init__(self, job: _Job, wanted: Wanted) -> None:
        self.job = job
        self.wanted = wanted
        self.uses: Uses | None = None
        """Keep the image until the end of its build."""
        self.building: asyncio.Task[str] | None = None
        """Makes the image."""
        self.image_id = ""
        self.top = ""
        """chain_id of its topmost layer; empty without layers."""
        self.is_new = False
        """There was no such image before."""
        self.response: dict[str, str] = {}
        """What exports of its cache say to the client."""
        self.bases: dict[str, ImageRecord] = {}
        """The images that its Dockerfile names."""

    async def end(self) -> None:
        """Its build has ended: nothing builds it any more, and it keeps nothing."""
        try:
            if self.building is not None:
                await cancelled(self.building)
        finally:  # the caller may be cancelled meanwhile
            self.building = None
            if self.uses is not None:
                await self.uses.release()


class Control:
    """The services of one connection or more."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._jobs: dict[str, _Job] = {}
        self._results: dict[str, _Result] = {}
        """By id; the last ones stay after their build, for builds that take them as input."""
        self._ended: dict[str, Progress] = {}
        """Of builds that have just ended: their client may ask for it later than for the build."""
        self._changed = asyncio.Event()
        self._worker = secrets.token_hex(12)
        self._connections: set[Connection] = set()
        self._history = HistoryCalls(parts.history)
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
            f"{BRIDGE}Evaluate": self._evaluate,
            f"{BRIDGE}StatFile": self._stat_file,
            f"{BRIDGE}ReadFile": self._read_file,
            f"{BRIDGE}Return": self._return,
            "/grpc.health.v1.Health/Check": self._health,
            **self._history.handlers,
        }

    async def serve(self, descriptor: int, head: bytes, early: bytes, peer: str = "") -> None:
        """Serve one hijacked connection of a process or host (`http/peers.py`). Raises OSError when
        the client has left.
        """
        ended = False

        def lost() -> None:
            nonlocal ended
            ended = True
            for connection in list(self._connections):
                if not connection.open:
                    self._connections.discard(connection)

        connection = await grpc.join(descriptor, head, early, self.handlers, lost, peer, _TERMS)
        if not ended:
            self._connections.add(connection)

    async def close(self) -> None:
        """End every connection, and the builds with them."""
        connections = list(self._connections)
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.closed()
        await self._parts.history.close()

    # --- the cache --------------------------------------------------------------------------------

    async def _disk_usage(self, stream: Stream) -> bytes:
        request = await _request(stream, DiskUsageRequest)
        wanted = usage.condition(request.filters)
        before = time.time_ns() - max(0, request.age_limit)
        entries = await self._parts.builder.usage()

        def answer() -> bytes:
            found = [entry for entry in entries if wanted(entry) and (not request.age_limit or entry.used < before)]
            return protobuf.encode(DiskUsageResponse(records=usage.records(found)))

        return await asyncio.to_thread(answer)  # there may be many thousands

    async def _prune(self, stream: Stream) -> None:
        chosen = usage.prune_options(await _request(stream, PruneRequest))
        for entry in (await self._parts.builder.prune(chosen)).entries:
            await stream.send(protobuf.encode(usage.record(entry)))

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
            stream.peer,
        )
        stream.begin()
        ours, theirs = socket.socketpair()
        try:
            await sessions.open(offer, theirs.detach(), b"", b"")
            await relay(stream, ours)
        finally:
            ours.close()

    # --- what the engine is -----------------------------------------------------------------------

    def _version(self) -> BuildkitVersion:
        return BuildkitVersion(package="engined", version=BUILDKIT_VERSION)

    async def _records(self) -> list[WorkerRecord]:
        return [
            WorkerRecord(
                id=self._worker,
                labels={_GATEWAY_LABEL: self._parts.gateway()},
                platforms=[Platform(os="linux", architecture=ARCHITECTURE)],
                policies=[_shown_policy(each) for each in await self._parts.builder.policies()],
                version=self._version(),
            )
        ]

    async def _list_workers(self, stream: Stream) -> bytes:
        await _request(stream, Empty)
        return protobuf.encode(ListWorkersResponse(records=await self._records()))

    async def _info(self, stream: Stream) -> bytes:
        await _request(stream, Empty)
        return protobuf.encode(InfoResponse(version=self._version()))

    async def _health(self, stream: Stream) -> bytes:
        await _request(stream, Empty)
        return protobuf.encode(HealthCheckResponse(status=1))

    async def _ping(self, stream: Stream) -> bytes:
        await _request(stream, Empty)
        return _ABLE + protobuf.encode(PongResponse(workers=await self._records()))

    # --- the frontend -----------------------------------------------------------------------------

    async def _frontend_solve(self, stream: Stream) -> bytes:
        request = await _request(stream, FrontendSolveRequest)
        job = await self._job_of(stream)
        if request.definition is not None and request.definition.operations:
            if request.frontend:
                raise InvalidParameter("cannot solve with both Definition and Frontend specified")
            return _answer(request, await self._fetch(job, request.definition), request.definition)
        if not request.frontend:
            return protobuf.encode(FrontendSolveResponse(result=Result()))
        inputs = {name: graphs.result_of(definition) for name, definition in request.inputs.items()}
        wanted = frontend.read(request.options, request.frontend, self._parts.gateway(), inputs)
        if wanted.call:
            return protobuf.encode(FrontendSolveResponse(result=Result(metadata=await self._call(job, wanted))))
        result_id = self._add(job, wanted)
        return _answer(request, result_id, graphs.definition(result_id))

    async def _fetch(self, job: _Job, definition: Definition) -> str:
        """Fetch the file of a URL. Returns the result's id."""
        wanted = graphs.web_file(definition)
        if len(job.files) >= FILES:
            raise InvalidParameter(f"{wanted.url[:200]}: a build fetches at most {FILES} files for its client")
        result_id = secrets.token_hex(12)
        job.files[result_id] = None
        with job.progress.during(wanted.name):
            job.files[result_id] = await graphs.fetch(
                wanted, self._parts.builder.registries, self._parts.images.temporary
            )
        return result_id

    async def _stat_file(self, stream: Stream) -> bytes:
        request = await _request(stream, StatFileRequest)
        fetched = (await self._job_of(stream)).fetched(request.ref)
        return protobuf.encode(StatFileResponse(stat=fetched.find(request.path)))

    async def _read_file(self, stream: Stream) -> bytes:
        request = await _request(stream, ReadFileRequest)
        fetched = (await self._job_of(stream)).fetched(request.ref)
        part = request.range or FileRange()
        if part.offset < 0 or part.length < 0:
            raise InvalidParameter(f"{request.path[:200]}: a range of a file has no negative numbers")
        return protobuf.encode(ReadFileResponse(data=fetched.read(request.path, part.offset, part.length)))

    def _add(self, job: _Job, wanted: Wanted) -> str:
        """Remember what is wanted. Returns the result's id."""
        result_id = secrets.token_hex(12)
        self._results[result_id] = _Result(job, wanted)
        job.results.add(result_id)
        for old in list(self._results)[: max(0, len(self._results) - RESULTS)]:
            if self._results[old].job.request.ref not in self._jobs:
                del self._results[old]
        return result_id

    async def _call(self, job: _Job, wanted: Wanted) -> dict[str, bytes]:
        """Answer a call about a Dockerfile."""
        parts = self._parts
        files = Files(parts.sessions, job.request.session, wanted, parts.images, parts.builder, self._image_of)
        try:
            return await files.call(parts.builder, job.progress)
        except InvalidParameter as error:
            lines = (error.line, error.last) if isinstance(error, AtLine) else None
            raise _placed(error.message, wanted, files, lines) from error

    async def _evaluate(self, stream: Stream) -> bytes:
        """Build a result before the end of its build: other builds wait for it."""
        request = await _request(stream, EvaluateRequest)
        if request.ref not in (await self._job_of(stream)).files:  # those are fetched already
            await self._image_of(request.ref)
        return b""

    async def _image_of(self, result_id: str) -> str:
        """The image of a result. It is built once, as a part of its own build."""
        result = self._results.get(result_id)
        if result is None:
            raise NotFound(f"no such result: {result_id[:200]}")
        if result.image_id:
            return result.image_id
        if result.building is None:
            # Another build may have its reference.
            if self._jobs.get(result.job.request.ref) is not result.job:
                raise NotFound(f"the build of result {result_id[:200]} has ended without an image")
            result.building = asyncio.create_task(self._run(result))
        building = result.building
        await asyncio.wait((building,))
        if building.cancelled():
            raise ServerError("the build that makes an input was cancelled")
        return building.result()

    async def _return(self, stream: Stream) -> bytes:
        request = await _request(stream, ReturnRequest)
        job = await self._job_of(stream)
        if not job.returned.done():
            job.returned.set_result(request)
        return b""

    async def _job_of(self, stream: Stream) -> _Job:
        return await self._find(stream.metadata("buildkit-controlapi-buildid"))

    async def _find(self, ref: str) -> _Job:
        """The build with this reference, as soon as its Solve has begun. Raises NotFound, and
        InvalidParameter without a reference.
        """
        if not ref:
            raise InvalidParameter("no buildid found in context")
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
        if request.ref not in self._jobs and await self._history.log(stream, request.ref):
            return
        progress = self._ended.get(request.ref) or (await self._find(request.ref)).progress
        stream.begin()
        async with contextlib.aclosing(progress.read()) as reports:
            async for report in reports:
                await stream.send(protobuf.encode(report))

    async def _solve(self, stream: Stream) -> bytes:
        request = await _request(stream, SolveRequest)
        if request.definition is not None and request.definition.operations:
            raise graphs.refusal()
        if not request.ref:
            raise InvalidParameter("the build has no reference")
        if request.ref in self._jobs:
            raise Conflict(f"build {request.ref[:200]!r} exists already")
        job = self._jobs[request.ref] = _Job(request)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        try:
            with self._parts.history.recorded(request, job.progress, lambda error: _failure(job, error)) as outcome:
                _check_entitlements(request.entitlements, self._parts.builder.entitlements)
                cache_exports.check(request.cache.exports if request.cache is not None else ())
                result = await self._wanted(job)
                if result is not None and result.wanted.options.host.network_mode == "host":
                    _check_entitlements(("network.host",), self._parts.builder.entitlements)
                response = await self._build(result) if result is not None else {}
                outcome.response = response
                if result is not None:
                    outcome.bases = result.bases
                    outcome.result = functools.partial(self._configuration, result.image_id)
            return protobuf.encode(SolveResponse(exporter_response=response))
        finally:
            del self._jobs[request.ref]
            await self._end(job)

    def _configuration(self, image_id: str) -> bytes:
        """The configuration of an image. Blocking."""
        return self._parts.images.configuration(self._parts.images.get(image_id))

    async def _end(self, job: _Job) -> None:
        """A Solve has ended: nothing of its build goes on. Its client gives up Status three seconds
        after the answer, so the answer waits for a client that is behind with the output.
        """
        try:
            async with contextlib.AsyncExitStack() as ending:
                # All of them now: other builds may end while this waits, and drop results.
                for result in [found for each in job.results if (found := self._results.get(each))]:
                    ending.push_async_callback(result.end)
        finally:
            ref = job.request.ref
            job.progress.close()
            self._ended[ref] = job.progress
            asyncio.get_running_loop().call_later(APPEAR_SECONDS, self._ended.pop, ref, None)
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            await job.progress.taken()

    async def _wanted(self, job: _Job) -> _Result | None:
        """What is to be built; None for a result without content."""
        request = job.request
        if request.frontend:
            inputs = {name: graphs.result_of(definition) for name, definition in request.inputs.items()}
            wanted = frontend.read(request.attributes, request.frontend, self._parts.gateway(), inputs)
            if wanted.call:
                await self._call(job, wanted)
                return None
            return self._results[self._add(job, wanted)]
        returned = await job.returned
        if returned.error is not None and returned.error.code:
            raise grpc.failure(returned.error.code, returned.error.message)
        answer = returned.result or Result()
        if answer.refs is not None and answer.refs.refs:
            raise Unimplemented("a build with several results is not supported")
        result_id = answer.ref.id if answer.ref is not None else answer.old_ref
        if not result_id:
            return None
        if result_id in job.files:
            if _exporters(request):
                raise Unimplemented("exporting a file of a URL is not supported")
            return None
        if result_id not in job.results:
            raise NotFound(f"no such result: {result_id[:200]}")
        return self._results[result_id]

    async def _build(self, result: _Result) -> dict[str, str]:
        """Build, and export the image. Returns what the client shows of it."""
        job = result.job
        exporters = _exporters(job.request)
        images = [each for each in exporters if each.type not in (LOCAL, TAR)]
        names = [name for each in images for name in frontend.listed(each.attributes, "name")]
        tags = options.tags(names)
        building, unnamed = result.building, tags
        if building is None:
            # A task, for other builds that take the result as input meanwhile.
            building = result.building = asyncio.create_task(self._run(result, tags))
            unnamed = ()
        await asyncio.wait((building,))
        made = building.result()
        for name in unnamed:
            await self._parts.images.tag(made, name.repository, name.tag)
        image_id = result.image_id
        try:
            for number, exporter in enumerate(exporters):
                if exporter.type in (LOCAL, TAR):
                    await self._export_files(job, exporter.type, number, result.top)
        finally:
            if not images and result.is_new:  # the cache has it
                await self._parts.images.delete_if(image_id, lambda record: record.nameless)
        return result.response | (self._image_exported(job, image_id, names) if images else {})

    def _image_exported(self, job: _Job, image_id: str, names: Sequence[str]) -> dict[str, str]:
        """Show the export. `names`: valid, as the client gave them: it is shown no default tag."""
        shown = [*dict.fromkeys(reference.parse(name).canonical for name in names)]
        exported = job.progress.vertex("exporting to image")
        exported.status("exporting layers", complete=True)
        exported.status(f"writing image {image_id}", complete=True)
        for name in shown:
            exported.status(f"naming to {name}", complete=True)
        exported.end()
        found = {"containerimage.digest": image_id, "containerimage.config.digest": image_id}
        if shown:
            found["image.name"] = ",".join(shown)
        return found

    async def _run(self, result: _Result, tags: tuple[Reference, ...] = ()) -> str:
        """Build an image and name it. Returns its id."""
        wanted, builder, request = result.wanted, self._parts.builder, result.job.request
        progress = result.job.progress
        files = Files(self._parts.sessions, request.session, wanted, self._parts.images, builder, self._image_of)
        steps = Steps(progress)
        cached = request.cache.exports if request.cache is not None else ()
        find = functools.partial(self._parts.sessions.find, request.session)
        exports = cache_exports.Exports(cached, find, builder.registries, progress)
        before = self._parts.images.index.ids()
        uses = result.uses = builder.uses()

        def keep(state: State) -> None:
            uses.add(state)
            result.top = state.top

        try:
            chosen = msgspec.structs.replace(
                wanted.options,
                grants_host_network="network.host" in request.entitlements,
                tags=tags,
                session=request.session,
                credentials=files.credentials,
                contexts=await files.named(builder, progress),
                imports=await files.imports(builder, request.cache.imports if request.cache else (), progress),
                inline_cache=_inline_cache(result),
                based_on=result.bases.__setitem__,
                result=keep,
                export=exports.run if exports else None,
            )
            async with contextlib.aclosing(files.start(builder, chosen, progress)) as reports:
                async for report in reports:
                    if isinstance(report, CheckWarning):
                        files.warn(progress, report)
                    else:
                        steps.take(report)
                    await progress.room()
        except EngineError as error:
            words = grpc.shortened(_words(error))
            cause = error.__cause__
            steps.end(cause.answer if isinstance(cause, Unresolved) else words)
            lines = (error.line, error.last) if isinstance(error, AtLine) else steps.lines
            raise _placed(words, wanted, files, lines, cause.lines if isinstance(cause, Circular) else ()) from error
        except asyncio.CancelledError:
            steps.end(CANCELED)
            raise
        steps.end()
        result.response = exports.response
        result.image_id, result.is_new = steps.image_id, steps.image_id not in before
        return steps.image_id

    async def _export_files(self, job: _Job, kind: str, number: int, top: str) -> None:
        """Send the files of an image with this topmost layer to the client. `number`: of the
        exporter in its request.
        """
        vertex = job.progress.vertex(
            "exporting to client directory" if kind == LOCAL else "exporting to client tarball"
        )
        try:
            session = await self._parts.sessions.find(job.request.session)
            await exporting.export(kind, number, session, self._parts.images.snapshots, top)
        except EngineError as error:
            vertex.end(error.message)
            raise ServerError(error.message) from error
        finally:
            vertex.end()


def _answer(request: FrontendSolveRequest, result_id: str, definition: Definition) -> bytes:
    """Name a result in the form that the client understands."""
    if not request.allow_result_return:
        return protobuf.encode(FrontendSolveResponse(old_ref=result_id))
    named = Ref(id=result_id, definition=definition)
    result = Result(ref=named) if request.allow_result_array else Result(old_ref=result_id)
    return protobuf.encode(FrontendSolveResponse(result=result))


def _placed(
    words: str, wanted: Wanted, files: Files, lines: tuple[int, int] | None, several: Sequence[int] = ()
) -> ServerError:
    """A failure, and where in the Dockerfile it is: in these lines, or at `several` places. Clients
    show the name of any other status.
    """
    if lines is None or not files.dockerfile:
        return ServerError(words)
    places = tuple((line, line) for line in several) or (lines,)
    return details.Placed(words, details.Lines(wanted.filename, files.dockerfile, places))


def _inline_cache(result: _Result) -> bool:
    """True if the image is to carry its cache."""
    cache = result.job.request.cache
    exports = cache.exports if cache is not None else ()
    return result.wanted.options.arguments.get("BUILDKIT_INLINE_CACHE") in ("1", "true") or any(
        each.type == cache_exports.INLINE for each in exports
    )


def _failure(job: _Job, error: BaseException) -> tuple[int, str, bytes]:
    """How the history records a failure: gRPC status, message, and both with details."""
    code, message = grpc.INTERNAL, BUG
    detail: details.Lines | details.Named | None = None
    if isinstance(error, asyncio.CancelledError):
        code, message = grpc.CANCELLED, "context canceled"
    elif isinstance(error, EngineError):
        code, message = grpc.status_of(error), grpc.shortened(error.message)
        detail = error.detail if isinstance(error, details.Placed | details.Unsupported) else None
    return code, message, details.status(code, message, detail, job.progress.failed)


def _words(error: EngineError) -> str:
    """The failure of a command in BuildKit's words, and other messages as they are."""
    if not isinstance(error, StepFailed):
        return error.message
    why = f"exit code: {error.exit_code}" if error.started else error.message
    return f"process {quoted(error.command)} did not complete successfully: {why}"


def _exporters(request: SolveRequest) -> list[Exporter]:
    """The exporters that a client asks for; none for a build that only fills the cache. Raises
    Unimplemented for all but images of this engine, and files, and InvalidParameter for others than
    BuildKit's.
    """
    exporters = list(request.exporters)
    if not exporters and request.exporter:
        exporters = [Exporter(type=request.exporter, attributes=request.exporter_attributes)]
    for exporter in exporters:
        if exporter.type not in (*_EXPORTERS, *_OTHER_EXPORTERS):
            raise InvalidParameter(f"exporter {quoted(exporter.type[:100])} could not be found")
        if exporter.type not in _EXPORTERS:
            raise Unimplemented(f"exporter {exporter.type[:100]!r} is not supported: only images, local and tar")
    return exporters


def _shown_policy(policy: CachePolicy) -> GCPolicy:
    filters = [",".join(f"{name}=={value}" for value in values) for name, values in policy.filters.items()]
    return GCPolicy(
        all=policy.all,
        keep_duration=policy.unused_for,
        reserved_space=policy.reserved,
        filters=filters,
        max_used_space=policy.max_used,
        min_free_space=policy.min_free,
    )


def _check_entitlements(asked: Iterable[str], allowed: Collection[str]) -> None:
    """Raises Forbidden for what this engine grants no build."""
    for name in asked:
        if name not in allowed:
            raise Forbidden(f"granting entitlement {name[:100]} is not allowed by build daemon configuration")


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


__all__ = ["Control", "History", "Limits", "Parts"]
