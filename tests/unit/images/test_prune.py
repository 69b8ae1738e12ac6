"""Prune, and the room that images take.

Needs root, because layers are extracted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common import times
from engine.common.pruning import Selection
from engine.errors import Conflict
from engine.images import views
from engine.images.index import Index
from engine.images.prune import prune
from engine.images.record import ImageRecord, ImageUser
from engine.images.usage import Sizes
from engine.wire.images import ImageConfig, ImagesPruned
from tests.support.images.archives import Image, docker_archive
from tests.unit.images.test_store import BARE, CHILD, GRANDCHILD, ONE, OTHER, TWO, Run, Stage, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
__all__ = ["run"]


ANY = Selection()


async def pruned(stage: Stage, *, dangling: bool = True, selection: Selection = ANY) -> ImagesPruned:
    return await prune(stage.images, stage.events, selection, dangling)


def ids(found: ImagesPruned, stage: Stage) -> set[str]:
    """The images among the deletions, which have layers too."""
    known = {image.id for image in (ONE, TWO, BARE, CHILD, GRANDCHILD)}
    return {each.deleted for each in found.images_deleted or ()} & known


def test_images_without_a_tag_go(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, TWO, BARE))
        found = await pruned(stage)
        assert ids(found, stage) == {BARE.id} and found.space_reclaimed == len(b"other")
        assert {image.id for image in stage.images} == {ONE.id, TWO.id}
        last = stage.events.history(0)[-1]
        assert (last.type, last.action, last.actor.id) == ("image", "prune", "")
        assert last.actor.attributes == {"reclaimed": "5"}
        again = await pruned(stage)
        assert again.images_deleted is None and again.space_reclaimed == 0

    run(work)


def test_all_unused_images_go(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, TWO, BARE))
        found = await pruned(stage, dangling=False)
        assert ids(found, stage) == {ONE.id, TWO.id, BARE.id}
        assert {each.untagged for each in found.images_deleted or ()} == {
            *("one:latest", "two:a", "registry.example:5000/team/two:b", "")
        }
        # a layer that two images have counts once
        assert found.space_reclaimed == 3003 + 4 + 5
        await stage.images.close()
        assert stage.on_disk() == ([], [], [])

    run(work)


@pytest.mark.parametrize("running", [False, True])
def test_an_image_with_a_container_keeps_its_names(run: Run, running: bool) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, TWO, BARE))
        stage.users[TWO.id] = stage.users[BARE.id] = [ImageUser("c" * 64, "/c", running)]
        assert ids(await pruned(stage, dangling=False), stage) == {ONE.id}
        assert stage.images.get(TWO.id).familiar_tags == ["registry.example:5000/team/two:b", "two:a"]

    run(work)


def test_parents_go_after_their_children(run: Run) -> None:
    """Parents with a name stay in a prune of dangling images, whatever their age; nameless ones go
    with the last child.
    """
    nameless = dataclasses.replace(CHILD, names=[])
    newest = dataclasses.replace(GRANDCHILD, parent=nameless)

    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, nameless, newest))
        assert (await pruned(stage)).images_deleted is None
        await stage.images.tag("one", "grandchild")  # its image has no name now
        assert ids(await pruned(stage), stage) == {newest.id, nameless.id}
        await stage.load(docker_archive(ONE, CHILD, GRANDCHILD))
        assert ids(await pruned(stage, dangling=False), stage) == {ONE.id, CHILD.id, GRANDCHILD.id}

    run(work)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(until_ns=times.parse_rfc3339("2020-06-01T00:00:00Z")), {ONE.id}),
        (Selection(until_ns=times.parse_rfc3339("2019-06-01T00:00:00Z")), set()),
        (Selection(labels=("kind",)), {ONE.id}),
        (Selection(labels=("kind=second",)), set()),
        (Selection(not_labels=("kind=first",)), {TWO.id, BARE.id}),
        (Selection(labels=("kind",), until_ns=1), set()),
    ],
)
def test_filters(run: Run, selection: Selection, expected: set[str]) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, TWO, BARE))
        assert ids(await pruned(stage, dangling=False, selection=selection), stage) == expected

    run(work)


def test_an_image_of_unknown_age_is_not_old(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(Image([OTHER], [], {}, "")))
        assert (await pruned(stage, selection=Selection(until_ns=1 << 62))).images_deleted is None
        assert (await pruned(stage)).images_deleted is not None

    run(work)


def test_a_name_given_meanwhile_saves_an_image(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(BARE))
        await asyncio.gather(stage.images.tag(BARE.id, "kept"), pruned(stage))
        assert stage.images.get("kept").id == BARE.id

    run(work)


def test_one_prune_at_a_time(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(BARE))
        first, second = await asyncio.gather(pruned(stage), pruned(stage), return_exceptions=True)
        assert isinstance(first, ImagesPruned) and isinstance(second, Conflict)

    run(work)


# --- usage ----------------------------------------------------------------------------------------


def test_usage(run: Run) -> None:
    async def work(stage: Stage) -> None:
        assert stage.images.usage() == (0, [])
        await stage.load(docker_archive(ONE, TWO, BARE))
        stage.users[TWO.id] = [ImageUser("c" * 64, "/c", False)]
        total, found = stage.images.usage()
        assert total == 3003 + 4 + 5
        assert {image.id: (image.size, image.shared_size, image.containers) for image in found} == {
            ONE.id: (3003, 3003, 0),
            TWO.id: (3007, 3003, 1),
            BARE.id: (5, 0, 0),
        }
        assert all(image.shared_size == image.containers == -1 for image in views.summaries(stage.images.index))
        await stage.images.delete("one")
        total, found = stage.images.usage()
        assert total == 3003 + 4 + 5 and {image.shared_size for image in found} == {0}

    run(work)


def test_parents_without_a_name_share_nothing(run: Run) -> None:
    nameless = dataclasses.replace(CHILD, names=[])

    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(nameless, dataclasses.replace(GRANDCHILD, parent=nameless)))
        _, found = stage.images.usage()
        assert [image.shared_size for image in found] == [0]

    run(work)


def _sizes(layers: dict[str, int]) -> Callable[[str], int]:
    return lambda chain_id: layers[chain_id]


@given(st.lists(st.lists(st.sampled_from("abcdef"), unique=True), max_size=6))
def test_what_images_share_is_at_most_their_size(chains: list[list[str]]) -> None:
    layers = {name: 1 << at for at, name in enumerate("abcdef")}
    index = Index()
    sizes = Sizes(index, _sizes(layers))
    for at, chain in enumerate(chains):
        index.put(ImageRecord(id=str(at), config=ImageConfig(), chain_ids=tuple(chain), tags=(f"h/t:{at}",)))
        assert sizes.total == sum(layers[each] for each in {each for chain in chains[: at + 1] for each in chain})
    for at, chain in enumerate(chains):
        others = {each for number, other in enumerate(chains) if number != at for each in other}
        assert sizes.shared[str(at)] == sum(layers[each] for each in chain if each in others)
