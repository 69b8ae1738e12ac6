"""GET /metrics on the listener of `metrics-addr`, in Prometheus' text format 0.0.4.

The names, types and labels are those of dockerd 28. Of its metrics those of Go's runtime, of raft
and of the HTTP handler are not served, as the engine has none of these; nor are counts of tasks.

Everything is read at a scrape. Not here: what is counted meanwhile (`engine/metrics.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from engine import metrics
from engine.api import replies, system
from engine.api.engine import Engine
from engine.common.facts import OwnProcess
from engine.containers.lifecycle import State
from engine.errors import EngineError
from engine.http.messages import Reply, Request

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


class Family(NamedTuple):
    """One metric, with all its samples."""

    name: str
    type: str
    help: str
    samples: Iterable[tuple[str, Labels, float]]
    """Suffix of the name, labels and value."""


class MetricsApplication:
    """Answers the requests of one listener, which has nothing but /metrics."""

    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, engine: Engine, process: Callable[[], OwnProcess]) -> None:
        """`process` reads what the kernel knows of this process. Blocking."""
        self._engine = engine
        self._process = process

    async def __call__(self, request: Request) -> Reply:
        if request.path != "/metrics":
            return Reply(404, b"404 page not found\n", "text/plain; charset=utf-8")
        if request.method not in ("GET", "HEAD"):
            return Reply(405, b"Method Not Allowed\n", "text/plain; charset=utf-8", (("Allow", "GET, HEAD"),))
        process = await asyncio.to_thread(self._process)
        found = [*families(self._engine), *_of_process(process), *await _of_swarm(self._engine)]
        return Reply(200, text(found), CONTENT_TYPE)

    def is_hijack(self, method: str, path: str) -> bool:
        return False

    def error_reply(self, error: BaseException) -> Reply:
        return replies.error_reply(error)


def families(engine: Engine) -> Iterator[Family]:
    """dockerd's metrics of the engine, in the order of their names."""
    host, counts = engine.host, engine.counts()
    states = engine.containers.counts()
    running = states[State.RUNNING] + states[State.RESTARTING]
    paused = states[State.PAUSED]
    stopped = sum(states.values()) - running - paused
    yield Family(
        *("builder_builds_failed_total", "counter", "Number of failed image builds"),
        [("", {"reason": reason}, count) for reason, count in metrics.BUILDS_FAILED.counts.items()],
    )
    yield _counter("builder_builds_triggered_total", "Number of triggered image builds", metrics.BUILDS)
    yield _durations(
        "container_actions",
        "The number of seconds it takes to process each container action",
        metrics.CONTAINER_ACTIONS,
    )
    yield Family(
        *("engine_daemon_container_states_containers", "gauge", "The count of containers in various states"),
        [
            ("", {"state": "paused"}, paused),
            ("", {"state": "running"}, running),
            ("", {"state": "stopped"}, stopped),
        ],
    )
    yield _gauge(
        "engine_daemon_engine_cpus_cpus", "The number of cpus that the host system of the engine has", host.cpus
    )
    labels = {
        "architecture": host.machine,
        "commit": host.git_commit,
        "daemon_id": host.id,
        "graphdriver": counts.driver,
        "kernel": host.kernel,
        "os": host.operating_system,
        "os_type": host.os,
        "os_version": host.os_version,
        "version": system.SERVER_VERSION,
    }
    yield Family(
        *("engine_daemon_engine_info", "gauge", "The information related to the engine and the OS it is running on"),
        [("", labels, 1)],
    )
    yield _gauge(
        *("engine_daemon_engine_memory_bytes", "The number of bytes of memory that the host system of the engine has"),
        host.memory,
    )
    yield _gauge(
        *("engine_daemon_events_subscribers_total", "The number of current subscribers to events"),
        engine.events.listeners,
    )
    yield _counter("engine_daemon_events_total", "The number of events logged", metrics.EVENTS)
    yield Family(
        *("engine_daemon_health_check_start_duration_seconds", "histogram"),
        "The number of seconds it takes to prepare to run health checks",
        _histogram({}, metrics.HEALTH_CHECK_STARTS),
    )
    yield _counter(
        *("engine_daemon_health_checks_failed_total", "The total number of failed health checks"),
        metrics.HEALTH_CHECKS_FAILED,
    )
    yield _counter("engine_daemon_health_checks_total", "The total number of health checks", metrics.HEALTH_CHECKS)
    yield _durations(
        "host_info_functions",
        "The number of seconds it takes to call functions gathering info about the host",
        *(metrics.HOST_FUNCTIONS, "function"),
    )
    for kind, durations in (("image", metrics.IMAGE_ACTIONS), ("network", metrics.NETWORK_ACTIONS)):
        yield _durations(f"{kind}_actions", f"The number of seconds it takes to process each {kind} action", durations)
    yield Family(
        *("logger_log_write_operations_failed_total", "counter", "Number of log write operations that failed"),
        [("", {}, counts.log_dropped)],
    )


def _of_process(process: OwnProcess) -> Iterator[Family]:
    """Those that every client library of Prometheus has."""
    yield Family(
        *("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds."),
        [("", {}, process.cpu_seconds)],
    )
    yield _gauge("process_max_fds", "Maximum number of open file descriptors.", process.most_descriptors)
    yield _gauge("process_open_fds", "Number of open file descriptors.", process.descriptors)
    yield _gauge("process_resident_memory_bytes", "Resident memory size in bytes.", process.resident)
    yield _gauge(
        "process_start_time_seconds", "Start time of the process since unix epoch in seconds.", process.started
    )
    yield _gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.", process.virtual)


class _Described(msgspec.Struct, frozen=True, rename="pascal"):
    state: str = ""


class _Managing(msgspec.Struct, frozen=True, rename="pascal"):
    leader: bool = False


class _Object(msgspec.Struct, frozen=True, rename="pascal"):
    """What is read of an object of the swarm."""

    id: str = msgspec.field(name="ID", default="")
    status: _Described = _Described()
    manager_status: _Managing = _Managing()


_objects = msgspec.json.Decoder(list[_Object]).decode
_SWARM_OBJECTS = ("configs", "networks", "secrets", "services")
_NODE_STATES = ("disconnected", "down", "ready", "unknown")
SWARM_LIMIT = 2.0
"""Seconds that the manager may take. Its metrics are left out then."""


async def _of_swarm(engine: Engine) -> list[Family]:
    """On managers, what their lists say. Tasks are not counted: a swarm may have 100,000."""
    cluster = engine.cluster
    found = [_gauge("swarm_node_manager", "Whether this node is a manager or not", cluster.is_manager)]
    if not cluster.is_manager:
        return found
    try:
        async with asyncio.timeout(SWARM_LIMIT):
            own = (await cluster.info()).get("NodeID", "")
            nodes, *others = [
                _objects((await cluster.call(f"{kind}.list", "", {"filters": {}})).body)
                for kind in ("nodes", *_SWARM_OBJECTS)
            ]
    except (EngineError, TimeoutError):
        return found
    leads = any(node.manager_status.leader and node.id == own for node in nodes)
    found.append(_gauge("swarm_manager_leader", "Indicates if this manager node is a leader", leads))
    states = Counter(node.status.state for node in nodes)
    samples = [("", {"state": state}, states[state]) for state in _NODE_STATES]
    found.append(Family("swarm_manager_nodes", "gauge", "The number of nodes", samples))
    for kind, objects in zip(_SWARM_OBJECTS, others, strict=True):
        help = f"The number of {kind} in the cluster object store"
        found.append(_gauge(f"swarm_manager_{kind}_total", help, len(objects)))
    return found


def _gauge(name: str, help: str, value: float) -> Family:
    return Family(name, "gauge", help, [("", {}, value)])


def _counter(name: str, help: str, counter: metrics.Counter) -> Family:
    return Family(name, "counter", help, [("", {}, counter.total)])


def _durations(name: str, help: str, durations: metrics.Durations, label: str = "action") -> Family:
    samples = [
        sample for value, found in sorted(durations.by_value.items()) for sample in _histogram({label: value}, found)
    ]
    return Family(f"engine_daemon_{name}_seconds", "histogram", help, samples)


def _histogram(labels: Labels, found: metrics.Histogram) -> Iterator[tuple[str, Labels, float]]:
    count = 0
    for bound, count in found.buckets():
        yield "_bucket", {**labels, "le": bound}, count
    yield "_sum", labels, found.sum
    yield "_count", labels, count


def text(found: Iterable[Family]) -> bytes:
    """Prometheus' text format. A histogram without samples is left out, as dockerd does."""
    lines = []
    for family in found:
        samples = [
            f"{family.name}{suffix}{_shown(labels)} {float(value) if isinstance(value, float) else int(value)}"
            for suffix, labels, value in family.samples
        ]
        if samples:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.type}", *samples]
    return ("\n".join(lines) + "\n").encode()


def _shown(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


__all__ = ["MetricsApplication", "families", "text"]
