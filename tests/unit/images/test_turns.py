"""The limit of transfers: order, changes of the limit, and waiters that leave."""

from __future__ import annotations

import asyncio

from engine.images.turns import Turns


class Work:
    """Transfers that run until they are told to end."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.running: list[int] = []
        self._ends: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def begin(self, *numbers: int) -> None:
        for number in numbers:
            self._ends[number] = asyncio.Event()
            self._tasks[number] = asyncio.create_task(self._transfer(number))
        await self._others()

    async def end(self, number: int) -> None:
        self._ends[number].set()
        await self._others()

    async def cancel(self, number: int) -> None:
        self._tasks[number].cancel()
        await self._others()

    async def _others(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _transfer(self, number: int) -> None:
        async with self.turns:
            self.running.append(number)
            try:
                await self._ends[number].wait()
            finally:
                self.running.remove(number)


def test_they_run_in_the_order_in_which_they_came() -> None:
    async def work() -> None:
        all_ = Work(Turns(2))
        await all_.begin(1, 2, 3, 4)
        assert all_.running == [1, 2] and all_.turns.full
        await all_.end(1)
        assert all_.running == [2, 3]
        await all_.end(2)
        await all_.end(3)
        assert all_.running == [4] and not all_.turns.full

    asyncio.run(work())


def test_the_limit_may_change() -> None:
    async def work() -> None:
        all_ = Work(Turns(1))
        await all_.begin(1, 2, 3, 4, 5)
        all_.turns.limit(3)
        await all_.begin()
        assert all_.running == [1, 2, 3]
        all_.turns.limit(1)
        await all_.end(2)
        assert all_.running == [1, 3]
        await all_.end(1)
        await all_.end(3)
        assert all_.running == [4]
        all_.turns.limit(0)
        await all_.begin(6, 7, 8)
        assert all_.running == [4, 5, 6, 7, 8] and not all_.turns.full

    asyncio.run(work())


def test_waiters_that_leave_take_no_turn() -> None:
    async def work() -> None:
        all_ = Work(Turns(1))
        await all_.begin(1, 2, 3)
        await all_.cancel(2)
        assert all_.running == [1]
        all_._tasks[3].cancel()  # in the moment in which its turn comes
        await all_.end(1)
        assert all_.running == []
        await all_.begin(4)
        assert all_.running == [4]

    asyncio.run(work())
