"""What of a client's directory stays between builds, and what is asked for again."""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.builder import kept
from engine.builder.buildkit import filesync
from engine.builder.buildkit.messages import Packet
from engine.builder.context import Context
from engine.builder.kept import KeptContexts, key_of
from engine.builder.trees import LARGE, Hashing, digest_of
from engine.errors import InvalidParameter, ServerError
from engine.rpc import protobuf
from tests.support.builds.sessions import DIRECTORY, LINK, Node, field

KEY = "0" * 32
OLD = time.time_ns() // 10**9 * 10**9 - 3600 * 10**9 + 123_456_789
"""A time that is neither racy nor weak."""

Tree = Mapping[str, Node | bytes]


class Sent(NamedTuple):
    """A transfer: what the client was asked for, and what the build reads."""

    asked: list[str]
    contents: dict[str, bytes]


class Client:
    """A client's directory, which `change` may change when a file's content is sent."""

    def __init__(self, tree: Tree, change: Callable[[Client, str], None] = lambda client, path: None) -> None:
        self.tree = dict(tree)
        self.asked: list[str] = []
        self.unreadable: Sequence[str] = ()
        self.lists: list[list[str]] = []
        """The paths that were asked for, for each list that was sent."""
        self._change = change

    async def copy(self, receiver: Any, paths: Sequence[str]) -> None:
        self.lists.append([*paths])
        listed = sorted(self.tree.items(), key=lambda each: each[0].split("/"))
        wanted: list[tuple[int, str, int]] = []
        for number, (path, given_node) in enumerate(listed):
            node = given_node if isinstance(given_node, Node) else Node(given_node, modified=OLD - sum(path.encode()))
            stat = field(2, node.stat(path))
            if (paths and path not in paths) or receiver.recall(stat):
                continue
            described = protobuf.decode(stat, Packet).stat
            assert described is not None
            if receiver.add(number, stat, filesync.listed(described)):
                wanted.append((number, path, described.size))
        for number, path, size in wanted:
            self.asked.append(path)
            self._change(self, path)
            content = contents(self.tree).get(path, b"") if path not in self.unreadable else b""
            for at in range(0, min(len(content), size), 32768):
                receiver.write(number, content[at : min(at + 32768, size)])
                if receiver.full():
                    await receiver.drained()
            receiver.complete(number, whole=len(content) == size)


class Store:
    """Kept contexts in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "build" / "contexts"
        (root / "tmp").mkdir(exist_ok=True)
        self.contexts = KeptContexts(root, root / "tmp")

    async def receive(self, tree: Tree, key: str = KEY, session: str = "one") -> tuple[list[str], Context]:
        client = Client(tree)
        return client.asked, await self.receive_from(client, key, session)

    async def receive_from(self, client: Client, key: str = KEY, session: str = "one") -> Context:
        async with self.contexts.transfer(key, "words", session) as transfer:
            return await transfer.receive(client.copy)

    async def build(self, tree: Tree, key: str = KEY, session: str = "one") -> Sent:
        """A build that reads every file, and checks its digest."""
        asked, context = await self.receive(tree, key, session)
        contents = {}
        for path, entry in context.walk(""):
            if entry.kind == "0":
                contents[path] = context.read(path, 1 << 30)
                if entry.size <= LARGE:
                    assert context.digest(entry) == hashlib.sha256(contents[path]).digest()
        await context.close()
        await self.contexts.close()
        return Sent(asked, contents)

    @property
    def files(self) -> list[str]:
        return sorted(os.listdir(self.directory / KEY)) if (self.directory / KEY).exists() else []

    @property
    def size(self) -> int:
        return sum((self.directory / KEY / name).stat().st_size for name in self.files if name != "index")


def run(work: Callable[[Store], Coroutine[Any, Any, None]], root: Path) -> None:
    """Run it on a store, and check that nothing stays open or is left."""
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        store = Store(root)
        await work(store)
        await store.contexts.close()
        assert not any(each.in_use for each in store.contexts.all())
        assert not os.listdir(root / "tmp")

    asyncio.run(main())
    assert len(os.listdir("/proc/self/fd")) <= before


def contents(tree: Tree) -> dict[str, bytes]:
    return {
        path: node if isinstance(node, bytes) else node.content
        for path, node in tree.items()
        if isinstance(node, bytes) or not node.mode & (DIRECTORY | LINK)
    }


TREE: Tree = {
    "a": b"first",
    "d": Node(mode=DIRECTORY | 0o755, modified=OLD),
    "d/large": os.urandom(100_000),
    "d/zeros": bytes(70_000),
    "empty": b"",
    "link": Node(mode=LINK | 0o777, target="a"),
}


def test_only_changes_are_sent(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        assert await store.build(TREE) == (["a", "d/large", "d/zeros"], contents(TREE))
        assert await store.build(TREE) == ([], contents(TREE))
        changes: dict[str, Node] = {
            "content": Node(b"FIRST", modified=OLD + 1),
            "size": Node(b"first!", modified=OLD),
            "mode": Node(b"first", 0o755, modified=OLD),
            "owner": Node(b"first", modified=OLD, uid=7),
            "attributes": Node(b"first", modified=OLD),
        }
        changes["attributes"].xattrs["user.x"] = b"1"
        for node in changes.values():
            changed = {**TREE, "a": node}
            assert await store.build(changed) == (["a"], contents(changed))
            assert await store.build(changed) == ([], contents(changed))
        fewer = {path: node for path, node in TREE.items() if path != "d/large"}
        assert (await store.build(fewer)).contents == contents(fewer)
        assert (await store.build({**TREE, "new": b"1"})).asked == ["new"]

    run(work, tmp_path)


def test_nothing_is_written_when_nothing_is_new(tmp_path: Path) -> None:
    """Only the time of the last use is, by which prune chooses."""

    async def work(store: Store) -> None:
        await store.build(TREE)
        index = store.directory / KEY / "index"
        os.utime(index, (1, 1))
        before = index.stat()
        await store.build(TREE)
        after = index.stat()
        assert after.st_ino == before.st_ino and after.st_mtime > before.st_mtime
        await store.build({**TREE, "link": Node(mode=LINK | 0o777, target="b")})
        assert index.stat().st_ino != before.st_ino
        async with store.contexts.transfer(KEY, "words", "one") as transfer:
            store.contexts._remove(KEY)
            context = await transfer.receive(Client(TREE).copy)
        await context.close()
        await store.contexts.close()
        assert not store.files
        assert (await store.build(TREE)).asked == ["a", "d/large", "d/zeros"]

    run(work, tmp_path)


def test_files_that_another_build_does_not_list_stay(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        one, two = {"a": b"1", "b": b"2"}, {"b": b"2", "c": b"3"}
        assert [(await store.build(tree)).asked for tree in (one, two, one, two)] == [["a", "b"], ["c"], [], []]

    run(work, tmp_path)


@pytest.mark.parametrize(
    "later", [-(OLD % 1_000_000), -(OLD % 10**9), 10**13], ids=["whole milliseconds", "whole seconds", "future"]
)
def test_times_that_tell_nothing(later: int, tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        for content in (b"first", b"other", b"other"):
            tree = {"a": Node(content, modified=OLD + later)}
            assert await store.build(tree) == (["a"], {"a": content})
        assert store.files in ([], ["index"])

    run(work, tmp_path)


def test_racy_files_are_asked_for_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = OLD
    monkeypatch.setattr(kept.time, "time_ns", lambda: now)

    async def work(store: Store) -> None:
        nonlocal now
        written = OLD - kept.RACY_NS + 1
        assert (await store.build({"a": Node(b"first", modified=written)})).asked == ["a"]
        changed = {"a": Node(b"other", modified=written)}
        now += 10 * kept.RACY_NS
        assert await store.build(changed) == (["a"], {"a": b"other"})
        assert await store.build(changed) == ([], {"a": b"other"})

    run(work, tmp_path)


def test_a_clock_that_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the time before are in the future then, until the clock has passed them."""
    now = OLD
    monkeypatch.setattr(kept.time, "time_ns", lambda: now)

    async def work(store: Store) -> None:
        nonlocal now
        early = {"a": Node(b"1", modified=OLD - 2 * kept.RACY_NS)}
        assert (await store.build(early)).asked == ["a"]
        now -= 10 * kept.RACY_NS
        assert (await store.build(early)).asked == []
        for content in (b"2", b"3"):
            late = {"a": Node(content, modified=OLD - kept.RACY_NS)}
            assert await store.build(late) == (["a"], {"a": content})
        now = OLD + 10 * kept.RACY_NS
        assert await store.build(late) == (["a"], {"a": b"3"})
        assert (await store.build(late)).asked == []

    run(work, tmp_path)


CHANGES: dict[str, Callable[[int], dict[str, Node]]] = {
    "content": lambda turn: {"a": Node(b"%05d" % turn, modified=OLD + turn)},
    "grown": lambda turn: {"a": Node(b"first" * turn, modified=OLD + turn)},
    "shrunk": lambda turn: {"a": Node(b"first"[:-turn], modified=OLD + turn)},
    "removed": lambda turn: {},
    "a directory": lambda turn: {"a": Node(mode=DIRECTORY | 0o755, modified=OLD + turn)},
}
FIRST: Tree = {"a": Node(b"first", modified=OLD), "b": b"beside"}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("times", [1, 3])
def test_a_file_that_changes_while_it_is_read(
    how: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read again until it stays, and nothing of what was read before is kept."""
    monkeypatch.setattr(kept, "PAUSE", 0)

    async def work(store: Store) -> None:
        def change(client: Client, path: str) -> None:
            turn = client.asked.count("a")
            if path == "a" and turn <= times:
                del client.tree["a"]
                client.tree |= CHANGES[how](turn)

        client = Client(FIRST, change)
        context = await store.receive_from(client)
        found = contents(client.tree)
        assert {path: context.read(path, 100) for path, entry in context.walk("") if entry.kind == "0"} == found
        assert client.asked.count("b") == 1
        await context.close()
        await store.contexts.close()
        for tree in (client.tree, FIRST):
            assert (await store.build(tree)).contents == contents(tree)

    run(work, tmp_path)


def test_a_file_that_never_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that the client cannot read, of which it sends nothing."""
    monkeypatch.setattr(kept, "PAUSE", 0)

    def grow(client: Client, path: str) -> None:
        if not client.unreadable:
            client.tree["log"] = Node(b"x" * (1 + len(client.asked)), modified=OLD + len(client.asked))

    async def work(store: Store) -> None:
        for unreadable in ((), ("log",)):
            client = Client({"log": Node(b"x", modified=OLD), "b": b"1"}, grow)
            client.unreadable = unreadable
            with pytest.raises(InvalidParameter, match="build context: log: it changes"):
                await store.receive_from(client)
            assert client.asked.count("log") == kept.READINGS and client.asked.count("b") == 1
        assert not store.files

    run(work, tmp_path)


def test_lists_are_compared_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have hundreds of thousands of files."""
    monkeypatch.setattr(kept, "PAUSE", 0)
    threads: dict[str, set[threading.Thread]] = {}

    def noted(name: str) -> None:
        function = getattr(kept, name)

        def note(*arguments: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread())
            return function(*arguments)

        monkeypatch.setattr(kept, name, note)

    noted("_with_twins")
    noted("_alone")

    def change(client: Client, path: str) -> None:
        if client.asked == ["a"]:
            client.tree["a"] = Node(b"other", modified=OLD + 1)

    async def work(store: Store) -> None:
        client = Client(FIRST, change)
        await (await store.receive_from(client)).close()
        assert client.asked == ["a", "b", "a"]

    run(work, tmp_path)
    assert threads.keys() == {"_with_twins", "_alone"}
    assert threading.current_thread() not in set().union(*threads.values())


def test_a_file_that_is_written_at_the_moment_is_read_twice(tmp_path: Path) -> None:
    """Two changes within a step of the file system's clock leave one time."""

    async def work(store: Store) -> None:
        client = Client({"a": Node(b"1", modified=time.time_ns())})
        await (await store.receive_from(client)).close()
        assert client.asked == ["a", "a"]

    run(work, tmp_path)


def test_only_what_was_read_is_listed_again(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        async def lists(tree: Tree) -> list[list[str]]:
            client = Client(tree)
            await (await store.receive_from(client)).close()
            await store.contexts.close()
            return client.lists

        assert await lists({"a": b"1", "b": b"2"}) == [[], ["a", "b"]]
        assert await lists({"a": b"1", "b": b"2"}) == [[]]
        assert await lists({"a": b"1", "b": b"2", "c": b"3"}) == [[], ["c"]]
        # A client would take the name as a pattern.
        for pattern in ("b*", "b?", "b[c]", "b\\c", "!b", " b", "b "):
            assert await lists({"a": b"1", pattern: b"2"}) == [[], []], pattern
        assert await lists({"a": b"1", "b !c~/(+)": b"2"}) == [[], ["b !c~/(+)"]]
        assert await lists({f"{number:0200}": b"1" for number in range(100)}) == [[], []]
        # It may not be able to read the name in metadata.
        assert await lists({"a": b"1", "\u00e9": b"2"}) == [[], []]
        assert await lists({"a": b"1", "\udcff": Node(b"3", modified=OLD)}) == [[], []]

    run(work, tmp_path)


def test_twins_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """`mv d/b d/a` changes the time of `d` alone."""

    def tree(a: bytes, b: bytes, changed: int) -> dict[str, Node]:
        files = {name: Node(content, modified=OLD) for name, content in (("d/a", a), ("d/b", b)) if content}
        return {"d": Node(mode=DIRECTORY | 0o755, modified=OLD + changed), **files}

    async def work(store: Store) -> None:
        await store.build(tree(b"one", b"two", 0))
        assert (await store.build(tree(b"one", b"two", 0))).asked == []
        assert (await store.build(tree(b"two", b"", 1))).contents == {"d/a": b"two"}
        # The same in a directory whose own time tells nothing.
        weak = -(OLD % 1_000_000)
        await store.build(tree(b"one", b"two", weak))
        assert (await store.build(tree(b"two", b"one", weak))).contents == {"d/a": b"two", "d/b": b"one"}

    run(work, tmp_path)


def test_directories_with_twins_that_change_places(tmp_path: Path) -> None:
    """`mv a c && mv b a && mv c b` changes no time that a client sends."""

    def tree(a: bytes, b: bytes) -> dict[str, Node]:
        directory = Node(mode=DIRECTORY | 0o755, modified=OLD)
        files = {"a/f": Node(a, modified=OLD), "a/g": Node(b"six", modified=OLD), "b/f": Node(b, modified=OLD)}
        return {"a": directory, "b": directory, **files}

    async def work(store: Store) -> None:
        await store.build(tree(b"one", b"two"))
        changed = await store.build(tree(b"two", b"one"))
        assert changed.contents == {"a/f": b"two", "a/g": b"six", "b/f": b"one"}
        assert changed.asked == ["a/f", "b/f"]  # nothing else has the name of a/g

    run(work, tmp_path)


def test_a_name_that_is_no_text_is_not_kept(tmp_path: Path) -> None:
    """All other files are."""
    files = {"a": Node(b"1", modified=OLD), "\udcff": Node(b"22", modified=OLD)}

    async def work(store: Store) -> None:
        assert sorted((await store.build(files)).asked) == ["a", "\udcff"]
        again = await store.build(files)
        assert again.asked == ["\udcff"] and again.contents == {"a": b"1", "\udcff": b"22"}

    run(work, tmp_path)


def test_nothing_is_kept_without_a_key(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        assert [(await store.build({"a": b"1"}, key="")).asked for _ in range(2)] == [["a"], ["a"]]
        assert not store.directory.exists()

    run(work, tmp_path)


def test_other_keys_and_other_boots(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.build({"a": b"1"})
        assert (await store.build({"a": b"1"}, key="1" * 32)).asked == ["a"]
        restarted = Store(store.root)
        await restarted.contexts.sweep()
        assert {each.key for each in restarted.contexts.all()} == {KEY, "1" * 32}
        assert (await restarted.build({"a": b"1"})).asked == []
        rebooted = Store(store.root)
        rebooted.contexts._boot = "another"
        await rebooted.contexts.sweep()
        assert not rebooted.contexts.all() and not os.listdir(store.directory)
        assert (await rebooted.build({"a": b"1"})).asked == ["a"]

    run(work, tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "empty", "long", "garbage", "no segment", "short segment"])
def test_a_damaged_index_is_dropped(damage: str, tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.build(TREE)
        index = store.directory / KEY / "index"
        (segment,) = [store.directory / KEY / name for name in store.files if name != "index"]
        if damage == "truncated":
            os.truncate(index, index.stat().st_size - 3)
        elif damage == "empty":  # as a power failure leaves a file that was not synced
            os.truncate(index, 0)
        elif damage == "long":
            index.write_bytes(index.read_bytes() + b"x")
        elif damage == "garbage":
            index.write_bytes(os.urandom(1000))
        elif damage == "no segment":
            segment.unlink()
        else:
            os.truncate(segment, 10)
        (store.directory / KEY / ".index.0123").write_bytes(b"left by a crash")
        assert await store.build(TREE) == (["a", "d/large", "d/zeros"], contents(TREE))
        assert len(store.files) == 2

    run(work, tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 1000))
def test_any_bytes_are_no_index_or_one(data: bytes, at: int) -> None:
    """A changed index is either dropped or reads as one; it raises nothing."""
    with tempfile.TemporaryDirectory() as name:

        async def work(store: Store) -> None:
            await store.build({"a": b"1", "b": b"2"})
            index = store.directory / KEY / "index"
            whole = index.read_bytes()
            place = at % len(whole)
            index.write_bytes(whole[:place] + data + whole[place + len(data) :])
            store.contexts._read(KEY)

        run(work, Path(name))


def test_a_transfer_that_fails_leaves_what_was(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.build({"a": b"1"})
        before = store.files
        with pytest.raises(ZeroDivisionError):
            async with store.contexts.transfer(KEY, "words", "one") as transfer:
                stat = field(2, Node(b"22", modified=OLD).stat("b"))
                described = protobuf.decode(stat, Packet).stat
                assert described is not None and transfer.add(0, stat, filesync.listed(described))
                transfer.write(0, b"2")
                await transfer._flush()
                raise ZeroDivisionError
        assert store.files == before
        assert (await store.build({"a": b"1"})).asked == []

    run(work, tmp_path)


def test_a_transfer_that_is_cancelled_while_it_fails(tmp_path: Path) -> None:
    """The client leaves, and its build is cancelled while the files are being closed."""

    async def work(store: Store) -> None:
        async def fail(begun: asyncio.Future[None]) -> None:
            async with store.contexts.transfer(KEY, "words", "one") as transfer:
                stat = field(2, Node(b"22", modified=OLD).stat("b"))
                described = protobuf.decode(stat, Packet).stat
                assert described is not None and transfer.add(0, stat, filesync.listed(described))
                transfer.write(0, b"2")
                await transfer._flush()
                begun.set_result(None)
                raise ZeroDivisionError

        for turns in range(6):
            begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(fail(begun))
            await begun
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert not store.contexts.all() and store.files == []

    run(work, tmp_path)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store) -> None:
        await store.build({"a": b"1"})
        before = store.files
        with monkeypatch.context() as patched:
            patched.setattr(kept, "room", lambda descriptor: 10)
            with pytest.raises(ServerError, match="not enough space for it on the disk of /"):
                await store.build({"a": b"1", "b": b"2" * 11})

            def full(*_: Any, **__: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patched.setattr(kept.files, "write_atomically", full)
            assert (await store.build({"a": b"1", "b": b"2"})).contents["b"] == b"2"
        assert store.files == before
        assert (await store.build({"a": b"1", "b": b"2"})).asked == ["b"]

    run(work, tmp_path)


def test_dead_contents_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "SEGMENTS", 4)

    async def work(store: Store) -> None:
        tree: dict[str, Node | bytes] = {f"f{number}": os.urandom(1000) for number in range(10)}
        await store.build(tree)
        for turn in range(20):
            tree[f"f{turn % 10}"] = Node(os.urandom(1000), modified=OLD + turn)
            asked, found = await store.build(tree)
            assert asked == [f"f{turn % 10}"] and found == contents(tree)
            assert store.size <= 20_000 and len(store.files) <= 5
        (only,) = store.contexts.all()
        assert only.size == store.size and only.what == "words"

    run(work, tmp_path)


def test_records_that_no_build_lists_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr(kept.time, "time_ns", lambda: now)

    async def work(store: Store) -> None:
        nonlocal now
        await store.build({"a": b"1" * 100, "b": b"2"})
        for _ in range(4):
            now += kept.UNUSED_NS // 3
            assert (await store.build({"b": b"2"})).asked == []
        assert store.size <= 2
        assert (await store.build({"a": b"1" * 100, "b": b"2"})).asked == ["a"]

    run(work, tmp_path)


def test_contexts_without_contents_leave_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a warning, nor a file, nor an entry in memory."""
    racy = {"a": Node(b"1", modified=time.time_ns() + 3600 * 10**9)}

    async def work(store: Store) -> None:
        directory = Node(mode=DIRECTORY | 0o755, modified=OLD)
        trees: tuple[Tree, ...] = ({}, racy, {"d": directory, "d/empty": b""})
        for tree in trees:
            await store.build(tree)
        await store.build({"b": b"2"})
        await store.build(racy, key="1" * 32)
        assert os.listdir(store.directory) == [KEY] and [*store.contexts._held] == [KEY]
        assert await store.contexts.remove(KEY)
        assert not os.listdir(store.directory) and not store.contexts._held
        assert not caplog.records

    run(work, tmp_path)


def test_a_removal_during_a_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that makes a context too large removes it; another one is kept later."""

    async def work(store: Store) -> None:
        async with store.contexts.transfer(KEY, "words", "other") as other:
            monkeypatch.setattr(kept, "BUDGET", 0)
            monkeypatch.setattr(kept, "SHARE", 1 << 60)
            await store.build(TREE)
            assert not store.files
            monkeypatch.undo()
            node = Node(b"1", modified=OLD)
            context = await other.receive(Client({"a": node}).copy)
        await context.close()
        await store.contexts.close()
        assert (await store.build({"a": node})).asked == []

    run(work, tmp_path)


def test_prune_while_builds_read(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.build(TREE)
        _, context = await store.receive(TREE)
        await store.contexts.close()
        (entry,) = store.contexts.all()
        assert entry.in_use and entry.size == store.size
        assert not await store.contexts.remove(KEY)
        store.contexts._remove(KEY)  # not even this disturbs the build
        assert context.read("d/large", 1 << 20) == contents(TREE)["d/large"]
        await context.close()
        assert await store.contexts.remove(KEY) and not store.contexts.all()
        assert not await store.contexts.remove("no such key")
        assert (await store.build(TREE)).asked == ["a", "d/large", "d/zeros"]

    run(work, tmp_path)


def test_the_oldest_go_when_all_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "BUDGET", 10_000)
    monkeypatch.setattr(kept, "SHARE", 1 << 60)

    async def work(store: Store) -> None:
        for number in range(4):
            await store.build({"a": bytes([number]) * 4000}, key=str(number) * 32)
        assert [each.key[0] for each in store.contexts.all()] == ["2", "3"]
        assert sorted(os.listdir(store.directory)) == ["2" * 32, "3" * 32]
        await store.build({"a": bytes(5001)}, key="4" * 32)
        assert [each.key[0] for each in store.contexts.all()] == ["2", "3"]

    run(work, tmp_path)


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "CONTEXTS", 3)

    async def work(store: Store) -> None:
        for number in range(6):
            await store.build({"a": bytes([number + 1])}, key=str(number) * 32)
        assert [key[0] for key in store.contexts._held] == ["3", "4", "5"]
        assert sorted(os.listdir(store.directory)) == [each * 32 for each in "345"]

    run(work, tmp_path)


def test_builds_at_once(tmp_path: Path) -> None:
    """Each reads its own files, whichever ends last; those of one session send nothing twice."""
    dice = random.Random(1)

    async def work(store: Store) -> None:
        versions = [(OLD + number, dice.randbytes(3000)) for number in range(3)]

        async def one(number: int) -> None:
            for _ in range(5):
                tree: dict[str, Node | bytes] = {}
                for name in "abcdef":
                    mtime, content = dice.choice(versions)
                    tree[name] = Node(content, modified=mtime)
                assert (await store.build(tree, session=str(number))).contents == contents(tree)

        await asyncio.gather(*(one(number) for number in range(6)))
        together = await asyncio.gather(*(store.build(TREE, key="2" * 32) for _ in range(4)))
        assert sorted(len(each.asked) for each in together) == [0, 0, 0, 3]

    run(work, tmp_path)


@pytest.mark.parametrize("path", ["", "/a", "a//b", "../a", "a/../b", ".", "a\0b"])
def test_paths_that_are_none(path: str, tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        with pytest.raises(InvalidParameter, match="build context"):
            await store.build({path: b"1"})

    run(work, tmp_path)


def test_long_stats_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is kept as long as the transfer, with fields that have no meaning."""
    monkeypatch.setattr("engine.builder.context.MAX_INDEX", 100_000)

    async def work(store: Store) -> None:
        async def listed(size: int) -> None:
            async with store.contexts.transfer(KEY, "words", "one") as transfer:
                for number in range(200):
                    transfer.add(number, bytes(size), kept.Listed(f"{number:03}", "0", 0o644, 0, 0, 0, OLD))
                await transfer.discard()

        await listed(1000)
        with pytest.raises(InvalidParameter, match="names and attributes take more than"):
            await listed(10_000)

    run(work, tmp_path)


def test_the_order_of_the_list(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        # \udc80 stands for the byte 80, which is less than the first one of ä
        for first, second in (("b", "a"), ("a", "a"), ("a.b", "a/b"), ("ä", "\udc80")):
            with pytest.raises(InvalidParameter, match="not in the order of the list"):
                async with store.contexts.transfer(KEY, "words", "one") as transfer:
                    for number, path in enumerate((first, second)):
                        described = protobuf.decode(field(2, Node(b"").stat(path)), Packet).stat
                        assert described is not None
                        transfer.add(number, os.fsencode(path), filesync.listed(described))

    run(work, tmp_path)


@pytest.mark.parametrize("size", [0, 1, LARGE, LARGE + 1, 3 * LARGE + 5])
def test_a_digest_in_pieces(size: int, tmp_path: Path) -> None:
    content = os.urandom(size)
    hashing = Hashing(size)
    for at in range(0, size, 1_000_003):
        hashing.update(content[at : at + 1_000_003])
    (tmp_path / "file").write_bytes(content)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert hashing.digest() == digest_of(descriptor, 0, size)
    finally:
        os.close(descriptor)


# --- keys -----------------------------------------------------------------------------------------


def key_in(directory: Path, *arguments: str, shared: str = "x:node", name: str = "context") -> str:
    """The key that a client with these arguments gets."""
    program = [sys.executable, "-c", "print(flush=True); input()", *arguments]
    with subprocess.Popen(program, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout is not None and client.stdout.readline()
            return key_of(f"unix:{client.pid}/0", shared, name)
        finally:
            client.communicate(b"\n")


def test_directories_of_one_name_have_their_own_keys(tmp_path: Path) -> None:
    for path in ("a/x", "b/x"):
        (tmp_path / path).mkdir(parents=True)
    keys = {
        key_in(tmp_path, "build", "a/x"),
        key_in(tmp_path, "build", "b/x"),
        key_in(tmp_path, "build", f"--context={tmp_path}/c/x"),
        key_in(tmp_path, "-f", "d/x/compose.yaml", "build"),
        key_in(tmp_path / "a/x", "build", "."),
        key_in(tmp_path / "b/x", "build", "."),
    }
    assert len(keys) == 6 and "" not in keys
    assert key_in(tmp_path, "build", "a/x") == key_in(tmp_path, "-t", "y:2", "build", "./a/../a/x") in keys
    assert key_in(tmp_path, "--build-context", "n=a/y", name="n") != key_in(
        tmp_path, "--build-context", "n=b/y", name="n"
    )


def test_what_is_part_of_a_key(tmp_path: Path) -> None:
    keys = [
        *(key_of("10.0.0.1", "x:node", "context"), key_of("10.0.0.2", "x:node", "context")),
        *(key_of("10.0.0.1", "x:other", "context"), key_of("10.0.0.1", "x:node", "other")),
        key_of("10.0.0.1", "x:node", "context", "hint"),
    ]
    assert len({*keys}) == len(keys) and all(len(key) == 32 for key in keys)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for peer, shared in (("10.0.0.1", ""), ("", "x:node"), (f"unix:{gone.pid}/0", "x:node"), ("unix:0/0", "x:node")):
        assert key_of(peer, shared, "context") == ""
