"""What one Dockerfile means to BuildKit's protocol and to the classic builder, where they differ.

The values for BuildKit are those of dockerd 28.5, which was given these files. It fetches
frontends.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

import pytest

from tests.support.builds import building, sessions
from tests.support.builds.buildx import Build, Built, dockerfile
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Node, hard_link, tar

pytestmark = pytest.mark.own


def buildx(
    engine: TempEngine, text: str, files: Mapping[str, bytes | sessions.Node] | None = None, **arguments: str
) -> Built:
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


@pytest.mark.parametrize(
    ("names", "owner"), [("none", "0:0"), ("root:none", "0:0"), ("none:7", "0:7"), ("7:none", "7:7")]
)
def test_names_that_the_image_does_not_list(builder: TempEngine, names: str, owner: str) -> None:
    """As in BuildKit they mean root, or the group of the user's number."""
    text = f"FROM busybox\nRUN echo root:x:0:0::/:/bin/sh >/etc/passwd\nCOPY --chown={names} Dockerfile /a\n"
    text += "RUN stat -c %u:%g /a\n"
    assert printed(buildx(builder, text, {"Dockerfile": b""})).decode().split() == [owner]
    with pytest.raises(AssertionError, match=r"unable to find (user|group) none"):
        classic(builder, text)


def test_run_of_nothing(builder: TempEngine) -> None:
    assert classic(builder, "FROM busybox\nRUN []\nLABEL a=b\n")
    with pytest.raises(AssertionError, match="RUN requires at least one argument"):
        classic(builder, "FROM busybox\nRUN\n")
    assert buildx(builder, "FROM busybox\nRUN\n").failure is None
    failed = buildx(builder, "FROM busybox\nRUN []\n")
    assert failed.failure is not None and failed.failure.message == "arguments are required"


def test_what_run_writes_below_a_volume(builder: TempEngine) -> None:
    text = "FROM busybox\nVOLUME /v\nRUN mkdir -p /v && echo data >/v/a\n"
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


def test_arg_and_env_in_their_order(builder: TempEngine) -> None:
    show = "LABEL $X-$Y=\nRUN echo $X $Y\n"
    text = f"FROM busybox AS one\nENV X=e\nARG X=a Y=${{X:?}}b\n{show}"
    assert printed(buildx(builder, text)) == b"a ab\n"
    assert printed(buildx(builder, text, X="given")) == b"given givenb\n"
    assert printed(buildx(builder, f"{text}ENV X=f\n{show}")) == b"f ab\n"
    assert printed(buildx(builder, f"{text}FROM one\n{show}")) == b"e ab\n"
    assert "e eb" in classic(builder, text)
    blank = buildx(builder, f"FROM busybox\nARG X=a Y=${{X:?none}}\n{show}", X="")
    assert blank.failure is not None and "X: none" in blank.failure.message


def test_names_of_steps_have_values(builder: TempEngine) -> None:
    text = (
        'FROM busybox\nARG A=one\nENV B=\'b c\'\nrun echo $A "$B" $NONE ${NONE:-$A} >/dev/null\nWORKDIR "/$B/$NONE"\n'
        "COPY --chown=1:1 f$NONE /$A/\nRUN <<EOF\n: $A\n:\nEOF\nRUN : # ${A^} $A\n"
        "RUN --mount=type=secret,id=s,env=S : $S\n"
    )
    names = [vertex.name for vertex in buildx(builder, text, {"f": b""}).vertices if vertex.name[0:2] == "[s"]
    assert names[1:] == [
        '[stage-0 2/7] RUN echo one "b c" $NONE ${NONE:-one} >/dev/null',
        "[stage-0 3/7] WORKDIR /b c/",
        "[stage-0 4/7] COPY --chown=1:1 f /one/",
        "[stage-0 5/7] RUN <<EOF (: one...)",
        "[stage-0 6/7] RUN : # ${A^} $A",
        "[stage-0 7/7] RUN --mount=type=secret,id=s,env=S : ****",
    ]


def test_what_only_the_classic_builder_says(builder: TempEngine) -> None:
    text = "FROM busybox\nHEALTHCHECK CMD a\nHEALTHCHECK CMD b\n"
    built = buildx(builder, text, UNUSED="x")
    assert [vertex.name for vertex in built.vertices if not vertex.name.startswith("[internal]")] == [
        "[1/1] FROM docker.io/library/busybox:latest",
        "exporting to image",
    ]
    lines = building.build(builder, text, api="v1.40", buildargs='{"UNUSED":"x"}').lines
    assert "[Warning] One or more build-args [UNUSED] were not consumed" in lines
    assert "Note: overriding previous HEALTHCHECK: [CMD-SHELL a]" in lines


def test_the_working_directory_of_scratch(builder: TempEngine) -> None:
    named = {"dockerfile": {"Dockerfile": b"FROM other\n"}, "context": {}, "other": {"f": b""}}
    for built in (
        buildx(builder, "FROM scratch\nCOPY f /\n", {"f": b""}),
        buildx(builder, "FROM scratch\n"),
        Build(builder.socket, named, options={"context:other": "local:other"}).result(),
    ):
        assert builder.request("GET", f"/images/{built.image_id}/json").json()["Config"]["WorkingDir"] == "/"
    built = building.build(builder, "FROM scratch\nCOPY f /\n", {"f": b""})
    assert builder.request("GET", f"/images/{built.id}/json").json()["Config"].get("WorkingDir", "") == ""


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
    for source, words in (("nowhere/*", "nowhere"), ("d/a d/[", "syntax error in pattern: [")):
        failed = buildx(builder, f"FROM busybox\nCOPY {source} /x/\n", {"d/a": b""})
        assert failed.failure is not None and words in failed.failure.message
    error = building.build(builder, "FROM busybox\nCOPY nomatch* /x/\n").error
    assert error is not None and "No source files were specified" in error["error"]


def test_several_sources_without_a_slash_after_the_destination(builder: TempEngine) -> None:
    text = (
        'FROM busybox\nWORKDIR /w\nCOPY a b /w\nCOPY a <<c /file\nhere\nc\nCOPY d a /new\nCOPY ["a", "b", "../json"]\n'
        "RUN cat /w/a /w/b /file /new/a /json && ls /new\n"
    )
    files = {"a": b"of-a\n", "b": b"of-b\n", "d/x": b""}
    assert printed(buildx(builder, text, files)) == b"of-a\nof-b\nhere\nof-a\nof-b\na\nx\n"
    failed = buildx(builder, "FROM busybox\nCOPY a d /x\n", files)
    assert failed.failure is not None and "cannot copy to non-directory: /x" in failed.failure.message
    error = building.build(builder, text, files).error
    assert error is not None and "the destination must be a directory and end with a /" in error["error"]


SOURCES_ABOVE = """\
FROM busybox AS other
RUN mkdir /q && echo of-other >/q/w
FROM busybox
COPY ../k /copy
ADD no/../../k /add
COPY ../d/*.txt /d/
COPY --parents ../d/./../../a.txt /parents/
COPY --from=other ../q/w /other
COPY <<../../h <</i <<j[1] /h/
h
../../h
i
/i
j
j[1]
RUN --mount=type=bind,source=../link/../k,target=/m cat /m
RUN --mount=from=other,source=../q/../q,target=/m cat /m/w
RUN --mount=type=cache,from=other,source=../q,target=/m cat /m/w
RUN cat /copy /add /d/a.txt /parents/a.txt /other /h/h /h/i /h/j[1]
"""


def test_sources_above_the_root_of_their_tree(builder: TempEngine) -> None:
    """They begin at the root. Links lead nowhere else either. The classic builder refuses them."""
    files = {"k": b"of-k\n", "d/a.txt": b"of-a\n", "link/x": b"", ".dockerignore": b"no\n"}
    built = buildx(builder, SOURCES_ABOVE, files)
    assert printed(built) == b"of-k\nof-k\nof-a\nof-a\nof-other\nh\ni\nj\n"
    logs = [vertex.log for vertex in built.vertices if "RUN --mount" in vertex.name]
    assert logs == [b"of-k\n", b"of-other\n", b"of-other\n"]
    for line in ("COPY ../k /", "ADD d/../../k /", "COPY --from=other ../q /", "RUN --mount=source=../k,target=/m ls"):
        text = f"FROM busybox AS other\nFROM busybox\n{line}\n"
        error = building.build(builder, text, files).error
        assert error is not None and "Forbidden path outside the build context: " in error["error"]


def test_links_that_lead_above_the_root_of_their_tree(builder: TempEngine) -> None:
    text = "FROM busybox\nCOPY ../up/k /copy\nRUN --mount=source=../up/up/k,target=/m cat /m /copy\n"
    files = {"k": b"of-k\n", "up": sessions.Node(mode=sessions.LINK | 0o777, target="../../..")}
    assert printed(buildx(builder, text, files)) == b"of-k\nof-k\n"


def test_add_of_a_file_an_archive_and_a_link_to_the_file(builder: TempEngine) -> None:
    text = "FROM busybox\nADD b a.tar c /dst/\nRUN cat /dst/b /dst/c; echo\n"
    nodes = (Node("b", b"own"), hard_link("c", "b"), Node("a.tar", tar([Node("b", b"archive")])))
    assert "archiveown" in classic(builder, text, {node.name: node for node in nodes})
