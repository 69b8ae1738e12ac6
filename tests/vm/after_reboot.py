"""After the machine has started again (`install.py`): restart policies, and a purge."""

from __future__ import annotations

from pathlib import Path

from tests.support.engine.harness import until
from tests.vm.install import active, fetched
from tests.vm.packaged import ROOT, SOCKET, docker, run, state


def test_the_service_starts_with_the_machine() -> None:
    until("the service is active", active, 120)


def test_restart_policies() -> None:
    def running() -> bool:
        return bool(state("web")["Running"] and state("stays")["Running"])

    until("web and stays run", running, 120)
    assert fetched(8080) == b"served\n"
    for name in ("stopped", "limited"):
        assert not state(name)["Running"], name


def test_the_shutdown_stopped_the_containers() -> None:
    """With their stop signals. A container without a restart policy stays down."""
    assert docker("run", "--rm", "-v", "data:/d", "busybox", "cat", "/d/ended") == "ended"
    assert (state("ends")["Running"], state("ends")["ExitCode"]) == (False, 7)


def test_volumes_are_kept() -> None:
    assert docker("run", "--rm", "-v", "data:/d", "busybox", "cat", "/d/file") == "kept"


def test_a_purge_leaves_nothing() -> None:
    docker("rm", "-f", "web", "stays", "stopped", "limited", "ends")
    docker("volume", "rm", "data")
    run("dpkg", "--purge", "engined")
    assert not ROOT.exists() and not Path(SOCKET).exists() and not Path("/run/engined").exists()
    assert "engined" not in run("ps", "-eo", "args").replace("/root/engined", "").replace("engined-tests", "")
    assert "engined0" not in run("ip", "-o", "link")
    assert "/run/engined" not in Path("/proc/self/mountinfo").read_text()
    assert (
        not list(Path("/sys/fs/cgroup/system.slice").glob("docker-*")) and not Path("/sys/fs/cgroup/engined").exists()
    )
    assert "engined" not in run("nft", "list", "tables", check=False)
    assert "engined" not in run("systemctl", "list-units", "--all", "--plain", "engined.*", "docker-*")
    assert _files() == []


def _files() -> list[str]:
    """Files whose names have the engine's, but for those of the tests."""
    found = run("find", "/", "/run", "-xdev", "-name", "*engined*", "-not", "-name", "*engined-tests*").splitlines()
    return [path for path in found if not path.startswith((str(Path.cwd()), "/tmp/"))]
