"""The rows of images in all versions: each at its version and just below."""

from __future__ import annotations

import msgspec
import pytest

from engine.api.versions import VERSIONS, Flag
from tests.unit.api.versions.rows import IMAGE, IMAGE_INSPECT, check_new_field, reply


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


@pytest.mark.parametrize("path", ["Metadata", "Variant", "OsVersion"])
def test_fields_of_inspect_of_1_25(path: str) -> None:
    check_new_field(IMAGE_INSPECT, path, "1.25", "1.24")


def test_what_inspect_shows_without_being_set() -> None:
    newest, older = reply(IMAGE_INSPECT, "1.52"), reply(IMAGE_INSPECT, "1.51")
    assert older.keys() - newest.keys() == {"Parent", "Comment", "DockerVersion", "EngineVersion", "Author"}
    assert {older[name] for name in older.keys() - newest.keys()} == {""}
    config = {"Cmd": ["sh"], "ExposedPorts": {"80/tcp": {}}}
    nothing = dict.fromkeys(("Entrypoint", "Env", "Labels", "OnBuild", "Volumes"))
    assert newest["Config"] == config
    assert older["Config"] == {**config, **nothing, "User": "", "WorkingDir": ""}


def test_what_inspect_shows_when_it_is_set() -> None:
    image = msgspec.structs.replace(IMAGE_INSPECT, parent="p", comment="c", author="a", docker_version="d")
    for version in ("1.52", "1.51"):
        shown = reply(image, version)
        assert [shown[name] for name in ("Parent", "Comment", "Author", "DockerVersion")] == ["p", "c", "a", "d"]


def test_an_image_has_fields_of_a_container() -> None:
    newest, older = reply(IMAGE_INSPECT, "1.50")["Config"], reply(IMAGE_INSPECT, "1.49")["Config"]
    assert older["Cmd"] == ["sh"] and older["ExposedPorts"] == {"80/tcp": {}}
    names = {"Hostname", "Domainname", "AttachStdin", "AttachStdout", "AttachStderr", "Tty", "OpenStdin", "StdinOnce"}
    assert older.keys() - newest.keys() == names | {"Image"}


def test_created_is_shown_where_it_is_not_known() -> None:
    newest, older = reply(IMAGE_INSPECT, "1.44"), reply(IMAGE_INSPECT, "1.43")
    assert "Created" not in newest and older["Created"] == "0001-01-01T00:00:00Z"
    assert "VirtualSize" not in newest and older["VirtualSize"] == 7


@pytest.mark.parametrize(
    ("flag", "since", "before"),
    [
        (Flag.IMAGE_WITHOUT_MAKER, "1.45", "1.44"),
        (Flag.REFUSED_CREDENTIALS, "1.25", "1.24"),
        (Flag.UNREADABLE_AUTH, "1.25", "1.24"),
        (Flag.IMAGE_IDENTITY, "1.54", "1.53"),
        (Flag.PULL_PLATFORM, "1.32", "1.31"),
        (Flag.PUSH_PLATFORM, "1.46", "1.45"),
        (Flag.IMAGE_PLATFORM, "1.48", "1.47"),
        (Flag.INSPECT_MANIFESTS, "1.48", "1.47"),
        (Flag.INSPECT_PLATFORM, "1.49", "1.48"),
        (Flag.DELETE_PLATFORMS, "1.50", "1.49"),
        (Flag.SHARED_SIZE, "1.42", "1.41"),
        (Flag.IMAGES_WITHOUT_FILTER, "1.41", "1.40"),
    ],
)
def test_behaviour(flag: Flag, since: str, before: str) -> None:
    assert VERSIONS[since].has(flag) and not VERSIONS[before].has(flag)


def test_the_image_list_counts_containers() -> None:
    assert VERSIONS["1.51"].has(Flag.IMAGE_CONTAINERS) and not VERSIONS["1.50"].has(Flag.IMAGE_CONTAINERS)
