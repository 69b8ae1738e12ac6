"""How long starts take with each driver of cgroups, beside the dockerd of the machine.

    make test-vm ARGS="-- -n 0 -s tests/vm/starts.py"

Engines take turns. A figure is the median in milliseconds: of the start alone, and of create,
start, wait and remove of a container that ends at once (`docker run --rm busybox true` without the
client). Under emulation only the relation of times means something.
"""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support import PATIENCE
from tests.support.engine import client
from tests.support.engine.harness import TempEngine, busybox_archive, until

ROUNDS = 7
TAR = {"Content-Type": "application/x-tar"}
BODY = {"Image": "busybox", "Cmd": ["true"]}


def ask(socket: str, method: str, path: str, body: object = None) -> client.Answer:
    answer = client.request(socket, method, f"/v1.41{path}", body, {}, 60 * PATIENCE)
    assert answer.status < 300, answer
    return answer


@contextlib.contextmanager
def dockerd(directory: Path, driver: str, subnet: str) -> Iterator[str]:
    """That of the package docker.io, with a bridge and a containerd of its own.

    Yields its socket.
    """
    directory.mkdir()
    socket, bridge = str(directory / "docker.sock"), f"dockerd-{driver[:3]}"
    subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], check=True)
    subprocess.run(["ip", "address", "add", f"{subnet}.1/24", "dev", bridge], check=True)
    command = ["dockerd", f"--host=unix://{socket}", f"--data-root={directory}/root", f"--exec-root={directory}/run"]
    command += [f"--pidfile={directory}/pid", f"--exec-opt=native.cgroupdriver={driver}", f"--bridge={bridge}"]
    with (directory / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as daemon:
        try:
            until("dockerd listens", lambda: Path(socket).exists() or daemon.poll() is not None, 60)
            assert daemon.poll() is None, (directory / "log").read_text()
            load(socket)
            assert ask(socket, "GET", "/info").json()["CgroupDriver"] == driver
            yield socket
        finally:
            daemon.terminate()


def load(socket: str) -> None:
    answer = client.request(socket, "POST", "/v1.41/images/load?quiet=1", busybox_archive(), TAR, 60 * PATIENCE)
    assert answer.status == 200, answer


def one_run(socket: str) -> tuple[float, float]:
    """Seconds of a start, and of a whole run."""
    began = time.monotonic()
    container = ask(socket, "POST", "/containers/create", BODY).json()["Id"]
    created = time.monotonic()
    ask(socket, "POST", f"/containers/{container}/start")
    started = time.monotonic()
    assert ask(socket, "POST", f"/containers/{container}/wait").json()["StatusCode"] == 0
    ask(socket, "DELETE", f"/containers/{container}")
    return started - created, time.monotonic() - began


def test_starts_with_each_driver(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        sockets: dict[str, str] = {}
        for index, driver in enumerate(("systemd", "cgroupfs")):
            for runtime in ("crun", "runc"):
                options = ("--exec-opt", f"native.cgroupdriver={driver}", "--runtime", runtime)
                engine = stack.enter_context(TempEngine(*options))
                engine.load_busybox()
                sockets[f"engined, {runtime}, {driver}"] = str(engine.socket)
            peer = dockerd(tmp_path / driver, driver, f"172.31.{index}")
            sockets[f"dockerd, runc, {driver}"] = stack.enter_context(peer)
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in sockets}
        for _ in range(1 + ROUNDS):
            for name, socket in sockets.items():
                runs[name].append(one_run(socket))
    medians = {
        name: [round(1000 * statistics.median(times)) for times in zip(*found[1:], strict=True)]
        for name, found in runs.items()
    }
    print(json.dumps({"kernel": platform.release(), "rounds": ROUNDS, "start, run": medians}, indent=1))
    assert all(start <= run for start, run in medians.values())
