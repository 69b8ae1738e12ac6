"""POST /grpc: builds as buildx makes them, and sessions of clients in builds."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support import PATIENCE
from tests.support.builds import building, sessions
from tests.support.builds.buildx import BRIDGE, CONTROL, Build, Built, dockerfile, shown, web_file
from tests.support.builds.repositories import Repository, smart
from tests.support.builds.sessions import Caller, Failure, Node, every, field, fields
from tests.support.builds.web import served
from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until
from tests.support.images import archives
from tests.support.images.registry import PASSWORD, USER, Registry

pytestmark = pytest.mark.own


def build(engine: TempEngine, text: str, **given: object) -> Built:
    """A build of one Dockerfile."""
    return Build(engine.socket, dockerfile(text), **given).result()  # type: ignore[arg-type]


def unique() -> str:
    """A word that no step of another test has in its cache key."""
    return secrets.token_hex(8)


# --- the image ------------------------------------------------------------------------------------


def test_a_build(builder: TempEngine) -> None:
    word = unique()
    text = f'FROM busybox\nARG X=no\nCOPY a sub/ /data/\nRUN echo {word} $X; echo problem >&2\nCMD ["cat", "/data/a"]\n'
    files = {"a": b"content", "sub": Node(mode=sessions.DIRECTORY | 0o755), "sub/b": b"b", "ignored": b"x" * 1000}
    directories = {
        "dockerfile": {"Dockerfile": text.encode()},
        "context": {".dockerignore": b"# no\n/ignored\n", "Dockerfile": b"FROM other\n", **files},
    }
    options = {"filename": "Dockerfile", "build-arg:X": "yes", "label:a": "b"}
    built = Build(builder.socket, directories, names="one:1,two", options=options).result()
    tags = "docker.io/library/one:1,docker.io/library/two"
    digest = built.image_id
    assert built.response == {
        "containerimage.digest": digest,
        "containerimage.config.digest": digest,
        "image.name": tags,
    }
    image = builder.request("GET", "/v1.24/images/one:1/json").json()
    assert image["Id"] == digest and image["Config"]["Labels"] == {"a": "b"}
    assert builder.request("GET", "/v1.24/images/two/json").json()["Id"] == digest
    names = [vertex.name for vertex in built.vertices]
    assert names[:5] == [
        "[internal] load build definition from Dockerfile",
        "[internal] load metadata for docker.io/library/busybox:latest",
        "[internal] load .dockerignore",
        "[internal] load build context",
        "[1/3] FROM docker.io/library/busybox:latest",
    ]
    assert all(vertex.done and not vertex.error for vertex in built.vertices)
    run = built.vertex(f"[3/3] RUN echo {word} yes; echo problem >&2")
    assert (run.log, run.errors, run.cached) == (f"{word} yes\n".encode(), b"problem\n", False)
    exported = built.vertex("exporting to image").statuses
    assert exported == {"exporting layers": True, f"writing image {digest}": True} | {
        f"naming to {tag}": True for tag in tags.split(",")
    }
    assert builder.docker("run", "--rm", "one:1").out == "content"
    assert builder.docker("run", "--rm", "one:1", "ls", "/data").out.split() == ["a", "b"]

    again = Build(builder.socket, directories, options=options).result()
    assert again.image_id == digest and again.vertex(run.name).cached
    assert "image.name" not in again.response


def sent(built: Built) -> int:
    """Bytes of the context that the client was asked for, as a tar archive has them."""
    (status,) = [each for each in built.vertex("[internal] load build context").statuses if ": " in each]
    size, unit = re.fullmatch(r"transferring context: ([0-9.]+)(B|kB|MB)", status).groups()  # type: ignore[union-attr]
    return int(float(size) * {"B": 1, "kB": 1000, "MB": 1000_000}[unit])


def test_only_what_a_build_reads_is_sent(builder: TempEngine) -> None:
    word = unique()
    files = {"a": b"a", "big": bytes(1 << 20), "sub": Node(mode=sessions.DIRECTORY | 0o755), "sub/b.c": b"b"}

    def build_of(text: str) -> Built:
        built = Build(builder.socket, {"dockerfile": {"Dockerfile": text.encode()}, "context": files}).result()
        assert built.failure is None, built.failure
        return built

    assert sent(build_of(f"FROM busybox\nCOPY a sub/*.c /{word}/")) < 10_000
    assert sent(build_of(f"FROM busybox\nCOPY . /{word}/")) > 1 << 20
    assert sent(build_of("FROM busybox\nRUN --mount=source=sub,target=/s cat /s/b.c")) < 10_000
    # of an unused stage nothing is sent, and without files there is no transfer
    unread = build_of(f"FROM busybox AS unused\nCOPY . /\nFROM busybox\nRUN echo {word}")
    assert "[internal] load build context" not in [vertex.name for vertex in unread.vertices]
    missing = Build(builder.socket, dockerfile("FROM busybox\nCOPY none /")).result()
    assert missing.failure is not None and "file not found in build context" in missing.failure.message


def test_the_triggers_of_a_base_say_what_is_sent(builder: TempEngine) -> None:
    base = f"{unique()}:1"
    Build(builder.socket, dockerfile("FROM busybox\nONBUILD COPY a /a\nENV PLACE=sub"), names=base).result()
    files = {"a": b"a", "big": bytes(1 << 20), "sub": Node(mode=sessions.DIRECTORY | 0o755), "sub/b": b"b"}
    text = f"FROM {base}\nCOPY $PLACE /b\nRUN cat /a /b/b"
    built = Build(builder.socket, {"dockerfile": {"Dockerfile": text.encode()}, "context": files}).result()
    assert built.failure is None and sent(built) < 10_000


def test_triggers_and_images_of_files_have_lines(builder: TempEngine) -> None:
    """Counted as BuildKit counts them: every trigger, whether it has a line or not."""
    base, other = f"{unique()}:1", f"{unique()}:1"
    triggers = "ONBUILD ARG X\nONBUILD WORKDIR /w\nONBUILD RUN echo $X >x\n"
    build(builder, f"FROM busybox\n{triggers}", names=base)
    build(builder, f"FROM busybox\nRUN echo {other} >/other", names=other)
    text = f"FROM {base}\nCOPY --from={other} /other /\nCOPY --from={other} /other /again\nRUN cat /other"
    built = build(builder, text)
    assert built.failure is None, built.failure
    names = [vertex.name for vertex in built.vertices if not vertex.name.startswith("[internal]")]
    assert sorted(names) == [
        f"FROM docker.io/library/{other}",
        f"[stage-0 1/4] FROM docker.io/library/{base}",
        "[stage-0 2/7] ONBUILD WORKDIR /w",
        "[stage-0 3/7] ONBUILD RUN echo $X >x",
        f"[stage-0 4/7] COPY --from={other} /other /",
        f"[stage-0 5/7] COPY --from={other} /other /again",
        "[stage-0 6/7] RUN cat /other",
        "exporting to image",
    ]
    assert all(vertex.done and not vertex.error for vertex in built.vertices)


def test_the_history_has_the_words_of_buildkit(builder: TempEngine) -> None:
    name = f"{unique()}:1"
    text = "FROM busybox\nARG A B=2\nENV A=x\nCOPY --chmod=0600 f g /d/\nRUN echo $B >/b\nEXPOSE 80-81\nCMD a\n"
    build_args = {"build-arg:A": "1"}
    built = Build(builder.socket, dockerfile(text, f=b"", g=b""), names=name, options=build_args).result()
    assert built.failure is None, built.failure
    steps = builder.request("GET", f"/v1.51/images/{name}/history").json()[:6]
    assert [step["CreatedBy"] for step in reversed(steps)] == [
        "ARG A=1 B=2",
        "ENV A=x",
        "COPY --chmod=0600 f g /d/ # buildkit",
        "RUN |2 A=x B=2 /bin/sh -c echo $B >/b # buildkit",
        "EXPOSE [80/tcp 81/tcp]",
        'CMD ["/bin/sh" "-c" "a"]',
    ]
    assert {step["Comment"] for step in steps} == {"buildkit.dockerfile.v0"}
    assert builder.request("GET", f"/v1.51/images/{name}/json").json()["Config"]["ArgsEscaped"] is True


def test_a_name_that_is_not_utf_8(builder: TempEngine) -> None:
    name = f"{unique()}:1"
    directories = {"dockerfile": {"Dockerfile": b"FROM busybox\nCOPY n\xff /x\n"}, "context": {"n\udcff": b"1"}}
    built = Build(builder.socket, directories, names=name, options={"filename": "Dockerfile"}).result()
    assert built.failure is None, built.failure
    history = builder.request("GET", f"/v1.51/images/{name}/history").json()
    assert history[0]["CreatedBy"] == "COPY n\ufffd /x # buildkit"


def test_the_history_has_no_words_of_other_builds(builder: TempEngine) -> None:
    """Values of arguments may be secrets of the build that made a step of the same result."""
    text = f"FROM busybox\nLABEL one={unique()}\nARG A\nARG B=1\nCOPY FILE /x\n"

    def made(file: str, arguments: dict[str, str]) -> list[str]:
        name = f"{unique()}:1"
        options = {f"build-arg:{key}": value for key, value in arguments.items()}
        given = dockerfile(text.replace("FILE", file), f=b"", g=b"")
        assert Build(builder.socket, given, names=name, options=options).result().failure is None
        steps = builder.request("GET", f"/v1.51/images/{name}/history").json()[:3]
        return [step["CreatedBy"] for step in reversed(steps)]

    assert made("f", {"A": "secret"}) == ["ARG A=secret", "ARG B=1", "COPY f /x # buildkit"]
    assert made("f", {"B": "2"}) == ["ARG A", "ARG B=2", "COPY f /x # buildkit"]
    assert made("g", {"B": "2"}) == ["ARG A", "ARG B=2", "COPY g /x # buildkit"]


def test_older_clients_name_the_frontend_in_solve(builder: TempEngine) -> None:
    built = build(builder, f"FROM busybox\nRUN echo {unique()}\n", direct=True, names="old")
    assert builder.request("GET", "/v1.24/images/old/json").json()["Id"] == built.image_id


def test_a_dockerfile_beside_the_context_with_its_own_ignore_file(builder: TempEngine) -> None:
    text = b"FROM busybox\nCOPY . /x\nRUN ls -A /x\n"
    directories = {
        "dockerfile": {
            "d/My.file": Node(mode=sessions.LINK | 0o777, target="../real"),
            "real": text,
            "d/My.file.dockerignore": b"b\n",
        },
        "context": {"a": unique().encode(), "b": b"", ".dockerignore": b"a\n"},
    }
    # the client follows links of the paths that it is asked for
    followed = {**directories["dockerfile"], "d/My.file": text}
    built = Build(builder.socket, directories | {"dockerfile": followed}, options={"filename": "d/My.file"}).result()
    assert built.vertex("[3/3] RUN ls -A /x").log == b".dockerignore\na\n"


def test_an_uploaded_archive(builder: TempEngine) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in {"Dockerfile": b"FROM busybox\nCOPY a /\nRUN cat a\n", "a": unique().encode()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))

    def pull(call: sessions.Call) -> None:
        assert call.values("urlpath") == ["/the-id"] and call.values("urlhost") == ["buildkit-session"]
        for begin in range(0, len(content.getvalue()), 100):
            call.send(field(1, content.getvalue()[begin : begin + 100]))

    built = build(
        builder,
        "",
        options={"context": "http://buildkit-session/the-id", "filename": "Dockerfile"},
        services={"/moby.upload.v1.Upload/Pull": pull},
    )
    assert built.failure is None and built.vertex("[3/3] RUN cat a").log != b""


def test_named_contexts(builder: TempEngine) -> None:
    """They stand for images in FROM and in the `from` of COPY and RUN."""
    word = unique()
    text = "FROM base\nCOPY --from=Extra a /\nRUN --mount=from=extra,target=/m cat /a; ls -A /m\n"
    directories = {
        "dockerfile": {"Dockerfile": text.encode()},
        "context": {},
        "extra": {"a": word.encode(), "b": b"", "c": b"", ".dockerignore": b"b\n"},
    }
    options = {"context:base": "docker-image://docker.io/library/busybox", "context:extra": "local:extra"}
    for cached in (False, True):
        built = Build(builder.socket, directories, options=options).result()
        assert built.image_id and built.vertices[-2].cached is cached, built
        assert cached or built.vertices[-2].log == f"{word}.dockerignore\na\nc\n".encode()
    missing = Build(builder.socket, dockerfile("FROM x\n"), options={"context:x": "local:x"}).result()
    assert missing.failure is not None and "no access allowed to dir x" in missing.failure.message


@pytest.mark.parametrize(
    ("text", "loaded"),
    [
        ("FROM busybox\nRUNX\n", False),
        ("FROM extra\nRUN --network=host true\n", False),
        ("FROM busybox AS one\nCOPY --from=extra / /\nFROM busybox\nRUN true\n", False),
        ("FROM busybox AS one\nONBUILD COPY --from=extra / /\nFROM one\n", True),
    ],
)
def test_a_named_context_is_loaded_for_a_valid_file_that_uses_it(builder: TempEngine, text: str, loaded: bool) -> None:
    built = Build(
        builder.socket, {**dockerfile(text), "extra": {"a": b""}}, options={"context:extra": "local:extra"}
    ).result()
    assert ("[context extra] load from client" in [vertex.name for vertex in built.vertices]) is loaded


def test_a_trigger_uses_a_stage_that_reads_the_context(builder: TempEngine) -> None:
    base = f"trigger-{unique()}"
    assert build(builder, "FROM busybox\nONBUILD COPY --from=files /a /b\n", names=base).image_id
    text = f"FROM busybox AS files\nCOPY a /a\nFROM {base}\nCOPY c /c\nRUN cat /b /c\n"
    built = Build(builder.socket, dockerfile(text, a=b"A", c=b"C")).result()
    assert built.failure is None and built.vertices[-2].log == b"AC"


def test_named_contexts_in_place_of_stages(builder: TempEngine) -> None:
    """The stage's own instructions are not run. `scratch` is the empty root."""
    text = (
        "FROM busybox AS Extra\nRUN exit 3\nFROM busybox AS empty\nRUN exit 4\n"
        f"FROM extra AS other\nFROM busybox\nCOPY --from=extra b /a\nCOPY --from=other a /b\n"
        f"RUN --mount=from=empty,target=/m : {unique()}; ls -A /m; cat a b\n"
    )
    options = {"context:extra": "local:extra", "context:empty": "docker-image://scratch"}
    directories = dockerfile(text) | {"extra": {"a": b"A", "b": b"B"}}
    built = Build(builder.socket, directories, options=options).result()
    assert built.failure is None and built.vertices[-2].log == b"BA", built
    options["context:extra"] = "docker-image://busybox"
    text = f"FROM empty\nCOPY Dockerfile /\nFROM busybox AS extra\nRUN exit 5\nFROM extra\nRUN : {unique()}\n"
    assert Build(builder.socket, dockerfile(text), options=options).result().image_id


def test_an_image_layout_of_the_client(builder: TempEngine) -> None:
    word = unique()
    made = build(builder, f"FROM busybox\nRUN echo {word} >/word\n", names="laid").image_id
    saved = builder.request("GET", "/v1.24/images/laid/get").body
    assert builder.request("DELETE", "/v1.24/images/laid").status == 200
    with tarfile.open(fileobj=io.BytesIO(saved)) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        contents = {name: file.read() for name, file in files.items() if file is not None}
    blobs = {f"sha256:{name[13:]}": content for name, content in contents.items() if name.startswith("blobs/sha256/")}
    index = contents["index.json"]
    blobs[f"sha256:{hashlib.sha256(index).hexdigest()}"] = index
    for digest in (f"sha256:{hashlib.sha256(index).hexdigest()}", json.loads(index)["manifests"][0]["digest"]):
        built = build(
            builder,
            f"FROM base\nRUN : {unique()}; cat /word\n",
            options={"context:base": f"oci-layout://store:latest@{digest}"},
            services=sessions.of_layout("store", blobs),
        )
        assert built.failure is None and built.vertices[-2].log == f"{word}\n".encode(), built
    image = builder.request("GET", f"/v1.24/images/{built.image_id}/json").json()
    assert image["RootFS"]["Layers"][:2] and builder.request("GET", f"/v1.24/images/{made}/json").status == 200
    manifest = json.loads(index)["manifests"][0]["digest"]
    for change, words in (({manifest: b"{}"}, "does not match its digest"), ({"x": b""}, "not found")):
        known = {manifest: blobs[manifest], **change} if "x" not in change else {"x": b""}
        refused = build(
            builder,
            "FROM base\n",
            options={"context:base": f"oci-layout://store@{manifest}"},
            services=sessions.of_layout("store", known),
        )
        assert refused.failure is not None and words in refused.failure.message


def test_files_of_a_repository_and_the_client_s_dockerfile(builder: TempEngine, tmp_path: Path) -> None:
    word = unique()
    for name, objects in (("r", "sha1"), ("s", "sha256")):
        repository = Repository(tmp_path, name, objects=objects)
        repository.commit({"Dockerfile": b"FROM nothing\n", "a": word.encode(), "b": b"", ".dockerignore": b"b\n"})
    text = "FROM busybox\nCOPY . /x\nCOPY --from=extra a /y\nRUN ls /x; cat /x/a /y\n"
    with smart(tmp_path) as url:
        options = {"context": f"{url}/r.git", "dockerfilekey": "dockerfile", "context:extra": f"{url}/s.git"}
        built = Build(builder.socket, {"dockerfile": {"Dockerfile": text.encode()}}, options=options).result()
    assert built.failure is None, built
    assert built.vertex("[stage-0 4/4] RUN ls /x; cat /x/a /y").log == f"Dockerfile\na\n{word}{word}".encode()


def test_a_build_that_begins_with_the_result_of_another(builder: TempEngine) -> None:
    """As `target:` in bake files: the client gives a definition of the result back as an input."""
    word = unique()
    base = Build(builder.socket, dockerfile(f"FROM busybox\nRUN echo {word} >/word\n"), names="base-of", finish=False)
    text = "FROM mine\nCOPY --from=mine /word /again\nRUN cat /again\n"
    given: dict[str, Any] = {"options": {"context:mine": "input:one"}, "inputs": {"one": base.definition}}
    built = build(builder, text, **given)  # builds the other one, as a part of that build
    assert built.vertex("[stage-0 3/3] RUN cat /again").log == f"{word}\n".encode()
    base.evaluate()
    base.finish()
    ended = base.result()
    assert [vertex.name for vertex in ended.vertices].count(f"[2/2] RUN echo {word} >/word") == 1
    assert builder.request("GET", "/v1.24/images/base-of/json").json()["Id"] == ended.image_id
    later = build(builder, text, **given)  # although that build has ended
    assert later.image_id == built.image_id


def test_a_build_that_begins_with_a_result_in_the_making(own_engine: TempEngine) -> None:
    """Nothing of the cache stays in use: prunes leave what is."""
    own_engine.load_busybox()
    base = Build(own_engine.socket, dockerfile(f"FROM busybox\nRUN : {unique()}; sleep 3\n"))
    until("it runs", lambda: own_engine.request("GET", "/v1.24/containers/json").json())
    given: dict[str, Any] = {"options": {"context:mine": "input:one"}, "inputs": {"one": base.definition}}
    built = build(own_engine, "FROM mine\n", **given)
    assert base.result().failure is None and built.failure is None
    records = own_engine.request("GET", "/v1.45/system/df?type=build-cache").json()["BuildCache"]
    assert records and [record["Description"] for record in records if record["InUse"]] == []


def test_a_build_whose_input_fails_or_ends(builder: TempEngine) -> None:
    base = Build(builder.socket, dockerfile(f"FROM busybox\nRUN echo {unique()}; exit 7\n"), finish=False)
    given: dict[str, Any] = {"options": {"context:mine": "input:one"}, "inputs": {"one": base.definition}}
    built = build(builder, "FROM mine\n", **given)
    assert built.failure is not None and built.failure.message.endswith("exit code: 7")
    with pytest.raises(Failure, match="exit code: 7"):
        base.evaluate()
    base.finish()
    ended = base.result().failure
    assert ended is not None and ended.message == built.failure.message

    base = Build(builder.socket, dockerfile(f"FROM busybox\nRUN echo {unique()}; sleep 1000\n"), finish=False)
    given["inputs"] = {"one": base.definition}
    waits = Build(builder.socket, dockerfile("FROM mine\n"), **given)
    until("it runs", lambda: builder.request("GET", "/v1.24/containers/json").json())
    base.solving.cancel()
    failure = waits.result().failure
    assert failure is not None and failure.message == "the build that makes an input was cancelled"
    again = build(builder, "FROM mine\n", **given).failure
    assert again is not None and ("cancelled" in again.message or "has ended without an image" in again.message)
    base.result()
    assert builder.request("GET", "/v1.24/containers/json?all=1").json() == []


def test_many_files(builder: TempEngine) -> None:
    files = {f"d{number % 20}/{number}": os.urandom(number % 5000) for number in range(1000)}
    directories = {
        "dockerfile": {"Dockerfile": b"FROM busybox\nCOPY . /x\nRUN cat /x/*/* | md5sum\n"},
        "context": files,
    }
    first = Build(builder.socket, directories).result()
    assert first.image_id
    second = Build(builder.socket, directories).result()
    assert second.image_id == first.image_id


# --- files of an image ----------------------------------------------------------------------------

FILES = (
    "FROM busybox AS made\nRUN mkdir -p /o/d && echo x >/o/d/f && ln /o/d/f /o/hard && ln -s d /o/link "
    "&& touch /o/d-x && head -c 3000000 /dev/zero >/o/large && chmod 4755 /o/d/f\n"
    "FROM scratch\nCOPY --from=made /o /\nCOPY a /a\n"
)


def test_files_of_an_image_in_a_directory(builder: TempEngine) -> None:
    received = sessions.Received()
    services = sessions.of_results(received, archive=False)
    built = Build(builder.socket, dockerfile(FILES, a=b"last"), exporter="local", services=services).result()
    assert built.failure is None and built.response == {}
    assert built.vertex("exporting to client directory").done
    assert received.files == {
        "a": (0o644, b"last", ""),
        "d": (0o755 | sessions.DIRECTORY, b"", ""),
        "d/f": (0o755 | 1 << 23, b"x\n", ""),
        "d-x": (0o644, b"", ""),
        "hard": (0o755 | 1 << 23, b"", "d/f"),
        "large": (0o644, bytes(3_000_000), ""),
        "link": (0o777 | sessions.LINK, b"", "d"),
    }
    assert list(received.files) == ["a", "d", "d/f", "d-x", "hard", "large", "link"]


def test_a_prune_while_files_are_exported(own_engine: TempEngine) -> None:
    """The image has no name, and its files are still being read."""
    own_engine.load_busybox()
    received = sessions.Received()
    (take,) = sessions.of_results(received, archive=False).values()

    def prune_first(call: sessions.Call) -> None:
        for path in ("build/prune?all=1", "images/prune"):
            assert own_engine.request("POST", f"/v1.45/{path}").status == 200
        take(call)

    given = {"exporter": "local", "services": {sessions.FILE_SEND: prune_first}}
    built = build(own_engine, f"FROM scratch\nCOPY --from=busybox /bin/busybox /{unique()}", **given)
    assert built.failure is None and len(received.files) == 1
    own_engine.request("POST", "/v1.45/build/prune?all=1")
    with Caller(own_engine.socket) as caller:
        assert caller.ask(f"{CONTROL}DiskUsage", b"") == b"", "nothing holds it after the build"


def test_files_of_an_image_as_an_archive(builder: TempEngine) -> None:
    received = sessions.Received()
    services = sessions.of_results(received, archive=True)
    built = Build(builder.socket, dockerfile(FILES, a=b"last"), exporter="tar", services=services).result()
    assert built.failure is None and built.vertex("exporting to client tarball").done
    with tarfile.open(fileobj=io.BytesIO(received.archive)) as archive:
        members = {member.name: member for member in archive}
        assert list(members) == ["a", "d", "d/f", "d-x", "hard", "large", "link"]
        assert members["large"].size == 3_000_000 and members["d/f"].mode == 0o4755
        content = archive.extractfile("hard")
        assert content is not None and content.read() == b"x\n"


def test_several_exporters(builder: TempEngine) -> None:
    """A client that takes files knows each exporter by its place."""
    files, archive = sessions.Received(), sessions.Received()
    (path, take_files), (_, take_archive) = (
        *sessions.of_results(files, archive=False).items(),
        *sessions.of_results(archive, archive=True).items(),
    )

    def take(call: sessions.Call) -> None:
        (number,) = call.values("buildkit-attachable-exporter-id")
        {"0": take_files, "2": take_archive}[number](call)

    text = f"FROM scratch\nCOPY a /{unique()}\n"
    built = Build(
        builder.socket,
        dockerfile(text, a=b"x"),
        exporters=("local", "moby", "tar"),
        names="both",
        services={path: take},
    ).result()
    assert builder.request("GET", "/v1.24/images/both/json").json()["Id"] == built.image_id
    assert len(files.files) == 1 and archive.archive


def test_a_build_that_exports_no_image_leaves_none(builder: TempEngine) -> None:
    """The cache has its steps. A build that takes its result as input finds it."""
    word = unique()
    text = f"FROM busybox AS a\nRUN echo {word} >/word\nFROM a\nLABEL a=b\n"
    before = builder.request("GET", "/v1.24/images/json?all=1").json()
    for cached in (False, True):
        first = Build(builder.socket, dockerfile(text), exporters=(), finish=False)
        if cached:
            first.finish()
            assert first.result().failure is None
        else:
            first.evaluate()
            options = {"context:base": "input:one", "input-metadata:one": "{}"}
            second = Build(
                builder.socket,
                dockerfile("FROM base\nRUN cat /word\n"),
                options=options,
                inputs={"one": first.definition},
                exporters=(),
                finish=False,
            )
            first.finish()
            assert first.result().failure is None
            second.finish()
            assert second.result().failure is None
        assert builder.request("GET", "/v1.24/images/json?all=1").json() == before


def test_a_file_system_for_another_system(builder: TempEngine) -> None:
    received = sessions.Received()
    text = (
        "FROM --platform=$BUILDPLATFORM busybox AS make\nARG TARGETOS TARGETARCH\n"
        "RUN echo $TARGETOS/$TARGETARCH >/out\nFROM scratch\nCOPY --from=make /out /\n"
    )
    options = {"platform": "darwin/arm64"}
    services = sessions.of_results(received, archive=False)
    built = Build(builder.socket, dockerfile(text), exporter="local", options=options, services=services).result()
    assert built.failure is None and received.files["out"][1] == b"darwin/arm64\n"


def test_what_run_sees_of_buildkit(builder: TempEngine) -> None:
    arguments = "TARGETSTAGE BUILDKIT_SBOM_SCAN_STAGE=true X=${Y:?}"
    text = f"FROM busybox AS last\nARG {arguments}\nRUN : {unique()}; hostname; env\n"
    for name in ("", "my-host"):
        options = {"build-arg:X": "1"} | ({"build-arg:BUILDKIT_SANDBOX_HOSTNAME": name} if name else {})
        built = build(builder, text, options=options)
        lines = built.vertices[-2].log.decode().splitlines()
        assert lines[0] == (name or "buildkitsandbox") and {"X=1", "TARGETSTAGE=last"} <= {*lines}
        assert not any("SBOM" in line for line in lines)


def test_a_limit_of_memory_kills(builder: TempEngine) -> None:
    text = f"FROM busybox\nRUN : {unique()}; head -c 64m /dev/zero | tail\n"
    options = {"memory": str(16 << 20), "memswap": str(16 << 20)}
    failure = build(builder, text, options=options).failure
    assert failure is not None and "exit code: 137" in failure.message


def test_caches_of_several_namespaces(builder: TempEngine) -> None:
    cache = f"--mount=type=cache,id={unique()},target=/c"
    text = f"FROM busybox\nRUN {cache} echo $N >>/c/names; tr '\\n' ' ' </c/names\n"

    def printed(namespace: str, name: str) -> bytes:
        options = {"build-arg:BUILDKIT_CACHE_MOUNT_NS": namespace}
        built = build(builder, text.replace("$N", name), options=options)
        assert built.failure is None
        return built.vertices[-2].log

    assert printed("", "a") == b"a "
    assert printed("one", "b") == b"b "
    assert printed("one", "c") == b"b c "
    assert printed("", "d") == b"a d "


def test_stages_without_the_cache(builder: TempEngine) -> None:
    first_run, last_run = f"RUN cat /proc/sys/kernel/random/uuid >/{unique()}", f"RUN : {unique()}"
    text = f"FROM busybox AS a\n{first_run}\nFROM a AS b\nRUN true\nFROM busybox\n{last_run}\nCOPY --from=b / /x\n"
    first = build(builder, text)
    second = build(builder, text, options={"no-cache": "A"})
    assert first.image_id != second.image_id
    assert not second.vertex(f"[a 2/2] {first_run}").cached and second.vertex(f"[stage-2 2/3] {last_run}").cached


def test_a_bind_mount_is_known_by_what_it_shows(builder: TempEngine) -> None:
    def text(other: str) -> str:
        return f"FROM busybox AS a\nRUN mkdir /d; echo {word} >/d/f; echo {other} >/other\nFROM busybox\n{run}\n"

    word, run = unique(), "RUN --mount=from=a,source=/d,target=/m cat /m/f"
    assert build(builder, text("1")).vertex(f"[stage-1 2/2] {run}").log == f"{word}\n".encode()
    assert build(builder, text("2")).vertex(f"[stage-1 2/2] {run}").cached
    word = unique()
    assert build(builder, text("2")).vertex(f"[stage-1 2/2] {run}").log == f"{word}\n".encode()


def test_an_empty_image(builder: TempEngine) -> None:
    built = build(builder, "FROM scratch\n", names="empty:1")
    image = builder.request("GET", "/v1.24/images/empty:1/json").json()
    assert image["Id"] == built.image_id and not image["RootFS"].get("Layers") and image["Os"] == "linux"
    assert build(builder, "FROM empty:1\nCOPY Dockerfile /\n").failure is None


def test_an_image_without_files(builder: TempEngine) -> None:
    received = sessions.Received()
    services = sessions.of_results(received, archive=True)
    text = "FROM scratch\nLABEL a=b\n"
    assert build(builder, text, exporter="tar", services=services).failure is None
    assert received.archive == bytes(1024)
    without = build(builder, text, exporter="tar")
    assert without.failure is not None and "offers no place for files" in without.failure.message


# --- failures -------------------------------------------------------------------------------------


def test_stages_are_shown_side_by_side(builder: TempEngine) -> None:
    cache = f"--mount=type=cache,id={unique()},target=/c"
    first = f"RUN {cache} until test -e /c/there; do sleep 0.02; done"
    second = f"RUN {cache} touch /c/there"
    built = build(
        builder,
        f"FROM busybox AS a\n{first}\nFROM busybox AS b\n{second}\nFROM scratch\n"
        "COPY --from=a /etc /a\nCOPY --from=b /etc /b\n",
    )
    assert built.failure is None
    assert built.vertex(f"[b 2/2] {second}").times[0] < built.vertex(f"[a 2/2] {first}").times[1]
    # an image of several stages has one line
    assert [vertex.name for vertex in built.vertices if "FROM" in vertex.name] == [
        "[a 1/2] FROM docker.io/library/busybox:latest"
    ]


def test_a_failure_is_shown_at_its_step(builder: TempEngine) -> None:
    word = unique()
    waits, fails = f"RUN : {word}; sleep 600", f"RUN : {word}; exit 3"
    built = build(builder, f"FROM busybox AS a\n{waits}\nFROM busybox\n{fails}\nCOPY --from=a / /x\n")
    assert built.failure is not None and "exit code: 3" in built.failure.message
    assert built.failure.places == [(4, 4)]
    assert "exit code: 3" in built.vertex(f"[stage-1 2/3] {fails}").error
    assert built.vertex(f"[a 2/2] {waits}").error == "context canceled"


def test_a_base_that_is_nowhere(builder: TempEngine) -> None:
    with Registry() as registry:
        name = f"{registry.host}/nothing:1"
        built = build(builder, f"FROM busybox AS a\nRUN true\nFROM {name}\nCOPY --from=a /etc /\n")
    assert built.failure is not None and built.failure.places == [(3, 3)]
    missing = f"{name}: not found"
    assert built.failure.message == f"{name}: failed to resolve source metadata for {name}: {missing}"
    assert built.vertex(f"[internal] load metadata for {name}").error == missing
    assert built.vertex("[internal] load metadata for docker.io/library/busybox:latest").error == ""
    assert not any("RUN" in vertex.name for vertex in built.vertices)


def test_an_image_that_cannot_be_fetched(builder: TempEngine) -> None:
    """The failure is shown at its line, not at that of the COPY."""
    with Registry() as registry:
        name = f"{registry.host}/damaged:1"
        layer = archives.tar([archives.Node("a", unique().encode())])
        registry.put("damaged", "1", archives.Image([layer]), compress=lambda _: b"damaged")
        built = build(builder, f"FROM busybox\nCOPY --from={name} /a /b\n")
    assert built.failure is not None and built.failure.places == [(2, 2)]
    assert built.vertex(f"FROM {name}").error == built.failure.message
    assert built.vertex(f"[stage-0 2/2] COPY --from={name} /a /b").error == "context canceled"


def test_workdir_of_the_root_has_no_line(builder: TempEngine) -> None:
    built = build(builder, f"FROM busybox\nLABEL a={unique()}\nWORKDIR /\nWORKDIR /a\n")
    names = [vertex.name for vertex in built.vertices if vertex.name[:2] == "[1" or vertex.name[:2] == "[2"]
    assert names == ["[1/3] FROM docker.io/library/busybox:latest", "[2/3] WORKDIR /a"]


def test_a_command_that_fails(builder: TempEngine) -> None:
    built = build(builder, f"FROM busybox\nRUN echo {unique()}; exit 3\nRUN true\n")
    assert built.failure is not None
    assert built.failure.message.startswith('process "/bin/sh -c echo ')
    assert built.failure.message.endswith("did not complete successfully: exit code: 3")
    assert builder.request("GET", "/v1.24/containers/json?all=1").json() == []
    assert built.vertices[-1].error == built.failure.message and built.vertices[-1].name.startswith("[2/3] RUN")
    assert built.response == {}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("FROM busybox\n\nRUN false \\\n  || false\nRUN true\n", (3, 4)),
        ("FROM busybox AS a\nRUN <<E\nexit 3\nE\nFROM busybox\nCOPY --from=a / /\n", (2, 4)),
        ("FROM busybox\n# comment\nCOPY none /\n", (3, 3)),
        ("FROM busybox\nRUNX true\n", (2, 2)),
        ("FROM busybox\nFROM a.invalid/b\n", (2, 2)),
    ],
)
def test_where_a_failure_is(builder: TempEngine, text: str, place: tuple[int, int]) -> None:
    failure = build(builder, text).failure
    assert failure is not None and failure.places == [place]


def test_a_command_that_prints_what_the_builder_says(builder: TempEngine) -> None:
    said = "Step 3/3 : RUN evil\n ---> Using cache\nSuccessfully built 0123456789ab\n"
    text = f"FROM busybox AS one\nRUN printf '%b' '{said!r}'; : {unique()}\nFROM one\nENV a=b\nRUN exit 3\n".replace(
        "''", "'"
    )
    built = build(builder, text)
    run, failed = built.vertices[-2:]
    assert run.name.startswith("[one 2/2] RUN printf") and run.log == said.encode() and not run.cached
    assert (failed.name, bool(failed.error)) == ("[stage-1 1/1] RUN exit 3", True)


def test_a_command_that_prints_much(builder: TempEngine) -> None:
    """Clients refuse messages of more than 16 MiB. Output is clipped, and the command goes on."""
    script = "yes out | head -c 30000000; yes err | head -c 9000000 >&2; echo done >/done"
    built = build(builder, f"FROM busybox\nRUN : {unique()}; {script}\nRUN cat /done\n")
    assert built.failure is None
    step, after = (vertex for vertex in built.vertices if vertex.name.startswith(("[2/3]", "[3/3]")))
    for text, word in ((step.log, b"out\n"), (step.errors, b"err\n")):
        shown, _, note = text.partition(b"\n[output clipped, log limit ")
        assert note.partition(b" ")[0] in (b"200KiB/s", b"2MiB") and 100_000 < len(text) < 3 << 20
        assert shown.startswith(word * 1000)
    assert after.log == b"done\n"


def test_a_long_command_that_fails(builder: TempEngine) -> None:
    lines = f"{'x' * 1000} \\\n" * 100
    built = build(builder, f"FROM busybox\nRUN : {unique()} {lines}; exit 3\n")
    assert built.failure is not None
    assert built.failure.message.endswith("did not complete successfully: exit code: 3")
    assert len(built.failure.message) < 20_000 and max(len(vertex.name) for vertex in built.vertices) < 20_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM busybox\nRUNX true\n", "unknown instruction: RUNX (did you mean RUN?)"),
        ("", "cannot be empty"),
        ("FROM busybox\nCOPY nothing /\n", "nothing"),
        ("# syntax=my/frontend:1\nFROM busybox\n", "my/frontend:1"),
        ("FROM busybox\nRUN --mount=type=secret,id=t,required=true true\n", "secret t: not found"),
        (
            "FROM busybox\nUSER nosuch\nRUN id\n",
            'process "/bin/sh -c id" did not complete successfully: unable to find user nosuch: '
            "no matching entries in passwd file",
        ),
        ("FROM busybox\nRUN echo >/f\nWORKDIR /f\n", "mkdir /f: not a directory"),
        ("FROM busybox\nRUN echo >/f && ln -s /f /l\nWORKDIR /l/x/y\n", "lstat /f/x: not a directory"),
        ("FROM busybox\nRUN ln -s /l /l\nWORKDIR /l\n", "too many links"),
        ("FROM busybox\nRUN []\n", "arguments are required"),
    ],
)
def test_dockerfiles_that_fail(builder: TempEngine, text: str, words: str) -> None:
    built = build(builder, text)
    assert built.failure is not None and words in built.failure.message


@pytest.mark.parametrize(
    ("text", "words", "place"),
    [
        ("RUNX true", "dockerfile parse error on line 4: unknown instruction: RUNX (did you mean RUN?)", (4, 4)),
        ("RUN --mount=target=. true", 'invalid mount target "/"', (4, 4)),
        ("WORKDIR /a\nRUN --mount=type=bind,target=.. true", 'invalid mount target "/"', (5, 5)),
        ("RUN --network=host true", "RUN --network=host is not allowed", (4, 4)),
        ("RUN --security=insecure true", "RUN --security=insecure is not supported", (4, 4)),
        ("ARG SUM=sha256:1\nADD --checksum=$SUM file /", "checksum requires HTTP(S) or Git sources", (5, 5)),
        ("COPY <<.. /x\n..", "COPY <<..: this is not the name of a file", (4, 5)),
        ("ARG PORT=x\nEXPOSE $PORT", "invalid containerPort: x", (5, 5)),
        ("FROM --platform=linux/s390x scratch AS t\nCOPY file /\nRUN true", "this one is for s390x", (6, 6)),
        ("COPY --from=7 / /", "invalid stage index 7", (4, 4)),
    ],
)
def test_what_is_wrong_for_certain_stops_before_the_context(
    builder: TempEngine, text: str, words: str, place: tuple[int, int]
) -> None:
    """No step runs, and no file is asked for."""
    built = build(builder, f"FROM busybox AS one\nCOPY file /\nRUN : {unique()}\n{text}\n")
    assert built.failure is not None and words in built.failure.message
    assert built.failure.places == [place]
    assert all(name.startswith("[internal] load ") for name in (vertex.name for vertex in built.vertices))
    assert not {"[internal] load .dockerignore", "[internal] load build context"}.intersection(
        vertex.name for vertex in built.vertices
    )


def test_run_without_a_command(builder: TempEngine) -> None:
    """The shell has nothing to do, as with BuildKit."""
    built = build(builder, f"FROM busybox\nENV word={unique()}\nRUN\nRUN --network=none\n")
    assert built.failure is None, built.failure
    names = [vertex.name for vertex in built.vertices if "RUN" in vertex.name]
    assert names == ["[2/3] RUN", "[3/3] RUN --network=none"]
    history = builder.request("GET", f"/v1.24/images/{built.image_id}/history").json()
    assert [each["CreatedBy"] for each in history[:2]] == ["RUN /bin/sh -c  # buildkit"] * 2


def test_a_target_that_is_missing(builder: TempEngine) -> None:
    text = "FROM busybox AS release\nCOPY file /\n"
    built = build(builder, text, options={"target": "relase"})
    assert built.failure is not None
    assert built.failure.message == 'target stage "relase" could not be found (did you mean release?)'
    assert [vertex.name for vertex in built.vertices] == ["[internal] load build definition from Dockerfile"]


def test_the_hosts_network_by_its_entitlement(builder: TempEngine) -> None:
    """The build's own network stays the default one."""
    look = f"readlink /proc/self/ns/net; : {unique()}"
    text = f"FROM busybox\nRUN --network=host {look}\nRUN {look}\n"
    built = build(builder, text, more=field(9, "network.host"))
    assert built.failure is None
    seen = [built.vertex(f"[{name}").log.decode() for name in (f"2/3] RUN --network=host {look}", f"3/3] RUN {look}")]
    assert [each == os.readlink("/proc/self/ns/net") + "\n" for each in seen] == [True, False]


def test_devices_and_fifos_of_the_context(builder: TempEngine) -> None:
    nodes = {
        "d": Node(mode=sessions.DIRECTORY | 0o755),
        "d/disk": Node(mode=1 << 26 | 0o600, major=7, minor=300),
        "d/null": Node(mode=1 << 26 | 1 << 21 | 0o640, major=1, minor=3),
        "d/pipe": Node(mode=1 << 25 | 0o604),
    }
    look = f"stat -c '%n %F %t:%T %a' /d/* ; : {unique()}"
    text = f"FROM busybox\nCOPY d /d\nRUN {look}\nRUN --mount=source=d,target=/d {look}\n"
    for _ in range(2):  # the second time from the kept list
        built = Build(builder.socket, dockerfile(text, **nodes), options={"no-cache": ""}).result()
        assert built.failure is None
        shown = b"/d/disk block special file 7:12c 600\n/d/null character special file 1:3 640\n/d/pipe fifo 0:0 604\n"
        assert [vertex.log for vertex in built.vertices if "RUN" in vertex.name] == [shown, shown]


def test_the_author_is_that_of_the_base(builder: TempEngine) -> None:
    name = f"author-{unique()}"
    first = build(builder, f"FROM busybox AS one\nMAINTAINER A\nFROM one\nLABEL a={name}\n", names=name)
    again = build(builder, f"FROM {name}\nLABEL b=c\n")
    other = build(builder, f"FROM {name}\nMAINTAINER B\n")
    images = [builder.request("GET", f"/v1.24/images/{built.image_id}/json").json() for built in (first, again, other)]
    assert [image["Author"] for image in images] == ["A", "A", "B"]
    saved = builder.request("GET", f"/v1.24/images/{name}/get").body
    with tarfile.open(fileobj=io.BytesIO(saved)) as archive:
        manifest = archive.extractfile("manifest.json")
        assert manifest is not None
        document = archive.extractfile(json.load(manifest)[0]["Config"])
        assert document is not None
        config = json.load(document)
    assert config["author"] == "A" and not any("author" in step for step in config["history"])


def test_files_that_stand_in_the_dockerfile_have_the_time_of_the_build(builder: TempEngine) -> None:
    """Which is no part of the step's key."""
    copies = f"COPY <<a <<b /new/\n{unique()}\na\nb\n"
    text = f"FROM busybox\n{copies}RUN stat -c %Y /new /new/a /new/b\n"
    began = int(time.time())
    first, again = build(builder, text), build(builder, text)
    assert first.image_id == again.image_id
    times = [*map(int, first.vertices[-2].log.split())]
    assert len(times) == 3 and all(began - 1 <= each <= time.time() for each in times)
    early = build(builder, text, options={"build-arg:SOURCE_DATE_EPOCH": "1000000000"})
    assert early.vertices[-2].log == b"1000000000\n" * 3


def test_a_script_runs_in_the_shell(builder: TempEngine) -> None:
    """So SHELL holds for it, and its status is the shell's if its interpreter is missing."""
    script = "RUN <<s\n#!/bin/sh\necho $0 $greeting\ns\n"
    shell = """SHELL ["/bin/sh", "-c", "export greeting=hello; exec $0"]\n"""
    built = build(builder, f"FROM busybox\nARG {unique()}\n{shell}{script}")
    assert built.failure is None and built.vertices[-2].log == b"/dev/pipes/s hello\n"
    history = builder.request("GET", f"/v1.24/images/{built.image_id}/history").json()
    assert history[0]["CreatedBy"].endswith("exec $0 /dev/pipes/s # buildkit")
    missing = build(builder, "FROM busybox\nRUN <<s\n#!/bin/nothing\ns\n")
    assert missing.failure is not None
    assert '"/bin/sh -c /dev/pipes/s" did not complete successfully: exit code: 127' in missing.failure.message


@pytest.mark.parametrize("destination", ["/t", "/t/", "/l", "/l/"])
def test_link_keeps_what_is_above(builder: TempEngine, destination: str) -> None:
    """Owner and mode of directories, and links to them."""
    text = (
        "FROM busybox\nRUN mkdir /t && chown 5:6 /t && chmod 1777 /t && ln -s t /l\n"
        f"COPY --link a {destination}\nRUN : {unique()}; stat -c '%n %a %u %g' /t /t/a; readlink /l\n"
    )
    built = Build(builder.socket, dockerfile(text, a=b"1")).result()
    assert built.failure is None and built.vertices[-2].log == b"/t 1777 5 6\n/t/a 644 0 0\nt\n"


def test_what_a_run_sees_of_the_engine(builder: TempEngine) -> None:
    """As with BuildKit: no mark of a container, a name of its own that is no variable, and files
    that cannot be written. /etc/hostname is the image's.
    """
    script = (
        "ls -A / | grep docker; env | grep HOST; hostname; cat /etc/hosts; "
        "for file in hosts resolv.conf; do echo x >>/etc/$file || echo $file; done 2>/dev/null; "
        f"echo mine >/etc/hostname; : {unique()}"
    )
    built = build(builder, f"FROM busybox\nRUN --network=none {script}\nRUN cat /etc/hostname\n")
    assert built.failure is None
    seen, after = (vertex.log.decode().splitlines() for vertex in built.vertices if "RUN" in vertex.name)
    assert seen == [
        "buildkitsandbox",
        "127.0.0.1\tlocalhost buildkitsandbox",
        "::1\tlocalhost ip6-localhost ip6-loopback",
        "hosts",
        "resolv.conf",
    ]
    assert after == ["mine"]
    usual = building.build(
        builder, "FROM busybox\nRUN ls /.dockerenv; env | grep -c HOSTNAME\n", networkmode="none", nocache=1
    )
    assert usual.error is None and {"/.dockerenv", "1"} <= set(usual.lines)


def test_any_user_may_read_a_bind_of_the_context(builder: TempEngine) -> None:
    text = f"FROM busybox\nUSER 1234\nRUN --mount=target=/m : {unique()}; stat -c '%a %u' /m; cat /m/a\n"
    built = Build(builder.socket, dockerfile(text, a=b"content")).result()
    assert built.failure is None and built.vertices[-2].log == b"755 0\ncontent"


def test_binds_and_caches_are_as_their_sources(builder: TempEngine) -> None:
    """A writable file keeps its time; a cache that begins with files has the owner and mode of
    their directory.
    """
    word = unique()
    text = (
        "FROM busybox AS files\nRUN mkdir -m 751 /d && touch /d/f && chown -R 7:8 /d\nFROM busybox\n"
        f"RUN --mount=source=a,target=/a,rw : {word}; stat -c %Y /a\n"
        f"RUN --mount=type=cache,id={word},from=files,source=d,target=/c stat -c '%a %u %g' /c\n"
        f"RUN --mount=type=cache,id={word},from=files,source=d,target=/c,uid=5,mode=700 stat -c '%a %u %g' /c\n"
    )
    built = Build(builder.socket, dockerfile(text, a=Node(b"1", modified=5 * 10**9))).result()
    assert built.failure is None
    assert [vertex.log for vertex in built.vertices if "RUN --mount" in vertex.name] == [
        b"5\n",
        b"751 7 8\n",
        b"700 5 8\n",
    ]


def test_volume_over_a_file(builder: TempEngine) -> None:
    """Only the start of a container needs a directory there."""
    built = build(builder, "FROM busybox\nRUN touch /file\nVOLUME /file\n")
    assert builder.request("GET", f"/v1.24/images/{built.image_id}/json").json()["Config"]["Volumes"] == {"/file": {}}


def test_an_empty_destination_is_the_working_directory(builder: TempEngine) -> None:
    text = f"FROM busybox\nARG none\nWORKDIR /w\nCOPY --link a $none\nCOPY b $none\nRUN : {unique()}; ls /w\n"
    built = Build(builder.socket, dockerfile(text, a=b"1", b=b"2")).result()
    assert built.failure is None and built.vertices[-2].log == b"a\nb\n"


def test_a_dockerfile_that_is_missing(builder: TempEngine) -> None:
    built = build(builder, "FROM busybox", options={"filename": "other"})
    assert built.failure is not None
    assert built.failure.message == "failed to read dockerfile: open other: no such file or directory"
    assert built.vertices[0].error == built.failure.message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"frontend": "gateway.v0", "options": {"source": "my/frontend"}}, "frontend 'my/frontend' is not supported"),
        ({"options": {"context:x": "oci-layout://x"}}, "'oci-layout://x': an image layout needs a name and a digest"),
        ({"options": {"context:x": "else://x"}}, "named context 'x': 'else://x' is not supported"),
        ({"options": {"context:x": "input:x"}}, "named context 'x': its input is missing"),
        ({"inputs": {"x": field(1, b"")}}, "builds of LLB are not supported"),
        ({"options": {"requestid": "frontend.other"}}, "unsupported request frontend.other"),
        ({"options": {"frontend.caps": "a,b"}}, "unsupported frontend capability a"),
        ({"exporter": "oci"}, "exporter 'oci' is not supported"),
        ({"names": "UPPER"}, "invalid reference"),
    ],
)
def test_what_is_refused(builder: TempEngine, given: dict[str, object], words: str) -> None:
    built = build(builder, "FROM busybox\n", **given)
    assert built.failure is not None and words in built.failure.message


class Reading:
    """A build whose client reads files of web servers before it says what to build."""

    def __init__(self, engine: TempEngine) -> None:
        self._build = Build(engine.socket, {}, direct=True, frontend="", exporter="")
        self.about = {"buildkit-controlapi-buildid": self._build.ref}

    def fetch(self, definition: bytes) -> str:
        """The id of the file."""
        answer = self._build.caller.ask(f"{BRIDGE}Solve", field(1, definition) + field(5, 1) + field(6, 1), self.about)
        return str(fields(fields(fields(answer)[3])[3])[1].decode())

    def stat(self, ref: str, path: str) -> dict[int, Any]:
        answer = self._build.caller.ask(f"{BRIDGE}StatFile", field(1, ref) + field(2, path), self.about)
        return fields(fields(answer)[1])

    def read(self, ref: str, path: str, more: bytes = b"") -> bytes:
        answer = self._build.caller.ask(f"{BRIDGE}ReadFile", field(1, ref) + field(2, path) + more, self.about)
        return bytes(fields(answer).get(1, b""))

    def end(self, ref: str = "") -> Built:
        """End it with the file as its result."""
        returned = field(1, field(3, field(1, ref))) if ref else b""
        self._build.caller.ask(f"{BRIDGE}Return", returned, self.about)
        return self._build.result()


def test_a_client_reads_files_of_web_servers(builder: TempEngine) -> None:
    """As buildx does for `--file URL`."""
    text = b"FROM busybox\n"
    with served({"/x": ("text/plain", text), "/big": ("text/plain", bytes(4 << 20 | 1))}) as url:
        reading = Reading(builder)
        ref = reading.fetch(web_file(f"{url}/x", filename="Dockerfile"))
        stat = reading.stat(ref, "Dockerfile")
        assert (stat[1], stat[2], stat[5]) == (b"Dockerfile", 0o600, len(text))
        assert reading.read(ref, "/Dockerfile") == text
        assert reading.read(ref, "Dockerfile", field(3, field(1, 5) + field(2, 4))) == b"busy"
        other = reading.fetch(web_file(f"{url}/x", perm="0644", checksum=f"sha256:{hashlib.sha256(text).hexdigest()}"))
        assert reading.stat(other, "x")[2] == 0o644
        for bad, words in (
            (web_file(f"{url}/none"), f"{url}/none: Got HTTP status code >= 400: 404"),
            (web_file(f"{url}/big"), f"{url}/big: larger than 4194304 bytes"),
            (web_file(f"{url}/x", checksum="x"), "invalid checksum digest format"),
            (web_file(f"{url}/x", checksum=f"sha256:{'0' * 64}"), "digest mismatch"),
            (web_file(f"{url}/x", authheadersecret="a"), "the attribute 'http.authheadersecret'"),
            (web_file("docker-image://busybox"), "builds of LLB are not supported"),
        ):
            with pytest.raises(Failure, match=re.escape(words)):
                reading.fetch(bad)
        for path in ("x", "..", "", "Dockerfile/x"):
            with pytest.raises(Failure, match="no such file"):
                reading.read(ref, path)
        with pytest.raises(Failure, match="no such result: 0"):
            reading.stat("0", "Dockerfile")
        built = reading.end(ref)
    assert built.failure is None
    assert all(vertex.done for vertex in built.vertices)
    assert (built.vertices[0].name, built.vertices[0].error) == (f"load {url}/x", "")
    assert "larger than" in built.vertex(f"load {url}/big").error


def test_a_client_reads_few_files_of_web_servers(builder: TempEngine) -> None:
    with served({"/x": ("text/plain", b"x")}) as url:
        reading = Reading(builder)
        for _ in range(16):
            reading.fetch(web_file(f"{url}/x"))
        with pytest.raises(Failure, match="at most 16 files"):
            reading.fetch(web_file(f"{url}/x"))
        assert reading.end().failure is None


# --- checks and calls -----------------------------------------------------------------------------


def test_warnings_of_a_build(builder: TempEngine) -> None:
    text = "FROM busybox AS One\nENV a b\nCOPY <<X /x\n$none\nX\n"
    built = build(builder, text)
    assert built.failure is None
    warned = built.vertex("[internal] load build definition from Dockerfile").warnings
    assert [each[3].decode().partition(":")[0] for each in warned] == [
        *("StageNameCasing", "LegacyKeyValueFormat", "UndefinedVar"),
    ]
    last = warned[-1]
    assert last[2] == 1
    assert last[3] == b"UndefinedVar: Usage of undefined variable '$none' (line 3)"
    assert last[4] == b"Variables should be defined before their use"
    assert last[5] == b"https://docs.docker.com/go/dockerfile/rule/undefined-var/"
    assert {number: value.decode() for number, value in fields(last[6]).items()} == {
        **{1: "Dockerfile", 2: text, 4: "Dockerfile"},
    }
    assert {number: fields(value) for number, value in fields(last[7]).items()} == {1: {1: 3}, 2: {1: 5}}


def test_warnings_that_are_errors(builder: TempEngine) -> None:
    text = "# check=skip=FromAsCasing;error=true\nFROM busybox as One\nRUN touch /never\n"
    built = build(builder, text)
    assert built.failure is not None
    assert "lint violation found for rules: StageNameCasing" in built.failure.message
    assert not any("RUN" in vertex.name for vertex in built.vertices)
    overruled = {"build-arg:BUILDKIT_DOCKERFILE_CHECK": "skip=all"}
    assert build(builder, text, options=overruled).failure is None
    wrong = build(builder, text, options={"build-arg:BUILDKIT_DOCKERFILE_CHECK": "x"})
    assert wrong.failure is not None
    assert 'failed to parse build-arg:BUILDKIT_DOCKERFILE_CHECK: invalid check option "x"' in wrong.failure.message


def test_the_classic_builder_checks_nothing(builder: TempEngine) -> None:
    built = building.build(builder, "# check=error=true\nFROM busybox AS One\nENV a b\n")
    assert built.error is None and "LegacyKeyValueFormat" not in built.text


def ask(engine: TempEngine, call: str, text: str, **options: str) -> Built:
    caps = {"frontend.caps": "moby.buildkit.frontend.subrequests+forward,x+forward"}
    return build(engine, text, exporters=(), options={"requestid": f"frontend.{call}", **caps, **options})


def test_calls(builder: TempEngine) -> None:
    text = "# one is it\nFROM busybox AS one\nARG V=1\nCMD x\n"
    linted = ask(builder, "lint", text)
    assert linted.failure is None and linted.response == {}
    assert linted.documents["result.statuscode"] == b"1" and linted.documents["version"] == b"1.0.0"
    (warning,) = json.loads(linted.documents["result.json"])["warnings"]
    assert warning["ruleName"] == "JSONArgsRecommended"
    assert ask(builder, "lint", "FROM busybox\n").documents["result.statuscode"] == b"0"

    outline = ask(builder, "outline", text)
    assert json.loads(outline.documents["result.json"])["args"][0]["name"] == "V"
    assert b"DESCRIPTION: is it" in outline.documents["result.txt"]
    assert outline.vertex("[internal] load build definition from Dockerfile").warnings
    targets = json.loads(ask(builder, "targets", text).documents["result.json"])["targets"]
    assert [each["name"] for each in targets] == ["one"]
    described = json.loads(ask(builder, "subrequests.describe", "").documents["result.json"])
    assert len(described) == 3


def test_calls_leave_no_image(builder: TempEngine) -> None:
    before = builder.request("GET", "/v1.24/images/json?all=1").json()
    ask(builder, "lint", "FROM busybox\nCOPY a /\n", **{"context:busybox": "local:context"})
    ask(builder, "outline", "FROM busybox\nRUN false\n")
    assert builder.request("GET", "/v1.24/images/json?all=1").json() == before


def test_a_pull_checks_with_the_image_of_the_registry(builder: TempEngine) -> None:
    """It has a variable that the image of that name which is here has not."""
    with Registry() as registry:
        name = f"{registry.host}/pulled:1"
        assert build(builder, f"FROM busybox\nENV NEW={unique()}\n", names=name).failure is None
        pushed = builder.request("POST", f"/v1.24/images/{name.removesuffix(':1')}/push?tag=1")
        assert b"errorDetail" not in pushed.body, pushed.body
        builder.post(f"/images/busybox/tag?repo={quote(name.removesuffix(':1'), safe='')}&tag=1", 201)
        text = f"FROM {name}\nENV OTHER=${{NEW:?missing}}\n"
        failed = build(builder, text)
        assert failed.failure is not None and "NEW: missing" in failed.failure.message
        assert build(builder, text, options={"image-resolve-mode": "pull"}).failure is None


def test_a_file_that_a_call_cannot_read(builder: TempEngine) -> None:
    failed = ask(builder, "outline", "FROM busybox\nBADCMD\n")
    assert failed.failure is not None and "unknown instruction: BADCMD" in failed.failure.message
    linted = json.loads(ask(builder, "lint", "FROM busybox\nBADCMD\n").documents["result.json"])
    assert linted["buildError"]["message"] == "dockerfile parse error on line 2: unknown instruction: BADCMD"


def test_a_check_needs_no_layers_of_a_base(builder: TempEngine) -> None:
    """The configuration of an image comes from its registry."""
    with Registry() as registry:
        name = f"{registry.host}/checked:1"
        text = f'FROM busybox\nLABEL only={unique()}\nENV OF_THE_BASE=1\nSHELL ["/bin/sh", "-c"]\n'
        assert build(builder, text, names=name).failure is None
        pushed = builder.request("POST", f"/v1.24/images/{name.removesuffix(':1')}/push?tag=1")
        assert b"errorDetail" not in pushed.body, pushed.body
        builder.request("DELETE", f"/v1.24/images/{name}")
        linted = ask(builder, "lint", f"FROM {name}\nENV a=$OF_THE_BASE b=$other\nCMD x\n")
        warnings = json.loads(linted.documents["result.json"])["warnings"]
        assert [each["detail"] for each in warnings] == ["Usage of undefined variable '$other'"]
        assert builder.request("GET", f"/v1.24/images/{name}/json").status == 404
        missing = ask(builder, "lint", f"FROM {registry.host}/nothing:1\n")
        copied = ask(builder, "lint", f"FROM busybox\nCOPY --from={registry.host}/nothing:2 / /\n")
    for answer, line in ((missing, 1), (copied, 2)):
        error = json.loads(answer.documents["result.json"])["buildError"]
        assert "failed to resolve source metadata" in error["message"]
        assert error["location"]["ranges"][0]["start"] == {"line": line}


def test_graphs_are_refused(builder: TempEngine) -> None:
    with Caller(builder.socket) as caller:
        for path, number in ((f"{CONTROL}Solve", 2), (f"{BRIDGE}Solve", 1)):
            about = {"buildkit-controlapi-buildid": "none"}
            with pytest.raises(Failure) as raised:
                caller.ask(path, field(number, field(1, b"operation")), about)
            assert raised.value.status in (12, 5), raised.value
        with pytest.raises(Failure, match=r"unknown method Nothing for service moby.buildkit.v1.Control") as raised:
            caller.ask(f"{CONTROL}Nothing", b"")
        assert raised.value.status == 12
        with pytest.raises(Failure, match="malformed protobuf message SolveRequest"):
            caller.ask(f"{CONTROL}Solve", b"\xff")


def test_a_build_without_files_and_without_a_result(builder: TempEngine) -> None:
    """Clients begin with an empty build to learn what the engine is able to do."""
    with sessions.session(builder.socket, {}) as (session_id, _), Caller(builder.socket) as caller:
        solving = caller.call(f"{CONTROL}Solve")
        solving.send(field(1, "empty") + field(5, session_id), last=True)
        about = {"buildkit-controlapi-buildid": "empty"}
        caller.ask(f"{BRIDGE}Return", field(1, b""), about)
        assert solving.all() == [b""]


def test_a_client_that_cancels(builder: TempEngine) -> None:
    for leaves in (False, True):
        under_way = Build(builder.socket, dockerfile(f"FROM busybox\nRUN echo {unique()}; sleep 1000\n"))
        log = b""
        while b"\n" not in log:
            report = under_way.status.receive()
            assert report is not None
            log += b"".join(vertex_log for vertex_log in _logs(report))
        assert len(builder.request("GET", "/v1.24/containers/json").json()) == 1
        if leaves:
            under_way.caller.close()
            under_way.peer.close()
        else:
            under_way.solving.cancel()
        until("the container is gone", lambda: builder.request("GET", "/v1.24/containers/json?all=1").json() == [])
        if not leaves:
            vertices = shown(under_way.status.all())
            assert vertices[-1].error == "context canceled"
            under_way._open.close()


def _logs(report: bytes) -> Iterator[bytes]:
    for kind, data in every(report):
        if kind == 3:
            yield fields(data)[4]


def test_the_client_leaves_while_it_sends_its_files(builder: TempEngine) -> None:
    begun = threading.Event()

    def stalls(call: sessions.Call) -> None:
        if call.values("dir-name") == ["dockerfile"]:
            sessions.of_files(dockerfile("FROM busybox\n"))[sessions.DIFF_COPY](call)
            return
        begun.set()
        while call.receive() is not None:
            pass

    under_way = Build(builder.socket, {}, services={sessions.DIFF_COPY: stalls})
    assert begun.wait(30 * PATIENCE)
    under_way.peer.close()
    built = under_way.result()
    assert built.failure is not None and "closed its connection" in built.failure.message


def test_the_end_of_the_daemon_ends_builds() -> None:
    with TempEngine() as engine:
        engine.load_busybox()
        under_way = Build(engine.socket, dockerfile("FROM busybox\nRUN sleep 1000\n"))
        until("it runs", lambda: engine.request("GET", "/v1.24/containers/json").json())
        engine.terminate()
        assert under_way.result().failure is not None
        engine.start()
        assert engine.request("GET", "/v1.24/containers/json?all=1").json() == []


# --- sessions in builds ---------------------------------------------------------------------------


def test_secrets(builder: TempEngine) -> None:
    secret = unique().encode()
    text = (
        f"FROM busybox\nRUN --mount=type=secret,id=t echo {unique()}; md5sum </run/secrets/t; "
        "stat -c %a /run/secrets/t\n"
        "RUN --mount=type=secret,id=other test ! -e /run/secrets/other\nRUN test ! -e /run/secrets/t\n"
        f'RUN --mount=type=secret,id=raw,env=RAW : {unique()}; echo "$RAW"\n'
    )
    # The runtime's configuration is JSON, in which Go puts U+FFFD for a byte that is not UTF-8.
    known = {"t": secret, "raw": b"a\xffb\xe2\x82", "null": b"a\0b"}
    built = build(builder, text, services=sessions.of_secrets(known))
    assert built.failure is None
    assert built.vertices[-2].log == "a\ufffdb\ufffd\ufffd\n".encode()
    refused = build(
        builder, "FROM busybox\nRUN --mount=type=secret,id=null,env=N x\n", services=sessions.of_secrets(known)
    )
    assert refused.failure is not None and "secret null: a variable cannot have a null byte" in refused.failure.message
    (log,) = [vertex.log for vertex in built.vertices if "md5sum" in vertex.name]
    assert log.splitlines()[2] == b"400"
    image = files_of(builder)
    assert secret not in image


def files_of(engine: TempEngine) -> bytes:
    """The content of all small files below the engine's root, and its log."""
    content = [engine.log_path.read_bytes()]
    for directory, _, names in os.walk(engine.root):
        for name in names:
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) < 1 << 20:
                    content.append(Path(path).read_bytes())
    return b"\n".join(content)


def test_secrets_by_the_classic_builder(builder: TempEngine) -> None:
    """POST /build with the id of a session."""
    text = f"FROM busybox\nRUN --mount=type=secret,id=t,required=true echo {unique()}; cat /run/secrets/t | md5sum\n"
    body = _archive({"Dockerfile": text.encode()})
    with sessions.session(builder.socket, sessions.of_secrets({"t": b"the secret"})) as (session_id, _):
        answer = builder.request("POST", f"/v1.24/build?session={session_id}&networkmode=none", body)
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert "errorDetail" not in lines[-1], lines
    assert any(hashlib.md5(b"the secret").hexdigest() in line.get("stream", "") for line in lines), lines
    without = builder.request("POST", "/v1.24/build?nocache=1", body)
    assert b"secret t: not found" in without.body


def _archive(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def test_an_ssh_agent(builder: TempEngine, tmp_path: Path) -> None:
    """The step reaches the client's agent; here it answers with what it was sent."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "agent"))
    listener.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = listener.accept()
                with stream:
                    while data := stream.recv(8192):
                        stream.sendall(data.upper())

    threading.Thread(target=serve, daemon=True).start()
    step = f"echo {unique()}; stat -c '%a %u' $SSH_AUTH_SOCK; until [ -e /tmp/over ]; do sleep 0.05; done"
    text = f"FROM busybox\nRUN --mount=type=ssh {step}\n"
    under_way = Build(builder.socket, dockerfile(text), services=sessions.of_agent(str(tmp_path / "agent")))
    (running,) = until("it runs", lambda: builder.request("GET", "/v1.24/containers/json").json())
    root = f"/proc/{builder.inspect(running['Id'])['State']['Pid']}/root"
    until("the socket is there", lambda: os.path.exists(f"{root}/run/buildkit/ssh_agent.0"))
    with client.connect(f"{root}/run/buildkit/ssh_agent.0") as stream:
        stream.sendall(b"hello")
        assert stream.recv(100) == b"HELLO"
    Path(root, "tmp/over").touch()
    built = under_way.result()
    listener.close()
    assert built.failure is None
    (log,) = [vertex.log for vertex in built.vertices if "RUN" in vertex.name]
    assert log.splitlines()[1] == b"600 0", log
    required = build(builder, "FROM busybox\nRUN --mount=type=ssh,required=true true\n")
    assert required.failure is not None and "unset ssh forward key default" in required.failure.message


def test_a_session_within_a_call(builder: TempEngine) -> None:
    """Files that several builds share come from a session that is opened by Control/Session."""
    shared = unique()
    near, far = socket.socketpair()
    peer = sessions.Peer(far, sessions.of_files(dockerfile("FROM busybox\nCOPY a /\nRUN cat /a\n", a=b"shared")))
    try:
        with Caller(builder.socket) as caller:
            about = {
                "x-docker-expose-session-uuid": shared,
                "x-docker-expose-session-grpc-method": sessions.DIFF_COPY,
            }
            tunnel = caller.call(f"{CONTROL}Session", about)

            def outward() -> None:
                with contextlib.suppress(OSError):
                    while data := near.recv(65536):
                        tunnel.send(field(1, data))

            def inward() -> None:
                with contextlib.suppress(OSError, Failure):
                    while (message := tunnel.receive()) is not None:
                        near.sendall(fields(message).get(1, b""))

            for work in (outward, inward):
                threading.Thread(target=work, daemon=True).start()
            options = {f"local-sessionid:{name}": shared for name in ("context", "dockerfile")}
            built = Build(builder.socket, {}, options=options).result()
            assert built.vertex("[3/3] RUN cat /a").log == b"shared"
            with pytest.raises(Failure, match=f"session {shared} is in use already"):
                caller.call(f"{CONTROL}Session", about).all()
    finally:
        peer.close()
        near.close()


def test_credentials_of_the_session(own_engine: TempEngine) -> None:
    """A private base is pulled with the credentials that the client's session gives."""
    engine = own_engine
    with Registry(password=True) as registry:
        name = f"{registry.host}/private/base"
        engine.post(f"/images/busybox/tag?repo={quote(name, safe='')}&tag=1", 201)
        headers = {"X-Registry-Auth": _auth_header()}
        pushed = engine.request("POST", f"/v1.24/images/{name}/push?tag=1", headers=headers)
        assert b"errorDetail" not in pushed.body, pushed.body
        engine.request("DELETE", f"/v1.24/images/{name}:1")
        text = f"FROM {name}:1\nRUN echo {unique()}\n"
        refused = build(engine, text, options={"image-resolve-mode": "pull"})
        assert refused.failure is not None
        known = sessions.of_credentials({registry.host: (USER, PASSWORD)})
        assert build(engine, text, services=known, options={"image-resolve-mode": "pull"}).image_id


def test_a_base_that_is_here_needs_no_credentials(builder: TempEngine) -> None:
    asked = []

    def get(call: sessions.Call) -> bytes:
        asked.append(call.receive())
        return b""

    text = f"FROM busybox\nRUN echo {unique()}\n"
    assert build(builder, text, services={sessions.CREDENTIALS: get}).image_id
    assert asked == []
    assert build(builder, text, services={sessions.CREDENTIALS: get}, options={"image-resolve-mode": "pull"}).failure
    assert asked == [field(1, "registry-1.docker.io")]


def _auth_header() -> str:
    return base64.urlsafe_b64encode(json.dumps({"username": USER, "password": PASSWORD}).encode()).decode()


# --- about the engine -----------------------------------------------------------------------------


def test_workers(builder: TempEngine) -> None:
    with Caller(builder.socket) as caller:
        record = fields(fields(caller.ask(f"{CONTROL}ListWorkers", b""))[1])
        assert fields(record[3])[2] == b"linux"
        label = fields(record[2])
        assert label[1] == b"org.mobyproject.buildkit.worker.moby.host-gateway-ip" and label[2].count(b".") == 3
        assert fields(caller.ask(f"{CONTROL}Info", b""))[1]
        assert caller.ask("/grpc.health.v1.Health/Check", b"") == field(1, 1)


def test_the_cache(own_engine: TempEngine) -> None:
    """It keeps what steps made when their images are deleted."""
    engine = own_engine
    text = f"FROM busybox\nRUN echo {unique()} >/x\nLABEL a=b\n"
    first = build(engine, text, names="gone:1").image_id
    before = engine.request("GET", "/v1.24/images/json?all=1").json()
    assert engine.docker("rmi", "gone:1").status == 0
    assert engine.request("POST", "/v1.45/images/prune").status == 200
    assert [image["RepoTags"] for image in engine.request("GET", "/v1.24/images/json?all=1").json()] == [
        ["busybox:latest"]
    ]
    assert engine.request("GET", f"/v1.24/images/{first}/json").status == 404
    again = build(engine, text, names="gone:1")
    assert again.image_id == first and next(each for each in again.vertices if "RUN" in each.name).cached, again
    assert engine.docker("run", "--rm", "gone:1", "cat", "/x").status == 0
    assert len(engine.request("GET", "/v1.24/images/json?all=1").json()) == len(before)
    assert engine.docker("rmi", "gone:1").status == 0
    with Caller(engine.socket) as caller:
        records = [fields(data) for _, data in every(caller.ask(f"{CONTROL}DiskUsage", b""))]
        first_type = field(1, f"type=={records[0][10].decode()},inuse==false")
        assert caller.ask(f"{CONTROL}DiskUsage", first_type) != b""
        assert caller.ask(f"{CONTROL}DiskUsage", field(1, "type==none")) == b""
        assert caller.ask(f"{CONTROL}DiskUsage", field(2, 3600 * 10**9)) == b"", "all were used just now"
        assert any(record[9].endswith(b">/x # buildkit") and record[4] == 17 for record in records), records
        calling = caller.call(f"{CONTROL}Prune")
        calling.send(field(1, "") + field(2, 1), last=True)
        pruned = {fields(message)[1] for message in calling.all()}
        assert pruned == {record[1] for record in records}
        assert caller.ask(f"{CONTROL}DiskUsage", b"") == b""
        with pytest.raises(Failure, match=r"failed to parse prune filters \[colour=red\]: ") as raised:
            calling = caller.call(f"{CONTROL}Prune")
            calling.send(field(1, "colour=red"), last=True)
            calling.all()
        assert raised.value.status == 2


def test_a_connection_that_begins_with_http_2(builder: TempEngine) -> None:
    with Caller(builder.socket, prior=True) as caller:
        records = fields(fields(caller.ask(f"{CONTROL}ListWorkers", b""))[1])
        assert records[1]
        with pytest.raises(Failure, match="unknown service containers"):
            caller.ask("/containers/json", b"")
    url = "http://localhost/containers/json"
    command = ["curl", "-s", "--http2-prior-knowledge", "-w", "%{http_code}", "--unix-socket", builder.socket, url]
    assert subprocess.run(command, capture_output=True, timeout=60 * PATIENCE, check=True).stdout == b"415"


@pytest.mark.parametrize("headers", [{}, {"Connection": "Upgrade", "Upgrade": "tcp"}])
def test_it_needs_the_upgrade(builder: TempEngine, headers: dict[str, str]) -> None:
    answer = builder.request("POST", "/grpc", headers=headers)
    assert answer.status == 400 and "needs the header Upgrade: h2c" in answer.message
