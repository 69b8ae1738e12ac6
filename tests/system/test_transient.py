"""Containers of one run, which image builds make: their output, their changes as a layer, their
mounts, and what is left of them after each kind of end.

The first half drives the containers of a daemon in a process of its own, the second half builds
images through the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import io
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.config import Config as EngineConfig
from engine.containers import removal
from engine.containers.container import Container
from engine.containers.extra_mounts import Bind, ExtraMount, File, Tmpfs
from engine.containers.output import output
from engine.daemon import Daemon
from engine.errors import Conflict, NotFound, ServerError
from engine.images import tarsplit
from engine.images.importing import EMPTY_LAYER
from engine.images.layers import Extraction
from engine.images.record import ImageRecord
from engine.runtime.cgroups import Cgroups
from engine.storage.snapshots import Ingest
from engine.wire.containers import CreateBody, HostConfig
from tests.support import PATIENCE
from tests.support.builds import sessions
from tests.support.engine.harness import TempEngine, below, contents, until
from tests.support.forks import cancel_when_interrupted, engine_of_forks, run_in_fork
from tests.support.images.archives import busybox_archive

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class Ran(NamedTuple):
    code: int
    out: bytes
    ingest: Ingest
    extraction: Extraction

    def names(self) -> set[str]:
        """The entries of the layer."""
        return {str(path.relative_to(self.ingest.path)) for path in below(self.ingest.path)}


class Site:
    """A daemon with busybox."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.containers = daemon.containers
        self.snapshots = daemon.snapshots
        self.image: ImageRecord = daemon.images.get("busybox")

    async def create(self, *command: str, mounts: Sequence[ExtraMount] = (), **host: Any) -> Container:
        body = CreateBody(cmd=list(command), host_config=HostConfig(**({"network_mode": "none"} | host)))
        return await self.containers.create_transient(body, self.image, mounts=mounts)

    async def run(
        self, script: str, *, mounts: Sequence[ExtraMount] = (), drop: Sequence[str] = (), **host: Any
    ) -> Ran:
        """Run a shell script to its end, and make a layer of its changes."""
        container = await self.create("sh", "-c", script, mounts=mounts, **host)
        attached = await output(container)
        await container.start()
        out = b"".join([data async for _, data in attached])
        attached.close()
        code = (await container.wait()).exit_code
        ingest = await self.containers.take(container)
        extraction = await self.daemon.images.layers.seal(ingest, self.image.chain_ids[-1], drop=drop)
        assert digest(ingest.path) == extraction.diff_id
        return Ran(code, out, ingest, extraction)

    def left(self) -> dict[str, list[str]]:
        """Directories of containers and snapshots."""
        root = self.daemon.config.root
        return {name: sorted(os.listdir(root / name)) for name in ("containers", "layers")}


def digest(diff: Path) -> str:
    hashed, buffer = hashlib.sha256(), bytearray(1 << 16)
    with tarsplit.stream(diff) as stream:
        while got := tarsplit.read(stream, memoryview(buffer)):
            hashed.update(buffer[:got])
    return f"sha256:{hashed.hexdigest()}"


def holding(directory: Path, text: bytes) -> list[Path]:
    """The files with that text."""
    return [path for path, held in contents(directory) if text in held]


def in_daemon(story: Callable[[Site], Awaitable[None]], root: Path | None = None) -> None:
    """Run the story in a new process with a daemon, which leaves nothing behind."""
    base = Path(tempfile.mkdtemp(prefix="eng", dir="/tmp"))
    config = EngineConfig(
        sockets=(str(base / "s"),), root=root or base / "root", run=base / "run", bridge=f"e{base.name}"[:15]
    )
    try:
        with engine_of_forks(config.run):
            run_in_fork(functools.partial(_main, config, story))
    finally:
        shutil.rmtree(base)


async def _main(config: EngineConfig, story: Callable[[Site], Awaitable[None]]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        daemon = Daemon(config)
        await daemon.open(stack)
        cancel_when_interrupted()
        try:
            async for _ in daemon.images.load(_archive()):
                pass
            site = Site(daemon)
            before = site.left()
            await story(site)
            assert not list(site.containers)
            assert site.left() == before
        finally:
            await daemon.stop_everything(0)


async def _archive() -> AsyncIterator[bytes]:
    yield busybox_archive()


def test_a_run_that_changes_nothing_makes_the_empty_layer() -> None:
    """Neither mount points nor hosts, hostname and resolv.conf are in it."""

    async def story(site: Site) -> None:
        for network in ("none", "host", "default"):
            ran = await site.run("cat /etc/hosts", network_mode=network)
            assert ran.code == 0 and ran.out and ran.extraction.diff_id == EMPTY_LAYER, ran
            assert os.listdir(ran.ingest.path) == []
            await site.snapshots.abandon(ran.ingest)

    in_daemon(story)


def test_changes_become_a_layer() -> None:
    async def story(site: Site) -> None:
        ran = await site.run(
            "echo out; mkdir -p /a/b /vol; echo x > /a/b/file; ln /a/b/file /a/hard; rm /bin/ls; echo y > /vol/y;"
            "echo 127.0.0.1 me >> /etc/hosts; exit 3",
            drop=["/vol"],
        )
        assert (ran.code, ran.out) == (3, b"out\n")
        assert ran.names() == {"a", "a/b", "a/b/file", "a/hard", "bin", "bin/ls", "vol"}
        assert ran.extraction.size == 2
        await site.snapshots.abandon(ran.ingest)

    in_daemon(story)


def test_events_and_no_record() -> None:
    """The events are Docker's, and no row is written."""

    async def story(site: Site) -> None:
        records = site.daemon.records
        container = await site.create("true")
        attached = await output(container)
        await container.start()
        assert container.id not in {key for key, _ in records.rows("container")}
        assert container.id not in {key for key, _ in records.rows("snapshot")}
        assert site.containers.get(container.record.name) is container
        assert [data async for data in attached] == []
        assert (await container.wait()).exit_code == 0
        await site.snapshots.abandon(await site.containers.take(container))
        history = site.daemon.events.history(0)
        seen = [event.action for event in history if event.actor.id == container.id]
        assert seen == ["create", "attach", "start", "die", "destroy"]

    in_daemon(story)


def test_extra_mounts(tmp_path: Path) -> None:
    """Directories, files and sockets by descriptor, a tmpfs, and a file that is on no disk."""
    source, cache, agent = tmp_path / "source", tmp_path / "cache", tmp_path / "agent"
    for path in (source, cache):
        path.mkdir()
    (source / "file").write_text("of the host\n")

    async def story(site: Site) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(agent))
        async with site.snapshots.content(site.image.chain_ids[-1]) as content:
            paths: list[tuple[str | Path, int | None]] = [
                *((source, None), (cache, None), (source / "file", None), (agent, None), ("bin", content)),
            ]
            opened = [os.open(path, os.O_PATH, dir_fd=at) for path, at in paths]
            ran = await site.run(
                "cat /source/file /etc/one /run/secrets/token; stat -c '%a %u %g' /run/secrets/token;"
                "touch /source/x || touch /other/x || touch /run/secrets/token || echo read-only;"
                "test -S /run/agent && echo socket; echo kept > /root/.cache/pip/kept; echo y > /scratch/y;"
                "cat /root/.cache/pip/deep/file; /other/echo other",
                mounts=[
                    Bind(destination="/source", source=opened[0]),
                    Bind(destination="/root/.cache/pip", source=opened[1], writable=True),
                    Bind(destination="/root/.cache/pip/deep", source=opened[0]),
                    Bind(destination="/etc/one", source=opened[2]),
                    Bind(destination="/run/agent", source=opened[3]),
                    Bind(destination="/other", source=opened[4]),
                    Tmpfs(destination="/scratch", size=1 << 20),
                    File(destination="/run/secrets/token", content=b"a secret of the test\n", uid=7, gid=8),
                ],
            )
            for each in opened:
                os.close(each)
        lines = [line for line in ran.out.decode().splitlines() if "Read-only" not in line]
        assert lines == [
            *(
                "of the host",
                "of the host",
                "a secret of the test",
                "400 7 8",
                "read-only",
                "socket",
                "of the host",
                "other",
            ),
        ]
        assert ran.extraction.diff_id == EMPTY_LAYER and ran.names() == set()
        assert (cache / "kept").read_text() == "kept\n"
        await site.snapshots.abandon(ran.ingest)
        assert not holding(site.daemon.config.root, b"a secret of the test")
        listener.close()

    in_daemon(story)


def test_output_is_complete_and_waits_for_its_reader() -> None:
    """The process is held back while nothing is read, and every byte arrives in order."""
    size = 12_000_000

    async def story(site: Site) -> None:
        container = await site.create("sh", "-c", f"seq 100000000 | head -c {size}; echo end >&2; touch /done")
        attached = await output(container)
        await container.start()
        await asyncio.sleep(0.5)
        assert container.running and not (site.snapshots.upper(container.id) / "done").exists()
        streams: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        async for number, data in attached:
            streams[number] += data
        expected = b"".join(b"%d\n" % number for number in range(1, 2_000_000))[:size]
        assert streams[1] == expected and streams[2] == b"end\n"
        attached.close()
        assert (await container.wait()).exit_code == 0
        await site.snapshots.abandon(await site.containers.take(container))

    in_daemon(story)


def test_output_goes_on_with_the_next_monitor() -> None:
    async def story(site: Site) -> None:
        container = await site.create("sh", "-c", "echo first; while [ ! -e /go ]; do sleep 0.05; done; echo last")
        attached = await output(container)
        await container.start()
        found = b""
        async for _, data in attached:
            found += data
            if found == b"first\n":
                dead = site.daemon.monitor.pid
                os.kill(dead, 9)
                while site.daemon.monitor.pid == dead:  # noqa: ASYNC110 (nothing reports it)
                    await asyncio.sleep(0.01)
                asyncio.get_running_loop().call_later(0.5, (Path(site.snapshots.mounted(container.id)) / "go").touch)
        assert found == b"first\nlast\n"
        assert (await container.wait()).exit_code in (0, 255)
        await site.snapshots.abandon(await site.containers.take(container))

    in_daemon(story)


def test_taken_or_kept_only_after_its_end() -> None:
    async def story(site: Site) -> None:
        container = await site.create("sleep", "1000")
        await container.start()
        for call in (site.containers.take, site.containers.keep):
            with pytest.raises(Conflict, match="is running"):
                await call(container)
        await removal.remove(container, force=True)
        for call in (site.containers.take, site.containers.keep):
            with pytest.raises(NotFound):
                await call(container)

    in_daemon(story)


def test_kept_containers_are_ordinary() -> None:
    async def story(site: Site) -> None:
        container = await site.create("sh", "-c", "echo one >> /file; cat /file")
        await container.start()
        await container.wait()
        await site.containers.keep(container)
        assert container.id in {key for key, _ in site.daemon.records.rows("container")}
        assert container.id in {key for key, _ in site.daemon.records.rows("snapshot")}
        attached = await output(container)
        await container.start()
        assert b"".join([data async for _, data in attached]) == b"one\none\n"
        attached.close()
        await container.wait()
        await removal.remove(container, force=False)
        assert container.id not in {key for key, _ in site.daemon.records.rows("container")}

    in_daemon(story)


def test_a_run_is_cancelled_at_once() -> None:
    async def story(site: Site) -> None:
        async def build() -> None:
            container = await site.create("sleep", "1000")
            try:
                await container.start()
                await container.wait()
            finally:
                await removal.remove(container, force=True)

        building = asyncio.create_task(build())
        while not any(each.running for each in site.containers):  # noqa: ASYNC110 (likewise)
            await asyncio.sleep(0.01)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building

    in_daemon(story)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 48 MiB."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(48 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


def test_the_disk_is_full_while_a_layer_is_made(small_disk: Path) -> None:
    """The run itself ends as its program does. The layer is a ServerError, and nothing is left."""

    async def story(site: Site) -> None:
        container = await site.create("sh", "-c", "for i in $(seq 300); do echo $i > /f$i; done; cat /dev/zero > /full")
        await container.start()
        assert (await container.wait()).exit_code == 1
        ingest = await site.containers.take(container)
        fill(small_disk / "fill")  # what the removal of the container has freed
        with pytest.raises(ServerError, match="no space left on device"):
            await site.daemon.images.layers.seal(ingest, site.image.chain_ids[-1])
        (small_disk / "fill").unlink()
        ran = await site.run("echo again > /file")
        assert ran.names() == {"file"}
        await site.snapshots.abandon(ran.ingest)

    in_daemon(story, small_disk / "root")


# --- through the API ------------------------------------------------------------------------------

DOCKERFILE = """
FROM busybox
RUN --mount=type=cache,target=/c --mount=type=tmpfs,target=/t echo up > /x; echo ready; sleep 1000
"""

STOPPABLE = """
FROM busybox
RUN trap 'exit 0' TERM; echo ready; while true; do sleep 0.05; done
"""


def context(dockerfile: str = DOCKERFILE) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(dockerfile)
        archive.addfile(member, io.BytesIO(dockerfile.encode()))
    return out.getvalue()


@contextlib.contextmanager
def building(engine: TempEngine, query: str, dockerfile: str = DOCKERFILE) -> Iterator[tuple[str, list[bytes]]]:
    """A build whose RUN does not end: its container, and its answer once the context has ended."""
    answers: list[bytes] = []

    def build() -> None:
        with contextlib.suppress(OSError, ValueError, Exception):
            answers.append(engine.request("POST", f"/v1.24/build?{query}", context(dockerfile)).body)

    thread = threading.Thread(target=build)
    thread.start()

    def running() -> str:
        return next((each for each in engine.containers() if engine.inspect(each)["State"]["Running"]), "")

    container = until("the container of RUN", running)
    until("its output", lambda: b"ready" in engine.logs(container))
    yield container, answers
    thread.join(30 * PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("killed", ["daemon", "daemon and monitor", "monitor, then daemon"])
def test_nothing_is_left_of_a_killed_engine(own_engine: TempEngine, killed: str) -> None:
    engine = own_engine
    before = engine.footprint()
    with building(engine, "t=never"):
        assert engine.footprint().beyond(before).keys() == {"mounts", "cgroups", "processes", "directories"}
        if killed == "daemon and monitor":
            monitor = engine.monitor_pid()
            engine.kill9()
            os.kill(monitor, 9)
        elif killed == "monitor, then daemon":
            engine.replace_monitor()
            engine.kill9()
        else:
            engine.kill9()
    engine.start()
    assert engine.containers() == []
    until("nothing is left", lambda: not engine.footprint().beyond(before))
    assert engine.request("GET", "/v1.24/images/never/json").status == 404


def test_nothing_is_left_of_a_killed_run_with_a_secret() -> None:
    """Its config.json with the secret is gone. The next daemon finds its cgroup all the same, and
    the one above that the runtime has made, which is the driver cgroupfs's way.
    """
    with TempEngine("--exec-opt", "native.cgroupdriver=cgroupfs") as engine:
        engine.load_busybox()
        before = engine.footprint()
        dockerfile = DOCKERFILE.replace("type=tmpfs,target=/t", "type=secret,id=token,env=T")
        with sessions.session(engine.socket, sessions.of_secrets({"token": b"a secret word"})) as (identifier, _):
            query = f"session={identifier}&cgroupparent=/{engine.root.parent.name}/deep"
            with building(engine, query, dockerfile):
                assert not holding(engine.root, b"a secret word")
                monitor = engine.monitor_pid()
                engine.kill9()
                os.kill(monitor, 9)
        engine.start()
        until("nothing is left", lambda: not engine.footprint().beyond(before))
        assert engine.containers() == []
        for root in Cgroups.detect().roots():
            assert not Path(f"{root}/{engine.root.parent.name}").exists()


@pytest.mark.parametrize("end", ["kill", "stop?t=0", "remove"])
def test_the_api_ends_a_run(own_engine: TempEngine, end: str) -> None:
    """The step fails. With `forcerm` no container is left."""
    engine = own_engine
    before = engine.footprint()
    with building(engine, "forcerm=1") as (container, answers):
        if end == "remove":
            assert engine.request("DELETE", f"/v1.24/containers/{container}?force=1").status == 204
        else:
            engine.post(f"/containers/{container}/{end}")
    assert b"returned a non-zero code: 137" in answers[0]
    assert engine.containers() == []
    until("nothing is left", lambda: not engine.footprint().beyond(before))


def test_a_stopped_run_makes_no_image_even_if_it_ends_well(own_engine: TempEngine) -> None:
    engine = own_engine
    before = engine.footprint()
    with building(engine, "t=never&forcerm=1", STOPPABLE) as (container, answers):
        engine.post(f"/containers/{container}/stop?t=10")
    assert b"was stopped by a client" in answers[0] and b"Successfully" not in answers[0]
    assert engine.request("GET", "/v1.24/images/never/json").status == 404
    assert engine.containers() == []
    until("nothing is left", lambda: not engine.footprint().beyond(before))


def test_a_client_that_leaves_ends_its_run(own_engine: TempEngine) -> None:
    engine = own_engine
    before = engine.footprint()
    body = context(DOCKERFILE)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(engine.socket)
        head = f"POST /v1.24/build HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        container = until("the container of RUN", lambda: next(iter(engine.containers()), ""))
        until("it runs", lambda: engine.inspect(container)["State"]["Running"])
    until("nothing is left", lambda: not engine.footprint().beyond(before))
    assert engine.containers() == []
