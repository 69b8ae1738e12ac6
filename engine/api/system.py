"""Handlers about the engine itself (Docker Engine API, "System"): /_ping, /version, /info,
/system/df.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from engine import __version__, metrics
from engine.api import swarm_mode
from engine.api.engine import Engine
from engine.api.parameters import boolean
from engine.api.replies import encode, json_reply
from engine.api.versions import MINIMUM, NEWEST, RELEASE, Flag
from engine.common import proxies, seccomp_profiles, times
from engine.common.facts import Host
from engine.common.network_rules import Pool
from engine.common.turns import Turn
from engine.config import Config
from engine.errors import InvalidParameter
from engine.http.messages import Reply, Request
from engine.usage import Kind, Usage, Usages
from engine.wire.containers import ContainerSummary
from engine.wire.images import ImageSummary
from engine.wire.system import (
    CacheRecord,
    Commit,
    Component,
    DefaultAddressPool,
    DiscoveredDevice,
    DiskUsage,
    FirewallBackend,
    IndexInfo,
    Info,
    InfoPlugins,
    KindUsage,
    Platform,
    RegistryConfig,
    Runtime,
    VersionInfo,
)
from engine.wire.volumes import Volume

INDEX = "https://index.docker.io/v1/"
"""The key of Docker Hub in clients' credential files."""

_ALWAYS_INSECURE = ("127.0.0.0/8", "::1/128")

PRODUCT = "engined"
INIT = "docker-init"
FEATURES = "org.opencontainers.runtime-spec.features"

_PING = (
    ("Cache-Control", "no-cache, no-store, must-revalidate"),
    ("Pragma", "no-cache"),
    # Docker CLIs that obey it (20.10) would send BuildKit's builds by POST /build for 2, which this
    # engine does not have. Later ones use buildx, whatever it says.
    ("Builder-Version", "1"),
)


def ping(engine: Engine, request: Request) -> Reply:
    """GET and HEAD /_ping. Clients negotiate the version with it; every reply has the version
    headers.
    """
    return _pong(request.method, engine.cluster.header)


SERVER_VERSION = f"{RELEASE}+engined.{__version__}"
"""What clients compare with versions of Docker."""


@functools.cache
def _pong(method: str, swarm: str) -> Reply:
    return Reply(200, b"" if method == "HEAD" else b"OK", "text/plain; charset=utf-8", (*_PING, ("Swarm", swarm)))


async def version(engine: Engine, request: Request) -> Reply:
    """GET /version."""
    programs = await asyncio.to_thread(engine.programs)
    host, counts = engine.host, engine.counts()
    go_version = f"none (Python {host.python})"
    details = {
        "ApiVersion": NEWEST,
        "Arch": host.arch,
        "BuildTime": host.build_time,
        "Experimental": str(engine.config.experimental).lower(),
        "GitCommit": host.git_commit,
        "GoVersion": go_version,
        "KernelVersion": host.kernel,
        "MinAPIVersion": MINIMUM,
        "Os": host.os,
    }
    components = [
        Component(name="Engine", version=__version__, details=details),
        Component(name=counts.runtime, version=counts.runtime_version, details={}),
    ]
    if programs.init_version:
        components.append(Component(name=INIT, version=programs.init_version, details={}))
    return json_reply(
        request,
        VersionInfo(
            platform=Platform(PRODUCT),
            components=components,
            version=SERVER_VERSION,
            api_version=NEWEST,
            min_api_version=MINIMUM,
            git_commit=host.git_commit,
            go_version=go_version,
            os=host.os,
            arch=host.arch,
            kernel_version=host.kernel,
            build_time=host.build_time,
            experimental=engine.config.experimental,
        ),
    )


async def info(engine: Engine, request: Request) -> Reply:
    """GET /info: facts about the host as of the engine's start, and current counts."""
    began = time.monotonic()
    devices, programs = await asyncio.to_thread(lambda: (engine.devices(), engine.programs()))
    metrics.HOST_FUNCTIONS.since("system_info", began)
    host, counts, has = engine.host, engine.counts(), request.version.has
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
                authorization=list(counts.authorization_plugins) or None,
                log=list(counts.log_drivers),
            ),
            memory_limit=host.memory_limit,
            swap_limit=host.swap_limit,
            kernel_memory=msgspec.UNSET if has(Flag.NO_KERNEL_MEMORY) else host.kernel_memory,
            cpu_cfs_period=host.cpu_cfs_period,
            cpu_cfs_quota=host.cpu_cfs_quota,
            cpu_shares=host.cpu_shares,
            cpu_set=host.cpu_set,
            pids_limit=host.pids_limit,
            ipv4_forwarding=host.ipv4_forwarding,
            bridge_nf_iptables=msgspec.UNSET if has(Flag.NO_BRIDGE_NF) else host.bridge_nf_iptables,
            bridge_nf_ip6tables=msgspec.UNSET if has(Flag.NO_BRIDGE_NF) else host.bridge_nf_ip6tables,
            debug=engine.config.log_level == "debug",
            nfd=counts.descriptors,
            oom_kill_disable=host.oom_kill_disable,
            n_goroutines=counts.tasks,
            system_time=times.rfc3339(time.time_ns()),
            logging_driver=engine.config.log_driver,
            cgroup_driver=host.cgroup_driver,
            cgroup_version=host.cgroup_version,
            n_events_listener=engine.events.listeners,
            kernel_version=host.kernel,
            operating_system=host.operating_system,
            os_version=host.os_version,
            os_type=host.os,
            architecture=host.machine,
            index_server_address=INDEX,
            registry_config=_registries(engine.config),
            ncpu=host.cpus,
            mem_total=host.memory,
            docker_root_dir=str(engine.config.root),
            engine_root_dir=str(engine.config.root),
            http_proxy=proxies.hidden(proxies.variable("HTTP_PROXY")),
            https_proxy=proxies.hidden(proxies.variable("HTTPS_PROXY")),
            no_proxy=proxies.variable("NO_PROXY"),
            name=host.name,
            labels=list(counts.labels),
            experimental_build=engine.config.experimental,
            server_version=SERVER_VERSION,
            security_options=list(host.security_options),
            runtimes={
                name: _runtime(*program, features=programs.features.get(name))
                for name, program in counts.runtimes.items()
            },
            default_runtime=counts.default_runtime,
            swarm=await swarm_mode.info(engine, request),
            live_restore_enabled=True,
            containerd_commit=_NONE,
            runc_commit=Commit(counts.runtime_version),
            init_binary=engine.config.init_path or INIT,
            init_commit=Commit(programs.init_version) if programs.init_version else _NONE,
            default_address_pools=_pools(engine.config) or msgspec.UNSET,
            firewall_backend=FirewallBackend("nftables"),
            generic_resources=_resources(engine.config) or None,
            cdi_spec_dirs=[str(directory) for directory in engine.config.cdi_specs],
            discovered_devices=[DiscoveredDevice("cdi", name) for name in devices] or msgspec.UNSET,
            warnings=[*_warnings(host, engine.config), *(f"WARNING: {trouble}" for trouble in counts.troubles)],
            log_deliveries=await engine.deliveries.totals() or msgspec.UNSET,
            log_dropped=counts.log_dropped or msgspec.UNSET,
            restoring=engine.restoring or msgspec.UNSET,
        ),
    )


def _runtime(path: str, *arguments: str, features: str | None) -> Runtime:
    return Runtime(path, list(arguments) or msgspec.UNSET, msgspec.UNSET if features is None else {FEATURES: features})


_NONE = Commit("N/A")
"""The version of a program that the engine does not have."""


def _warnings(host: Host, config: Config) -> list[str]:
    """Warnings for the operator, in Docker's words, which scripts search for."""
    found = [f"WARNING: {text}" for offered, text in _limits(host) if not offered]
    if config.seccomp_profile != seccomp_profiles.BUILTIN:
        found.append("WARNING: daemon is not using the default seccomp profile")
    if not config.tls_cert:
        found += [f"WARNING: API is accessible on http://{address} without encryption" for address in config.tcp]
    return found


def _limits(host: Host) -> Iterator[tuple[bool, str]]:
    yield host.memory_limit, "No memory limit support"
    yield host.swap_limit, "No swap limit support"
    yield host.oom_kill_disable or host.cgroup_version == "2", "No oom kill disable support"
    yield host.cpu_cfs_quota, "No cpu cfs quota support"
    yield host.cpu_cfs_period, "No cpu cfs period support"
    yield host.cpu_shares, "No cpu shares support"
    yield host.cpu_set, "No cpuset support"
    yield host.pids_limit, "No pids limit support"
    yield host.ipv4_forwarding, "IPv4 forwarding is disabled"


def _pools(config: Config) -> list[DefaultAddressPool]:
    return [DefaultAddressPool(str(base), size) for base, size in map(Pool.parse, config.address_pools)]


def _resources(config: Config) -> list[dict[str, object]]:
    """As in `cluster/description.py`, whose structs an engine outside of a swarm does not load."""
    found: list[dict[str, object]] = []
    for kind, _, value in (entry.partition("=") for entry in config.generic_resources):
        if value.isascii() and value.isdigit():
            found.append({"DiscreteResourceSpec": {"Kind": kind, "Value": int(value)}})
        else:
            found.append({"NamedResourceSpec": {"Kind": kind, "Value": value}})
    return found


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


async def disk_usage(engine: Engine, request: Request) -> Reply:
    """GET /system/df. The lists go into the totals with `verbose`, and into the older fields
    otherwise: clients that send no version read those.
    """
    kinds = _kinds(request)
    verbose = request.version.has(Flag.DF_VERBOSE) and boolean(request.query, "verbose")
    running = {kind: asyncio.ensure_future(_USAGES[kind].ask(engine.usage)) for kind in kinds}
    try:
        usages = dict(zip(running, await asyncio.gather(*running.values()), strict=True))
    finally:
        for task in running.values():
            task.cancel()
    fields: dict[str, Any] = {}
    for kind, usage in usages.items():
        shown = _USAGES[kind]
        items = await _encoded(usage.items, request, shown.struct)
        fields[shown.totals] = KindUsage(
            active_count=usage.active,
            total_count=len(usage.items),
            reclaimable=usage.reclaimable,
            total_size=usage.size,
            items=items if verbose else msgspec.UNSET,
        )
        if not verbose:
            fields[shown.items] = items
    if Kind.IMAGE in usages and not verbose:
        fields["layers_size"] = usages[Kind.IMAGE].size
    return json_reply(request, DiskUsage(**fields))


class _Kind(NamedTuple):
    """How /system/df asks for a kind of objects, and shows it."""

    ask: Callable[[Usages], Awaitable[Usage[Any]]]
    struct: type
    items: str
    totals: str


_USAGES = {
    Kind.IMAGE: _Kind(Usages.images, ImageSummary, "images", "image_usage"),
    Kind.CONTAINER: _Kind(Usages.containers, ContainerSummary, "containers", "container_usage"),
    Kind.VOLUME: _Kind(Usages.volumes, Volume, "volumes", "volume_usage"),
    Kind.BUILD_CACHE: _Kind(Usages.build_cache, CacheRecord, "build_cache", "build_cache_usage"),
}


def _kinds(request: Request) -> list[Kind]:
    """The kinds that the request names; all without `type`, and where it has no meaning."""
    given = request.query.get_all("type") if request.version.has(Flag.DF_TYPES) else []
    for each in given:
        if each not in Kind.__members__.values():
            raise InvalidParameter(f"unknown object type: {each[:100]}")
    return [kind for kind in Kind if not given or kind in given]


async def _encoded(values: Sequence[Any], request: Request, of: type) -> msgspec.Raw:
    """A list as JSON, made in parts, between which other requests are served."""
    parts = []
    turn = Turn()
    for begin in range(0, len(values), _AT_ONCE):
        await turn.over()
        parts.append(encode(list(values[begin : begin + _AT_ONCE]), request, of)[1:-1])
    return msgspec.Raw(b"[%b]" % b",".join(parts))


_AT_ONCE = 50
"""Objects that are encoded at a time: about a millisecond's work."""
