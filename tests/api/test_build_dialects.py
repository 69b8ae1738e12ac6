"""What one Dockerfile means to BuildKit's protocol and to the classic builder, where they differ.

The values for BuildKit are read from its sources, and were not compared with a running one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

import pytest

from tests.support.builds import building
from tests.support.builds.buildx import Build, Built, dockerfile
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Node, hard_link, tar

pytestmark = pytest.mark.own


def buildx(engine: TempEngine, text: str, files: Mapping[str, bytes] | None = None, **arguments: str) -> Built:
    """A build by BuildKit's protocol, of steps that nothing has in its cache."""
    text = re.sub(r"^(FROM .*)", rf"\1\nLABEL unique={secrets.token_hex(8)}", text, count=1, flags=re.M)
    options = {f"build-arg:{name}": value for name, value in arguments.items()}
    return Build(engine.socket, dockerfile(text, **(files or {})), options=options).result()


def classic(engine: TempEngine, text: str, files: Mapping[str, bytes | Node] | None = None) -> list[str]:
    """The lines of a build by POST /build."""
    built = building.build(engine, text, files, nocache=1, networkmode="none")
    assert built.error is None, built.objects
    return built.lines


def printed(built: Built) -> bytes:
    """The output of the last RUN."""
    assert built.failure is None, built.failure
    return [vertex.log for vertex in built.vertices if "RUN" in vertex.name][-1]


OWNERS = "RUN stat -c %u:%g /a /a/b /a/b/c\n"


@pytest.mark.parametrize(
    ("user", "owner"),
    [("1000", "1000:1000"), ("5:6", "5:6"), ("www-data", "33:33"), ("www-data:7", "33:7"), ("0:www-data", "0:33")],
)
def test_workdir_belongs_to_the_user(builder: TempEngine, user: str, owner: str) -> None:
    names = "RUN echo www-data:x:33: >/etc/group; echo www-data:x:33:33::/:/bin/sh >/etc/passwd\n"
    text = f"FROM busybox\n{names}USER {user}\nWORKDIR /a/b\nWORKDIR c/\n{OWNERS}"
    assert printed(buildx(builder, text)).decode().split() == [owner] * 3
    assert classic(builder, text).count("0:0") == 3


def test_workdir_before_a_user_is_known(builder: TempEngine) -> None:
    """`USER app` before the RUN that adds it: the directory is root's."""
    built = buildx(builder, "FROM busybox\nUSER nobody-here\nWORKDIR /a/b/c\nUSER 0\n" + OWNERS)
    assert printed(built).split() == [b"0:0"] * 3
    failed = buildx(builder, "FROM busybox\nCOPY --chown=nobody-here Dockerfile /\n", {"Dockerfile": b""})
    assert failed.failure is not None and "unable to find user nobody-here" in failed.failure.message


def test_what_run_writes_below_a_volume(builder: TempEngine) -> None:
    text = "FROM busybox\nVOLUME /v\nRUN []\nRUN mkdir -p /v && echo data >/v/a\n"
    text += "RUN cat /v/a 2>/dev/null || echo nothing\n"
    assert printed(buildx(builder, text)) == b"data\n"
    assert "nothing" in classic(builder, text)


def test_a_volume_that_the_image_lacks(builder: TempEngine) -> None:
    """In the classic builder a volume is mounted there, whose mount point stays."""
    look = "stat -c '%n %u %a' /a /a/nd; ls -A /a/nd"
    text = f"FROM busybox\nVOLUME /a/nd /etc\nRUN chown 5 /a/nd && touch /a/nd/x && {look}\nRUN echo again; {look}\n"
    first, second = "\n".join(classic(builder, text)).split("\nagain\n")
    assert "/a 0 755\n/a/nd 5 755\nx\n" in first
    assert second.startswith("/a 0 755\n/a/nd 0 755\n") and "x\n" not in second
    failed = buildx(builder, text)
    assert failed.failure is not None and failed.vertices[-1].errors.startswith(b"chown: /a/nd: No such file")


def test_proxies_under_both_spellings(builder: TempEngine) -> None:
    text = "FROM busybox\nENV no_proxy=z\nRUN env | grep -i _proxy | sort\n"
    lines = printed(buildx(builder, text, HTTP_PROXY="p", no_proxy="q")).decode().split()
    assert lines == ["HTTP_PROXY=p", "NO_PROXY=q", "http_proxy=p", "no_proxy=q"]


def test_an_argument_keeps_its_value(builder: TempEngine) -> None:
    text = "FROM busybox AS one\nARG V=1\nRUN true\nARG V\nRUN echo -$V-\n"
    assert printed(buildx(builder, text)) == b"-1-\n"
    assert printed(buildx(builder, text + "FROM one\nARG V\nRUN echo child -$V-\n")) == b"child -1-\n"
    assert printed(buildx(builder, text + "FROM one\nRUN echo child -$V-\n")) == b"child -1-\n"
    assert "--" in classic(builder, text)
    assert "child --" in classic(builder, text + "FROM one\nRUN echo child -$V-\n")


def test_a_cache_of_another_owner_is_another_cache(builder: TempEngine) -> None:
    name = secrets.token_hex(8)
    text = (
        f"FROM busybox\nRUN --mount=type=cache,id={name},target=/c touch /c/root\nUSER 1000\n"
        f"RUN --mount=type=cache,id={name},target=/c,uid=1000 touch /c/own && ls /c\n"
    )
    assert printed(buildx(builder, text)) == b"own\n"
    text = f"FROM busybox\nRUN --mount=type=cache,id={name},target=/c,mode=755,uid=0 ls /c\n"
    assert printed(buildx(builder, text)) == b"root\n"


def test_mounts_without_a_target(builder: TempEngine) -> None:
    """They are at the working directory, which cannot be the root."""
    name = secrets.token_hex(8)
    text = (
        f"FROM busybox AS s\nRUN mkdir /s && echo of-s >/s/f\nFROM busybox\nWORKDIR /w\nRUN --mount=type=bind ls\n"
        f"RUN --mount=type=cache,id={name} touch f\nRUN --mount=type=cache,id={name} ls\n"
        "RUN --mount=from=s,source=/s cat f\n"
    )
    built = buildx(builder, text, {"here": b""})
    assert printed(built) == b"of-s\n"
    logs = [vertex.log for vertex in built.vertices if "RUN --mount" in vertex.name]
    assert logs == [b"Dockerfile\nhere\n", b"", b"f\n", b"of-s\n"]
    refused = buildx(builder, "FROM busybox\nRUN --mount=type=bind ls\n")
    assert refused.failure is not None and 'invalid mount target "/"' in refused.failure.message


@pytest.mark.parametrize("frontend", ["mirror.gcr.io/docker/dockerfile:1", "registry.corp/docker/dockerfile:1.4"])
def test_mirrors_of_the_frontend(builder: TempEngine, frontend: str) -> None:
    assert buildx(builder, f"# syntax={frontend}\nFROM busybox\nRUN true\n").failure is None


def test_frontends_mean_nothing_to_the_classic_builder(builder: TempEngine) -> None:
    assert classic(builder, "# syntax=my/frontend:1\nFROM busybox\nLABEL a=b\n")


def test_copy_keeps_the_kinds_of_what_is_there(builder: TempEngine) -> None:
    base = "FROM busybox\nRUN mkdir /real /d && ln -s real /link && touch /file\n"
    for path, words in (
        ("link/x", "cannot copy to non-directory: /link"),
        ("file/x", "cannot copy to non-directory: /file"),
        ("d", "cannot replace to directory /d with file"),
    ):
        failed = buildx(builder, f"{base}COPY root /\n", {f"root/{path}": b""})
        assert failed.failure is not None and words in failed.failure.message
        assert classic(builder, f"{base}COPY root /\n", {f"root/{path}": b""})
    assert buildx(builder, f"{base}COPY root /\n", {"root/real/x": b"", "root/file": b""}).failure is None


def test_wildcards_that_match_nothing(builder: TempEngine) -> None:
    text = "FROM busybox\nCOPY nomatch* /x/\nADD d/*.none e*/x /x/\nRUN ls /x || echo nothing\n"
    assert printed(buildx(builder, text, {"d/a": b""})) == b"nothing\n"
    failed = buildx(builder, "FROM busybox\nCOPY nowhere/* /x/\n", {"d/a": b""})
    assert failed.failure is not None and "nowhere" in failed.failure.message
    error = building.build(builder, "FROM busybox\nCOPY nomatch* /x/\n").error
    assert error is not None and "No source files were specified" in error["error"]


def test_add_of_a_file_an_archive_and_a_link_to_the_file(builder: TempEngine) -> None:
    text = "FROM busybox\nADD b a.tar c /dst/\nRUN cat /dst/b /dst/c; echo\n"
    nodes = (Node("b", b"own"), hard_link("c", "b"), Node("a.tar", tar([Node("b", b"archive")])))
    assert "archiveown" in classic(builder, text, {node.name: node for node in nodes})
