"""The installed package, as a user of this machine sees it.

For tests in the virtual machine alone.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tests.support.engine import client
from tests.support.engine.harness import busybox_archive

SOCKET = "/run/engined.sock"
ROOT = Path("/var/lib/engined")


def run(*command: str, check: bool = True) -> str:
    """The output of a command in the machine's network namespace; tests have one of their own."""
    done = subprocess.run(
        ["nsenter", "--net=/proc/1/ns/net", *command], capture_output=True, text=True, check=False, timeout=900
    )
    assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def docker(*arguments: str, check: bool = True) -> str:
    return run("docker", "--host", f"unix://{SOCKET}", *arguments, check=check).strip()


def api(method: str, path: str, body: Any = None) -> Any:
    answer = client.request(SOCKET, method, path, body, {}, 600)
    assert answer.status < 300, answer
    return answer.json() if answer.body else None


def load_busybox() -> None:
    answer = client.request(
        SOCKET, "POST", "/v1.44/images/load?quiet=1", busybox_archive(), {"Content-Type": "application/x-tar"}, 600
    )
    assert answer.status == 200, answer


def state(container: str) -> Any:
    return api("GET", f"/v1.44/containers/{container}/json")["State"]
