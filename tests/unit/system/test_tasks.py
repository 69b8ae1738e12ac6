"""Background tasks: they are kept until they are done, and their failures are logged."""

from __future__ import annotations

import ast
import asyncio
import gc
import logging
import re
from pathlib import Path

import pytest

from engine.system import tasks
from engine.system.tasks import spawn
from tests.support import PATIENCE


async def _fail(reason: str) -> None:
    await asyncio.sleep(0)
    raise OSError(reason)


def test_a_failure_is_logged_with_its_traceback_and_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        spawn(_fail("no room"), "sweep the cellar")
        await asyncio.sleep(0.01)

    asyncio.run(run())
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.message == "sweep the cellar: failed: no room"
    assert record.exc_info is not None
    assert record.exc_info[0] is OSError


def test_a_task_lives_without_a_reference_of_its_own() -> None:
    reached = []

    async def wait_alone() -> None:
        # Only the task holds this future, and the future the task: a cycle.
        own = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, lambda: own.done() or own.set_result(None))
        await own
        reached.append(True)

    async def run() -> None:
        spawn(wait_alone(), "wait")
        gc.collect()
        await asyncio.sleep(0.05)

    asyncio.run(run())
    assert reached
    assert not tasks._running


def test_cancellation_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        task = spawn(asyncio.sleep(10), "sleep")
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert not caplog.records


def test_the_result_may_be_awaited() -> None:
    async def answer() -> int:
        return 42

    async def run() -> int:
        return await spawn(answer(), "answer")

    assert asyncio.run(run()) == 42


@pytest.mark.parametrize("fatal", [False, True])
def test_a_fatal_failure_calls_the_hook(fatal: bool) -> None:
    told: list[str] = []

    async def run() -> None:
        spawn(_fail("gone"), "restore the monitor", fatal=fatal)
        await asyncio.sleep(0.01)

    tasks.when_fatal(told.append)
    try:
        asyncio.run(run())
    finally:
        tasks.when_fatal(None)
    assert told == (["restore the monitor failed: gone"] if fatal else [])


ENGINE = Path(__file__).resolve().parents[3] / "engine"
KEPT = {
    ("builder/build.py", "self._results[stage.index]"): "awaited by `_run`",
    ("builder/buildkit/control.py", "result.building"): "awaited by `_image_of`, ended by `_end`",
    ("builder/kept.py", "self._writing"): "awaited by `_written` and `_discard`",
    ("http/protocol.py", "self._task"): "reports its own failures",
    ("images/pull.py", "download.task"): "awaited by each user of the download",
    ("images/registry/download.py", "self._writing"): "awaited by `_settle`",
    ("manager/logs.py", "self._dialling"): "awaited by each reader of another manager's logs",
    ("manager/quorum.py", "self._counting"): "awaited by each caller of `reachable`",
    ("networks/attachments.py", "sandbox.opening"): "awaited by `opened` and `leave`",
    ("shipper/destination.py", "self._task"): "logs its own failures, and is awaited by `end`",
    ("usage.py", "self._running[kind]"): "awaited by `_shared`",
}
"""Attributes that hold a task which `spawn` has not made, and where its failure goes."""


def test_tasks_without_spawn_are_awaited_by_their_maker() -> None:
    """A task that is made otherwise stays in a local name that is used again, or in KEPT. A failure
    of any other would be logged late or never.
    """
    kept = set()
    for path in ENGINE.rglob("*.py"):
        name = str(path.relative_to(ENGINE))
        if name in ("system/tasks.py", "system/threads.py"):
            continue
        for function in ast.walk(ast.parse(path.read_text(), str(path))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for statement in ast.walk(function):
                made = isinstance(statement, ast.Assign | ast.Expr) and isinstance(statement.value, ast.Call)
                if not made or not _MAKES.fullmatch(ast.unparse(statement.value.func)):
                    continue
                where = f"{name}:{statement.lineno}"
                assert isinstance(statement, ast.Assign), f"{where}: its failure is lost"
                for target in statement.targets:
                    text = ast.unparse(target)
                    if isinstance(target, ast.Attribute | ast.Subscript):
                        kept.add((name, text))
                    else:
                        uses = [each for each in ast.walk(function) if isinstance(each, ast.Name) and each.id == text]
                        assert any(isinstance(each.ctx, ast.Load) for each in uses), f"{where}: {text} is not used"
                        kept_alone = re.search(rf"\b{text}\.add_done_callback\(\S+\.discard\)", ast.unparse(function))
                        assert kept_alone is None, f"{where}: its failure is lost"
    assert kept == KEPT.keys()


_MAKES = re.compile(r"(?!group\.).*\b(create_task|ensure_future)")
"""An `asyncio.TaskGroup`, called `group`, handles failures itself."""


def test_work_goes_on_without_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    """Its failure is its owner's: the loop reports nothing, also of Python 3.14."""
    loop_says = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_says.append(context))
        go = asyncio.Event()

        async def work(error: Exception | None) -> int:
            await go.wait()
            if error is not None:
                raise error
            return 5

        for error in (None, OSError("no room")):
            go.clear()
            task = asyncio.ensure_future(work(error))
            patient = asyncio.ensure_future(asyncio.wait_for(tasks.shield(task), 10 * PATIENCE))
            gone = tasks.shield(task)
            gone.cancel()
            await asyncio.sleep(0)
            assert gone.cancelled() and not task.done()
            go.set()
            if error is None:
                assert await patient == 5 == await tasks.shield(task)
            else:
                with pytest.raises(OSError, match="no room"):
                    await patient
        task = asyncio.ensure_future(asyncio.Event().wait())
        waiting = tasks.shield(task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
    gc.collect()
    assert not loop_says and not caplog.records
