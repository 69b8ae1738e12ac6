"""A client that leaves ends its build, whatever the build does at that moment, and nothing of it is
left: no container, process, mount, layer or file."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support import PATIENCE
from tests.support.builds.table import Building, build, head
from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Node, tar

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

FILES = [Node(f"d/{at // 100}/{at}", os.urandom(2000)) for at in range(3000)]


@pytest.fixture(scope="module")
def shared() -> Iterator[TempEngine]:
    with TempEngine() as engine:
        engine.load_busybox()
        # workers, sockets and caches that the first build makes
        assert build(engine.request, dockerfile("FROM busybox\nRUN true\n")).image
        yield engine


@pytest.fixture
def engine(shared: TempEngine) -> Iterator[TempEngine]:
    """Asserts that the engine has no more than before the test, but for steps that were finished:
    those are in the cache until a prune.
    """
    shared.request("POST", "/v1.24/build/prune?all=1")
    before, images = shared.footprint(), names(shared)
    yield shared
    until("no container is left", lambda: shared.containers() == [])

    def left() -> dict[str, set[str]]:
        # a step may have been so far that it ends
        assert shared.request("POST", "/v1.24/build/prune?all=1").status == 200
        return shared.footprint().beyond(before) | {"images": names(shared) - images}

    until("nothing is left", lambda: not any(left().values()))
    until("no file is left", lambda: os.listdir(shared.root / "tmp") == [])
    shared.assert_recorded()


def names(engine: TempEngine) -> set[str]:
    return {name for image in engine.request("GET", "/v1.24/images/json").json() for name in image["RepoTags"] or []}


def dockerfile(text: str, *more: Node) -> list[Node]:
    return [Node("Dockerfile", text.encode()), *more]


def running(engine: TempEngine, word: bytes) -> bool:
    """Whether a process with that word in its command runs on the host."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if word in file.read() and int(pid) != os.getpid():
                return True
    return False


def test_in_run(engine: TempEngine) -> None:
    building = Building(engine.socket, dockerfile("FROM busybox\nRUN echo begun; sleep 77123\n"), {"t": "never"})
    building.said("begun")
    until("the shell executes it", lambda: running(engine, b"sleep\x0077123"))
    building.close()
    until("the process has ended", lambda: not running(engine, b"sleep\x0077123"))


def test_in_run_that_ignores_signals(engine: TempEngine) -> None:
    text = "FROM busybox\nRUN trap '' TERM INT HUP; echo begun; while true; do sleep 77124; done\n"
    building = Building(engine.socket, dockerfile(text))
    building.said("begun")
    building.close()
    until("the process has ended", lambda: not running(engine, b"sleep\x0077124"))


def test_in_run_that_writes(engine: TempEngine) -> None:
    """Output whose reader has left does not hold up the build."""
    building = Building(engine.socket, dockerfile("FROM busybox\nRUN yes 77125; true\n"))
    building.said("77125")
    building.close()
    until("the process has ended", lambda: not running(engine, b"yes\x0077125"))


def test_a_client_that_reads_slowly_is_waited_for(engine: TempEngine) -> None:
    """Output has back-pressure: the daemon keeps no more of it than a bounded amount."""
    building = Building(engine.socket, dockerfile("FROM busybox\nRUN yes 77126 | head -c 30000000\n"))
    building.said("77126")
    building.close()
    until("the process has ended", lambda: not running(engine, b"yes\x0077126"))


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_while_the_context_arrives(engine: TempEngine, part: float) -> None:
    body = tar(dockerfile("FROM busybox\nCOPY d /d\n", *FILES))
    with client.connect(engine.socket) as connection:
        connection.sendall(head(len(body)) + body[: int(len(body) * part)])


def test_while_a_compressed_context_arrives(engine: TempEngine) -> None:
    body = gzip.compress(tar(dockerfile("FROM busybox\nCOPY d /d\n", *FILES)), 1)
    with client.connect(engine.socket) as connection:
        connection.sendall(head(len(body)) + body[: len(body) // 2])


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_at_a_step(engine: TempEngine, step: int) -> None:
    """Right after its line was sent: within COPY, RUN, the seal of its layer, and the end."""
    text = f"FROM busybox\nLABEL at={step}\nCOPY d /d\nRUN cp -r /d /e\nRUN rm -r /d\n"
    building = Building(engine.socket, dockerfile(text, *FILES), {"nocache": "1"})
    building.until(f"Step {step} ")
    building.close()


def test_while_stages_run(engine: TempEngine) -> None:
    text = "".join(f"FROM busybox AS s{at}\nRUN echo begun{at}; sleep 77127\n" for at in range(4))
    copies = "".join(f"COPY --from=s{at} /etc/passwd /p{at}\n" for at in range(4))
    building = Building(engine.socket, dockerfile(f"{text}FROM busybox\n{copies}"))
    building.said("begun0")
    until("all stages run", lambda: len(engine.containers()) == 4)
    building.close()
    until("the processes have ended", lambda: not running(engine, b"sleep\x0077127"))


@contextlib.contextmanager
def stalling() -> Iterator[tuple[int, threading.Event]]:
    """A server that takes requests and never answers; its port, and whether it was asked."""
    asked, over = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            if connection.recv(65536):
                asked.set()
                over.wait()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], asked
        over.set()


@pytest.mark.parametrize(
    "text",
    [
        "FROM 127.0.0.1:{}/base\n",
        "FROM busybox\nADD http://127.0.0.1:{}/file /x\n",
        "FROM busybox\nCOPY --from=127.0.0.1:{}/image /x /x\n",
        "FROM busybox\nADD http://127.0.0.1:{}/repository.git /x\n",
    ],
    ids=["base", "url", "image", "git"],
)
def test_while_another_server_stalls(engine: TempEngine, text: str) -> None:
    with stalling() as (port, asked):
        building = Building(engine.socket, dockerfile(text.format(port)))
        assert asked.wait(30 * PATIENCE), "the server was not asked"
        building.close()
        until("no helper process is left", lambda: not running(engine, f"127.0.0.1:{port}".encode()))


def test_while_a_remote_context_stalls(engine: TempEngine) -> None:
    with stalling() as (port, asked):
        building = Building(engine.socket, b"", {"remote": f"http://127.0.0.1:{port}/context.tar"})
        assert asked.wait(30 * PATIENCE), "the server was not asked"
        building.close()


def test_the_next_build_is_right(engine: TempEngine) -> None:
    """What a cancelled build has finished is used, what it has not is not."""
    text = "FROM busybox\nRUN head -c 8 /dev/urandom > /x\nRUN echo begun; echo half > /y; sleep 1; echo whole > /y\n"
    building = Building(engine.socket, dockerfile(text))
    building.said("begun")
    building.close()
    until("the container is gone", lambda: engine.containers() == [])
    assert build(engine.request, dockerfile(text), {"t": "right"}).image
    container = engine.create("cat", "/y", Image="right")
    engine.post(f"/containers/{container}/start")
    assert engine.wait(container) == 0 and engine.logs(container) == b"whole\n"
    engine.request("DELETE", f"/v1.24/containers/{container}")
    engine.request("DELETE", "/v1.24/images/right?force=1")


def test_many_times(engine: TempEngine) -> None:
    """No descriptor or task is left of any of them."""
    body = tar(dockerfile("FROM busybox\nRUN echo begun; sleep 77128\n"))

    def leave() -> None:
        building = Building(engine.socket, body)
        building.said("begun")
        building.close()

    before = 0
    for times in (5, 20):
        for _ in range(times):
            leave()
        until("no container is left", lambda: engine.containers() == [])
        before = before or engine.open_files()
    until("no descriptor is left", lambda: engine.open_files() <= before + 2)
