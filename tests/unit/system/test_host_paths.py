"""Calls that may wait for ever: each has a thread, up to a limit."""

from __future__ import annotations

import _thread
import asyncio
import threading

import pytest

from engine.errors import ServerError
from engine.system import host_paths, threads
from engine.system.host_paths import HostPaths


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


def test_calls_that_hang_stop_no_other_until_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        paths = HostPaths(3)
        go = threading.Event()
        hanging = [paths.run(go.wait) for _ in range(2)]
        for _ in range(10):  # one after the other in the third thread
            assert await paths.run(divmod, 7, 2) == (3, 1)
        hanging.append(paths.run(go.wait))
        with monkeypatch.context() as impatient:
            impatient.setattr(host_paths, "PATIENCE", 0.01)
            with pytest.raises(ServerError, match="3 calls wait for file systems of this host"):
                await paths.run(divmod, 7, 2)
            hanging[0].cancel()  # its thread still waits
            while paths.hanging(0.01) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            with pytest.raises(ServerError, match="no more can be begun"):
                paths.run(divmod, 7, 2)  # at once: all have waited for long
        go.set()
        assert await asyncio.gather(*hanging[1:]) == [True, True]
        assert await paths.run(divmod, 7, 2) == (3, 1)

    asyncio.run(main())


def test_more_calls_than_threads_wait_while_none_hangs() -> None:
    async def main() -> None:
        paths = HostPaths(3)
        assert await asyncio.gather(*(paths.run(divmod, each, 2) for each in range(300))) == [
            divmod(each, 2) for each in range(300)
        ]

    asyncio.run(main())


def test_the_program_does_not_wait_for_what_hangs() -> None:
    async def main() -> None:
        go = threading.Event()
        hanging = HostPaths(1).run(go.wait)
        threads.finish()
        go.set()
        assert await hanging

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
