"""Carries out this node's tasks: each becomes a container, whose life is the task's state.

`Reconciler` drives each task. A step compares what is wanted with what is there and does one thing;
what happens to the container in between (exit, health, removal) wakes the task by the observers of
`containers`. So an idle node costs nothing, and 1,000 tasks cost 1,000 small objects.

The states are the API's (1.24, "Tasks"), forward only:

    accepted → preparing (image, volumes, container) → ready → starting (process; until it is
    healthy, with a health check) → running → complete, failed, shutdown; before starting rejected

The container is named after the task, so that there is one at most: a daemon that was killed after
the create, and before it knew, finds it by name and labels. A container that has ended stays until
the managers forget the task. Restarts are the leader's decision, which makes another task.

Owns:    the containers of tasks.
Threads: the event loop's. Creates and starts are bounded (`PARALLEL`); pulls and stops are not.
Raises:  nothing: a failure is the task's error.
Not here: the session (`agent.py`), the create's body (`bodies.py`), rows (`tasks.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec

from engine.cluster.bodies import LABEL, TASK_LABEL, Node, create_body, grace, host_ports, wanted_networks
from engine.cluster.delivery import Deliveries
from engine.cluster.parts import Parts
from engine.cluster.pulling import Pulls
from engine.cluster.tasks import Observed, SpecRecord, TaskSet
from engine.cluster.views import NodeNetworks
from engine.containers import removal
from engine.containers.container import Container
from engine.containers.health import HEALTHY, STARTING, UNHEALTHY
from engine.containers.lifecycle import State
from engine.errors import (
    BUG,
    Conflict,
    EngineError,
    NotFound,
    NotModified,
    ServerError,
    WrongState,
    words,
)
from engine.swarm_session.messages import Assigned, Assignments, Status
from engine.swarm_session.states import TaskState
from engine.system.reconcile import Backoff, Reconciler
from engine.system.tasks import spawn
from engine.system.threads import cancelled
from engine.wire.services import ServiceSpec
from engine.wire.tasks import PortConfig

PARALLEL = 16
"""Creates and starts at one time."""
REMOVALS = 8
"""Removals at one time."""
AGAIN = 1.0, 30.0
"""Seconds until a stop or a removal that failed is tried again: at first, and at most."""

WITHDRAWAL_LIMIT = 3.0
"""Seconds that the managers may take to store that a task gets no more traffic, and to send it to
the nodes.
"""
WITHDRAWAL = 0.2
"""Seconds from then until its signal, in which all nodes stop leading traffic to it."""

END_LIMIT = 30.0
"""Seconds that tasks have to end beyond their grace period, when this node leaves."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Superseded(Exception):
    """The task is wanted otherwise now: what was awaited has been cancelled."""


class _Task:
    """One task in work."""

    __slots__ = ("assigned", "gone", "observed", "stopping", "unhealthy", "waiting")

    def __init__(self, assigned: Assigned, observed: Observed) -> None:
        self.assigned = assigned
        self.observed = observed
        self.gone = False
        """The managers have forgotten it."""
        self.stopping = False
        """Its container is being ended because the task is not wanted any more."""
        self.unhealthy = False
        """Its container is being ended because of its health check."""
        self.waiting: asyncio.Task[object] | None = None
        """What its step awaits and may be cancelled when the task is not wanted any more."""

    @property
    def wanted(self) -> bool:
        return not self.gone and self.assigned.desired < TaskState.SHUTDOWN


class Executor:
    """All tasks of this node."""

    def __init__(
        self,
        parts: Parts,
        node: Node,
        networks: NodeNetworks,
        changed: Callable[[str, bool], None],
        stored: Callable[[str], Awaitable[None]],
    ) -> None:
        """`changed(task, urgent)` is called after each change of a task's status; urgent ones
        concern other nodes. `stored(task)` returns when the managers have stored the last one, or
        cannot be reached.
        """
        self._parts = parts
        self._networks = networks
        self._stored = stored
        self._containers = parts.containers
        self._node = node
        self._changed = changed
        self._set = TaskSet(parts.records)
        self._deliveries = Deliveries()
        self._pulls = Pulls(parts.images, parts.remote, mirrors=lambda: parts.remote.mirrored)
        self._tasks: dict[str, _Task] = {}
        self._by_container: dict[str, str] = {}
        self._work = Reconciler(
            self._reconcile,
            self._step_failed,
            what=lambda task: f"task {task.assigned.id}",
            backoff=lambda: Backoff(*AGAIN),
        )
        """On tasks that are forgotten, too, until their records are removed."""
        self._slots = asyncio.Semaphore(PARALLEL)
        self._removals = asyncio.Semaphore(REMOVALS)
        self._synchronized = False
        """A manager has sent the whole set to this daemon."""
        self._leaving = False
        """This node leaves its swarm."""
        self._restarting: set[str] = set()
        """Containers that a client restarts, although their tasks have ended."""
        self._empty = asyncio.Event()
        self._empty.set()

    # --- from outside -----------------------------------------------------------------------------

    def open(self) -> None:
        """Load the tasks and go on where the last daemon ended."""
        self._set.load()
        lifecycle = self._containers.lifecycle
        lifecycle.ended.subscribe(self._container_ended)
        lifecycle.health.subscribe(self._container_changed)
        lifecycle.gone.subscribe(self._container_changed)
        lifecycle.started.subscribe(self._container_started)
        for record in self._set:
            task = self._tasks[record.assigned.id] = _Task(record.assigned, record.observed)
            if record.observed.container:
                self._by_container[record.observed.container] = record.assigned.id
            self._wake(task)
        self._count()

    async def close(self) -> None:
        """The daemon ends. Containers run on; the next daemon goes on with the tasks."""
        self._unsubscribe()
        await self._work.close()
        await self._pulls.close()

    async def assign(self, message: Assignments) -> None:
        """Take a set of tasks, or changes of it; one call after another, and none after `end` was
        called. Raises ServerError when it cannot be kept.
        """
        applied = await self._set.apply(message)
        if self._leaving:  # `end` has begun meanwhile: it removes their records with the others
            return
        # Not before: a task that is removed during the await has the content forgotten that no task
        # here refers to, and the managers send it once.
        self._deliveries.put(message.secrets, message.configs)
        for task_id in applied.gone:
            if (task := self._tasks.get(task_id)) is not None:
                task.gone = True
                self._wake(task)
        for assigned in message.put:
            # Assigned again while it is removed: the managers want it after all.
            if (task := self._tasks.get(assigned.id)) is not None and task.gone:
                task.gone = False
                self._wake(task)
        for task_id in applied.put:
            record = self._set.get(task_id)
            assert record is not None
            task = self._tasks.get(task_id)
            if task is None:
                task = self._tasks[task_id] = _Task(record.assigned, record.observed)
            task.assigned = record.assigned
            self._wake(task)
        self._count()
        if message.whole and not self._synchronized:
            self._synchronized = True
            for task in self._tasks.values():  # some may have waited for secrets
                self._wake(task)
            await self._sweep()

    async def end(self) -> None:
        """End all tasks and remove their containers and records: this node leaves its swarm."""
        self._leaving = True
        for task in self._tasks.values():
            task.gone = True
            self._wake(task)
        seconds = END_LIMIT + max((grace(record.spec) for record in self._set.specs()), default=0.0)
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            _log.error("%d tasks have not ended within %g s; they are left behind", len(self._tasks), seconds)
        await self._sweep()
        await self._set.clear()
        self._unsubscribe()

    def statuses(self, tasks: Iterable[str] | None = None) -> tuple[Status, ...]:
        """Of all tasks, or of these; those that are gone are left out."""
        chosen = (
            self._tasks.values()
            if tasks is None
            else [self._tasks[task_id] for task_id in tasks if task_id in self._tasks]
        )
        return tuple(task.observed.status(task.assigned.id) for task in chosen if not task.gone)

    async def save(self, tasks: Iterable[str]) -> None:
        """Write what has become of these tasks. Raises ServerError."""
        await self._set.observe((task_id, self._tasks[task_id].observed) for task_id in tasks if task_id in self._tasks)

    def container_of(self, task: str) -> Container | None:
        """None when this node has no such task, or no container for it."""
        known = self._tasks.get(task)
        return None if known is None else self._find(known)

    def task_of(self, container: str) -> Assigned | None:
        """The task of a container that is about to start. Raises WrongState if it has ended: its
        addresses may be another task's.
        """
        task = self._tasks.get(self._by_container.get(container, ""))
        if task is None:
            return None
        if task.observed.state.ended and task.assigned.addresses:
            raise WrongState(f"Container {container} belongs to the task {task.assigned.id}, which has ended")
        return task.assigned

    def __len__(self) -> int:
        return len(self._tasks)

    # --- what wakes a task ------------------------------------------------------------------------

    def _wake(self, task: _Task) -> None:
        self._work.mark(task, urgent=not task.wanted)
        if task.waiting is not None and not task.wanted:
            task.waiting.cancel()

    def _container_changed(self, container: Container) -> None:
        task = self._tasks.get(self._by_container.get(container.id, ""))
        if task is not None:
            self._wake(task)

    def _container_ended(self, container: Container) -> None:
        if container.id in self._by_container and container.restarting:
            self._restarting.add(container.id)
        self._container_changed(container)

    def _container_started(self, container: Container) -> None:
        """A client has restarted it. Its task has ended with the first run and has a successor, so
        the second run must not go on beside that.
        """
        if container.id not in self._restarting:
            return
        self._restarting.discard(container.id)
        task = self._tasks.get(self._by_container.get(container.id, ""))
        if task is not None:
            _log.warning("container %s belongs to a task that has ended: stopping it again", container.record.name)
            spawn(self._stop(task, container), f"task {task.assigned.id}: stop its container again")

    def _unsubscribe(self) -> None:
        lifecycle = self._containers.lifecycle
        lifecycle.ended.unsubscribe(self._container_ended)
        lifecycle.health.unsubscribe(self._container_changed)
        lifecycle.gone.unsubscribe(self._container_changed)
        lifecycle.started.unsubscribe(self._container_started)

    def _count(self) -> None:
        if self._tasks:
            self._empty.clear()
        else:
            self._empty.set()

    # --- the steps of a task ----------------------------------------------------------------------

    async def _reconcile(self, task: _Task) -> float | None:
        try:
            return 0.0 if await self._step(task) else None
        except _Superseded:
            return 0.0
        except (EngineError, OSError):
            raise  # of an end: a failure before is the task's, and final
        except Exception:
            container = self._find(task)
            if not task.wanted or (container is not None and container.running):
                raise
            _log.exception("task %s (%s)", task.assigned.id, task.assigned.name)
            self._fail(task, ServerError(BUG))
            return 0.0

    def _step_failed(self, task: _Task, error: Exception, seconds: float) -> None:
        text = "task %s (%s): %s; trying again in %g s"
        bug = not isinstance(error, (EngineError, OSError))
        _log.error(text, task.assigned.id, task.assigned.name, words(error), seconds, exc_info=bug)

    async def _step(self, task: _Task) -> bool:
        """Take one step. Returns False when there is nothing to do until something changes."""
        state = task.observed.state
        if task.gone:
            await self._forget(task)
            return False
        if state.ended:
            return False
        container = self._find(task)
        if container is not None and _has_ended(container):
            self._ended(task, container)
            return False
        if not task.wanted:
            await self._end(task, container)
            return True
        if state < TaskState.ACCEPTED:
            self._observe(task, TaskState.ACCEPTED, "accepted")
        if container is None:
            if task.observed.container:
                self._fail(task, NotFound(f"No such container: {task.assigned.name}"))
                return False
            return await self._prepare(task)
        if container.record.status.state == State.REMOVING:
            return False
        if container.record.status.state == State.CREATED:
            if state < TaskState.READY:
                self._observe(task, TaskState.READY, "prepared", container=container.id)
            if task.assigned.desired < TaskState.RUNNING:
                return False
            return await self._start(task, container)
        return await self._follow(task, container)

    async def _prepare(self, task: _Task) -> bool:
        """Image, volumes, container; and its start, if it is wanted at once."""
        record = self._set.spec(task.assigned)
        if record is None:
            self._fail(task, ServerError(f"the spec {task.assigned.spec} is missing on this node"))
            return False
        try:
            if self._waits_for_content(task, record.spec):
                return False
            if task.observed.state < TaskState.PREPARING:
                self._observe(task, TaskState.PREPARING, "preparing")
            image = record.spec.task_template.container_spec
            assert image is not None
            await self._unless_superseded(task, self._pulls.bring(image.image, record.auth))
            # no other task waits for one that cannot be made
            for network in task.assigned.addresses:
                await self._unless_superseded(task, self._networks.need(network))
            async with self._slots:
                if not task.wanted:
                    return True
                container = await self._create(task, record)
                if task.wanted and task.assigned.desired >= TaskState.RUNNING:
                    await self._start_in_slot(task, record.spec, container)
        except (EngineError, OSError) as error:
            self._fail(task, error)
        return True

    def _waits_for_content(self, task: _Task, spec: ServiceSpec) -> bool:
        """True if its secrets and configs come with the next session, after a restart of the
        daemon. Raises NotFound if they do not.
        """
        missing = self._deliveries.missing(task.assigned, spec)
        if missing and self._synchronized:
            raise NotFound(f"{missing[0]} not found")
        return bool(missing)

    async def _create(self, task: _Task, record: SpecRecord) -> Container:
        spec = record.spec
        for network in wanted_networks(spec):
            self._parts.networks.get(network.target)
        assigned = self._set.get(task.assigned.id)
        body = create_body(
            task.assigned,
            spec,
            self._node,
            log_driver=assigned.log_driver if assigned is not None else None,
            resources=task.assigned.generic,
            name_of=self._parts.networks.name_of,
        )
        # A template that fails must show before the start.
        self._deliveries.files(task.assigned, spec, self._node)
        try:
            created = await self._containers.create(body, task.assigned.name)
        except Conflict:
            container = self._find(task)  # the last daemon's, or that of a step that was cancelled
            if container is None:
                raise
        else:
            container = self._containers.get(created.id)
        self._by_container[container.id] = task.assigned.id
        self._observe(task, TaskState.READY, "prepared", container=container.id)
        return container

    async def _start(self, task: _Task, container: Container) -> bool:
        record = self._set.spec(task.assigned)
        if record is None:
            self._fail(task, ServerError(f"the spec {task.assigned.spec} is missing on this node"))
            return False
        try:
            if self._waits_for_content(task, record.spec):
                return False
        except NotFound as error:
            self._fail(task, error)
            return False
        async with self._slots:
            if task.wanted:
                await self._start_in_slot(task, record.spec, container)
        return True

    async def _start_in_slot(self, task: _Task, spec: ServiceSpec, container: Container) -> None:
        self._observe(task, TaskState.STARTING, "starting")
        try:
            container.extra_mounts = self._deliveries.files(task.assigned, spec, self._node)
            await container.start()
        except NotModified:
            pass  # a client was faster
        except (EngineError, OSError) as error:
            self._fail(task, error)

    async def _follow(self, task: _Task, container: Container) -> bool:
        """It runs: is it healthy?"""
        status = container.record.status
        health = status.health.status if status.health is not None else HEALTHY
        if health == UNHEALTHY:
            task.unhealthy = True
            await self._stop(task, container)
            return True
        # a daemon that was killed, or a client, has started it
        if task.observed.state < TaskState.STARTING:
            self._observe(task, TaskState.STARTING, "starting", container=container.id)
        if task.observed.state < TaskState.RUNNING and health != STARTING:
            ports = _published(task, self._set.spec(task.assigned), container)
            self._observe(task, TaskState.RUNNING, "started", container=container.id, pid=status.pid, ports=ports)
        return False

    # --- the end of a task ------------------------------------------------------------------------

    def _ended(self, task: _Task, container: Container) -> None:
        """The container has ended, by itself or not."""
        status = container.record.status
        code = status.exit_code
        known: dict[str, Any] = {"container": container.id, "pid": 0, "exit_code": code, "ports": ()}
        if status.state == State.EXITED and status.finished_at:
            known["since"] = status.finished_at  # perhaps there was no daemon then
        if task.unhealthy:
            self._observe(task, TaskState.FAILED, error=_exit(code, "unhealthy container"), **known)
        elif task.stopping or (not task.wanted and container.record.stopped_by_user):
            self._observe(task, TaskState.SHUTDOWN, "shutdown", **known)
        elif status.error:
            self._observe(task, TaskState.FAILED, error=status.error, **known)
        elif code:
            cause = "out of memory" if status.oom_killed else ""
            self._observe(task, TaskState.FAILED, error=_exit(code, cause), **known)
        else:
            self._observe(task, TaskState.COMPLETE, "finished", **known)

    async def _end(self, task: _Task, container: Container | None) -> None:
        """The task is not wanted any more."""
        if container is not None and container.record.status.state != State.CREATED:
            task.stopping = True
            await self._stop(task, container)
            if not container.removed and _has_ended(container):
                self._ended(task, container)
                return
        self._observe(task, TaskState.SHUTDOWN, "shutdown")

    async def _withdraw(self, task: _Task) -> None:
        """Have no more traffic led to a task of the swarm's networks, before it gets its signal."""
        if not task.assigned.addresses or task.observed.state != TaskState.RUNNING or task.observed.withdrawn:
            return
        self._networks.withdrawn(task.assigned.id, True)
        task.observed = msgspec.structs.replace(task.observed, withdrawn=True)
        if not task.gone:  # then they have withdrawn it themselves
            self._changed(task.assigned.id, True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WITHDRAWAL_LIMIT):
                    await self._stored(task.assigned.id)
                    await self._networks.withdrawal_seen(task.assigned.id)
        await asyncio.sleep(WITHDRAWAL)

    async def _stop(self, task: _Task, container: Container) -> None:
        if container.running:
            await self._withdraw(task)
        record = self._set.spec(task.assigned)
        seconds = grace(record.spec) if record is not None else 10.0
        with contextlib.suppress(NotModified, NotFound):
            await container.stop(seconds)

    async def _forget(self, task: _Task) -> None:
        """End what runs, without a report, and remove everything."""
        task_id = task.assigned.id
        if self._tasks.get(task_id) is task:  # otherwise its record alone is left
            container = self._find(task)
            if container is not None:
                if container.running:
                    task.stopping = True
                    await self._stop(task, container)
                async with self._removals:
                    await self._remove(container)
            if not task.gone:  # assigned again meanwhile: it gets another container
                task.observed = Observed()
                task.stopping = task.unhealthy = False
                return
            del self._tasks[task_id]
            self._networks.withdrawn(task_id, False)
            self._by_container.pop(task.observed.container, None)
            if container is not None:
                self._by_container.pop(container.id, None)
            if task.assigned.secrets or task.assigned.configs:
                self._deliveries.keep(other.assigned for other in self._tasks.values() if not other.gone)
        if task_id not in self._tasks:
            await self._set.forget(task_id)
        self._count()

    async def _remove(self, container: Container) -> None:
        """The container, with its anonymous volumes."""
        with contextlib.suppress(NotFound):
            await removal.remove(container, force=True, volumes=True)

    async def _sweep(self) -> None:
        """Remove containers of tasks that this node does not have any more: an earlier daemon could
        not write that it had them.
        """
        for container in list(self._containers):
            labels = container.record.config.labels
            task = labels.get(TASK_LABEL, "")
            # The name as well: containers of an image that was committed from a task have labels.
            ours = labels.get(LABEL + "node.id") == self._node.id and container.record.name == labels.get(
                LABEL + "task.name"
            )
            if task and ours and task not in self._tasks:
                _log.warning("removing container %s: its task %s is not on this node", container.record.name, task)
                with contextlib.suppress(EngineError):
                    await self._remove(container)

    # --- small things -----------------------------------------------------------------------------

    def _find(self, task: _Task) -> Container | None:
        """The task's container: by its id, else by its name and label."""
        if task.observed.container:
            return self._containers.find(task.observed.container)
        try:
            container = self._containers.get(task.assigned.name)
        except NotFound:
            return None
        if container.record.name != task.assigned.name:
            return None  # a prefix of an id
        if container.record.config.labels.get(TASK_LABEL) != task.assigned.id:
            return None
        self._by_container[container.id] = task.assigned.id
        return container

    def _observe(self, task: _Task, state: TaskState, message: str = "", error: str = "", **known: Any) -> None:
        before, now = task.observed, time.time_ns()
        fields: dict[str, Any] = {
            "since": now,
            "ran": before.ran or (now if state is TaskState.RUNNING else 0),
            "container": before.container,
            "pid": before.pid,
            "exit_code": before.exit_code,
            "ports": before.ports,
            "withdrawn": before.withdrawn,
        }
        task.observed = Observed(
            state=state,
            message=message or before.message,
            error=error,
            **{**fields, **known},
        )
        if task.assigned.addresses:
            self._networks.withdrawn(task.assigned.id, state > TaskState.RUNNING or task.observed.withdrawn)
        if not task.gone:
            self._changed(task.assigned.id, bool(task.assigned.addresses) and state >= TaskState.RUNNING)

    def _fail(self, task: _Task, error: BaseException) -> None:
        """Before the start it is rejected: another node may do better."""
        state = TaskState.REJECTED if task.observed.state < TaskState.STARTING else TaskState.FAILED
        container = self._find(task)
        container_id = container.id if container is not None else task.observed.container
        code = container.record.status.exit_code if container is not None else 0
        self._observe(task, state, error=words(error), container=container_id, exit_code=code)
        _log.warning("task %s (%s) %s: %s", task.assigned.id, task.assigned.name, state.label, words(error))

    async def _unless_superseded(self, task: _Task, work: Coroutine[object, object, T]) -> T:
        """The result of work that is cancelled when the task is not wanted any more. Raises
        _Superseded then.
        """
        waiting = asyncio.get_running_loop().create_task(work)
        task.waiting = waiting
        try:
            await asyncio.wait([waiting])
        finally:
            task.waiting = None
            if not waiting.done():
                await cancelled(waiting)
        if waiting.cancelled():
            raise _Superseded
        return waiting.result()


def _has_ended(container: Container) -> bool:
    """Its run is over, or its start has failed."""
    status = container.record.status
    return status.state == State.EXITED or (status.state == State.CREATED and bool(status.error))


def _exit(code: int, cause: str = "") -> str:
    return f"task: non-zero exit ({code})" + (f": {cause}" if cause else "")


def _published(task: _Task, record: SpecRecord | None, container: Container) -> tuple[PortConfig, ...]:
    """The ports of mode host, with those that were chosen."""
    if record is None:
        return ()
    published = []
    for port in host_ports(record.spec):
        protocol = port.protocol or "tcp"
        for mapped in container.record.ports:
            offset = port.target_port - mapped.port
            if mapped.protocol == protocol and 0 <= offset < mapped.count and mapped.version == 4:
                chosen = mapped.host_port + offset
                if port.published_port in (0, chosen):
                    published.append(
                        PortConfig(
                            name=port.name,
                            protocol=protocol,
                            target_port=port.target_port,
                            published_port=chosen,
                            publish_mode=port.publish_mode,
                        )
                    )
    return tuple(dict.fromkeys(published))


__all__ = ["PARALLEL", "Executor"]
