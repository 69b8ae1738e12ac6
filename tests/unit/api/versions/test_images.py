"""The rows of images in all versions: each at its version and just below."""

from __future__ import annotations

import msgspec
import pytest

from engine.api.versions import VERSIONS, Flag
from tests.unit.api.versions.rows import IMAGE, check_new_field, reply


@pytest.mark.parametrize("path", ["SharedSize", "Containers"])
def test_fields_of_1_25(path: str) -> None:
    check_new_field(IMAGE, path, "1.25", "1.24")


@pytest.mark.parametrize(
    ("tags", "digests", "older"),
    [
        ([], [], (["<none>:<none>"], ["<none>@<none>"])),
        (["a:1"], [], (["a:1"], [])),
        ([], ["a@sha256:1"], ([], ["a@sha256:1"])),
    ],
)
def test_images_without_a_name(tags: list[str], digests: list[str], older: tuple[list[str], list[str]]) -> None:
    image = msgspec.structs.replace(IMAGE, repo_tags=tags, repo_digests=digests)
    for version, expected in (("1.43", (tags, digests)), ("1.42", older)):
        shown = reply(image, version)
        assert (shown["RepoTags"], shown["RepoDigests"]) == expected


def test_images_have_no_virtual_size() -> None:
    assert reply(IMAGE, "1.43")["VirtualSize"] == IMAGE.size
    assert "VirtualSize" not in reply(IMAGE, "1.44")


def test_the_image_list_counts_containers() -> None:
    assert VERSIONS["1.51"].has(Flag.IMAGE_CONTAINERS) and not VERSIONS["1.50"].has(Flag.IMAGE_CONTAINERS)
