"""What `engined check` says of a host that lacks something, and whether its fix helps. For this
machine alone.

    make test-vm ARGS="-- tests/vm/fixes.py"
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.commands import check
from tests.vm.packaged import run

CONTAINERS = 100
CHECK = [sys.executable, "-m", "engine", "check", "--containers", str(CONTAINERS)]


def rows(*within: str) -> dict[str, tuple[bool, str]]:
    """By subject: whether it passes, and the fix."""
    found: dict[str, tuple[bool, str]] = {}
    subject = ""
    for line in run(*within, *CHECK, check=False).splitlines():
        if row := re.match(r"(ok|FAIL) +(.+?)  ", line):
            subject = row[2]
            found[subject] = (row[1] == "ok", "")
        elif "fix: " in line:
            found[subject] = (False, line.partition("fix: ")[2])
    return found


def fix_of(subject: str, *within: str) -> str:
    passes, fix = rows(*within)[subject]
    assert not passes and fix, subject
    return fix


LOW: dict[str, object] = {
    **{"kernel.pid_max": 9000, "kernel.threads-max": 9000, "kernel.pty.max": 500, "fs.file-max": 6000},
    **{"fs.inotify.max_user_instances": 100, "fs.inotify.max_user_watches": 9000},
    **{"net.ipv4.neigh.default.gc_thresh2": 300, "net.ipv4.neigh.default.gc_thresh3": 400},
    **{"net.ipv6.neigh.default.gc_thresh3": 400, "net.core.netdev_max_backlog": 500},
    **{"net.netfilter.nf_conntrack_max": 1000, "net.ipv4.ip_local_port_range": "60000 60999"},
}


def test_settings() -> None:
    run("modprobe", "nf_conntrack")
    names = {subject: name for subject, name, _ in check.settings(CONTAINERS)}
    names["ephemeral ports"] = "net.ipv4.ip_local_port_range"
    before = {name: run("sysctl", "-n", name).strip() for name in names.values()}
    for name, low in LOW.items():
        run("sysctl", "-w", f"{name}={low}")
    try:
        found = rows()
        for subject in names:
            passes, fix = found[subject]
            assert not passes, subject
            run("sh", "-c", fix.partition(", and")[0])
        found = rows()
        assert [subject for subject in names if not found[subject][0]] == []
    finally:
        for name, value in before.items():
            run("sysctl", "-w", f"{name}={value}")


def test_open_files() -> None:
    def limited(number: str) -> list[str]:
        return ["systemd-run", "--quiet", "--pipe", "--wait", f"--working-directory={Path.cwd()}", "-p", number]

    wanted = re.search(r"LimitNOFILE=\d+", fix_of("open files", *limited("LimitNOFILE=700")))
    assert wanted is not None
    assert rows(*limited(wanted[0]))["open files"][0]


def test_a_chain_that_drops() -> None:
    run("nft", "add table inet strict")
    try:
        run("nft", "add chain inet strict every { type filter hook forward priority 0; policy drop; }")
        run("sh", "-c", fix_of("forwarding"))
        assert rows()["forwarding"][0]
    finally:
        run("nft", "delete table inet strict")


def test_a_bus_that_does_not_run() -> None:
    run("systemctl", "stop", "dbus.socket", "dbus.service")
    run("systemctl", "kill", "--signal=KILL", "dbus.service", check=False)
    try:
        fix = fix_of("cgroup driver").partition(", or ")[2]
        run("sh", "-c", fix)
        assert rows()["cgroup driver"][0]
    finally:
        run("systemctl", "start", "dbus.socket")


@pytest.mark.parametrize(
    ("subject", "files"),
    [("runtime", ("/usr/bin/crun", "/usr/sbin/runc")), ("init", ("/usr/bin/tini-static", "/usr/bin/docker-init"))],
)
def test_programs(subject: str, files: tuple[str, ...], tmp_path: Path) -> None:
    """The package that has them cannot be installed here, where there is no network."""
    owner = run("dpkg", "-S", files[0]).partition(":")[0]
    for file in files:
        shutil.move(file, tmp_path / Path(file).name)
    try:
        assert fix_of(subject) == f"apt install {owner}"
    finally:
        for file in files:
            shutil.move(tmp_path / Path(file).name, file)
    assert rows()[subject][0]


def test_modules() -> None:
    """They are loaded here, so that their names alone are tried."""
    for fix in ("modprobe -a bridge veth", "modprobe -a nf_tables nft_chain_nat nft_masq nft_fib_inet"):
        assert fix in Path(check.__file__).read_text()
        subprocess.run(fix.replace("-a", "-na"), shell=True, check=True)
