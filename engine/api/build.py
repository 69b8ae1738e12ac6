"""Handlers of image builds: decode, one call into the builder, reply.

Parameters that newer versions document are obeyed at older ones too, because clients send them
there, but for the rows of `versions/`. So is what a build streams.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import msgspec

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import empty_reply, json_reply, started, upload_reply
from engine.api.versions import Flag
from engine.builder import classic, options
from engine.builder.options import Options, PruneOptions
from engine.builder.quiet import quiet
from engine.common import times
from engine.errors import InvalidParameter
from engine.http.messages import Query, Reply, Request, StreamReply
from engine.images.credentials import registry_config
from engine.wire.build import BuildMessage
from engine.wire.containers import HostConfig


async def build(engine: Engine, request: Request) -> StreamReply:
    """POST /build. An error before the first message becomes the reply's status."""
    found = decode(engine, request)
    reports = (await engine.builder.load()).build(request.body, found)
    if found.build_id:
        reports = engine.builds.run(found.build_id, reports)
    suppressed = parameters.boolean(request.query, "q")
    if suppressed:
        reports = quiet(reports, engine.images.temporary)
    messages = classic.stream(reports, numbered=found.numbered_steps)
    if not suppressed and not _shows_ids(request):
        messages = _without_aux(messages)
    return await upload_reply(request, await started(messages))


async def prune(engine: Engine, request: Request) -> Reply:
    """POST /build/prune."""
    pruned = await (await engine.builder.load()).prune(decode_prune(request))
    return json_reply(request, pruned.report)


def cancel(engine: Engine, request: Request) -> Reply:
    """POST /build/cancel. An id without a build is no error: the build may just have ended."""
    build_id = request.query.get("id", "")
    if not build_id:
        raise InvalidParameter("build ID not provided")
    engine.builds.cancel(build_id)
    return empty_reply(request)


def decode(engine: Engine, request: Request) -> Options:
    """The parameters of POST /build. Raises InvalidParameter that names the parameter."""
    query = request.query
    options.check_frontend(query.get("version", ""), query.get("session", ""), query.get("remote", ""))
    options.check_squash(parameters.boolean(query, "squash"), experimental=engine.config.experimental)
    options.check_security(query.get_all("securityopt"))
    if request.version.has(Flag.BUILD_OUTPUTS):
        options.check_outputs(query.get("outputs", ""))
    extra_hosts = [entry for entry in query.get_all("extrahosts") if entry]
    gateway = engine.networks.host_gateway if any(entry.endswith(":host-gateway") for entry in extra_hosts) else ""
    host = HostConfig(
        memory=_number(query, "memory"),
        memory_swap=_number(query, "memswap"),
        cpu_shares=_number(query, "cpushares"),
        cpu_period=_number(query, "cpuperiod"),
        cpu_quota=_number(query, "cpuquota"),
        cpuset_cpus=query.get("cpusetcpus", ""),
        cpuset_mems=query.get("cpusetmems", ""),
        cgroup_parent=query.get("cgroupparent", ""),
        shm_size=_number(query, "shmsize"),
        ulimits=options.ulimits(query.get("ulimits", "")) or None,
        isolation=query.get("isolation", ""),
        network_mode=query.get("networkmode", ""),
        extra_hosts=extra_hosts or None,
    )
    force_remove = parameters.boolean(query, "forcerm")
    return Options(
        dockerfile=query.get("dockerfile", "") or query.get("buildfile", ""),
        tags=options.tags(query.get_all("t")),
        remote=query.get("remote", ""),
        no_cache=parameters.boolean(query, "nocache"),
        pull=parameters.boolean(query, "pull"),
        remove=force_remove or not query.get("rm", "") or parameters.boolean(query, "rm"),
        force_remove=force_remove,
        host=options.host(host, gateway),
        arguments=options.arguments(query.get("buildargs", "")),
        labels=options.labels(query.get("labels", "")),
        cache_from=options.cache_from(query.get("cachefrom", "")),
        target=query.get("target", ""),
        platform=options.platform(query.get("platform", "") if request.version.has(Flag.PULL_PLATFORM) else ""),
        session=query.get("session", ""),
        build_id=query.get("buildid", ""),
        credentials=registry_config(request.headers.get("x-registry-config")),
        numbered_steps=request.version.has(Flag.NUMBERED_STEPS),
        unused_arguments_fail=not request.version.has(Flag.UNUSED_ARGUMENTS_WARN),
    )


def decode_prune(request: Request) -> PruneOptions:
    """The parameters of POST /build/prune. Raises InvalidParameter that names the parameter."""
    query = request.query
    filters = parameters.filters(query, options.PRUNE_FILTERS)
    values = [value for texts in filters.values() for value in texts]
    options.check_filters(sum(map(len, values)), len(values))
    unused = filters.pop("until", []) + filters.pop("unused-for", [])
    if len(unused) > 1:
        raise InvalidParameter("filters: until and unused-for take one value together")
    since = 0
    for text in unused:
        try:
            since = times.parse_timestamp(text, time.time_ns())
        except (ValueError, OverflowError):
            raise InvalidParameter(f"filters: {text[:100]!r} is neither a duration nor a timestamp") from None
    kept = _space(query, "keep-storage")
    pruning = PruneOptions(
        all=parameters.boolean(query, "all"), filters=filters, unused_since_ns=since, reserved_space=kept
    )
    if not request.version.has(Flag.PRUNE_SPACE):
        return pruning
    return msgspec.structs.replace(
        pruning,
        reserved_space=_space(query, "reserved-space") or kept,  # the older name of the same
        max_used_space=_space(query, "max-used-space"),
        min_free_space=_space(query, "min-free-space"),
    )


def _number(query: Query, name: str) -> int:
    return parameters.integer(query, name, 0)


def _space(query: Query, name: str) -> int:
    try:
        return parameters.integer(query, name, 0, minimum=0)
    except InvalidParameter:
        raise InvalidParameter(f"{name} is in bytes and expects an integer, got {query.get(name, '')[:100]}") from None


def _shows_ids(request: Request) -> bool:
    """True from 1.30 on, and for a request with `version`, a parameter of 1.38: docker CLIs send it
    at any version, and need the id for `--iidfile`, which compose uses.
    """
    return request.version.has(Flag.BUILD_AUX) or bool(request.query.get("version"))


async def _without_aux(messages: AsyncGenerator[BuildMessage, None]) -> AsyncGenerator[BuildMessage, None]:
    """For versions that do not have `aux`."""
    try:
        async for message in messages:
            if message.aux is None:
                yield message
    finally:
        await messages.aclose()
