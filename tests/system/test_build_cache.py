"""The build cache by single changes: what makes a step run again, and what does not."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.builds.table import TAR, Built, build, cached
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Node, busybox, directory, docker_archive, symlink, tar

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

STEPS = """\
FROM busybox
ARG who=x
ENV a=1
COPY d /d
RUN echo $who > /r
LABEL l=1
COPY f* /f/
RUN echo 2 > /s
"""
CONTEXT = [
    Node("Dockerfile", STEPS.encode()),
    directory("d"),
    Node("d/a", b"A"),
    symlink("d/l", "a"),
    Node("f1", b"F"),
    Node("unused", b"U"),
]
LAST = 8


def with_text(old: str, new: str) -> list[Node]:
    assert old in STEPS
    return [Node("Dockerfile", STEPS.replace(old, new, 1).encode()), *CONTEXT[1:]]


def with_node(one: str, /, **changes: object) -> list[Node]:
    assert one in {node.name for node in CONTEXT}
    return [dataclasses.replace(node, **changes) if node.name == one else node for node in CONTEXT]  # type: ignore[arg-type]


PACKED: dict[str, Callable[[list[Node]], bytes]] = {
    "compression": lambda nodes: gzip.compress(tar(nodes)),
    "format of the archive": lambda nodes: tar(nodes, tarfile.GNU_FORMAT),
}
CHANGES: dict[str, tuple[list[Node], dict[str, str], int]] = {
    # the change, the query, and the first step that runs again: LAST + 1 when none does
    "nothing": (CONTEXT, {}, LAST + 1),
    "times": ([dataclasses.replace(node, mtime=1) for node in CONTEXT], {}, LAST + 1),
    "order of the archive": (CONTEXT[::-1], {}, LAST + 1),
    "compression": (CONTEXT, {}, LAST + 1),
    "format of the archive": (CONTEXT, {}, LAST + 1),
    "owner": (with_node("d/a", uid=5, gid=6), {}, LAST + 1),
    "a file that no step copies": (with_node("unused", data=b"V"), {}, LAST + 1),
    "a comment": (with_text("ENV a", "# comment\n\nENV a"), {}, LAST + 1),
    "case of a keyword": (with_text("ENV a=1", "env a=1"), {}, LAST + 1),
    "another name of the file": (
        [dataclasses.replace(CONTEXT[0], name="Other"), *CONTEXT[1:]],
        {"dockerfile": "Other"},
        9,
    ),
    "a proxy": (CONTEXT, {"buildargs": '{"HTTP_PROXY": "http://x"}'}, LAST + 1),
    "a tag": (CONTEXT, {"t": "other"}, LAST + 1),
    "a limit": (CONTEXT, {"memory": str(64 << 20)}, LAST + 1),
    "the default of an argument given": (CONTEXT, {"buildargs": '{"who": "x"}'}, LAST + 1),
    "an argument": (CONTEXT, {"buildargs": '{"who": "y"}'}, 5),
    "ENV": (with_text("a=1", "a=2"), {}, 3),
    "content": (with_node("d/a", data=b"B"), {}, 4),
    "content of the same size at the same time": (with_node("d/a", data=b"Z"), {}, 4),
    "mode": (with_node("d/a", mode=0o755), {}, 4),
    "mode of the directory whose files are copied": (with_node("d", mode=0o700), {}, LAST + 1),
    "target of a link": (with_node("d/l", link="b"), {}, 4),
    "kind": (with_node("d/l", type=b"0"), {}, 4),
    "another name": (with_node("d/a", name="d/b"), {}, 4),
    "one file more": ([*CONTEXT, Node("d/b", b"A")], {}, 4),
    "an empty directory more": ([*CONTEXT, directory("d/b")], {}, 4),
    "one file less": ([node for node in CONTEXT if node.name != "d/l"], {}, 4),
    "destination": (with_text("COPY d /d", "COPY d /e"), {}, 4),
    "owner of the copy": (with_text("COPY d", "COPY --chown=1 d"), {}, 4),
    "RUN": (with_text("echo $who", "echo  $who"), {}, 5),
    "LABEL": (with_text("l=1", "l=2"), {}, 6),
    "one more match": ([*CONTEXT, Node("f2", b"F")], {}, 7),
    "the last RUN": (with_text("echo 2", "echo 3"), {}, 8),
    "labels of the request": (CONTEXT, {"labels": '{"x": "y"}'}, LAST + 1),
    "nocache": (CONTEXT, {"nocache": "1"}, 0),
    "a step less": (with_text("LABEL l=1\n", ""), {}, 6),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[TempEngine]:
    with TempEngine() as engine:
        engine.load_busybox()
        yield engine


@pytest.fixture
def fresh() -> Iterator[TempEngine]:
    """An engine whose cache and images a test may remove."""
    with TempEngine() as engine:
        engine.load_busybox()
        yield engine


def marked(nodes: list[Node], marker: str) -> list[Node]:
    """The context with one more step at the begin, so that no other test has filled its cache."""
    line = f"FROM busybox\nLABEL case={marker.replace(' ', '-')}\n".encode()
    return [dataclasses.replace(node, data=node.data.replace(b"FROM busybox\n", line)) for node in nodes]


def built(engine: TempEngine, nodes: list[Node] | bytes, query: dict[str, str] | None = None) -> Built:
    """Build. Raises AssertionError unless there is an image."""
    found = build(engine.request, nodes, query)
    assert found.image, found
    return found


def image(engine: TempEngine, name: str) -> str:
    """Id of an image."""
    answer = engine.request("GET", f"/v1.24/images/{name}/json")
    assert answer.status == 200, answer
    return str(answer.json()["Id"])


@pytest.mark.parametrize("change", CHANGES)
def test_a_change(engine: TempEngine, change: str) -> None:
    """The first step after the marker is step 3."""
    nodes, query, begin = CHANGES[change]
    first = built(engine, marked(CONTEXT, change))
    assert cached(first.text) == []
    body = PACKED[change](marked(CONTEXT, change)) if change in PACKED else marked(nodes, change)
    second = built(engine, body, query)
    assert cached(second.text) == ([] if change == "nocache" else list(range(2, begin + 1))), second.text
    if begin > LAST and "labels" not in query:
        assert second.image == first.image
    # and what just ran is in the cache now
    third = built(engine, body, {**query, "nocache": ""})
    steps = LAST + 1 - (change == "a step less") + ("labels" in query)
    assert cached(third.text) == list(range(2, steps + 1)), third.text
    assert third.image == second.image


def test_a_build_without_the_cache_fills_it(engine: TempEngine) -> None:
    """The result of the later build counts."""
    nodes = [Node("Dockerfile", b"FROM busybox\nLABEL fills=1\nRUN head -c 8 /dev/urandom > /x\n")]
    first, second, third = (built(engine, nodes, query) for query in ({}, {"nocache": "1"}, {}))
    assert first.image != second.image == third.image


def test_another_base(fresh: TempEngine) -> None:
    """A base of another id is another parent; the former one still has its steps."""
    nodes = [Node("Dockerfile", b"FROM busybox\nRUN echo 1 > /x\n")]
    first = built(fresh, nodes)
    original = image(fresh, "busybox")
    archive = docker_archive(busybox(config={"Labels": {"other": "1"}}))
    assert fresh.request("POST", "/v1.24/images/load?quiet=1", archive, TAR).status == 200
    second = built(fresh, nodes)
    assert cached(second.text) == [] and second.image != first.image
    fresh.request("POST", f"/v1.24/images/{original}/tag?repo=busybox&tag=latest")
    third = built(fresh, nodes)
    assert cached(third.text) == [2] and third.image == first.image


@pytest.mark.parametrize("end", ["terminate", "kill9"])
def test_the_cache_outlives_the_daemon(fresh: TempEngine, end: str) -> None:
    first = built(fresh, CONTEXT, {"t": "kept"})
    getattr(fresh, end)()
    fresh.start()
    second = built(fresh, CONTEXT)
    assert cached(second.text) == list(range(2, LAST + 1)) and second.image == first.image


def test_a_removed_image_is_built_again(fresh: TempEngine) -> None:
    """The cache never names an image that is gone."""
    first = built(fresh, CONTEXT, {"t": "gone"})
    assert fresh.request("DELETE", "/v1.24/images/gone").status == 200
    second = built(fresh, CONTEXT, {"t": "gone"})
    assert image(fresh, "gone").startswith(f"sha256:{second.image}")
    identifier = fresh.create("cat", "/r", "/s", "/d/a", Image="gone")
    fresh.post(f"/containers/{identifier}/start")
    assert fresh.wait(identifier) == 0 and fresh.logs(identifier) == b"x\n2\nA"
    assert built(fresh, CONTEXT).image == second.image != ""
    assert first.image


def test_what_was_loaded_is_matched_only_by_cachefrom(fresh: TempEngine) -> None:
    """Nothing of another engine is used unless its image was named (CVE-2024-24557)."""
    nodes = [Node("Dockerfile", b"FROM busybox\nRUN head -c 8 /dev/urandom > /x\nENV a=1\nRUN echo 2 > /y\n")]
    first = built(fresh, nodes, {"t": "mine"})
    saved = fresh.request("GET", "/v1.24/images/mine/get").body
    with TempEngine() as other:
        other.load_busybox()
        assert other.request("POST", "/v1.24/images/load?quiet=1", saved, TAR).status == 200
        named = built(other, nodes, {"cachefrom": json.dumps(["mine"])})
        assert cached(named.text) == [2, 3, 4] and named.image == first.image, named.text
        assert cached(built(other, nodes, {"cachefrom": json.dumps(["missing"])}).text) in ([], [2, 3, 4])
    with TempEngine() as other:
        other.load_busybox()
        assert other.request("POST", "/v1.24/images/load?quiet=1", saved, TAR).status == 200
        unnamed = built(other, nodes)
        assert cached(unnamed.text) == [] and unnamed.image != first.image


def test_prune(fresh: TempEngine) -> None:
    """A prune of all leaves the tagged image, whose steps then run again."""
    built(fresh, CONTEXT, {"t": "kept"})
    built(fresh, with_text("echo 2", "echo 3"))
    answer = fresh.request("POST", "/v1.24/build/prune?all=1")
    assert answer.status == 200 and set(answer.json()) >= {"CachesDeleted", "SpaceReclaimed"}, answer
    assert image(fresh, "kept")
    identifier = fresh.create("cat", "/s", Image="kept")
    fresh.post(f"/containers/{identifier}/start")
    assert fresh.wait(identifier) == 0 and fresh.logs(identifier) == b"2\n"
    assert cached(built(fresh, CONTEXT).text) == []


def test_prune_leaves_no_step(fresh: TempEngine) -> None:
    """Images of steps go with their records, from the last one of a chain to its base."""
    before = fresh.footprint()
    built(fresh, CONTEXT)
    answer = fresh.request("POST", "/v1.24/build/prune?all=1")
    assert len(answer.json()["CachesDeleted"]) >= LAST - 2
    assert [one["RepoTags"] for one in fresh.request("GET", "/v1.24/images/json?all=1").json()] == [["busybox:latest"]]
    fresh.assert_settles(before)


def test_a_stage_is_keyed_by_what_is_copied(engine: TempEngine) -> None:
    """A stage that ran again with the same result does not make the next stage run again."""

    def nodes(comment: str, value: str) -> list[Node]:
        text = (
            f"FROM busybox AS one\nLABEL comment={comment}\nRUN echo {value} > /x\n"
            "FROM busybox\nLABEL stage=keyed\nCOPY --from=one /x /x\nRUN cat /x > /y\n"
        )
        return [Node("Dockerfile", text.encode())]

    first = built(engine, nodes("a", "1"))
    assert cached(built(engine, nodes("b", "1")).text) == [5, 6, 7]
    assert cached(built(engine, nodes("b", "2")).text) == [2, 5]
    assert built(engine, nodes("a", "1")).image == first.image


def test_steps_are_shared_between_files(engine: TempEngine) -> None:
    common = "FROM busybox\nENV common=1\nRUN head -c 8 /dev/urandom > /x\n"
    built(engine, [Node("Dockerfile", f"{common}RUN echo 1 > /y\n".encode())])
    second = built(engine, [Node("Dockerfile", f"{common}RUN echo 2 > /y\n".encode())])
    assert cached(second.text) == [2, 3]


def test_order_of_metadata_matters(engine: TempEngine) -> None:
    """The same config by other steps is another key: the history differs."""
    first = built(engine, [Node("Dockerfile", b"FROM busybox\nENV order=1\nLABEL b=2\nRUN echo 1 > /x\n")])
    second = built(engine, [Node("Dockerfile", b"FROM busybox\nLABEL b=2\nENV order=1\nRUN echo 1 > /x\n")])
    assert cached(second.text) == [] and first.image != second.image


def test_everything_of_the_config_is_part_of_the_key(engine: TempEngine) -> None:
    """Docker 1.12 left these out of the comparison."""
    images = set()
    for line in ("HEALTHCHECK CMD a", "HEALTHCHECK CMD b", "ONBUILD ENV a=b", "STOPSIGNAL 9", "WORKDIR /tmp", "USER 0"):
        found = built(engine, [Node("Dockerfile", f"FROM busybox\nENV whole=1\n{line}\nRUN echo 1 > /x\n".encode())])
        assert 4 not in cached(found.text), (line, found.text)
        images.add(found.image)
    assert len(images) == 6


def test_a_url_is_asked_each_time(engine: TempEngine) -> None:
    """Its content decides, although the line is the same."""
    content = [b"one"]
    asked: list[str] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content[0])))
            self.end_headers()
            self.wfile.write(content[0])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = f"FROM busybox\nADD http://127.0.0.1:{server.server_port}/f /f\nRUN cat /f > /g\n"
        nodes = [Node("Dockerfile", text.encode())]
        first = built(engine, nodes)
        second = built(engine, nodes)
        assert cached(second.text) == [2, 3] and second.image == first.image
        content[0] = b"two"
        third = built(engine, nodes)
        assert cached(third.text) == [] and third.image != first.image
        server.shutdown()
    assert len(asked) >= 3


def test_a_failed_build_keeps_its_steps(engine: TempEngine) -> None:
    text = "FROM busybox\nENV failed=1\nRUN head -c 8 /dev/urandom > /x\n"
    failed = build(engine.request, [Node("Dockerfile", f"{text}RUN false\n".encode())])
    assert failed.error and not failed.image
    assert cached(built(engine, [Node("Dockerfile", f"{text}RUN true\n".encode())]).text) == [2, 3]


def test_random_changes_never_give_a_wrong_file(engine: TempEngine) -> None:
    """Whatever was built before, each image has what its own context says."""
    chance = random.Random(15)
    for _ in range(12):
        first, second, third = (chance.choice("abc") for _ in range(3))
        text = f"FROM busybox\nENV random={first}\nCOPY f /f\nRUN echo $random$(cat /f){third} > /x\n"
        built(engine, [Node("Dockerfile", text.encode()), Node("f", second.encode())], {"t": "random"})
        identifier = engine.create("cat", "/x", Image="random")
        engine.post(f"/containers/{identifier}/start")
        assert engine.wait(identifier) == 0
        assert engine.logs(identifier) == f"{first}{second}{third}\n".encode()
        engine.request("DELETE", f"/v1.24/containers/{identifier}")
