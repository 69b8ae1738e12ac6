"""docker-py's `images.build` and its low-level `build`, pinned to API 1.24."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import pytest

from tests.support.builds.building import context
from tests.support.engine.harness import TempEngine


@pytest.fixture
def client(builder: TempEngine) -> Iterator[docker.DockerClient]:
    found = builder.client()
    yield found
    found.close()


def _file(text: str) -> io.BytesIO:
    return io.BytesIO(text.encode())


def test_build_of_a_directory(client: docker.DockerClient, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM busybox\nARG v=1\nCOPY . /c\nRUN echo v is $v\nCMD cat /c/a\n")
    (tmp_path / "a").write_text("content\n")
    (tmp_path / "ignored").write_text("x")
    (tmp_path / ".dockerignore").write_text("ignored\n")
    built, log = client.images.build(path=str(tmp_path), tag="py:1", buildargs={"v": "2"}, rm=True)
    assert built.tags == ["py:1"]
    texts = [each["stream"] for each in log if "stream" in each]
    assert "v is 2\n" in texts
    assert client.containers.run("py:1", remove=True, network_mode="none") == b"content\n"
    assert client.containers.run("py:1", ["ls", "/c"], remove=True, network_mode="none") == b"Dockerfile\na\n"
    assert client.containers.list(all=True) == []


def test_build_of_a_file_object(client: docker.DockerClient) -> None:
    built, _ = client.images.build(fileobj=_file("FROM busybox\nLABEL a=b\n"), labels={"c": "d"}, nocache=True)
    assert built.labels == {"a": "b", "c": "d"}


@pytest.mark.parametrize("encoding", [None, "gzip"])
def test_build_of_an_archive(client: docker.DockerClient, encoding: str | None) -> None:
    """With `encoding` docker-py sends Content-Encoding, whatever the bytes are."""
    body = context("FROM x\n", {"f/File": b"FROM busybox\nCOPY a /\nLABEL is=archive\n", "a": b"a"})
    built, _ = client.images.build(
        fileobj=io.BytesIO(body), custom_context=True, dockerfile="f/File", encoding=encoding
    )
    assert built.labels == {"is": "archive"}


def test_build_of_a_packed_directory(client: docker.DockerClient, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM busybox\nCOPY Dockerfile /\n")
    assert client.images.build(path=str(tmp_path), gzip=True)[0].id


def test_a_failing_step(client: docker.DockerClient) -> None:
    with pytest.raises(docker.errors.BuildError) as raised:
        client.images.build(fileobj=_file("FROM busybox\nRUN echo said; exit 6\n"))
    assert raised.value.msg == "The command '/bin/sh -c echo said; exit 6' returned a non-zero code: 6"
    log = list(raised.value.build_log)
    assert {"stream": "said\n"} in log
    assert log[-1]["errorDetail"]["code"] == 6


def test_a_bad_dockerfile(client: docker.DockerClient) -> None:
    with pytest.raises(docker.errors.APIError, match="nknown instruction: NONSENSE"):
        client.images.build(fileobj=_file("FROM busybox\nNONSENSE\n"))


def test_quiet(client: docker.DockerClient) -> None:
    built, _ = client.images.build(fileobj=_file("FROM busybox\nLABEL a=q\n"), quiet=True)
    assert built.labels == {"a": "q"}


def test_options(client: docker.DockerClient) -> None:
    """All that docker-py lets pass at API 1.24."""
    text = "FROM busybox\nRUN df -k /dev/shm | tail -n 1\n"
    built, log = client.images.build(
        fileobj=_file(text),
        shmsize=1 << 20,
        container_limits={"memory": 64 << 20, "memswap": 64 << 20, "cpushares": 512, "cpusetcpus": "0"},
        nocache=True,
        forcerm=True,
        pull=False,
        isolation="default",
    )
    out = "".join(each.get("stream", "") for each in log)
    assert " 1024 " in out
    assert built.id


def test_low_level(client: docker.DockerClient) -> None:
    """The decoded stream, as its documentation shows it."""
    log = list(client.api.build(fileobj=_file("FROM busybox\nRUN true\n"), tag="low", rm=True, decode=True))
    assert all(set(each) <= {"stream", "aux", "status", "id", "progress", "progressDetail"} for each in log)
    text = "".join(each.get("stream", "") for each in log)
    assert f"Successfully built {client.images.get('low').short_id.removeprefix('sha256:')}" in text
