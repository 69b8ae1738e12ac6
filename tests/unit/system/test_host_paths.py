"""Calls that may wait for ever: each has a thread, up to a limit."""

from __future__ import annotations

import _thread
import asyncio
import threading

import pytest

from engine.errors import ServerError
from engine.system import host_paths
from engine.system.host_paths import HostPaths
from tests.support import PATIENCE


def test_a_result_a_failure_and_a_cancellation() -> None:
    async def main() -> None:
        paths = HostPaths(2)
        assert await paths.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await paths.run(divmod, 7, 0)
        go = threading.Event()
        hanging = paths.run(go.wait)
        hanging.cancel()
        assert await paths.run(divmod, 7, 2) == (3, 1)
        go.set()

    asyncio.run(main())


def test_calls_that_hang_stop_no_other_until_the_limit() -> None:
    async def main() -> None:
        paths = HostPaths(3)
        go = threading.Event()
        hanging = [paths.run(go.wait) for _ in range(2)]
        for _ in range(10):  # one after the other in the third thread
            assert await paths.run(divmod, 7, 2) == (3, 1)
        hanging.append(paths.run(go.wait))
        with pytest.raises(ServerError, match="3 calls wait for file systems of this host"):
            paths.run(divmod, 7, 2)
        hanging[0].cancel()  # its thread still waits
        with pytest.raises(ServerError, match="no more can be begun"):
            paths.run(divmod, 7, 2)
        go.set()
        assert await asyncio.gather(*hanging[1:]) == [True, True]
        assert await paths.run(divmod, 7, 2) == (3, 1)

    asyncio.run(main())


def test_threads_without_work_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_paths, "IDLE", 0.01)

    async def main() -> None:
        paths = HostPaths(8)
        for _ in range(3):
            go = threading.Event()
            calls = [paths.run(go.wait) for _ in range(8)]
            assert paths._threads == 8
            go.set()
            await asyncio.gather(*calls)
            async with asyncio.timeout(30 * PATIENCE):
                while paths._threads:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        paths = HostPaths()
        with monkeypatch.context() as patch:
            patch.setattr(_thread, "start_new_thread", refuse)
            with pytest.raises(ServerError, match="the host allows no more threads"):
                paths.run(divmod, 7, 2)
        assert await paths.run(divmod, 7, 2) == (3, 1)

    asyncio.run(main())
