"""Handlers of "Services": decode, one call to the manager, reply."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec

from engine.api import manager, parameters, service_logs
from engine.api.engine import Engine
from engine.api.replies import json_reply
from engine.api.versions import Flag
from engine.common.network_rules import PREDEFINED_NAMES, SWARM
from engine.errors import EngineError, InvalidParameter
from engine.http.messages import Reply, Request, StreamReply
from engine.images import reference
from engine.images.credentials import registry_auth
from engine.wire.services import Service, ServiceCreated, ServiceSpec, ServiceUpdated

_log = logging.getLogger(__name__)

FILTERS = ("id", "name", "label", "mode", "runtime")

DIGEST_TIMEOUT = 10.0
"""Seconds that a registry has to tell the digest of an image."""


async def list_all(engine: Engine, request: Request) -> Reply:
    query = {
        "filters": parameters.filters(request.query, FILTERS),
        "status": request.version.has(Flag.SERVICE_STATUS) and manager.flag(request.query, "status"),
    }
    return await manager.ask(engine, request, "services.list", Service, query=query, many=True)


async def inspect(engine: Engine, request: Request) -> Reply:
    query = {"insert_defaults": manager.flag(request.query, "insertDefaults")}
    return await manager.ask(engine, request, "services.inspect", Service, query=query)


async def create(engine: Engine, request: Request) -> Reply:
    query = _query(request)
    spec, warnings = await _spec(engine, request)
    query["local_networks"] = _local_networks(engine, spec)
    done = await engine.cluster.call("services.create", "", query, msgspec.json.encode(spec))
    created = msgspec.json.decode(done.body, type=ServiceCreated)
    warnings += created.warnings or ()
    return json_reply(request, ServiceCreated(id=created.id, warnings=warnings or None))


async def update(engine: Engine, request: Request) -> Reply:
    query = _query(request) | {
        "network_changes": request.version.has(Flag.NETWORKS_CHANGE),
        "version": manager.version(request.query, "service"),
        "rollback": _choice(request, "rollback", ("", "none", "previous")).removeprefix("none"),
        "registry_auth_from": _choice(request, "registryAuthFrom", ("", "spec", "previous-spec")),
    }
    spec, warnings = await _spec(engine, request, resolve=not query["rollback"])
    query["local_networks"] = _local_networks(engine, spec)
    name = request.parameters["id"]
    done = await engine.cluster.call("services.update", name, query, msgspec.json.encode(spec))
    # 1.24 documents no body. docker CLIs and docker-py expect one at every version, as dockerd
    # sends it.
    warnings += msgspec.json.decode(done.body, type=ServiceUpdated).warnings or ()
    return json_reply(request, ServiceUpdated(warnings or None))


async def remove(engine: Engine, request: Request) -> Reply:
    return await manager.ask(engine, request, "services.remove")


async def read_logs(engine: Engine, request: Request) -> StreamReply:
    return await service_logs.reply(engine, request, "service")


# --- the spec -------------------------------------------------------------------------------------


def _query(request: Request) -> dict[str, Any]:
    header = request.headers.get("x-registry-auth")
    try:
        registry_auth(header)
    except InvalidParameter:
        if not request.version.has(Flag.UNREADABLE_AUTH):
            raise
        header = ""
    return {"registry_auth": header, "node_local_networks": request.version.has(Flag.NODE_LOCAL_NETWORKS)}


def _local_networks(engine: Engine, spec: ServiceSpec) -> list[str]:
    """The targets that are networks of this engine alone, which the manager does not know."""
    return [network.target for network in spec.task_template.networks if _local_name(engine, network.target)]


def _local_name(engine: Engine, target: str) -> str:
    """The name of this engine's network of that name or id; "" when it has none."""
    with contextlib.suppress(EngineError):
        record = engine.networks.get(target).record
        return "" if record.scope == SWARM else record.name
    return ""


def _named_by_name(engine: Engine, spec: ServiceSpec) -> ServiceSpec:
    """With the names of networks that each node has, whose ids differ from node to node."""
    networks = [
        msgspec.structs.replace(network, target=name)
        if (name := _local_name(engine, network.target)) in PREDEFINED_NAMES
        else network
        for network in spec.task_template.networks
    ]
    if networks == spec.task_template.networks:
        return spec
    return msgspec.structs.replace(spec, task_template=msgspec.structs.replace(spec.task_template, networks=networks))


def _choice(request: Request, name: str, choices: tuple[str, ...]) -> str:
    given = request.query.get(name, "")
    if given not in choices:
        raise InvalidParameter(f"invalid value for {name}: {given[:100]!r}: {' or '.join(choices[1:])} is expected")
    return given


async def _spec(engine: Engine, request: Request, *, resolve: bool = True) -> tuple[ServiceSpec, list[str]]:
    """The spec of the body, and what the client should know about it."""
    spec = await manager.body(request, ServiceSpec, _spellings)
    warnings = []
    if spec.networks:
        warnings.append("Networks of the service itself are not read from API v1.44 on: use TaskTemplate.Networks")
        spec = msgspec.structs.replace(spec, networks=[])
    spec = _named_by_name(engine, spec)
    container = spec.task_template.container_spec
    if resolve and container is not None and container.image and not request.version.has(Flag.DIGEST_BY_CLIENT):
        image, warning = await _pinned(engine, container.image, request.headers.get("x-registry-auth"))
        warnings += warning
        if image != container.image:
            container = msgspec.structs.replace(container, image=image)
            template = msgspec.structs.replace(spec.task_template, container_spec=container)
            spec = msgspec.structs.replace(spec, task_template=template)
    return spec, warnings


async def _pinned(engine: Engine, image: str, auth: str) -> tuple[str, list[str]]:
    """The image with the digest that its registry has for it now. Without one, the image as it is
    and a warning.
    """
    try:
        name = reference.parse(image)
        if name.digest:
            return image, []
        async with asyncio.timeout(DIGEST_TIMEOUT):
            found = await engine.remote.described(image, registry_auth(auth))
        return f"{name.tagged().familiar}@{found.descriptor.digest}", []
    except (EngineError, TimeoutError) as error:
        _log.warning("the digest of image %s cannot be found: %s", image, error or "the registry does not answer")
        return image, [
            f"image {image} could not be accessed on a registry to record its digest. Each node will access {image} "
            "itself, so nodes may run different versions of it."
        ]


def _spellings(shape: dict[str, Any]) -> None:
    """1.24's document says NanoCPU where clients send NanoCPUs."""
    template = shape.get("TaskTemplate")
    resources = template.get("Resources") if isinstance(template, dict) else None
    if isinstance(resources, dict):
        for name in ("Limits", "Reservations"):
            manager.renamed(resources.get(name), "NanoCPU", "NanoCPUs")
