"""Threads for blocking calls: how they start, their scheduling (sched(7)), and waiting for work
that cannot be cancelled.

The event loop never waits for the start of a thread. `threading.Thread.start` does, for ever where
memory is short: the interpreter then ends the new thread before its first line. So nothing else in
the engine starts threads while it serves (`tests.lint` looks for that), and `asyncio.to_thread`
uses a pool from here, too (`installed`). Pools that most requests need have all their threads
before the engine listens (`start_all`). Others start a thread for a call that finds none free, and
refuse the call if the thread does not begin.

A rule for every pool: work that waits for a client or a registry never runs in a bounded pool that
other requests use. A client that stalls would hold a thread of the pool, and a few such clients
would stop everything. Such work runs in `in_own_thread`. Calls that a file system may hold for ever
run in `host_paths.py`.

The event loop's thread has a higher priority than others, and threads for long work have a lower
one.

Threads: the methods of `Threads` are called on an event loop. The interpreter's end waits for no
         thread of this module; see `finish`.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import functools
import logging
import os
import queue
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

from engine.errors import ServerError
from engine.system.tasks import shield

T = TypeVar("T")
P = ParamSpec("P")

BEGIN = 10.0
"""Seconds after which a thread that was started, and does nothing yet, counts as dead."""
IDLE = 4.0
"""Seconds after which a thread without work ends. `Idle.PAUSE` of images is longer, so that their
memory can be returned to the host then."""

_NICE = -10
_REFUSED = "the host allows no more threads"


def raise_priority() -> None:
    """Give the calling thread a nice value of -10, so that it runs soon when containers use every
    CPU.

    Processes and threads that it starts have 0. Without CAP_SYS_NICE nothing changes.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # 0: the calling thread alone


def become_batch() -> None:
    """Give the calling thread the policy SCHED_BATCH: it preempts no other thread when it wakes. A
    failure is ignored.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0: the calling thread alone


def surely(function: Callable[..., T], *arguments: Any) -> T:
    """Call the function until memory suffices, for something that must happen. In threads only."""
    while True:
        try:
            return function(*arguments)
        except MemoryError:
            time.sleep(0.1)


class Call(Generic[T]):
    """A call for a thread."""

    __slots__ = ("arguments", "begun", "error", "function", "future", "loop", "result")

    def __init__(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self.function: Callable[..., T] | None = function
        self.arguments = arguments
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()
        self.begun = 0.0
        """The monotonic time at which a thread took it; 0 before."""
        self.result: Any = None
        self.error: BaseException | None = None

    def perform(self) -> None:
        """In the thread. A repetition does nothing."""
        function, self.function = self.function, None
        try:
            if function is not None and not self.future.done():  # it was not cancelled or refused
                self.result = function(*self.arguments)
        except BaseException as error:
            self.error = error
        finally:
            self.arguments = ()

    def answer(self) -> None:
        """Have the loop give the result to the caller. In the thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            surely(self.loop.call_soon_threadsafe, self._answer)

    def _answer(self) -> None:
        # A traceback holds the frame of `perform`, and so this object: without these references
        # there is no cycle.
        future, result, error = self.future, self.result, self.error
        del self.future, self.result, self.error
        try:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        finally:
            del future, result, error


class Threads:
    """At most `most` threads for calls of an event loop, which start when they are needed. Further
    calls wait for one of them.

    `ready`: `start_all` starts all of them, and they stay. `batch`: for long work, with the policy
    SCHED_BATCH; for bytes and files that are complete, see the rule above.
    """

    def __init__(self, most: int, *, ready: bool = False, batch: bool = False) -> None:
        self._most = most
        self._batch = batch
        self._stay = False
        self._closed = False
        self.ready = ready
        self.begin()
        _all.add(self)

    def begin(self) -> None:
        """Without threads: also in a process that is a fork of another one, which has none of its
        threads.
        """
        self._queue: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._calls: set[Call[Any]] = set()
        """Calls that have not ended. A thread was started for each as long as there are fewer than
        `most`: so there is a free one whenever there are more threads than calls."""
        self._threads = 0

    def run(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """The result of `function`, which does not run if this raises ServerError: no thread can be
        started, or the pool is closed.
        """
        call = Call(function, arguments)
        with self._lock:
            if self._closed:
                raise ServerError("the engine is stopping")
            starts = self._threads <= len(self._calls) and self._threads < self._most
            if not starts:
                self._admit(call)
            self._calls.add(call)
            try:
                if starts:
                    self._start_for(call)
                else:
                    self._queue.put(call)
            except (RuntimeError, MemoryError) as error:
                self._calls.discard(call)
                raise ServerError(_REFUSED) from error
        return call.future

    @property
    def busy(self) -> bool:
        """True if a call has not ended that `finish` waits for."""
        return bool(self._calls)

    submit = run
    """`loop.run_in_executor` calls this, and takes a future of its loop as it is."""

    def _admit(self, call: Call[Any]) -> None:
        """Called with the lock, before a call waits for one of the threads. May raise
        ServerError."""

    def _start_for(self, call: Call[Any]) -> None:
        """Called with the lock. Raises RuntimeError, MemoryError."""
        call.loop.call_later(BEGIN, self._look_after, call)
        _thread.start_new_thread(self._serve, (call,))
        self._threads += 1

    def _look_after(self, call: Call[Any]) -> None:
        """Its thread was started a while ago. If that one is dead, a call that waits for a thread
        gets another one.
        """
        refused = []
        with self._lock:
            if call.begun or call not in self._calls:
                return
            self._threads -= 1
            refused.append(call)
            with contextlib.suppress(queue.Empty):
                while (waiting := self._queue.get_nowait()) is not None:
                    try:
                        self._start_for(waiting)
                        break
                    except (RuntimeError, MemoryError):
                        refused.append(waiting)
            self._calls.difference_update(refused)
        for each in refused:
            refuse(each, _REFUSED)

    def _serve(self, first: Call[Any]) -> None:
        """A thread, which was started for this call."""
        if self._batch:
            become_batch()
        with self._lock:
            if first not in self._calls:
                return  # this thread counts as dead
            first.begun = time.monotonic()
        call: Call[Any] | None = first
        del first
        while True:
            try:
                if call is not None:
                    self._perform(call)
                    call = None
                call = self._queue.get(timeout=None if self._stay else IDLE)
                if call is None:
                    return
                call.begun = time.monotonic()
            except queue.Empty:
                with self._lock:
                    if self._threads > len(self._calls):
                        self._threads -= 1
                        return
            except MemoryError:
                time.sleep(0.1)

    def _perform(self, call: Call[Any]) -> None:
        call.perform()
        with self._lock:
            self._calls.discard(call)
        call.answer()

    async def start(self) -> None:
        """Start all threads, which stay until `close`. Raises ServerError if one cannot be."""
        self._stay = True
        together = threading.Barrier(self._most)
        try:
            await asyncio.gather(*(self.run(together.wait) for _ in range(self._most)))
        except BaseException:
            together.abort()
            raise

    def close(self) -> None:
        """End the threads when the calls that were made have ended."""
        with self._lock:
            self._closed, self.ready = True, False
            for _ in range(self._threads):
                self._queue.put(None)


def refuse(call: Call[Any], why: str) -> None:
    """Give the caller a ServerError. On the loop."""
    if not call.future.done():
        call.future.set_exception(ServerError(why))


_all: weakref.WeakSet[Threads] = weakref.WeakSet()
_default = Threads(min(32, (os.cpu_count() or 1) + 4), ready=True)
_own = Threads(sys.maxsize, batch=True)


def _begin_all() -> None:
    for threads in _all:
        threads.begin()


os.register_at_fork(after_in_child=_begin_all)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Let `asyncio.to_thread` on the running loop, one of uvloop, use a pool from here."""
    loop: Any = asyncio.get_running_loop()
    loop.set_default_executor(_default)
    # A record of the log has the thread's identity by default, which is kept for ever.
    logging.logThreads = False
    try:
        yield
    finally:
        loop.set_default_executor(None)  # its end would start a thread to shut it down


async def start_all() -> None:
    """Start the threads of all pools that are to be ready, and those in which uvloop looks up
    names: it aborts the process when one of them cannot be started. Raises ServerError.
    """
    for threads in _all:
        if threads.ready:
            await threads.start()
    with contextlib.suppress(socket.gaierror):
        await asyncio.get_running_loop().getaddrinfo("-", None, flags=socket.AI_NUMERICHOST)


def finish() -> None:
    """At the end of the program: wait until no thread has a call that ends for certain."""
    while any(threads.busy for threads in _all):
        time.sleep(0.01)


def in_own_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a thread that no other work needs. For work that may wait for a client
    indefinitely.

    Raises ServerError if no thread can be started.
    """
    return _own.run(work)


class Helper(Generic[T]):
    """Work for another thread that need not begin: where the host allows no thread, it does not.
    For code in threads.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._claimed, self._begun, self._ended = threading.Lock(), threading.Lock(), threading.Lock()
        self._begun.acquire()
        self._ended.acquire()
        self._result: Any = None
        self._error: BaseException | None = None
        with contextlib.suppress(RuntimeError, MemoryError):
            _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        self._begun.release()
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.release()

    def begins(self) -> bool:
        """Wait until it begins. Returns False if it does not."""
        return self._begun.acquire(timeout=BEGIN)

    def joined(self) -> bool:
        """Wait for its end. Returns False if it has not begun, and never will. Raises its error."""
        if self._claimed.acquire(blocking=False):
            return False
        self._ended.acquire()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # no reference cycle
        return True

    def result(self) -> T:
        """Of work that was joined."""
        return self._result  # type: ignore[no-any-return]


def in_new_thread(work: Callable[[], T]) -> T:
    """The result of `work` in a thread that ends with it, because it changes the thread: its mount
    namespace, for instance. Blocks. Raises ServerError if no thread can be started.
    """
    helper = Helper(work)
    helper.begins()
    if not helper.joined():
        raise ServerError(_REFUSED)
    return helper.result()


async def uninterrupted(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """The result of `work`, which runs to its end even when the caller is cancelled.

    The cancellation is raised after the end, in place of the result or of a failure of `work`.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        if cancelled is not None:
            if not task.cancelled():
                task.exception()  # mark it as retrieved
            raise cancelled
        return task.result()
    finally:
        del cancelled, task  # a traceback holds this frame: without these it is no reference cycle


class Abandoned(Exception):
    """The result of the work is no longer wanted."""


_abandoned = threading.local()
"""`check`: in a thread with `abandonable` work, the event that ends it."""


def checkpoint() -> None:
    """Called again and again in long work. Raises Abandoned when its result is no longer wanted."""
    event: threading.Event | None = getattr(_abandoned, "check", None)
    if event is not None and event.is_set():
        raise Abandoned


async def abandonable(run: Callable[..., asyncio.Future[T]], function: Callable[..., T], *arguments: Any) -> T:
    """The result of `function(*arguments)`, which `run` calls in a thread (`LongWork.run`). As
    `uninterrupted`, but when the caller is cancelled, the work ends at its next `checkpoint`.
    """
    event = threading.Event()

    def work() -> T:
        _abandoned.check = event
        try:
            checkpoint()
            return function(*arguments)
        finally:
            del _abandoned.check

    working = run(work)
    try:
        return await shield(working)
    except asyncio.CancelledError:
        event.set()
        try:
            await uninterrupted(asyncio.wait([working]))
        finally:  # the caller may be cancelled again meanwhile
            if not working.cancelled():
                working.exception()  # mark it as retrieved
        raise


async def opened(work: Coroutine[Any, Any, int] | asyncio.Future[int]) -> int:
    """The descriptor that `work` opens. As `uninterrupted`; when the caller is cancelled, it is
    closed.
    """
    found: list[int] = []

    async def keep() -> None:
        found.append(await work)

    try:
        await uninterrupted(keep())
    except BaseException:
        for descriptor in found:
            # In a thread: closing the last descriptor of a mount waits for an RCU grace period.
            await uninterrupted(asyncio.to_thread(os.close, descriptor))
        raise
    return found[0]


def whole(verb: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A decorator: complete the coroutine even when its caller is cancelled (`uninterrupted`)."""

    @functools.wraps(verb)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await uninterrupted(verb(*args, **kwargs))

    return run


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel `task` and wait for its end, even if the caller is cancelled meanwhile. An error of
    the task is ignored.
    """
    task.cancel()
    try:
        await uninterrupted(asyncio.wait([task]))
    finally:
        if not task.cancelled():
            task.exception()  # seen
