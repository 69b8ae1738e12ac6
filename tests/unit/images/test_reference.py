"""Names of images: the grammar, short forms, Docker's messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.images import reference

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "canonical", "familiar"),
    [
        ("busybox", "docker.io/library/busybox", "busybox"),
        ("busybox:1.36", "docker.io/library/busybox:1.36", "busybox:1.36"),
        ("library/busybox", "docker.io/library/busybox", "busybox"),
        ("docker.io/busybox", "docker.io/library/busybox", "busybox"),
        ("index.docker.io/busybox:a", "docker.io/library/busybox:a", "busybox:a"),
        ("user/name", "docker.io/user/name", "user/name"),
        ("a/b/c:t", "docker.io/a/b/c:t", "a/b/c:t"),
        ("library/a/b", "docker.io/library/a/b", "library/a/b"),
        (f"library/{'a1' * 32}", f"docker.io/library/{'a1' * 32}", f"library/{'a1' * 32}"),
        ("docker.io/docker.io/a/b", "docker.io/docker.io/a/b", "docker.io/docker.io/a/b"),
        ("localhost/name", "localhost/name", "localhost/name"),
        ("localhost:5000/name:tag", "localhost:5000/name:tag", "localhost:5000/name:tag"),
        ("quay.io/x/y", "quay.io/x/y", "quay.io/x/y"),
        ("Reg.Example:80/x", "Reg.Example:80/x", "Reg.Example:80/x"),
        ("[fd00::1]:5000/x:y", "[fd00::1]:5000/x:y", "[fd00::1]:5000/x:y"),
        (f"busybox@{DIGEST}", f"docker.io/library/busybox@{DIGEST}", f"busybox@{DIGEST}"),
        (f"busybox:t@{DIGEST}", f"docker.io/library/busybox:t@{DIGEST}", f"busybox:t@{DIGEST}"),
        ("a__b-.".replace("-.", "--c"), "docker.io/library/a__b--c", "a__b--c"),
        ("x:" + "t" * 128, "docker.io/library/x:" + "t" * 128, "x:" + "t" * 128),
    ],
)
def test_forms(text: str, canonical: str, familiar: str) -> None:
    found = reference.parse(text)
    assert (found.canonical, found.familiar) == (canonical, familiar)
    assert reference.parse(familiar) == reference.read(canonical) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid reference format: ''$"),
        ("Busybox", "repository name must be lowercase"),
        ("user/Name:tag", "repository name must be lowercase"),
        ("x:", "invalid reference format"),
        (":x", "invalid reference format"),
        ("x:y:z", "invalid reference format"),
        ("x:" + "t" * 129, "invalid reference format"),
        ("-x", "invalid reference format"),
        ("x..y", "invalid reference format"),
        ("a//b", "invalid reference format"),
        ("/a", "invalid reference format"),
        ("a/", "invalid reference format"),
        ("../x", "invalid reference format"),
        ("x y", "invalid reference format: 'x y'$"),
        ("x\n", "invalid reference format"),
        ("x@sha256:12", "invalid reference format"),
        ("x@sha256:" + "0" * 63, "invalid checksum digest length"),
        ("x@md5:" + "0" * 32, "unsupported digest algorithm"),
        ("f" * 64, "cannot specify 64-byte hexadecimal strings"),
        ("x/" * 130 + "x", "more than 255 characters"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        reference.parse(text)


def test_tags() -> None:
    assert reference.parse("x").tagged().familiar == "x:latest"
    assert reference.parse(f"x@{DIGEST}").tagged().tag == ""
    assert reference.parse(f"x:old@{DIGEST}").tagged() == reference.parse(f"x@{DIGEST}")
    assert reference.with_tag("docker.io/library/x", "").familiar == "x:latest"
    assert reference.with_tag("localhost:5000/x", "y").familiar == "localhost:5000/x:y"
    assert reference.with_tag("x:a", "b").familiar == "x:b"
    for repository, tag in (
        (f"x@{DIGEST}", ""),
        ("x", "bad tag"),
        ("x", "-"),
        ("X", ""),
        ("sha256:abc", ""),
        ("sha256", "a"),
    ):
        with pytest.raises(InvalidParameter):
            reference.with_tag(repository, tag)


@given(st.text(alphabet="aB0.-_/:@[] é", max_size=30))
def test_anything_is_a_name_or_refused(text: str) -> None:
    try:
        found = reference.parse(text)
    except InvalidParameter:
        return
    assert reference.parse(found.familiar) == found == reference.parse(found.canonical)
