"""Graphs of operations: which ones are read, and what they name."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.buildkit.control_messages import Definition, Empty, Input, Operation, OperationMetadata, Source
from engine.builder.buildkit.graphs import Fetched, WebFile, definition, result_of, web_file
from engine.builder.buildkit.messages import Stat
from engine.errors import EngineError, InvalidParameter, NotFound, Unimplemented
from engine.rpc import protobuf
from tests.support.builds import buildx

URL = "https://host.example/x"


def graph(*operations: Operation) -> Definition:
    """These operations in a row, the last of which names the one before it."""
    encoded = [protobuf.encode(operation) for operation in operations]
    digest = f"sha256:{hashlib.sha256(encoded[-1]).hexdigest()}"
    return Definition(operations=[*encoded, protobuf.encode(Operation(inputs=[Input(digest=digest)]))])


def web(**attributes: str) -> Definition:
    return graph(Operation(source=Source(URL, {f"http.{name}": value for name, value in attributes.items()})))


def test_results() -> None:
    found = definition("abc")
    assert result_of(found) == "abc"
    assert list(found.metadata.values()) == [OperationMetadata()]
    with pytest.raises(Unimplemented):
        web_file(found)
    with pytest.raises(Unimplemented):
        result_of(web())


def test_files_of_web_servers() -> None:
    assert web_file(web()) == WebFile(URL, URL, "", "", 0o600)
    assert web_file(web(filename="Dockerfile", checksum="sha256:1", perm="0644")) == WebFile(
        *(URL, URL, "Dockerfile", "sha256:1", 0o644)
    )
    sent = protobuf.decode(buildx.web_file(URL, filename="x"), Definition)
    assert web_file(sent) == WebFile(URL, f"load {URL}", "x", "", 0o600)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"perm": "9"}, "'9' is not a mode"),
        ({"perm": "-1"}, "'-1' is not a mode"),
        ({"perm": "10000"}, "'10000' is not a mode"),
        ({"filename": "a/b"}, "'a/b' is not the name of a file"),
        ({"filename": ".."}, "is not the name of a file"),
        ({"header.accept": "x"}, "the attribute 'http.header.accept' of a file to fetch is not supported"),
        ({"uid": "1"}, "the attribute 'http.uid'"),
    ],
)
def test_values_that_are_refused(attributes: dict[str, str], words: str) -> None:
    with pytest.raises(EngineError) as caught:
        web_file(web(**attributes))
    assert words in caught.value.message and isinstance(caught.value, InvalidParameter | Unimplemented)


SOURCE = Operation(source=Source(URL))


@pytest.mark.parametrize(
    "other",
    [
        Definition(),
        graph(Operation(source=Source("docker-image://busybox"))),
        graph(Operation(source=Source("git://host.example/x.git"))),
        graph(Operation(file=Empty())),
        graph(SOURCE, Operation(inputs=[Input(digest="sha256:1")], exec=Empty())),
        graph(SOURCE, SOURCE),
        graph(Operation(inputs=[Input(digest="sha256:1")], source=Source(URL))),
        Definition(operations=[protobuf.encode(SOURCE)] * 2),
        Definition(operations=[protobuf.encode(SOURCE), protobuf.encode(Operation(inputs=[Input(digest="sha256:1")]))]),
    ],
)
def test_other_graphs_are_refused(other: Definition) -> None:
    for read in (web_file, result_of):
        with pytest.raises(Unimplemented, match="builds of LLB are not supported"):
            read(other)


@given(st.lists(st.binary(max_size=60), max_size=3), st.data())
def test_any_bytes(operations: list[bytes], data: st.DataObject) -> None:
    """Whatever a client sends is read or refused."""
    if data.draw(st.booleans()):
        whole = protobuf.encode(web(filename="x"))
        cut = data.draw(st.integers(0, len(whole)))
        sent = whole[:cut] + data.draw(st.binary(max_size=8)) + whole[cut:]
        try:
            given_graph = protobuf.decode(sent, Definition)
        except InvalidParameter:
            return
    else:
        given_graph = Definition(operations=operations)
    try:
        assert web_file(given_graph).url.startswith("http")
    except EngineError as error:
        assert isinstance(error, InvalidParameter | Unimplemented)


def test_reading_a_file() -> None:
    found = Fetched(Stat(path="Dockerfile", size=5), b"01234")
    assert found.find("/./Dockerfile") is found.stat
    assert found.read("Dockerfile", 0, 0) == b"01234"
    assert found.read("Dockerfile", 1, 2) == b"12"
    assert found.read("Dockerfile", 3, 9) == b"34"
    assert found.read("Dockerfile", 9, 0) == b""
    for path in ("", "/", "dockerfile", "Dockerfile/x", "../x"):
        with pytest.raises(NotFound, match="no such file"):
            found.read(path, 0, 0)
