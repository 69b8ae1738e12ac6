"""Containers' roots are mounted in a separate namespace: the host's mount table has none of them,
while they run and after any of the engine's processes dies.

Checked in the kernel: mountinfo of the host, and of the namespace that the daemon's threads use.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tests.support.engine.harness import TempEngine, kill_and_wait, until


def on_host(engine: TempEngine) -> list[str]:
    """Mounts of this engine in the host's namespace, except the directory where runtimes find a
    root."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(engine.base) in line and line.split()[4] != str(engine.run / "root")]


def file_of(engine: TempEngine, container: str, path: str) -> bytes:
    """Read a file of the container by the archive call."""
    answer = engine.request("GET", f"/v1.24/containers/{container}/archive?path={path}")
    assert answer.status == 200, answer
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as archive:
        content = archive.extractfile(archive.getmembers()[0])
        assert content is not None
        return content.read()


def looked_into(engine: TempEngine, container: str, word: str) -> None:
    """Every call that uses a running container's root sees the container's files, and the container
    sees the changes of the call."""
    engine.docker("exec", "-u", "nobody", container, "sh", "-c", f"echo {word} > /tmp/{word}")
    assert file_of(engine, container, f"/tmp/{word}") == f"{word}\n".encode()
    assert f"A /tmp/{word}" in engine.docker("diff", container).out
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("put")
        entry.size = len(word)
        archive.addfile(entry, io.BytesIO(word.encode()))
    answer = engine.request(
        "PUT",
        f"/v1.24/containers/{container}/archive?path=/tmp",
        packed.getvalue(),
        {"Content-Type": "application/x-tar"},
    )
    assert answer.status == 200, answer
    assert engine.docker("exec", container, "cat", "/tmp/put").out == word
    exported = engine.request("GET", f"/v1.24/containers/{container}/export")
    with tarfile.open(fileobj=io.BytesIO(exported.body)) as archive:
        assert f"tmp/{word}" in archive.getnames()


def test_nothing_on_the_host(own_engine: TempEngine, tmp_path: Path) -> None:
    engine = own_engine
    before = engine.footprint()
    (tmp_path / "file").write_text("bound")
    binds = ["named:/v", f"{tmp_path}:/b", f"{tmp_path}/file:/f:ro"]
    first = engine.started("sleep", "1000", network="bridge", host={"Binds": binds})
    second = engine.started("sleep", "1000", host={"IpcMode": f"container:{first}"})
    assert on_host(engine) == []
    engine.docker("exec", first, "sh", "-c", "echo x > /v/x; echo s > /dev/shm/s")
    assert engine.docker("exec", first, "cat", "/f").out == "bound"
    assert engine.docker("exec", second, "cat", "/dev/shm/s").out == "s\n"
    shm = engine.docker("exec", second, "grep", " /dev/shm ", "/proc/mounts").out
    assert "nosuid,nodev,noexec" in shm, "the flags of the first container's mount"
    looked_into(engine, first, "word")
    assert on_host(engine) == []
    engine.post(f"/containers/{first}/restart?t=0")
    assert engine.docker("exec", first, "cat", "/v/x").out == "x\n"
    engine.remove_all()
    assert engine.request("DELETE", "/v1.24/volumes/named").status == 204
    engine.assert_settles(before)


def test_a_start_that_fails_leaves_nothing(own_engine: TempEngine) -> None:
    engine = own_engine
    before = engine.footprint()
    container = engine.create("/no/such/program", host={"Binds": ["named:/v"]})
    descriptors = engine.open_files()
    for _ in range(3):
        answer = engine.request("POST", f"/v1.24/containers/{container}/start")
        assert answer.status == 404, answer
    until("nothing is mounted", lambda: not engine.mounts_aside())
    # the runtime's file, the mount namespace's
    until("no descriptor is left", lambda: engine.open_files() <= descriptors + 2)
    engine.remove_all()
    engine.assert_settles(before)


@pytest.mark.parametrize("victims", ["daemon", "monitor", "monitor then daemon", "daemon twice"])
def test_looked_into_after_deaths(own_engine: TempEngine, victims: str) -> None:
    engine = own_engine
    before = engine.footprint()
    container = engine.started("sleep", "1000")
    looked_into(engine, container, "earlier")
    if "monitor" in victims:
        monitor = engine.kill_monitor()
        until("another monitor", lambda: (found := engine._monitors()) and found != [monitor])
        engine.docker("exec", container, "true")  # the new daemon has taken over
    if "daemon" in victims:
        engine.restart()
    if "twice" in victims:
        engine.restart()
    looked_into(engine, container, "later")
    assert file_of(engine, container, "/tmp/earlier") == b"earlier\n"
    assert on_host(engine) == []
    engine.post(f"/containers/{container}/stop?t=0")
    assert file_of(engine, container, "/tmp/later") == b"later\n", "a stopped one is looked into alike"
    engine.remove_all()
    engine.assert_settles(before)


def test_what_ended_without_a_daemon_is_unmounted(own_engine: TempEngine) -> None:
    engine = own_engine
    before = engine.footprint()
    container = engine.started("cat", OpenStdin=True)
    pid = engine.inspect(container)["State"]["Pid"]
    engine.kill9()
    kill_and_wait(pid)
    engine.start()
    assert engine.inspect(container)["State"]["ExitCode"] == 137
    engine.remove_all()
    engine.assert_settles(before)
