"""The build cache over a real image store: what survives a restart, what follows an image that is
removed, and the removal by prune.

Needs root, because layers are extracted.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.builder import prune, state
from engine.builder.cache import Cache
from engine.builder.caches import CacheDirectory, Caches
from engine.builder.copying import Destination, Selection, Stream, select
from engine.builder.kept import KeptContexts
from engine.builder.keys import base_key, key_of
from engine.builder.options import PruneOptions
from engine.builder.parts import REMEMBERED, LaidOut, Parts
from engine.builder.state import State, after, of_image
from engine.builder.steps import layer
from engine.builder.trees import MemoryTree
from engine.config import Config as EngineConfig
from engine.errors import ServerError
from engine.images import reference
from engine.images.index import Index
from engine.images.record import ImageRecord
from engine.storage.records import Change, Records
from engine.system import files
from engine.system.threads import cancelled
from engine.wire.containers import Config
from tests.support import PATIENCE
from tests.unit.images.test_store import ONE, Stage, docker_archive

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class Site(Stage):
    """A store with a cache, and a base image."""

    async def __aenter__(self) -> Site:
        await super().__aenter__()
        self.open_cache()
        return self

    async def __aexit__(self, *error: object) -> None:
        # As after a crash: what the cache has not written is lost.
        if self.cache._claims is not None:
            await self.cache._claims.release()
        await super().__aexit__(*error)

    def open_cache(self) -> None:
        self.cache = Cache(self.records, self.images)
        absent: Any = None
        self.parts = Parts(
            config=EngineConfig(root=self.root, run=self.root / "run"),
            containers=absent,
            images=self.images,
            remote=absent,
            events=self.events,
            cache=self.cache,
            caches=Caches(self.root),
            contexts=KeptContexts(self.root, self.root),
            shared=absent,
            sessions=absent,
        )

    async def base(self) -> State:
        await self.load(docker_archive(ONE))
        record = self.images.get("one")
        return of_image(record, base_key(record.id))

    def meta(self, before: State, text: str) -> State:
        """A step that sets a label."""
        config = Config(labels={**before.config.labels, text: ""})
        key = key_of(before.key, "meta", text, config=config)
        found = self.cache.find(key)
        if found is None:
            found = after(before, key=key, config=config, command=["LABEL", text])
            self.cache.add(found, before.key, text)
        return found

    async def directory(self, before: State, name: str) -> State:
        """A step that makes a directory, in a layer of its own."""
        return await self.copied(before, name, Selection((), "dir", ""), Destination(name, True, (name,)))

    async def file(self, before: State, name: str) -> State:
        """A step that makes a file of three bytes, in a layer of its own."""
        selection = select(MemoryTree({name: b"abc"}), [name], destination_is_directory=False)
        return await self.copied(before, name, selection, Destination(name, False, ()))

    async def copied(self, before: State, name: str, selection: Selection, place: Destination) -> State:
        key = key_of(before.key, "copy", name, config=before.config)
        async with self.images.claimed() as claim:
            diff_id = await layer.lay_out(
                self.parts,
                before.document.rootfs.diff_ids,
                lambda: Stream(selection, place, -1, now=1),
                claim,
            )
            made = after(before, key=key, config=before.config, command=["COPY", name], diff_id=diff_id)
            self.cache.add(made, before.key, name)
        return made

    def kept(self) -> set[str]:
        return {step.text for _, step in self.cache}


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Site], Awaitable[None]]], None]:
    def runner(work: Callable[[Site], Awaitable[None]]) -> None:
        async def main() -> None:
            async with Site(tmp_path) as site:
                await work(site)

        asyncio.run(main())

    return runner


Run = Callable[[Callable[[Site], Awaitable[None]]], None]


def test_a_step_is_known_before_it_is_written_and_after_a_restart(run: Run) -> None:
    made: list[State] = []

    async def first(site: Site) -> None:
        made.append(site.meta(await site.directory(await site.base(), "d"), "x"))
        assert site.meta(made[0], "y").parent == made[0].image_id
        assert made[0].image_id not in site.images.index
        await site.cache.write_result(made[0], [reference.with_tag("built", "")])
        assert site.images.get("built").id == made[0].image_id

    async def second(site: Site) -> None:
        found = site.cache.find(made[0].key)
        assert found is not None and found.image_id == made[0].image_id
        assert found.document == made[0].document and found.chain_ids == made[0].chain_ids
        assert site.kept() == {"d", "x", "y"}

    run(first)
    run(second)


def test_files_that_are_known_are_read_and_others_are_written_at_once(run: Run) -> None:
    """A large file that has changed and kept its size was read twice."""
    opened: list[str] = []

    async def work(site: Site) -> None:
        async with site.images.claimed() as claim:

            async def lay_out(content: bytes, alike: str) -> tuple[str, list[Path]]:
                def stream() -> Stream:
                    opened.append(alike)
                    selection = select(MemoryTree({"f": content}), ["f"], destination_is_directory=False)
                    return Stream(selection, Destination("f", False, ()), -1, now=1)

                diff_id = await layer.lay_out(site.parts, (), stream, claim, alike=alike)
                return diff_id, site.snapshots.layer_paths()

            first = await lay_out(b"abc", "one")
            assert await lay_out(b"abc", "one") == first
            assert opened == ["one", "one"]
            changed, paths = await lay_out(b"xyz", "other")
            assert [path.joinpath("f").read_bytes() for path in paths] == [b"abc", b"xyz"]
            assert opened[2:] == ["other"]
            # What is remembered may be wrong: a file was changed and has its old times.
            third, paths = await lay_out(b"123", "other")
            assert opened[3:] == ["other", "other"]
            assert [path.joinpath("f").read_bytes() for path in paths] == [b"abc", b"xyz", b"123"]
            assert len({first[0], changed, third}) == 3

    run(work)


def test_only_the_latest_files_are_remembered() -> None:
    laid_out = LaidOut()
    for number in range(REMEMBERED + 2):
        laid_out.add(number, f"sha256:{number}")
        laid_out.add(0, "sha256:again")
    assert laid_out.find(0) == "sha256:again"
    assert laid_out.find(1) is None and laid_out.find(2) is None
    assert laid_out.find(3) == "sha256:3"


def test_what_was_not_written_is_gone_with_its_layers(run: Run) -> None:
    async def first(site: Site) -> None:
        await site.directory(await site.base(), "lost")
        assert len([name for name in site.on_disk()[0] if name.isdigit()]) == 2

    async def second(site: Site) -> None:
        assert site.kept() == set()
        assert len([name for name in site.on_disk()[0] if name.isdigit()]) == 1

    run(first)
    run(second)


def test_a_failed_write_keeps_images_for_the_next_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(site: Site) -> None:
        made = await site.directory(await site.base(), "d")
        with monkeypatch.context() as patched:

            async def refuse(self: Records, *changes: object) -> None:
                raise ServerError("no space left on device")

            patched.setattr(Records, "commit", refuse)
            with pytest.raises(ServerError, match="no space"):
                await site.cache.write()
        assert site.cache.find(made.key) is not None
        assert site.snapshots.layer(made.top) is not None
        await site.cache.write()
        assert made.image_id in site.images.index

    run(work)


def test_steps_that_come_while_it_writes_are_written_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise those of a failed build would keep their claims, and the engine would not rest."""

    async def work(site: Site) -> None:
        base, commit = await site.base(), Records.commit
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slowly(self: Records, *changes: Change) -> None:
            begun.set()
            await go_on.wait()
            await commit(self, *changes)

        monkeypatch.setattr(Records, "commit", slowly)
        first = site.meta(base, "first")
        site.cache.write_soon()
        await begun.wait()
        second = site.meta(first, "second")
        site.cache.write_soon()
        go_on.set()
        assert site.cache._soon is not None
        await site.cache._soon
        assert second.image_id in site.images.index
        assert site.cache._claims is None

    run(work)


def test_the_result_of_a_build_is_recorded_although_it_was_removed_meanwhile(run: Run) -> None:
    async def work(site: Site) -> None:
        made = await site.directory(site.meta(await site.base(), "x"), "d")
        await site.cache.write()
        found = site.cache.find(made.key)
        assert found is not None
        async with site.images.claimed() as claim:
            claim(found.top)
            await site.images.delete(found.image_id)
            assert found.image_id not in site.images.index
            await site.cache.write_result(found, [reference.with_tag("built", "")])
        assert site.images.configuration(site.images.get("built"))
        assert site.snapshots.layer(found.top) is not None

    run(work)


def test_a_result_is_recorded_although_it_was_removed_while_it_waited_for_a_write(run: Run) -> None:
    async def work(site: Site) -> None:
        base = await site.base()
        async with site.images.claimed() as claim:
            made = await site.directory(base, "d")
            claim(made.top)
            async with site.cache._writing:
                result = asyncio.create_task(site.cache.write_result(made, [reference.with_tag("built", "")]))
                await asyncio.sleep(0)
                await site.cache._write({}, last=False)
                await site.images.delete(made.image_id)
            await result
        assert site.images.get("built").id == made.image_id
        assert site.snapshots.layer(made.top) is not None

    run(work)


def test_prune_leaves_what_a_build_uses(run: Run) -> None:
    async def work(site: Site) -> None:
        made = site.meta(await site.base(), "x")
        site.cache.used[made.image_id] += 1
        assert (await prune.prune(site.parts, PruneOptions(all=True))).entries == []
        site.cache.used -= Counter([made.image_id])
        assert [each.id for each in (await prune.prune(site.parts, PruneOptions())).entries] == [made.key]

    run(work)


def test_an_image_that_is_removed_takes_its_steps_with_it(run: Run) -> None:
    async def work(site: Site) -> None:
        base = await site.base()
        middle = site.meta(base, "middle")
        last = site.meta(middle, "last")
        await site.cache.write_result(last, [reference.with_tag("built", "")])
        await site.images.delete("built")
        assert site.kept() == set(), "untagged parents go with the image"
        assert site.cache.find(last.key) is site.cache.find(middle.key) is None
        await site.cache.write()
        site.open_cache()
        assert site.kept() == set()

    run(work)


def test_an_owned_step_stays_when_its_image_is_deleted(run: Run) -> None:
    """No client sees the image until a build uses it again. Prune frees it."""
    made: list[State] = []

    async def first(site: Site) -> None:
        middle = site.meta(await site.directory(await site.base(), "d"), "middle")
        last = site.meta(middle, "last")
        made.extend((middle, last))
        for each in made:
            site.cache.own(each.image_id)
        await site.cache.write_result(last, [reference.with_tag("built", "")])
        deleted = await site.images.delete("built")
        assert {each.deleted for each in deleted} >= {last.image_id, middle.image_id}
        assert last.image_id not in site.images.index and site.images.usage()[0] < 1 << 20
        assert site.snapshots.layer(last.top) is not None
        await site.images.delete("one")
        await site.cache.write()

    async def second(site: Site) -> None:
        middle, last = made
        await site.cache.write()
        assert {each.description for each in await prune.entries(site.parts)} == {"middle", "last"}
        assert not {middle.image_id, last.image_id} & site.images.index.ids()
        for each in made:
            found = site.cache.find(each.key)
            assert found is not None and found.document == each.document
        await site.cache.write_result(last, [reference.with_tag("built", "")])
        assert site.images.get("built").parent == middle.image_id
        assert site.images.configuration(site.images.get("built")) == last.raw
        await site.images.delete("built")
        assert site.snapshots.layer(last.top) is not None
        report = await prune.prune(site.parts, PruneOptions())
        assert [each.id for each in report.entries] == [last.key, middle.key]
        assert site.snapshots.layer(last.top) is None
        assert not site.images.kept.ids() and site.images.usage()[0] == 0

    run(first)
    run(second)


def test_an_owned_step_that_ran_again_frees_its_former_image(run: Run) -> None:
    async def work(site: Site) -> None:
        base = await site.base()
        former = site.meta(base, "x")
        site.cache.own(former.image_id)
        await site.cache.write()
        await site.images.delete(former.image_id)
        assert former.image_id in site.images.kept
        latter = after(base, key=former.key, config=Config(labels={"y": ""}), command=["LABEL"])
        site.cache.add(latter, base.key, "LABEL")
        await site.cache.write()
        assert former.image_id not in site.images.kept

    run(work)


def test_prune_of_a_chain_reads_the_cache_mounts_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(site: Site) -> None:
        made = await site.base()
        for number in range(20):
            made = site.meta(made, str(number))
        walks, walk = 0, site.parts.caches.all

        def counted(sizes: Mapping[str, int]) -> list[CacheDirectory]:
            nonlocal walks
            walks += 1
            return walk(sizes)

        monkeypatch.setattr(site.parts.caches, "all", counted)
        for options in (PruneOptions(max_used_space=1 << 40), PruneOptions(all=True)):
            walks = 0
            await prune.prune(site.parts, options)
            assert walks == 1
        assert site.kept() == set()

    run(work)


def test_prune_removes_what_no_name_needs_from_the_end_of_each_chain(run: Run) -> None:
    async def work(site: Site) -> None:
        base = await site.base()
        dead = await site.directory(site.meta(base, "dead"), "deader")
        live = site.meta(await site.directory(base, "kept"), "named")
        await site.cache.write_result(live, [reference.with_tag("built", "")])
        report = await prune.prune(site.parts, PruneOptions())
        assert len(report.entries) == 2
        assert site.kept() == {"kept", "named"}
        assert dead.image_id not in site.images.index
        assert site.snapshots.layer(dead.top) is None and site.snapshots.layer(live.top) is not None
        report = await prune.prune(site.parts, PruneOptions(all=True))
        assert len(report.entries) == 2 and report.reclaimed == 0
        assert site.kept() == set() and site.images.get("built").id == live.image_id

    run(work)


def test_prune_forgets_the_steps_below_an_image_that_no_step_made(run: Run) -> None:
    """Such as the nameless result of a build with an inline cache, or of a commit."""

    async def work(site: Site) -> None:
        base = site.meta(await site.base(), "base")
        made = await site.directory(base, "made")
        document = msgspec.structs.replace(made.document, author="a committer")
        other = state.recorded(document, made.key, made.image_id, made.chain_ids, made.document.rootfs.diff_ids)
        await site.cache.write_result(other, [])
        assert {each.shared for each in await prune.steps(site.parts)} == {True}
        assert (await prune.prune(site.parts, PruneOptions())).entries == []
        pruned = await prune.prune(site.parts, PruneOptions(all=True))
        assert (len(pruned.entries), pruned.reclaimed) == (2, 0)
        assert site.kept() == set() and site.images.get(other.image_id).parent == made.image_id

    run(work)


def test_others_run_while_a_prune_walks_over_the_images(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It walks over them once."""

    async def work(site: Site) -> None:
        base = await site.base()
        for number in range(300):
            site.meta(base, str(number))
        await site.cache.write()
        walks, looks = 0, Counter[int]()
        turns = 0
        whole, steps_of = Index.__iter__, site.cache.steps_of

        def walked(index: Index) -> Iterator[ImageRecord]:
            nonlocal walks
            walks += 1
            return whole(index)

        def looked(image_id: str) -> Collection[str]:
            looks[turns] += 1
            return steps_of(image_id)

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(Index, "__iter__", walked)
        monkeypatch.setattr(site.cache, "steps_of", looked)
        beside = asyncio.create_task(other())
        await prune.prune(site.parts, PruneOptions(all=True, max_used_space=1 << 40))
        await cancelled(beside)
        assert walks == 1 and sum(looks.values()) >= 300 and max(looks.values()) <= 100

    run(work)


def test_others_run_while_conditions_are_compared(run: Run) -> None:
    """Also with entries whose images stay, which `all` looks at by themselves."""

    async def work(site: Site) -> None:
        last = await site.base()
        for number in range(3 * prune.TURN):
            last = site.meta(last, str(number))
        await site.cache.write_result(last, [reference.with_tag("built", "")])
        turns, compared = 0, Counter[int]()

        def condition(_: prune.Entry) -> bool:
            compared[turns] += 1
            return False

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        await prune.prune(site.parts, PruneOptions(all=True, condition=condition))
        await cancelled(beside)
        assert compared.total() == 3 * prune.TURN and max(compared.values()) <= prune.TURN

    run(work)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (PruneOptions(filters={"description": ["b"]}), {"a"}),
        (PruneOptions(filters={"id": ["nothing"]}), {"a", "b"}),
        (PruneOptions(filters={"type": ["exec.cachemount"]}), {"a", "b"}),
        (PruneOptions(filters={"label": ["x"]}), {"a", "b"}),
        (PruneOptions(filters={"label!": ["x"]}), set()),
        (PruneOptions(filters={"private": ["true"]}), set()),
        (PruneOptions(unused_since_ns=1), {"a", "b"}),
        (PruneOptions(reserved_space=1 << 40), {"a", "b"}),
    ],
)
def test_filters_of_prune(run: Run, options: PruneOptions, left: set[str]) -> None:
    async def work(site: Site) -> None:
        base = await site.base()
        site.meta(base, "a")
        site.meta(base, "b")
        await site.cache.write()
        await prune.prune(site.parts, options)
        assert site.kept() == left

    run(work)


def test_bytes_count_once(run: Run) -> None:
    """A step may have several keys, and two steps may have made one layer."""

    async def work(site: Site) -> None:
        base = await site.base()
        first = await site.file(base, "f")
        site.cache.know("other", first, base.key, "f")
        label = site.meta(base, "x")
        second = await site.file(label, "f")
        last = site.meta(second, "y")
        assert second.top == first.top
        await site.cache.write()

        async def shown() -> dict[str, tuple[int, bool]]:
            return {each.id: (each.size, each.shared) for each in await prune.entries(site.parts)}

        alone = {label.key: (0, False), first.key: (0, False), second.key: (3, False), last.key: (0, False)}
        assert await shown() == alone
        await site.cache.write_result(last, [reference.with_tag("built", "")])
        assert await shown() == {key: (size, True) for key, (size, _) in alone.items()}
        small = PruneOptions(all=True, max_used_space=1)
        assert (await prune.prune(site.parts, small)).entries == [], "the images have the bytes"
        await site.images.delete("built")
        assert await shown() == {first.key: (3, False)}
        report = await prune.prune(site.parts, PruneOptions())
        assert [each.id for each in report.entries] == [first.key] and report.reclaimed == 3
        assert site.cache.find("other") is None and site.snapshots.layer(first.top) is None

    run(work)


def test_a_second_key_finds_the_same_image(run: Run) -> None:
    async def work(site: Site) -> None:
        made = site.meta(await site.base(), "x")
        site.cache.know("other", made, "", "x")
        found = site.cache.find("other")
        assert found is not None and found.image_id == made.image_id
        assert found.key == made.key, "the steps after it have one key, however it was found"
        assert set(site.cache.steps_of(made.image_id)) == {made.key, "other"}

    run(work)


def test_a_step_that_ran_again_does_not_go_with_its_former_image(run: Run) -> None:
    async def work(site: Site) -> None:
        base = await site.base()
        key, config = "k", Config(labels={"a": "b"})
        former = after(base, key=key, config=config, command=["LABEL"])
        site.cache.add(former, base.key, "LABEL")
        site.cache.know("other", former, base.key, "LABEL")
        await site.cache.write()
        latter = after(base, key=key, config=config, command=["LABEL", "again"])
        site.cache.add(latter, base.key, "LABEL")
        site.cache.know("other", latter, base.key, "LABEL")
        await site.cache.write()
        await site.images.delete(former.image_id)
        for each in (key, "other"):
            found = site.cache.find(each)
            assert found is not None and found.image_id == latter.image_id

    run(work)


def test_cache_mounts_are_kept_shared_and_removed(tmp_path: Path) -> None:
    async def work() -> None:
        caches = Caches(tmp_path)
        filled: list[int] = []

        def fill(directory: int) -> None:
            filled.append(directory)
            os.close(os.open("seed", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=directory))

        async with caches.use("a/b", "shared", fill, 0o750) as first:
            assert os.listdir(first) == ["seed"] and first.stat().st_mode & 0o777 == 0o750
            async with caches.use("a/b", "shared", fill, 0o755) as again:
                assert again == first and len(filled) == 1
            async with caches.use("a/b", "private", fill, 0o755) as other:
                assert other != first and len(filled) == 2
            assert not await caches.remove(first.parent.name), "it is in use"
        async with caches.use("a/b", "private", fill, 0o755) as again:
            assert again == first
        assert {each.id for each in caches.all()} == {"a/b"} and len(caches.all()) == 2
        uses = {each.name: each.uses for each in caches.all()}
        assert uses == {first.parent.name: 3, other.parent.name: 1}
        assert all(each.created <= each.used for each in caches.all())
        (first.parent / "uses").write_text("")  # as after a crash
        async with caches.use("a/b", "shared", fill, 0o755):
            assert {each.uses for each in caches.all()} == {1}
        for each in caches.all():
            assert await caches.remove(each.name)
        assert caches.all() == []

    asyncio.run(work())


def test_a_use_of_a_cache_mount_that_cannot_be_counted(tmp_path: Path) -> None:
    """As on a full disk: the step has its directory, and the former count stays."""

    async def work() -> None:
        caches = Caches(tmp_path)
        async with caches.use("a", "shared", lambda _: None, 0o755) as first:
            pass
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            async with caches.use("a", "shared", lambda _: None, 0o755) as again:
                pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert again == first and [each.uses for each in caches.all()] == [1]

    asyncio.run(work())


def test_a_cache_mount_of_an_older_version_keeps_its_age(tmp_path: Path) -> None:
    """It has no file `uses` yet."""

    async def work() -> None:
        caches = Caches(tmp_path)
        async with caches.use("a", "shared", lambda _: None, 0o755) as data:
            pass
        (data.parent / "uses").unlink()
        os.utime(data.parent, ns=(1, 1_000_000_000))
        async with caches.use("a", "shared", lambda _: None, 0o755):
            pass
        assert [(each.created, each.uses) for each in caches.all()] == [(1_000_000_000, 1)]

    asyncio.run(work())


def test_a_locked_cache_mount_is_used_by_one_step_at_a_time(tmp_path: Path) -> None:
    async def work() -> None:
        caches, inside, most = Caches(tmp_path), 0, 0

        async def step() -> None:
            nonlocal inside, most
            async with caches.turn(["x"]), caches.use("x", "locked", lambda _: None, 0o755):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.01)
                inside -= 1

        await asyncio.gather(*(step() for _ in range(5)))
        assert most == 1

    asyncio.run(work())


def test_locked_cache_mounts_in_any_order_and_twice(tmp_path: Path) -> None:
    async def work() -> None:
        caches = Caches(tmp_path)

        async def step(*ids: str) -> None:
            async with caches.turn(ids):
                await asyncio.sleep(0)

        await asyncio.wait_for(asyncio.gather(step("a", "b"), step("b", "a"), step("a", "a")), 10 * PATIENCE)

    asyncio.run(work())


def test_a_new_cache_mount_of_several_steps_is_made_once(tmp_path: Path) -> None:
    async def work() -> None:
        caches, filled, at_once = Caches(tmp_path), 0, asyncio.Barrier(4)

        def fill(directory: int) -> None:
            nonlocal filled
            filled += 1
            time.sleep(0.05)  # the others come meanwhile

        async def step() -> None:
            async with caches.use("x", "shared", fill, 0o755) as path:
                before = path.stat().st_ino
                await at_once.wait()
                assert path.stat().st_ino == before

        await asyncio.gather(*(step() for _ in range(4)))
        assert filled == 1

    asyncio.run(work())


def test_a_cache_mount_whose_removal_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is empty for the next step, and `sweep` removes the rest."""

    async def work() -> None:
        async def used(caches: Caches, name: str = "x") -> list[str]:
            async with caches.use(name, "shared", lambda _: None, 0o755) as path:
                found = os.listdir(path)
                (path / "file").touch()
                return found

        caches, removed, remove_tree = Caches(tmp_path), 0, files.remove_tree

        def half(path: Path) -> None:
            nonlocal removed
            removed += 1
            if removed == 2:
                raise OSError("killed")
            remove_tree(path)

        assert await used(caches) == [] and await used(caches) == ["file"]
        (name,) = (each.name for each in caches.all())
        with monkeypatch.context() as patched, pytest.raises(OSError, match="killed"):
            patched.setattr("engine.builder.caches.files.remove_tree", half)
            await caches.remove(name)
        following = Caches(tmp_path)
        assert following.all() == [] and len(os.listdir(tmp_path / "build" / "caches")) == 1
        assert await used(following) == []
        await following.sweep()
        assert os.listdir(tmp_path / "build" / "caches") == [name]
        # as a killed engine of before may have left it
        (tmp_path / "build" / "caches" / name / "id").unlink()
        assert await used(following) == [] and [each.id for each in following.all()] == ["x"]

    asyncio.run(work())


def test_a_cache_mount_that_is_being_removed_is_made_again(tmp_path: Path) -> None:
    async def work() -> None:
        caches = Caches(tmp_path)
        async with caches.use("x", "shared", lambda _: None, 0o755) as path:
            (path / "old").touch()
        removal = asyncio.create_task(caches.remove(path.parent.name))
        await asyncio.sleep(0)
        async with caches.use("x", "shared", lambda _: None, 0o755) as path:
            assert await removal
            assert os.listdir(path) == []

    asyncio.run(work())
