"""The engine's own mount namespace: a failure to create or enter it fails one call, and later calls
work."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ServerError
from engine.system import detached_mounts, mounts
from engine.system.detached_mounts import MountNamespace

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def failing(at: int, real: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """The function `real`, except that call number `at` raises."""
    calls = 0

    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error
        return real(*arguments, **keywords)

    return call


@pytest.mark.parametrize(
    ("owner", "name", "at", "error"),
    [
        (mounts, "own_directory", 1, OSError(errno.ENOMEM, "Cannot allocate memory")),
        (mounts, "mount", 1, ServerError("no space left on device")),
        (mounts, "mount", 2, ServerError("no space left on device")),
        (detached_mounts, "attach", 1, ServerError("cannot allocate memory")),
        (detached_mounts, "attach", 2, ServerError("cannot allocate memory")),
        (detached_mounts, "detach", 1, ServerError("cannot allocate memory")),
        (os, "chdir", 2, OSError(errno.ENOMEM, "Cannot allocate memory")),
    ],
)
def test_a_failure_on_the_way_in_is_passing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, error: Exception
) -> None:
    """The call after the failed one works in the same thread, and nothing is mounted on the
    host.
    """
    (tmp_path / "file").touch()
    before = mounts.mounts()
    monkeypatch.setattr(detached_mounts, "THREADS", 1)

    async def main() -> None:
        namespace = MountNamespace(tmp_path, "/own")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(at, getattr(owner, name), error))
            with pytest.raises(ServerError):
                await namespace.run(lambda: os.listdir("."))
        assert await namespace.run(lambda: sorted(os.listdir("/"))) == ["calls", "layers", "own", "proc"]
        assert await namespace.run(lambda: os.listdir(".")) == ["file"]
        assert await namespace.run_apart(lambda: os.listdir("/layers")) == ["file"]
        os.close(namespace.descriptor)

    asyncio.run(main())
    assert [mount for mount in mounts.mounts() if mount not in before] == []


_IN_A_CHROOT = """
import os, subprocess, sys
from engine.errors import ServerError
from engine.system.detached_mounts import check_root

check_root()
if sys.argv[2] == "mount":
    subprocess.run(["mount", "--rbind", "/", sys.argv[1]], check=True)
else:
    os.mkdir(f"{sys.argv[1]}/proc")
    subprocess.run(["mount", "--bind", "/proc", f"{sys.argv[1]}/proc"], check=True)
os.chroot(sys.argv[1])
try:
    check_root()
except ServerError as error:
    print(error.message)
"""


@pytest.mark.parametrize("kind", ["directory", "mount"])
def test_a_chroot_is_refused(tmp_path: Path, kind: str) -> None:
    command = ["unshare", "--mount", sys.executable, "-c", _IN_A_CHROOT, str(tmp_path), kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("the engine cannot run in a chroot: ") and done.stdout.count("\n") == 1
