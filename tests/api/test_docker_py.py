"""docker-py, pinned to API 1.24: the same tasks as in the CLI's tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import docker
import docker.errors
import pytest

from tests.support import PATIENCE
from tests.support.engine.client import payload
from tests.support.engine.harness import TempEngine, busybox_archive, until


@pytest.fixture
def client(engine: TempEngine) -> Iterator[docker.DockerClient]:
    found = engine.client()
    yield found
    found.close()


def test_run_returns_the_output(client: docker.DockerClient, engine: TempEngine) -> None:
    assert client.containers.run("busybox", ["echo", "hello"], remove=True, network_mode="none") == b"hello\n"
    with pytest.raises(docker.errors.ContainerError) as raised:
        client.containers.run("busybox", "sh -c 'echo wrong >&2; exit 3'", remove=True, network_mode="none")
    assert raised.value.exit_status == 3
    assert raised.value.stderr == b"wrong\n"
    assert engine.containers() == []


def test_version_negotiation(engine: TempEngine) -> None:
    """`auto` reads the unversioned /version and uses the version in it."""
    found = docker.DockerClient(base_url=f"unix://{engine.socket}", version="auto")
    assert found.ping() is True
    assert found.version()["ApiVersion"] == found.api.api_version
    found.close()


def test_a_life(client: docker.DockerClient) -> None:
    container = client.containers.create(
        "busybox",
        ["sh", "-c", "echo one; echo two; echo err >&2; exec sleep 600"],
        name="life",
        network_mode="none",
        labels={"k": "v"},
        environment={"A": "b"},
    )
    assert container.status == "created"
    container.start()
    until("it has printed", lambda: sorted(container.logs().split()) == [b"err", b"one", b"two"])
    assert container.logs(stdout=True, stderr=False) == b"one\ntwo\n"
    assert len(container.logs(tail=1).splitlines()) == 1
    container.reload()
    assert container.status == "running"
    assert container.labels == {"k": "v"}
    assert "A=b" in container.attrs["Config"]["Env"]
    assert [found.id for found in client.containers.list(filters={"label": "k=v"})] == [container.id]
    container.restart(timeout=0)
    container.kill()
    assert container.wait()["StatusCode"] == 137
    container.start()
    container.stop(timeout=0)
    container.remove()
    with pytest.raises(docker.errors.NotFound):
        client.containers.get("life")
    assert client.containers.list(all=True) == []


def test_errors_are_the_client_s_own(client: docker.DockerClient) -> None:
    with pytest.raises(docker.errors.ImageNotFound):
        client.containers.create("no-such-image", "true")
    with pytest.raises(docker.errors.NotFound):
        client.containers.get("no-such-container")
    with pytest.raises(docker.errors.ImageNotFound):
        client.images.get("no-such-image")
    client.containers.create("busybox", "true", name="taken")
    with pytest.raises(docker.errors.APIError) as raised:
        client.containers.create("busybox", "true", name="taken")
    assert raised.value.status_code == 409


def test_attach_socket(client: docker.DockerClient) -> None:
    container = client.containers.create(
        "busybox", ["sh", "-c", "read word; echo got $word; echo err >&2"], stdin_open=True, network_mode="none"
    )
    stream = container.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    container.start()
    stream._sock.sendall(b"this\n")
    received = b""
    while chunk := stream._sock.recv(4096):
        received += chunk
    stream.close()
    assert payload(received, 1) == b"got this\n"
    assert payload(received, 2) == b"err\n"


def test_attach_stream_and_logs_follow(client: docker.DockerClient) -> None:
    container = client.containers.create("busybox", ["sh", "-c", "seq 1000"], network_mode="none")
    expected = b"".join(b"%d\n" % number for number in range(1, 1001))
    attached = container.attach(stream=True, stdout=True, stderr=True)
    container.start()
    assert b"".join(attached) == expected
    assert b"".join(container.logs(stream=True, follow=True)) == expected


def test_wait_answers_every_waiter(client: docker.DockerClient, engine: TempEngine) -> None:
    container = client.containers.run(
        "busybox", ["sh", "-c", "read word; exit 5"], stdin_open=True, detach=True, network_mode="none"
    )
    answers: list[int] = []
    waiting = [threading.Thread(target=lambda: answers.append(engine.wait(container.id))) for _ in range(8)]
    for waiter in waiting:
        waiter.start()
    container.attach_socket(params={"stdin": 1, "stream": 1})._sock.sendall(b"go\n")
    for waiter in waiting:
        waiter.join(30 * PATIENCE)
    assert answers == [5] * 8


def test_images(client: docker.DockerClient) -> None:
    (image,) = client.images.load(busybox_archive())
    assert "busybox:latest" in image.tags
    assert image.tag("other", "v2")
    assert "other:v2" in client.images.get(image.id).tags
    assert client.images.list("other")[0].id == image.id
    client.images.remove("other:v2")
    assert client.images.list("other") == []


def test_events(client: docker.DockerClient) -> None:
    stream = client.events(decode=True, filters={"type": "container", "event": ["create", "die", "destroy"]})
    container = client.containers.run("busybox", ["false"], detach=True, network_mode="none")
    container.wait()
    container.remove()
    seen = [next(stream) for _ in range(3)]
    stream.close()
    assert [event["Action"] for event in seen] == ["create", "die", "destroy"]
    assert [event["status"] for event in seen] == ["create", "die", "destroy"]
    assert {event["id"] for event in seen} == {container.id}
    assert seen[1]["Actor"]["Attributes"]["exitCode"] == "1"
