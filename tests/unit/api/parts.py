"""An engine of fakes, and requests without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec

from engine.api.application import Application
from engine.api.engine import Engine
from engine.api.routes import ROUTES, Route
from engine.api.versions import LATEST, VERSIONS
from engine.cluster.cluster import Cluster
from engine.common.facts import Counts, Host, ProgramFacts
from engine.config import Config
from engine.events import EventLog
from engine.http.messages import Body, Headers, Query, Reply, Request

HOST = Host(
    id="ABCD",
    name="node",
    kernel="6.1.0",
    operating_system="Debian GNU/Linux 12 (bookworm)",
    memory=8 << 30,
    cpus=4,
    os_version="12",
    security_options=("name=apparmor", "name=seccomp,profile=builtin"),
    memory_limit=True,
    ipv4_forwarding=True,
    build_time="2026-01-02T03:04:05Z",
    python="3.11.7",
)


class Undelivered:
    """No container has a remote log target."""

    async def totals(self) -> None:
        return None


def engine(config: Config | None = None) -> Engine:
    counts = Counts(
        running=2,
        paused=1,
        stopped=3,
        images=7,
        runtime="crun",
        runtime_version="1.8.1",
        runtimes={"crun": ("/usr/bin/crun",)},
        network_drivers=("bridge", "host", "macvlan", "null"),
        log_drivers=("json-file", "none"),
        descriptors=17,
    )
    outside: Any = SimpleNamespace(config=Config())  # of a swarm
    deliveries: Any = Undelivered()
    running: Any = SimpleNamespace(runs=lambda container_id: True)
    absent: Any = None  # parts that the handlers under test never reach
    return Engine(
        builder=absent,
        buildkit=absent,
        cluster=Cluster(outside),
        config=config or Config(),
        events=EventLog(),
        host=HOST,
        counts=lambda: counts,
        containers=running,
        deliveries=deliveries,
        devices=list,
        execs=absent,
        images=absent,
        networks=absent,
        plugins=absent,
        programs=lambda: ProgramFacts(init_version="0.19.0", features={"crun": '{"ociVersionMin":"1.0.0"}'}),
        remote=absent,
        statistics=absent,
        usage=absent,
        volumes=absent,
    )


def application(rows: Iterable[Route] = ROUTES, config: Config | None = None) -> Application:
    return Application(engine(config), rows)


def request(
    path: str = "/", method: str = "GET", *, query: str = "", body: bytes = b"", version: str | None = None
) -> Request:
    fields = [(b"Content-Type", b"application/json")] if body else []
    made = Request(method, path, Query(query.encode()), Headers(fields), Body(None, body))
    made.version = LATEST if version is None else VERSIONS[version]
    return made


def headed(
    path: str,
    method: str = "GET",
    *,
    query: str = "",
    body: bytes = b"",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Request:
    """A request for an application, which finds its version."""
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request(method, path, Query(query.encode()), Headers(fields), Body(None, body))


def ask(app: Application, path: str, method: str = "GET", *, query: str = "", body: bytes = b"") -> Reply:
    """The reply that a client would get, also for errors."""

    async def run() -> Any:
        try:
            result = app(request(path, method, query=query, body=body))
            return await result if isinstance(result, Coroutine) else result
        except Exception as error:
            return app.error_reply(error)

    reply = asyncio.run(run())
    assert isinstance(reply, Reply)
    return reply


def shown(reply: Reply) -> Any:
    assert reply.body.endswith(b"\n")
    return msgspec.json.decode(reply.body)
