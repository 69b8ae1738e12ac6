"""Background tasks: work that the code which starts it does not wait for.

asyncio keeps only a weak reference to a task. The failure of a task that is never awaited is
reported only when the task is garbage-collected. `spawn` holds each task until it is done and logs
its failure at once.

Not here: tasks that their creator awaits (`asyncio.create_task`, `asyncio.TaskGroup`). Their
failure is the creator's to handle, and `spawn` would log it a second time.

`shield` waits for work that other callers wait for as well, or that goes on without its caller.

Owns:    a reference to every task until it is done; the hook for failures that end the daemon.
Threads: the event loop's alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from engine.errors import words

_log = logging.getLogger(__name__)

T = TypeVar("T")

_running: set[asyncio.Task[Any]] = set()
_on_fatal: Callable[[str], None] | None = None


def spawn(coroutine: Coroutine[Any, Any, T], what: str, *, fatal: bool = False) -> asyncio.Task[T]:
    """Run `coroutine` in the background.

    `what` describes the work in the log: "container X: restart".

    A failure is logged with its traceback. With `fatal`, for work that the engine cannot do
    without, it also calls the hook of `when_fatal`. Cancellation is not a failure.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=what)
    _running.add(task)
    task.add_done_callback(_fatal_done if fatal else _done)
    return task


def when_fatal(hook: Callable[[str], None] | None) -> None:
    """Call `hook(message)` when a fatal task has failed.

    The daemon sets it for as long as it serves.
    """
    global _on_fatal  # noqa: PLW0603 (one daemon per process)
    _on_fatal = hook


def _done(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s: failed: %s", task.get_name(), words(error), exc_info=error)


def _fatal_done(task: asyncio.Task[Any]) -> None:
    _done(task)
    if not task.cancelled() and (error := task.exception()) is not None and _on_fatal is not None:
        _on_fatal(f"{task.get_name()} failed: {error}")


def shield(work: Awaitable[T]) -> asyncio.Future[T]:
    """Wait for work that goes on when this caller is cancelled, as `asyncio.shield` does.

    Since Python 3.14 that one reports the failure of work whose caller was cancelled as an error of
    the loop, although other callers may have been given it. Here the failure is left to the work's
    owner, whatever the Python.
    """
    inner = asyncio.ensure_future(work)
    if inner.done():
        return inner
    outer: asyncio.Future[T] = inner.get_loop().create_future()

    def settle(_: asyncio.Future[T]) -> None:
        if outer.done():  # cancelled in this turn of the loop
            if not inner.cancelled():
                inner.exception()  # counts as retrieved
        elif inner.cancelled():
            outer.cancel()
        elif (error := inner.exception()) is not None:
            outer.set_exception(error)
        else:
            outer.set_result(inner.result())

    inner.add_done_callback(settle)
    outer.add_done_callback(lambda _: inner.remove_done_callback(settle))
    return outer
