"""`make demo`: starts the engine, runs a container through its API, and removes everything again.

The engine uses its default paths if nothing else does, otherwise temporary ones. The client is
`tests/support/engine/client.py`, which needs only the standard library.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from engine import __version__
from engine.config import DEFAULT_BRIDGE, DEFAULT_ROOT, DEFAULT_RUN, DEFAULT_SOCKET
from tests.support.engine import client
from tests.support.images import archives

ENGINED = Path(sys.executable).parent / "engined"
SCRIPT = """
echo "Hello from $(hostname), a $(busybox | head -n 1 | cut -d" " -f1,2) on Linux $(uname -r)."
ip -4 -o addr show eth0 | cut -d" " -f2-7
"""


def main() -> int:
    if os.geteuid() != 0:
        print("demo: must run as root: the engine makes mounts, namespaces and cgroups", file=sys.stderr)
        return 1
    temporary = ""
    socket, root, run, arguments = DEFAULT_SOCKET, DEFAULT_ROOT, DEFAULT_RUN, []
    used = [path for path in (socket, root, run, f"/sys/class/net/{DEFAULT_BRIDGE}") if os.path.exists(path)]
    if used:
        temporary = tempfile.mkdtemp(prefix="eng", dir="/tmp")
        socket, root, run = (f"{temporary}/{name}" for name in ("s.sock", "root", "run"))
        arguments = [
            "--socket",
            socket,
            "--root",
            root,
            "--run",
            run,
            "--bridge",
            f"e{os.path.basename(temporary)}"[:15],
        ]
        print(f"{used[0]} exists already: the demo uses {temporary}")
    with tempfile.TemporaryFile() as log:
        return _run(socket, root, run, arguments, temporary, log)


def _run(socket: str, root: str, run: str, arguments: list[str], temporary: str, log: IO[bytes]) -> int:
    begin = time.perf_counter()
    engine = subprocess.Popen(
        [ENGINED, "serve", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
    )
    try:
        assert engine.stdout
        line = engine.stdout.readline().decode()
        if not line.startswith("listening on "):
            raise RuntimeError("engined did not start")
        print(
            f"engined {__version__} on Linux {platform.release()}: {line.strip()}, "
            f"{_milliseconds(begin)} after its start"
        )
        _show(socket)
    except (OSError, RuntimeError, AssertionError) as error:
        log.seek(0)
        print(log.read().decode(errors="replace"), end="", file=sys.stderr)
        print(f"demo: {error}", file=sys.stderr)
        return 1
    finally:
        stopped = subprocess.run([ENGINED, "stop", "--run", run, "--time", "1"], check=False)
        if stopped.returncode:
            engine.kill()
        engine.wait()
        for directory in (temporary,) if temporary else (root, run):
            shutil.rmtree(directory, ignore_errors=True)
    print("engined stop: no process, mount, link or cgroup is left. Next: README.md, 'First steps'.")
    return 0


def _show(socket: str) -> None:
    archive = archives.docker_archive(archives.busybox())
    _timed(
        "load",
        f"busybox:latest, made of Debian's busybox-static, {len(archive) / 1e6:.1f} MB",
        lambda: _ask(socket, "POST", "/images/load?quiet=1", archive),
    )
    body = {"Image": "busybox", "Cmd": ["sh", "-c", SCRIPT]}
    created = _timed(
        "create", "a container on the bridge network", lambda: _ask(socket, "POST", "/containers/create", body)
    )
    container = f"/containers/{json.loads(created)['Id']}"
    _timed("start", "", lambda: _ask(socket, "POST", f"{container}/start"))
    ended = _timed("wait", "", lambda: _ask(socket, "POST", f"{container}/wait"))
    output = _timed("logs", "", lambda: _ask(socket, "GET", f"{container}/logs?stdout=1&stderr=1"))
    for line in b"".join(part for _, part in client.frames(output)).decode().splitlines():
        print(f"           | {line}")
    status = json.loads(ended)["StatusCode"]
    if status:
        raise RuntimeError(f"the container ended with {status}")
    _timed("remove", "", lambda: _ask(socket, "DELETE", container))


def _ask(socket: str, method: str, target: str, body: Any = None) -> bytes:
    answer = client.request(socket, method, f"/v1.24{target}", body)
    if answer.status >= 300 or (b'"error"' in answer.body and "load" in target):
        raise RuntimeError(f"{method} {target}: {answer.status} {answer.body.decode(errors='replace')}")
    return answer.body


def _timed(verb: str, what: str, act: Callable[[], bytes]) -> bytes:
    begin = time.perf_counter()
    result = act()
    print(f"{verb:>8} {_milliseconds(begin):>9}  {what}".rstrip())
    return result


def _milliseconds(begin: float) -> str:
    return f"{(time.perf_counter() - begin) * 1000:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
