"""Handlers about the engine itself (Docker Engine API, "System"): /_ping, /version, /info,
/events.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque

from engine import __version__, times
from engine.api.engine import Engine
from engine.api.parameters import filters, timestamp
from engine.api.replies import encode, json_reply
from engine.api.versions import MINIMUM, NEWEST
from engine.config import Config
from engine.errors import InvalidParameter
from engine.events import EVENT_FILTERS, Subscription
from engine.http.messages import Reply, Request, StreamReply
from engine.wire.events import Message
from engine.wire.system import (
    IndexInfo,
    Info,
    InfoPlugins,
    RegistryConfig,
    Runtime,
    SwarmInfo,
    VersionInfo,
)

INDEX = "https://index.docker.io/v1/"
"""The key of Docker Hub in clients' credential files."""

_ALWAYS_INSECURE = ("127.0.0.0/8", "::1/128")

_PONG = Reply(
    200,
    b"OK",
    "text/plain; charset=utf-8",
    (("Cache-Control", "no-cache, no-store, must-revalidate"), ("Builder-Version", "1")),
)


def ping(engine: Engine, request: Request) -> Reply:
    """GET and HEAD /_ping. Clients negotiate the version with it; every reply has the version
    headers.
    """
    return _PONG


def version(engine: Engine, request: Request) -> Reply:
    """GET /version."""
    host = engine.host
    return json_reply(
        request,
        VersionInfo(
            version=__version__,
            api_version=NEWEST,
            min_api_version=MINIMUM,
            git_commit=host.git_commit,
            go_version=f"none (Python {host.python})",
            os=host.os,
            arch=host.arch,
            kernel_version=host.kernel,
            build_time=host.build_time,
        ),
    )


def info(engine: Engine, request: Request) -> Reply:
    """GET /info: facts about the host as of the engine's start, and current counts."""
    host, counts = engine.host, engine.counts()
    return json_reply(
        request,
        Info(
            id=host.id,
            containers=counts.running + counts.paused + counts.stopped,
            containers_running=counts.running,
            containers_paused=counts.paused,
            containers_stopped=counts.stopped,
            images=counts.images,
            driver=counts.driver,
            driver_status=[list(pair) for pair in counts.driver_status],
            plugins=InfoPlugins(
                volume=list(counts.volume_drivers),
                network=list(counts.network_drivers),
                log=list(counts.log_drivers),
            ),
            memory_limit=host.memory_limit,
            swap_limit=host.swap_limit,
            kernel_memory=host.kernel_memory,
            cpu_cfs_period=host.cpu_cfs_period,
            cpu_cfs_quota=host.cpu_cfs_quota,
            cpu_shares=host.cpu_shares,
            cpu_set=host.cpu_set,
            pids_limit=host.pids_limit,
            ipv4_forwarding=host.ipv4_forwarding,
            bridge_nf_iptables=host.bridge_nf_iptables,
            bridge_nf_ip6tables=host.bridge_nf_ip6tables,
            debug=engine.config.log_level == "debug",
            nfd=counts.descriptors,
            oom_kill_disable=host.oom_kill_disable,
            n_goroutines=counts.tasks,
            system_time=times.rfc3339(time.time_ns()),
            logging_driver="json-file",
            cgroup_driver="cgroupfs",
            n_events_listener=engine.events.listeners,
            kernel_version=host.kernel,
            operating_system=host.operating_system,
            os_type=host.os,
            architecture=host.machine,
            index_server_address=INDEX,
            registry_config=_registries(engine.config),
            ncpu=host.cpus,
            mem_total=host.memory,
            docker_root_dir=str(engine.config.root),
            engine_root_dir=str(engine.config.root),
            http_proxy=os.environ.get("HTTP_PROXY", os.environ.get("http_proxy", "")),
            https_proxy=os.environ.get("HTTPS_PROXY", os.environ.get("https_proxy", "")),
            no_proxy=os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")),
            name=host.name,
            labels=list(counts.labels),
            experimental_build=False,
            server_version=__version__,
            cluster_store="",
            cluster_advertise="",
            security_options=list(host.security_options),
            runtimes={name: Runtime(path) for name, path in counts.runtimes.items()},
            default_runtime=counts.runtime,
            swarm=SwarmInfo(),
            live_restore_enabled=True,
        ),
    )


def _registries(config: Config) -> RegistryConfig:
    """The configuration of registries as Docker shows it: networks by CIDR, hosts by name, mirrors
    of Docker Hub.
    """
    mirrors = [mirror.rstrip("/") + "/" for mirror in config.registry_mirrors]
    hosts = [rule for rule in config.insecure_registries if "/" not in rule]
    hub = {"docker.io": IndexInfo(name="docker.io", mirrors=mirrors, secure=True, official=True)}
    return RegistryConfig(
        insecure_registry_cidrs=[*_ALWAYS_INSECURE, *(rule for rule in config.insecure_registries if "/" in rule)],
        index_configs={host: IndexInfo(name=host, mirrors=[], secure=False, official=False) for host in hosts} | hub,
        mirrors=mirrors,
    )


def events(engine: Engine, request: Request) -> StreamReply:
    """GET /events. With `since` or `until`, remembered past events come first. Then live events
    follow, up to `until`.
    """
    wanted = filters(request.query, EVENT_FILTERS)
    since = timestamp(request.query, "since") if request.query.get("since") else None
    until = timestamp(request.query, "until") if request.query.get("until") else None
    if since is not None and until is not None and until < since:
        raise InvalidParameter(f"`since` time ({since}) cannot be after `until` time ({until})")
    # Nothing is awaited between subscribing and reading the past, so no event is missed or sent
    # twice. The response head is flushed after both.
    subscription = engine.events.subscribe(wanted)
    asked = since is not None or until is not None
    past = engine.events.history(since or 0, until, wanted) if asked else []
    return StreamReply(request.status, EventFeed(request, subscription, past, until))


class EventFeed:
    """Events as lines of JSON; all waiting events are sent in one chunk. An object, not a
    generator: see `StreamReply`.
    """

    def __init__(self, request: Request, subscription: Subscription, past: list[Message], until: int | None) -> None:
        self._request = request
        self._subscription = subscription
        self._past = deque(past)
        self._until = until

    def __aiter__(self) -> EventFeed:
        return self

    async def __anext__(self) -> bytes:
        if self._past:
            messages = list(self._past)
            self._past.clear()
        else:
            messages = await self._live()
        if not messages:
            raise StopAsyncIteration
        return b"".join([encode(message, self._request) + b"\n" for message in messages])

    async def _live(self) -> list[Message]:
        if self._until is None:
            return await self._subscription.take()
        remaining = (self._until - time.time_ns()) / 1e9
        if remaining <= 0:
            return []
        try:
            async with asyncio.timeout(remaining):
                messages = await self._subscription.take()
        except TimeoutError:
            return []
        return [message for message in messages if message.time_nano <= self._until]

    async def aclose(self) -> None:
        self._subscription.close()
