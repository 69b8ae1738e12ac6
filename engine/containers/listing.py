"""Which containers a list shows: filters, `limit`, `since`, `before`, in Docker's order (newest
first). And how much space one takes.

Reads immutable records only. Not here: how a container is shown (`views.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from engine.common import booleans, labels, patterns
from engine.containers import views
from engine.containers.container import Container
from engine.containers.containers import Containers
from engine.containers.lifecycle import State
from engine.containers.store import ContainerRecord
from engine.errors import EngineError, InvalidParameter, NotFound
from engine.images.store import ImageStore

STATUSES = (*State, "dead")
"""Values of the filter `status`. None is dead here: a removal that fails leaves the state as it
was.
"""
HEALTH = ("starting", "healthy", "unhealthy", "none")


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The query of GET /containers/json.

    `limit` 0 or less: no limit; `filters`: name to wanted values.
    """

    all: bool = False
    limit: int = 0
    since: str = ""
    before: str = ""
    filters: dict[str, list[str]] = msgspec.field(default_factory=dict)

    @property
    def by_containers(self) -> bool:
        """The choice depends on nothing but the containers' records."""
        return "ancestor" not in self.filters


Test = Callable[[Container], bool]


def select(containers: Containers, images: ImageStore, wanted: Selection) -> list[Container]:
    """The containers, newest first.

    Raises InvalidParameter for a bad filter value, NotFound for an unknown `since` or `before`.
    """
    tests = [test for name, values in wanted.filters.items() for test in _tests(name, values, containers, images)]
    published, exposed = (port_filter(name, wanted.filters.get(name, ())) for name in ("publish", "expose"))
    if published or exposed:
        tests.append(lambda container: _has_port(container, published, exposed))
    if wanted.since:
        tests.append(_created_beside(containers.get(wanted.since), later=True))
    if wanted.before:
        tests.append(_created_beside(containers.get(wanted.before), later=False))
    everything = (
        wanted.all or wanted.limit > 0 or wanted.since or wanted.before or {"status", "exited"} & wanted.filters.keys()
    )
    if not everything:
        tests.append(lambda container: container.running or container.record.status.state == State.RESTARTING)
    chosen: Iterable[Container] = reversed([*containers])
    for test in tests:
        chosen = filter(test, chosen)
    found = sorted(chosen, key=lambda container: container.record.created, reverse=True)
    return found[: wanted.limit] if wanted.limit > 0 else found


def _created_beside(pivot: Container, *, later: bool) -> Test:
    at = pivot.record.created
    if later:
        return lambda container: container.record.created > at
    return lambda container: container.record.created < at


def _by_status(values: Sequence[str]) -> Test:
    for value in values:
        if value not in STATUSES:
            raise InvalidParameter(f"Unrecognised filter value for status: {value}")
    return lambda container: str(container.record.status.state) in values


def _by_exit_code(values: Sequence[str]) -> Test:
    codes = set()
    for value in values:
        try:
            codes.add(int(value))
        except ValueError:
            raise InvalidParameter(f"Invalid filter 'exited': {value!r} is not an exit code") from None
    return lambda container: (
        not container.running
        and bool(container.record.status.finished_at)
        and container.record.status.exit_code in codes
    )


def _by_labels(values: Sequence[str]) -> Test:
    return lambda container: labels.have_all(container.record.config.labels, values)


def _by_health(values: Sequence[str]) -> Test:
    for value in values:
        if value not in HEALTH:
            raise InvalidParameter(f"Unrecognised filter value for health: {value}")
    return lambda container: _health(container) in values


def _by_task(values: Sequence[str]) -> Test:
    of_service = _boolean("is-task", values)
    return lambda container: _is_task(container) == of_service


def _by_volume(values: Sequence[str]) -> Test:
    return lambda container: any(
        value in places
        for places in (
            *((mount.name, mount.destination, mount.source) for mount in container.record.mounts),
            *((mount.name, mount.destination) for mount in container.record.image_mounts),
        )
        for value in values
    )


def _by_network(values: Sequence[str]) -> Test:
    return lambda container: any(
        value == network or (settings.network_id and settings.network_id.startswith(value))
        for network, settings in container.record.networks.items()
        for value in values
    )


_BY_RECORD: Mapping[str, Callable[[Sequence[str]], Test]] = {
    "status": _by_status,
    "exited": _by_exit_code,
    "label": _by_labels,
    "isolation": lambda values: lambda container: (container.record.host.isolation or "default") in values,
    "health": _by_health,
    "is-task": _by_task,
    "volume": _by_volume,
    "network": _by_network,
    "name": lambda values: lambda container: any(patterns.match(values, name) for name in _names(container)),
    "id": lambda values: lambda container: patterns.match(values, container.id),
}
"""Filters that look at one record alone, and what makes a test of their values."""

_BY_OTHERS = ("ancestor", "before", "since", "publish", "expose")

FILTERS = frozenset((*_BY_RECORD, *_BY_OTHERS))
"""The filters of dockerd, at every version."""


def _tests(name: str, values: Sequence[str], containers: Containers, images: ImageStore) -> list[Test]:
    if name in _BY_RECORD:
        return [_BY_RECORD[name](values)]
    if name == "ancestor":
        ids: set[str] = set()
        for value in values:
            with contextlib.suppress(NotFound):
                ids |= images.index.descendants(images.get(value).id)
        return [lambda container: container.record.image_id in ids]
    if name in {"before", "since"}:
        return [_created_beside(containers.get(value), later=name == "since") for value in values]
    if name in {"publish", "expose"}:
        return []  # `select` has both
    raise InvalidParameter(f"Invalid filter '{name}'")


def _boolean(name: str, values: Sequence[str]) -> bool:
    found = {booleans.FILTER_WORDS.get(value) for value in values}
    if found not in ({True}, {False}):
        raise InvalidParameter(f"invalid filter '{name}={','.join(values)}'")
    return found == {True}


PortRange = tuple[range, str]
"""Ports and their protocol."""


def port_filter(name: str, values: Iterable[str]) -> list[PortRange]:
    """The ports and protocols of `80`, `80/udp`, `80-90/tcp`. Raises InvalidParameter."""
    found: list[PortRange] = []
    for value in values:
        if ":" in value:
            raise InvalidParameter(f"filter for '{name}' should not contain ':': {value[:100]}")
        numbers, _, protocol = value.partition("/")
        first, dash, last = numbers.partition("-")
        begin, end = _port(first), _port(last if dash else first)
        if begin is None or end is None or begin > end:
            raise InvalidParameter(f"error while looking up for {name} {value[:100]}: it is no port, nor a range")
        found.append((range(begin, end + 1), protocol.lower() or "tcp"))
    return found


def _port(text: str) -> int | None:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else -1
    return number if 0 <= number <= 65535 else None


def _has_port(container: Container, published: Sequence[PortRange], exposed: Sequence[PortRange]) -> bool:
    return any(
        (port.public_port > 0 and _within(port.public_port, port.type, published))
        or _within(port.private_port, port.type, exposed)
        for port in views.listed_ports(container.record)
    )


def _within(number: int, protocol: str, ranges: Sequence[PortRange]) -> bool:
    return any(number in ports and protocol == each for ports, each in ranges)


TASK = "com.docker.swarm.task"
"""Beginning of the labels of a swarm's task containers."""


def _is_task(container: Container) -> bool:
    """The name counts too: containers of an image that was committed from a task have its
    labels.
    """
    of_container = container.record.config.labels or {}
    return f"{TASK}.id" in of_container and of_container.get(f"{TASK}.name") == container.record.name


def _health(container: Container) -> str:
    health = container.record.status.health
    return health.status if health is not None else "none"


def image_shown(record: ContainerRecord, images: ImageStore) -> str:
    """The name of the container's image, or the image's id if that name was moved or removed."""
    name = record.config.image
    try:
        return name if images.get(name).id == record.image_id else record.image_id
    except EngineError:
        return record.image_id


async def sizes(container: Container) -> tuple[int, int]:
    """Bytes that its own layer holds, and those of its whole root.

    The files are counted in a thread.
    """
    snapshots = container.parts.snapshots
    try:
        own = (await snapshots.usage(container.id)).size
    except (NotFound, FileNotFoundError):
        return 0, 0  # it is being removed
    return own, own + sum(layer.size for layer in snapshots.chain(container.record.parent))


def _names(container: Container) -> tuple[str, str]:
    """The texts for the filter `name`: clients anchor with and without the slash."""
    return f"/{container.record.name}", container.record.name
