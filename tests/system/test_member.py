"""etcd's members as children: three of them over mutual TLS, their deaths, removal, new
clusters.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engine.errors import ServerError
from engine.manager import space
from engine.manager.certificates import Root, new_root
from engine.manager.kv import EtcdError, NoSpace, PutKey
from engine.manager.member import Member
from engine.manager.records import CLAIMS, Claim
from engine.manager.space import Space
from engine.manager.store import Compare, Delete, Put, Store
from engine.swarm_session.clock import SystemClock
from engine.swarm_session.states import Role
from tests.support import PATIENCE
from tests.support.swarm.members import Swarm, joined

Work = Callable[[Swarm], Awaitable[None]]


def run(work: Work, seconds: float = 55 * PATIENCE) -> None:
    async def whole() -> None:
        swarm = Swarm()
        try:
            async with asyncio.timeout(seconds):
                await work(swarm)
        finally:
            await swarm.close()

    asyncio.run(whole())


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 30 * PATIENCE) -> float:
    """Wait for a condition that may fail with etcd's errors; returns how long it took."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            if await condition():
                return time.monotonic() - began
        except EtcdError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError("it does not come true")


async def three(swarm: Swarm) -> list[Member]:
    members = [swarm.member(f"n{number}") for number in (1, 2, 3)]
    await members[0].start()
    for member in members[1:]:
        await joined(member, members[0])
    return members


async def leader_of(members: list[Member]) -> Member:
    for member in members:
        try:
            status = await member.etcd.status()
        except EtcdError:
            continue
        if status.leader == status.member:
            return member
    raise EtcdError("no leader")


async def writes(member: Member) -> bool:
    return (await member.etcd.commit([], [PutKey("/test", b"")])).done


def test_one_member_that_is_killed_and_stopped() -> None:
    async def work(swarm: Swarm) -> None:
        member = swarm.member("n1")
        assert not member.exists
        etcd = await member.start()
        assert member.exists
        await etcd.commit([], [PutKey("/a", b"1")])
        first = member.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: writes(member))
        assert member.pid not in (0, first)
        assert (await etcd.range("/a")).items[0].value == b"1"
        await member.stop()
        assert member.pid == 0
        assert not (member.run / "etcd:0").exists()
        again = swarm.member("n1")
        etcd = await again.start()
        assert (await etcd.range("/a")).items[0].value == b"1"
        await again.stop()
        again.wipe()
        assert not again.exists

    run(work)


def test_one_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.manager.member.STEADY", 2.0)

    async def work(swarm: Swarm) -> None:
        member = swarm.member("n1")
        await member.start()
        data, aside = member.root / "etcd", member.root / "aside"
        data.rename(aside)
        data.write_text("no directory")
        os.kill(member.pid, signal.SIGKILL)

        async def in_trouble() -> bool:
            return "not a directory" in member.trouble

        await until(in_trouble)
        data.unlink()
        aside.rename(data)
        await until(lambda: writes(member))

        async def runs() -> bool:
            return not member.trouble

        await until(runs)

    run(work)


def test_a_stale_socket_and_settings_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(swarm: Swarm) -> None:
        monkeypatch.setenv("ETCD_NAME", "other")
        monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://0.0.0.0:2379")
        member = swarm.member("n1")
        await member.start()
        await member.stop()
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(member.run / "etcd:0"))
        await member.start()
        assert [each.name for each in await member.etcd.members()] == ["n1"]

    run(work)


def test_three_members_lose_their_leader() -> None:
    """The leader is killed, a member stopped by SIGSTOP: the others go on, nothing is lost."""

    async def work(swarm: Swarm) -> None:
        members = await three(swarm)
        assert sorted(each.name for each in await members[2].etcd.members()) == ["n1", "n2", "n3"]
        assert not any(each.learner for each in await members[2].etcd.members())
        stores = [Store(member.etcd, SystemClock()) for member in members]
        for store in stores:
            await store.load()
        leader = await leader_of(members)
        others = [store for store, member in zip(stores, members, strict=True) if member is not leader]
        writing = asyncio.create_task(write_for(others[0], 4))
        await asyncio.sleep(0.5)
        os.kill(leader.pid, signal.SIGKILL)
        assert await writing > 1
        leader = await leader_of(members)
        others = [store for store, member in zip(stores, members, strict=True) if member is not leader]
        os.kill(leader.pid, signal.SIGSTOP)
        writing = asyncio.create_task(write_for(others[0], 4))
        await asyncio.sleep(3)
        os.kill(leader.pid, signal.SIGCONT)
        assert await writing > 1
        for store in stores:
            assert await store.current() == ""
        assert stores[0].all(CLAIMS) == stores[1].all(CLAIMS) == stores[2].all(CLAIMS)
        for store in stores:
            await store.close()

    run(work)


async def write_for(store: Store, seconds: float) -> int:
    """Write for some seconds, each record once and guarded; returns how many.

    None takes over 4 s.
    """
    began, number = time.monotonic(), len(store.all(CLAIMS))
    first = number
    while time.monotonic() - began < seconds:
        await store.commit([Put(CLAIMS, f"c{number}", Claim(str(number)))], [Compare(CLAIMS, f"c{number}")])
        number += 1
    return number - first


def test_quorum_lost_and_back() -> None:
    async def work(swarm: Swarm) -> None:
        members = await three(swarm)
        store = Store(members[0].etcd, SystemClock())
        await store.load()
        for member in members[1:]:
            await member.stop()
        reason = await store.current(timeout=2 * PATIENCE)
        assert "lost its quorum" in reason
        writing = asyncio.create_task(store.commit([Put(CLAIMS, "late", Claim("1"))]))
        await asyncio.sleep(3)
        assert not writing.done()
        again = swarm.member("n2")
        await again.start()
        await writing
        assert store.record(CLAIMS, "late") == Claim("1")
        await store.close()

    run(work)


def test_a_member_with_data_starts_without_its_peers() -> None:
    """Its start returns; it serves when they are back."""

    async def work(swarm: Swarm) -> None:
        members = await three(swarm)
        for member in members:
            await member.stop()
        first = swarm.member("n1")
        async with asyncio.timeout(15 * PATIENCE):
            await first.start()
        second = swarm.member("n2")
        await second.start()
        await until(lambda: writes(first))

    run(work)


def test_a_removed_member_ends() -> None:
    async def work(swarm: Swarm) -> None:
        members = await three(swarm)
        removed: list[str] = []
        for member in members:
            member.on_removed = lambda node=member.node: removed.append(node)  # type: ignore[misc]
        gone = members[2]
        await members[0].etcd.remove_member((await gone.etcd.status()).member)
        for _ in range(200):
            if removed:
                break
            await asyncio.sleep(0.05)
        assert removed == ["n3"]
        assert gone.pid == 0
        assert await writes(members[0])
        # one that was off at that time is told when it comes back
        other = members[1]
        number = (await other.etcd.status()).member
        back = swarm.member("n4")
        await joined(back, members[0])
        await other.stop()
        await until(lambda: _removes(members[0], number))
        late = swarm.member("n2")
        late.on_removed = lambda: removed.append("n2 late")
        await late.start()
        for _ in range(200):
            if len(removed) > 1:
                break
            await asyncio.sleep(0.05)
        assert removed == ["n3", "n2 late"]

    run(work)


async def _removes(member: Member, number: int) -> bool:
    await member.etcd.remove_member(number)
    return True


def test_a_new_cluster_of_one_member() -> None:
    """With two of three lost, and from another address."""

    async def work(swarm: Swarm) -> None:
        members = await three(swarm)
        await members[0].etcd.commit([], [PutKey("/a", b"1")])
        for member in members:
            await member.stop()
        (members[0].root / "peer-port").unlink()
        forced = swarm.member("n1")
        assert forced.peer_url != members[0].peer_url
        etcd = await forced.start(force=True)
        assert (await etcd.range("/a")).items[0].value == b"1"
        assert [each.name for each in await etcd.members()] == ["n1"]
        await until(lambda: _has_url(forced))
        os.kill(forced.pid, signal.SIGKILL)  # starts again without the flag
        await until(lambda: writes(forced))
        another = swarm.member("n5")
        await joined(another, forced)
        os.kill(forced.pid, signal.SIGKILL)
        await until(lambda: writes(forced))
        assert len(await etcd.members()) == 2

    run(work)


async def _has_url(member: Member) -> bool:
    return [each.peer_url for each in await member.etcd.members()] == [member.peer_url]


def test_a_worker_is_no_peer() -> None:
    """Neither with a worker's certificate of the same root, nor with one of another root."""

    async def work(swarm: Swarm) -> None:
        first = swarm.member("n1")
        await first.start()
        for node, role, root in (
            ("n2", Role.WORKER, swarm.root),
            ("n3", Role.MANAGER, Root(*new_root(time.time_ns()))),
        ):
            other = swarm.member(node)
            swarm.certify(node, "127.0.0.1", role=role, root=root)
            added = await first.etcd.add_learner(other.peer_url)
            cluster = f"n1={first.peer_url},{node}={other.peer_url}"
            with pytest.raises(ServerError, match="etcd does not start"):
                async with asyncio.timeout(25 * PATIENCE):
                    await other.start(initial_cluster=cluster)
            assert other.pid == 0
            await first.etcd.remove_member(added.id)

    run(work)


def test_a_full_database_recovers() -> None:
    """The quota is reached, every write is refused; then old revisions go, and the room is back."""

    async def work(swarm: Swarm) -> None:
        members = [swarm.member(f"n{number}") for number in (1, 2)]
        for member in members:
            member.quota = 16 << 20
        await members[0].start()
        await joined(members[1], members[0])
        etcd = members[0].etcd
        with pytest.raises(NoSpace):
            for _ in range(60):
                await etcd.commit([], [PutKey("/x/big", os.urandom(1 << 20))], timeout=10 * PATIENCE)
        alarms = await etcd.alarms()
        assert alarms and {alarm.kind for alarm in alarms} == {"nospace"}
        rooms = [Space(member.etcd, SystemClock(), quota=member.quota) for member in members]
        running = [asyncio.create_task(room.run()) for room in rooms]
        await until(lambda: _calm(members[0]))
        await until(lambda: _calm(members[1]))
        for task in running:
            task.cancel()

        async def roomy() -> bool:
            """A member whose own database raised no alarm returns its pages at its next look."""
            return not await rooms[0].look() and (await etcd.status()).size < 8 << 20

        await until(roomy)

    run(work)


def test_records_are_removed_from_a_full_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no old revisions, so it stays full until somebody removes records. That works, also
    for a manager whose process starts meanwhile.
    """
    monkeypatch.setattr(space, "LEADER_WAITS", 0.0)
    big = Claim("x" * 100_000)

    async def loaded(member: Member) -> Store:
        store = Store(member.etcd, SystemClock(), node="n1")
        await store.load()
        return store

    async def work(swarm: Swarm) -> None:
        member = swarm.member("n1")
        member.quota = 4 << 20
        await member.start()
        before, room = await loaded(member), Space(member.etcd, SystemClock(), quota=member.quota)
        count = 0
        for _ in range(20):  # an alarm that comes early is gone when there is room
            with pytest.raises(ServerError, match="database space exceeded"):
                while count < 1000:
                    await before.commit([Put(CLAIMS, f"key{count}", big)])
                    count += 1
            assert await room.look()
            if await room.look():
                break
        else:
            raise AssertionError("it is never full")
        after = await loaded(member)
        # etcd looks at the size now and then only, so the database has become two or three times as
        # big as the quota.
        kept = count // 8
        # The last one may be there although its commit has failed: the client repeats what took
        # long.
        for number in range(kept, count + 1):
            store = before if number % 2 else after
            async with asyncio.timeout(5 * PATIENCE):
                await store.commit([Delete(CLAIMS, f"key{number}")])
        with pytest.raises(ServerError, match="database space exceeded"):
            await after.commit([Put(CLAIMS, "another", big)])
        assert await room.look()
        assert not await room.look()
        await after.commit([Put(CLAIMS, "another", big)])
        assert await before.current() == ""
        assert len(before.all(CLAIMS)) == len(after.all(CLAIMS)) == kept + 1
        await before.close()
        await after.close()

    run(work)


async def _calm(member: Member) -> bool:
    return not await member.etcd.alarms() and await writes(member)


def test_a_port_in_use_is_named() -> None:
    async def work(swarm: Swarm) -> None:
        member = swarm.member("n1")
        port = int(member.peer_url.rpartition(":")[2])
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port)
        with pytest.raises(ServerError, match="address already in use"):
            await member.start()
        assert member.pid == 0
        server.close()

    run(work)


def test_new_roots_restart_the_members_in_turn() -> None:
    """etcd reads the roots when it starts. Certificates of the new root connect afterwards."""

    async def work(swarm: Swarm) -> None:
        member = swarm.member("n1")
        await member.start()
        first = member.pid
        old = swarm.root
        swarm.root = Root(*new_root(time.time_ns()))
        (member.root / "ca.crt").write_text(old.pem + swarm.root.pem)

        async def restarted() -> bool:
            return member.pid not in (0, first) and await writes(member)

        await until(restarted)
        swarm.certify("n1", "127.0.0.1")
        (member.root / "ca.crt").write_text(old.pem + swarm.root.pem)
        other = swarm.member("n2")
        await joined(other, member)
        assert await writes(other)

    run(work)


def test_the_child_dies_with_its_manager(tmp_path: Path) -> None:
    program = tmp_path / "manager.py"
    program.write_text(_PROGRAM)
    first = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert first.stdout is not None
    child = int(first.stdout.readline())
    first.kill()
    first.wait()
    first.stdout.close()
    ends = time.monotonic() + 5 * PATIENCE
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < ends, "etcd outlives its manager"
        time.sleep(0.01)


_PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.support.swarm.members import Swarm

async def main():
    swarm = Swarm(directory=Path(sys.argv[1]))
    member = swarm.member("n1")
    await member.start()
    print(member.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
