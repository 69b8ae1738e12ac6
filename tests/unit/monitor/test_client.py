"""The daemon's side of the monitor, against a monitor played by the test: the effect of each report
and each death on waiting callers."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engine.errors import ServerError
from engine.logs.targets import JsonFile
from engine.monitor import client as client_module
from engine.monitor import messages, previous
from engine.monitor.client import Monitor
from engine.monitor.handles import Exit, Interrupted, LaunchFailed
from tests.support import PATIENCE
from tests.support.engine.descriptors import none_left_open
from tests.support.fakes.peer import Peer


def no_monitor(self: Monitor, connection: int, lock: int) -> tuple[int, int]:
    """Replaces the spawn of a monitor before `drive` has set the one of the test's peer."""
    raise OSError("no monitor is started in this test")


@pytest.fixture(autouse=True)
def bystander(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this process from becoming a subreaper, and from searching the host's processes for
    ended ones."""
    monkeypatch.setattr(client_module, "become_subreaper", lambda: None)
    monkeypatch.setattr(client_module.orphans, "end_launches", lambda run: None)
    monkeypatch.setattr(client_module.orphans, "collect", lambda known: None)
    monkeypatch.setattr(client_module.orphans, "monitors", lambda run: [])
    monkeypatch.setattr(client_module, "RESTART_PAUSE", 0.001)
    monkeypatch.setattr(Monitor, "_spawn", no_monitor)


Ends = list[tuple[str, Exit]]


def drive(
    tmp_path: Path,
    story: Callable[[Monitor, Peer, Ends], Awaitable[None]],
    codec: messages.Codec = messages.CURRENT,
) -> None:
    """Run a test with an open client, and assert that no descriptor is left at its end."""

    async def play() -> None:
        ends: Ends = []
        peer = Peer(tmp_path, codec)
        peer.listen()
        monitor = Monitor(tmp_path, attach_stall=5, on_exit=lambda key, end: ends.append((key, end)))
        monitor._spawn = peer.spawn  # type: ignore[method-assign]
        opening = asyncio.ensure_future(monitor.open())
        await peer.greet()
        await asyncio.wait_for(opening, 10 * PATIENCE)
        try:
            await story(monitor, peer, ends)
        finally:
            await monitor.close()
            peer.die()
            await asyncio.sleep(0)

    with none_left_open():
        asyncio.run(asyncio.wait_for(play(), 30 * PATIENCE))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10 * PATIENCE):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.001)


def descriptors(count: int) -> list[int]:
    """The pidfd of a process that is not a child of this one, and other descriptors."""
    return [os.pidfd_open(os.getpid()), *(os.open(os.devnull, os.O_RDONLY) for _ in range(count - 1))]


async def launch(monitor: Monitor, peer: Peer, key: str = "one", pid: int = 77) -> asyncio.Task[client_module.Process]:
    """A run whose answer has been sent and not been read yet."""
    task = asyncio.ensure_future(monitor.run(key, ["runtime"], cwd="/"))
    order = await peer.next()
    assert isinstance(order, messages.Run)
    peer.send(messages.Done(order.seq, pid=pid), descriptors(3))
    return task


def test_a_process_hands_out_its_exit(tmp_path: Path) -> None:
    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        process = await (await launch(monitor, peer))
        assert monitor.processes == {"one": process} and not process.exit.done()
        assert process.stdio == "oe" and len(process.descriptors) == 3
        peer.send(messages.Exited("one", 3, 9))
        assert await asyncio.wait_for(asyncio.shield(process.exit), 10 * PATIENCE) == Exit(3, 9)
        await asyncio.sleep(0)
        assert ends == [("one", Exit(3, 9))] and not monitor.processes and process.descriptors == []

    drive(tmp_path, story)


def test_a_process_that_ends_during_its_run(tmp_path: Path) -> None:
    """Answer and exit are read in one turn of the loop: the caller of `run` gets the exit, however
    many tasks are between."""

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        task = await launch(monitor, peer)
        peer.send(messages.Exited("one", 127, 9))
        process = await asyncio.wait_for(asyncio.shield(task), 10 * PATIENCE)
        assert process.pid == 77 and process.exit.done() and process.exit.result() == Exit(127, 9)
        await asyncio.sleep(0)
        assert ends == [("one", Exit(127, 9))]

    drive(tmp_path, story)


def test_a_run_that_nobody_awaits_any_more(tmp_path: Path) -> None:
    """The process exists nevertheless: `processes` has it, with its exit."""

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        task = asyncio.ensure_future(monitor.run("one", ["runtime"], cwd="/"))
        order = await peer.next()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        peer.send(messages.Done(order.seq, pid=77), descriptors(3))
        peer.send(messages.Exited("one", 1, 9))
        await until(lambda: bool(ends))
        assert ends == [("one", Exit(1, 9))] and not monitor._launched

    drive(tmp_path, story)


def test_a_process_lives_through_its_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next monitor receives the process. A caller that awaits its exit keeps waiting; a launch
    in progress has failed.
    """

    async def ended(pid: int) -> bool:
        return True

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(monitor, "_has_ended", ended)
        process = await (await launch(monitor, peer))
        pending = asyncio.ensure_future(monitor.run("two", ["runtime"], cwd="/"))
        assert isinstance(await peer.next(), messages.Run)
        peer.die()
        await peer.greet()
        adopt = await peer.next()
        assert isinstance(adopt, messages.Adopt) and (adopt.key, adopt.pid, adopt.stdio) == ("one", 77, "oe")
        assert peer.descriptors[adopt.seq] == 3
        with pytest.raises(LaunchFailed) as caught:
            await pending
        assert caught.value.interrupted
        assert not process.exit.done() and monitor.processes["one"] is process
        peer.send(messages.Exited("one", 0, 9))
        assert await asyncio.wait_for(asyncio.shield(process.exit), 10 * PATIENCE) == Exit(0, 9)

    drive(tmp_path, story)


def test_a_monitor_that_lives_on_tells_of_its_processes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the connection was lost. The process stays the same object, with the descriptors of the
    new State.
    """

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        process = await (await launch(monitor, peer))
        monkeypatch.setattr(client_module, "DYING_LIMIT", 0.01)
        peer.hold_lock()
        peer.disconnect()
        hello = await peer.next()
        peer.send(messages.State("one", 77, True, "oe"), descriptors(3))
        peer.send(messages.Done(hello.seq))
        await until(monitor._connected.is_set)
        assert monitor.processes == {"one": process} and len(process.descriptors) == 3 and peer.starts == 0
        peer.send(messages.Exited("one", 5, 9))
        assert await asyncio.wait_for(asyncio.shield(process.exit), 10 * PATIENCE) == Exit(5, 9)

    drive(tmp_path, story)


def test_a_monitor_of_the_previous_protocol(tmp_path: Path) -> None:
    """After an upgrade the daemon speaks the previous protocol, logs and adoption included."""

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        target = JsonFile("/x", 3, 4, b"{}")
        task = asyncio.ensure_future(monitor.run("one", ["runtime"], cwd="/", log=target))
        order = await peer.next()
        assert isinstance(order, messages.Run) and order.log == target
        peer.send(messages.Done(order.seq, pid=77), descriptors(3))
        process = await task
        peer.send(messages.State("two", 78, True, "oe", False, target), descriptors(3))
        await until(lambda: "two" in monitor.processes)
        assert monitor.processes["two"].log == target
        peer.send(messages.Exited("one", 0, 9))
        await asyncio.wait_for(asyncio.shield(process.exit), 10 * PATIENCE)

    drive(tmp_path, story, previous.CODEC)


def test_a_monitor_of_an_unknown_protocol(tmp_path: Path) -> None:
    async def play() -> None:
        peer = Peer(tmp_path)
        peer.listen()
        monitor = Monitor(tmp_path, attach_stall=5, on_exit=lambda key, end: None)
        opening = asyncio.ensure_future(monitor.open())
        for protocol in (messages.PROTOCOL, previous.PREVIOUS):
            hello = await peer.next()
            assert isinstance(hello, messages.Hello) and hello.protocol == protocol
            peer.send(messages.Failed(hello.seq, "the monitor speaks protocol 99"))
        with pytest.raises(ServerError, match="of another version: the monitor speaks protocol 99"):
            await asyncio.wait_for(opening, 10 * PATIENCE)
        await monitor.close()
        peer.die()

    asyncio.run(asyncio.wait_for(play(), 30 * PATIENCE))


@pytest.mark.parametrize(
    "report", [messages.Failed(0, "not an order"), messages.Superseded()], ids=["refused", "superseded"]
)
def test_only_another_daemon_ends_the_work_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: messages.Report
) -> None:
    """After an order that the monitor could not read, the next monitor is restored as usual; after
    another daemon's Hello it is left alone."""

    async def ended(pid: int) -> bool:
        return True

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(monitor, "_has_ended", ended)
        peer.send(report)
        monitor.forget("nothing")
        await peer.next()
        await until(lambda: isinstance(report, messages.Failed) or monitor.closing)
        peer.die()
        if isinstance(report, messages.Failed):
            await peer.greet()
            await until(monitor._connected.is_set)
        else:
            await asyncio.sleep(0.1)
            assert peer.connection is None

    drive(tmp_path, story)


def test_a_process_that_the_next_monitor_does_not_take_is_offered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, its log cannot be opened. Without a monitor its output would stall, and its exit
    would not be noticed."""

    async def ended(pid: int) -> bool:
        return True

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(monitor, "_has_ended", ended)
        monkeypatch.setattr(client_module, "RESTART_PAUSE", 0.01)
        await (await launch(monitor, peer))
        peer.die()
        await peer.greet()
        for _ in range(3):
            adopt = await peer.next()
            assert isinstance(adopt, messages.Adopt) and peer.descriptors[adopt.seq] == 3
            peer.send(messages.Failed(adopt.seq, "No space left on device"))
        adopt = await peer.next()
        peer.send(messages.Done(adopt.seq))
        peer.send(messages.Exited("one", 0, 9))
        await until(lambda: bool(ends))
        assert peer.orders.empty() and not monitor._adopting

    drive(tmp_path, story)


def test_it_is_seen_that_all_output_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that runs and that the present monitor has taken over, once that monitor has
    sent its file. Nothing is asked."""

    async def ended(pid: int) -> bool:
        return True

    def send_file() -> None:
        file = os.open(tmp_path, os.O_RDWR | os.O_TMPFILE)
        os.ftruncate(file, 8)
        peer_now[0].send(messages.Unlogged(), [file])

    peer_now: list[Peer] = []

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(monitor, "_has_ended", ended)
        peer_now.append(peer)
        task = asyncio.ensure_future(monitor.run("one", ["runtime"], cwd="/"))
        order = await peer.next()
        out, into = os.pipe2(os.O_NONBLOCK)
        peer.send(messages.Done(order.seq, pid=77), [*descriptors(1), os.dup(out), out])
        await task
        assert not monitor.all_logged("one")  # a monitor of an earlier version
        send_file()
        await until(lambda: monitor.all_logged("one"))
        assert not monitor.all_logged("another")
        os.write(into, b"x")
        assert not monitor.all_logged("one")
        os.read(monitor.processes["one"].descriptors[1], 1)
        assert monitor.all_logged("one")
        os.close(into)
        peer.die()
        await until(lambda: not monitor._connected.is_set())
        assert not monitor.all_logged("one")
        await peer.greet()
        adopt = await peer.next()
        await until(monitor._connected.is_set)
        send_file()
        await until(lambda: monitor._unlogged >= 0)
        assert not monitor.all_logged("one")  # nor what the last monitor had read
        peer.send(messages.Done(adopt.seq))
        await until(lambda: monitor.all_logged("one"))
        peer.send(messages.State("two", 78, True, "t"), descriptors(2))
        await until(lambda: "two" in monitor.processes)
        assert not monitor.all_logged("two")

    drive(tmp_path, story)


def test_the_next_monitor_has_everything_before_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill of the daemon loses nothing from then on, and no other daemon can start a monitor
    meanwhile."""

    async def ended(pid: int) -> bool:
        return True

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(monitor, "_has_ended", ended)
        found: list[tuple[messages.Order, int]] = []

        def spawn(connection: int, lock: int) -> tuple[int, int]:
            with socket.socket(fileno=os.dup(connection)) as end:
                for _ in range(7):
                    data, passed, _, _ = socket.recv_fds(end, messages.PACKET, 8)
                    found.append((messages.decode_order(data), len(passed)))
                    for descriptor in passed:
                        os.close(descriptor)
            with open(tmp_path / "monitor/lock", "rb") as another, pytest.raises(BlockingIOError):
                fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return peer.spawn(connection, lock)

        monkeypatch.setattr(monitor, "_spawn", spawn)
        for key in ("one", "two"):
            await (await launch(monitor, peer, key))
        with socket.socket() as listener:
            monitor.keep(listener.fileno())
            monitor.hold("one", listener.fileno())
            monitor.hold("two", listener.fileno())
            monitor.let_go("two")
            monitor.relay(listener, b"\x7f\0\0\1")
            for name in ("three", "four"):
                monitor.serve(name, listener.fileno(), b"\x7f\0\0\1", 80)
            for _ in range(7):
                await peer.next()
            ending = asyncio.ensure_future(monitor.end_serving(["four"]))
            order = await peer.next()
            assert isinstance(order, messages.Hold) and order.name == "four" and not ending.done()
            peer.send(messages.Done(order.seq))
            await ending
            peer.die()
            await until(lambda: len(found) == 7)
        orders = [type(order) for order, _ in found]
        assert orders[:5] == [messages.Hello, messages.Keep, messages.Hold, messages.Serve, messages.Relay]
        assert orders[5:] == [messages.Adopt, messages.Adopt]
        assert [passed for _, passed in found] == [0, 1, 1, 1, 1, 3, 3]
        peer.send(messages.Done(found[0][0].seq))
        await until(monitor._connected.is_set)
        assert peer.orders.empty() and peer.starts == 1

    drive(tmp_path, story)


def test_a_monitor_that_another_daemon_has_started_is_awaited(tmp_path: Path) -> None:
    """It has the lock and not yet a socket: a second one must not be started."""

    async def play() -> None:
        peer = Peer(tmp_path)
        peer.hold_lock()
        monitor = Monitor(tmp_path, attach_stall=5, on_exit=lambda key, end: None)
        tries = 0
        hand_over = monitor._hand_over

        def counted() -> None:
            nonlocal tries
            tries += 1
            hand_over()

        monitor._hand_over = counted  # type: ignore[method-assign]
        monitor._spawn = peer.spawn  # type: ignore[method-assign]
        opening = asyncio.ensure_future(monitor.open())
        await until(lambda: tries > 2)
        peer.listen()
        await peer.greet()
        await opening
        assert peer.starts == 0
        await monitor.close()
        peer.die()

    asyncio.run(asyncio.wait_for(play(), 30 * PATIENCE))


def test_a_monitor_that_dies_before_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not replaced in the same instant, since the next one would die as well, but after a
    pause. The process stays, and so does what is to be kept meanwhile."""

    async def ended(pid: int) -> bool:
        return True

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(monitor, "_has_ended", ended)
        process = await (await launch(monitor, peer))
        for number in (1, 2, 3):
            peer.die()
            await until(lambda number=number: peer.starts == number)  # type: ignore[misc]
            assert isinstance(await peer.next(), messages.Hello)
            assert isinstance(await peer.next(), messages.Adopt)
        peer.die()
        hello = await peer.next()
        monitor.keep(2)
        orders = [await peer.next(), await peer.next()]
        assert {type(each) for each in orders} == {messages.Adopt, messages.Keep}
        peer.send(messages.Done(hello.seq))
        await until(monitor._connected.is_set)
        assert monitor.processes == {"one": process} and peer.starts == 4 and peer.orders.empty()

    drive(tmp_path, story)


def test_a_monitor_that_dies_while_the_launches_of_the_last_one_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had answered, so it is replaced at once as well."""
    over = asyncio.Event()

    async def ended(pid: int) -> bool:
        await over.wait()
        return True

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(monitor, "_has_ended", ended)
        await (await launch(monitor, peer))
        for number in (1, 2, 3):
            peer.die()
            await until(lambda number=number: peer.starts == number)  # type: ignore[misc]
            await peer.greet()
            assert isinstance(await peer.next(), messages.Adopt)
            await until(lambda: monitor._starting is not None and monitor._starting.hello.done())
            assert not monitor._connected.is_set()
        over.set()
        await until(monitor._connected.is_set)
        assert peer.starts == 3 and peer.orders.empty()
        again = await launch(monitor, peer, "two", 78)
        assert (await again).pid == 78

    drive(tmp_path, story)


@pytest.mark.parametrize("number", [errno.ESRCH, errno.EINVAL])
def test_a_dead_monitor_whose_session_lives_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """While runtimes of its session are left, its pid is in use but names no process: Linux 6.1
    answers EINVAL then, later kernels ESRCH."""

    def refuse(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(os, "pidfd_open", refuse)
        assert await monitor._has_ended(4711)

    drive(tmp_path, story)


def test_a_monitor_that_dies_right_after_it_answered(tmp_path: Path) -> None:
    """Answer and end are read in one turn of the loop. What it reported is handed to the next
    one."""

    async def play() -> None:
        peer = Peer(tmp_path)
        peer.listen()
        monitor = Monitor(tmp_path, attach_stall=5, on_exit=lambda key, end: None)
        monitor._spawn = peer.spawn  # type: ignore[method-assign]
        opening = asyncio.ensure_future(monitor.open())
        hello = await peer.next()
        peer.send(messages.State("one", 77, True, "oe"), descriptors(3))
        peer.send(messages.Done(hello.seq))
        peer.die()
        await peer.greet()
        adopt = await peer.next()
        assert isinstance(adopt, messages.Adopt) and peer.descriptors[adopt.seq] == 3
        await opening
        assert peer.starts == 1 and peer.orders.empty()
        await monitor.close()
        peer.die()

    asyncio.run(asyncio.wait_for(play(), 30 * PATIENCE))


def test_a_process_that_is_refused_before_the_monitor_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended(pid: int) -> bool:
        return True

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(monitor, "_has_ended", ended)
        await (await launch(monitor, peer))
        peer.die()
        hello = await peer.next()
        adopt = await peer.next()
        peer.send(messages.Failed(adopt.seq, "No space left on device"))
        await until(lambda: not monitor._adopting)
        await asyncio.sleep(5 * client_module.RESTART_PAUSE)
        assert peer.orders.empty()
        peer.send(messages.Done(hello.seq))
        adopt = await peer.next()
        assert isinstance(adopt, messages.Adopt) and peer.descriptors[adopt.seq] == 3
        peer.send(messages.Done(adopt.seq))
        await until(lambda: not monitor._adopting)

    drive(tmp_path, story)


def test_reports_of_a_dead_monitor_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It died with unread orders: the kernel reports ECONNRESET before what is in the queue, which
    may be the only descriptors of a process."""

    async def ended(pid: int) -> bool:
        return True

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(monitor, "_has_ended", ended)
        assert peer.connection is not None
        task = asyncio.ensure_future(monitor.run("one", ["runtime"], cwd="/"))
        order = await peer.next()
        asyncio.get_running_loop().remove_reader(peer.connection)
        monitor.forget("nothing")
        peer.send(messages.Done(order.seq, pid=77), descriptors(3))
        peer.send(messages.State("two", 78, True, "oe"), descriptors(3))
        peer.die()
        assert (await asyncio.wait_for(task, 10 * PATIENCE)).pid == 77
        await peer.greet()
        adopted = [await peer.next(), await peer.next()]
        assert [each.key for each in adopted if isinstance(each, messages.Adopt)] == ["one", "two"]

    drive(tmp_path, story)


@pytest.mark.parametrize("tty", [False, True])
def test_only_a_terminal_has_a_size(tmp_path: Path, tty: bool) -> None:
    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        task = asyncio.ensure_future(monitor.run("one", ["runtime"], cwd="/", tty=tty))
        order = await peer.next()
        peer.send(messages.Done(order.seq, pid=77), descriptors(2 if tty else 3))
        await task
        resizing = asyncio.ensure_future(monitor.resize("one", 24, 80))
        if tty:
            order = await peer.next()
            assert isinstance(order, messages.Resize)
            peer.send(messages.Done(order.seq))
        await asyncio.wait_for(resizing, 10 * PATIENCE)
        assert peer.orders.empty()

    drive(tmp_path, story)


@pytest.mark.parametrize("answered", [False, True])
def test_a_monitor_that_dies_during_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: bool) -> None:
    """The launch fails as interrupted, so that a restart policy can try again. Other requests are
    interrupted too; a log watch is repeated with the next monitor."""

    async def ended(pid: int) -> bool:
        return True

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(monitor, "_has_ended", ended)
        run = asyncio.ensure_future(monitor.run("one", ["runtime"], cwd="/"))
        order = await peer.next()
        watch = asyncio.ensure_future(monitor.watch_log("two", 1, 2))
        assert isinstance(await peer.next(), messages.Watch)
        attach = asyncio.ensure_future(monitor.resize("three", 1, 2))
        assert isinstance(await peer.next(), messages.Resize)
        if answered:
            peer.send(messages.Done(order.seq, pid=77), descriptors(3))
        monitor.forget("four")
        await peer.next()
        peer.die()
        await until(lambda: not monitor._connected.is_set())
        monitor.forget("five")
        await peer.greet()
        with pytest.raises(Interrupted):
            await attach
        if answered:
            assert (await run).pid == 77
            assert isinstance(await peer.next(), messages.Adopt)
        else:
            with pytest.raises(LaunchFailed) as caught:
                await run
            assert caught.value.interrupted
        orders = [await peer.next(), await peer.next()]
        assert {type(each) for each in orders} == {messages.Forget, messages.Watch}
        asked = next(each for each in orders if isinstance(each, messages.Watch))
        peer.send(messages.Done(asked.seq))
        await asyncio.wait_for(watch, 10 * PATIENCE)

    drive(tmp_path, story)


def test_a_confirmation_that_a_dead_monitor_did_not_read_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next daemon would receive an old exit."""

    async def ended(pid: int) -> bool:
        return True

    async def story(monitor: Monitor, peer: Peer, ends: Ends) -> None:
        monkeypatch.setattr(monitor, "_has_ended", ended)
        await (await launch(monitor, peer))
        peer.send(messages.Exited("one", 0, 9))
        await until(lambda: bool(ends))
        peer.die()
        monitor.forget("one")  # goes nowhere
        hello = await peer.next()
        peer.send(messages.State("one", 0, False, status=0, at=9))
        peer.send(messages.Done(hello.seq))
        order = await peer.next()
        assert isinstance(order, messages.Forget) and order.key == "one"
        assert len(ends) == 1

    drive(tmp_path, story)


def test_a_shutdown_waits_for_a_process_that_is_ending(tmp_path: Path) -> None:
    """A start that a killed daemon had begun is unknown to this daemon, and may still be ending."""

    async def story(monitor: Monitor, peer: Peer, _: Ends) -> None:
        async def refuse() -> None:
            order = await peer.next()
            assert isinstance(order, messages.Shutdown)
            peer.send(messages.Failed(order.seq, "1 processes are left: one"))

        ending = asyncio.ensure_future(monitor.shutdown(10 * PATIENCE))
        await refuse()
        await refuse()
        order = await peer.next()
        assert isinstance(order, messages.Shutdown)
        peer.send(messages.Done(order.seq))
        await asyncio.wait_for(ending, 10 * PATIENCE)
        assert monitor.closing

    drive(tmp_path, story)


def test_a_shutdown_beside_a_process_is_refused(tmp_path: Path) -> None:
    async def story(monitor: Monitor, peer: Peer, _: Ends) -> None:
        ending = asyncio.ensure_future(monitor.shutdown())
        order = await peer.next()
        peer.send(messages.Failed(order.seq, "1 processes are left: one"))
        with pytest.raises(ServerError, match="1 processes are left"):
            await asyncio.wait_for(ending, 10 * PATIENCE)
        assert not monitor.closing

    drive(tmp_path, story)
