"""The Debian package on a host with systemd: first steps, firewalls, upgrades, and what stays
beside running containers. Afterwards the machine starts again (`after_reboot.py`).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.engine.harness import until
from tests.vm.packaged import ROOT, api, docker, load_busybox, run, state

DEB = next(Path("dist").glob("engined_*.deb"))


def active() -> bool:
    return run("systemctl", "is-active", "engined", check=False).strip() == "active"


def fetched(port: int) -> bytes:
    """The page at a published port, once its server listens.

    An AssertionError says what is seen.
    """
    address = f"http://127.0.0.1:{port}/"
    try:
        return bytes(until("a page", lambda: run("curl", "-s", "-m", "20", address, check=False), 12).encode())
    except AssertionError as error:
        seen = [run("ss", "-ltnp", check=False), docker("ps", "-a"), docker("logs", "web", check=False)]
        raise AssertionError("\n".join([str(error), *seen, run("nft", "list", "ruleset", check=False)])) from None


def serve(name: str, port: int, *options: str) -> None:
    script = "mkdir /w; echo served >/w/index.html; exec httpd -f -p 80 -h /w"
    docker("run", "-d", "--name", name, "-p", f"{port}:80", *options, "busybox", "sh", "-c", script)


def test_the_package_starts_the_service() -> None:
    run("dpkg", "--install", str(DEB))
    assert active(), run("journalctl", "-u", "engined")
    assert "engined" in run("systemctl", "show", "engined", "--property", "MainPID,Description")
    # It is stopped before those whom it needs for the end of its containers.
    after = run("systemctl", "show", "engined", "--property", "After", "--value").split()
    assert {"dbus.service", "firewalld.service", "network-online.target"} <= set(after)
    said = run("engined", "check", check=False)
    assert "ok    runtime" in said and "ok    cgroup driver           systemd" in said, said


def test_the_first_steps_of_the_readme() -> None:
    chapter = Path("README.md").read_text().partition("\n## First steps\n")[2]
    _, steps, *_ = re.findall(r"```sh\n(.*?)```", chapter, re.DOTALL)  # the first starts the engine
    said = run("bash", "-euxo", "pipefail", "-c", steps)
    assert "\nhello\n" in said and "\nbuilt\n" in said, said


def test_systemd_and_apparmor() -> None:
    load_busybox()
    assert "Cgroup Driver: systemd" in docker("info")
    assert "name=apparmor" in docker("info", "--format", "{{.SecurityOptions}}")
    docker("volume", "create", "data")
    docker("run", "--rm", "-v", "data:/d", "busybox", "sh", "-c", "echo kept >/d/file")


def test_a_published_port() -> None:
    serve("web", 8080, "--restart", "always")
    assert fetched(8080) == b"served\n"


def test_a_reload_of_systemd_and_of_the_service() -> None:
    docker("run", "-d", "--name", "limited", "--memory", "64m", "--pids-limit", "40", "busybox", "sleep", "100000")
    run("systemctl", "daemon-reload")
    run("systemctl", "reload", "engined")
    scope = Path(f"/sys/fs/cgroup/system.slice/docker-{docker('inspect', '-f', '{{.Id}}', 'limited')}.scope")
    assert (scope / "memory.max").read_text() == f"{64 << 20}\n"
    assert (scope / "pids.max").read_text() == "40\n"


def test_a_restart_of_the_service_leaves_containers_alone() -> None:
    before = {name: state(name)["Pid"] for name in ("web", "limited")}
    run("systemctl", "restart", "engined")
    assert {name: state(name)["Pid"] for name in before} == before
    run("systemctl", "stop", "engined")
    assert not active() and all(Path(f"/proc/{pid}").exists() for pid in before.values())
    run("systemctl", "start", "engined")
    assert {name: state(name)["Pid"] for name in before} == before
    assert fetched(8080) == b"served\n"
    assert docker("exec", "limited", "echo", "yes") == "yes"


def test_a_daemon_that_is_killed_is_started_again() -> None:
    pid = run("systemctl", "show", "engined", "--property", "MainPID", "--value").strip()
    before = state("web")["Pid"]
    run("kill", "-9", pid)
    until("another one answers", lambda: docker("ps", "-q", check=False), 60)
    assert state("web")["Pid"] == before


def test_an_upgrade_leaves_containers_alone() -> None:
    before = {name: state(name)["Pid"] for name in ("web", "limited")}
    run("dpkg", "--install", str(DEB))
    assert active()
    assert {name: state(name)["Pid"] for name in before} == before
    assert fetched(8080) == b"served\n"


def test_ufw() -> None:
    run("ufw", "--force", "enable")
    try:
        assert docker("run", "--rm", "busybox", "wget", "-qO-", f"http://{gateway()}:8080/") == "served"
        assert fetched(8080) == b"served\n"
    finally:
        run("ufw", "--force", "disable")


def test_firewalld() -> None:
    run("systemctl", "unmask", "firewalld")
    run("systemctl", "start", "firewalld")
    try:
        until(
            "the bridge is in firewalld's zone",
            lambda: run("firewall-cmd", "--get-zone-of-interface", "engined0", check=False).strip() == "docker",
            60,
        )
        assert docker("run", "--rm", "busybox", "wget", "-qO-", f"http://{gateway()}:8080/") == "served"
        run("firewall-cmd", "--reload")
        until(
            "a reload leaves it there",
            lambda: run("firewall-cmd", "--get-zone-of-interface", "engined0", check=False).strip() == "docker",
            60,
        )
        assert fetched(8080) == b"served\n"
    finally:
        run("systemctl", "stop", "firewalld")


def gateway() -> str:
    """The address of the host on the default network."""
    return str(api("GET", "/v1.44/networks/bridge")["IPAM"]["Config"][0]["Gateway"])


def test_it_is_ready_for_a_reboot() -> None:
    docker("run", "-d", "--name", "stays", "--restart", "unless-stopped", "busybox", "sleep", "100000")
    docker("run", "-d", "--name", "stopped", "--restart", "unless-stopped", "busybox", "sleep", "100000")
    docker("stop", "-t", "0", "stopped")
    ends = 'trap "echo ended >/d/ended; exit 7" USR1; while :; do sleep 1; done'
    docker("run", "-d", "--name", "ends", "--stop-signal", "USR1", "-v", "data:/d", "busybox", "sh", "-c", ends)
    assert ROOT.is_dir() and subprocess.run(["systemctl", "is-enabled", "-q", "engined"], check=False).returncode == 0
