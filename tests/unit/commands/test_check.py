from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.commands import check
from engine.errors import InvalidParameter
from engine.networks import firewall
from engine.networks.firewall import Chain
from engine.runtime import init, scopes
from engine.runtime.cgroups import Cgroups
from engine.runtime.oci import Runtime
from engine.system import calls


def test_kernel() -> None:
    assert check.kernel("6.1.0-18-amd64").ok
    assert check.kernel("5.12.0").ok
    assert not check.kernel("5.10.0-30-amd64").ok
    assert not check.kernel("strange").ok


def test_settings_against_files(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel/pid_max").write_text("32768\n")
    enough, short = (
        check.setting("ids", "kernel.pid_max", 32768, tmp_path),
        check.setting("ids", "kernel.pid_max", 32769, tmp_path),
    )
    assert enough and enough.ok
    assert short and not short.ok
    assert short.text == "kernel.pid_max = 32768 (wanted 32769)"
    assert short.fix.startswith("sysctl -w kernel.pid_max=32769")
    assert check.setting("none", "kernel.nothere", 1, tmp_path) is None
    (tmp_path / "kernel/words").write_text("many\n")
    assert check.setting("none", "kernel.words", 1, tmp_path) is None


def test_what_is_wanted_grows_with_the_plan() -> None:
    small, large = ({name: wanted for _, name, wanted in check.settings(count)} for count in (10, 10_000))
    assert all(small[name] <= large[name] for name in small)
    assert large["fs.inotify.max_user_instances"] == 10_128
    assert (small["net.core.netdev_max_backlog"], large["net.core.netdev_max_backlog"]) == (1000, 20_000)
    assert large["fs.mount-max"] == 24_096


@pytest.mark.parametrize(
    ("containers", "mode", "release", "nodes", "each"),
    [
        (10, "v1", "6.18.1", 1, 391),
        (3000, "hybrid", "6.18.1", 1, 765),
        (3000, "v2", "6.18.1", 1, 718),
        (3000, "v2", "6.18.1", 2, 1046),
        (3000, "v2", "6.1.0-18-amd64", 1, 554),
    ],
)
def test_memory_of_the_kernel(containers: int, mode: str, release: str, nodes: int, each: int, tmp_path: Path) -> None:
    known = tmp_path / "meminfo"
    wanted = containers * each // 1024
    for available, enough in ((wanted, True), (wanted - 1, False)):
        known.write_text(f"MemTotal: 99999999 kB\nMemAvailable:    {available * 1024} kB\n")
        found = check.kernel_memory(containers, mode, release, nodes, known)
        assert found.ok == enough and f"{wanted} MiB, {each} KiB each" in found.text


def test_namespaces_of_every_kind(tmp_path: Path) -> None:
    for kind in ("mnt", "net", "pid", "user"):
        (tmp_path / f"max_{kind}_namespaces").write_text("1128\n" if kind != "user" else "0\n")
    assert check.every_namespace(1000, tmp_path).ok, "user namespaces are not wanted"
    (tmp_path / "max_net_namespaces").write_text("1127\n")
    row = check.every_namespace(1000, tmp_path)
    assert not row.ok and row.text == "user.max_net_namespaces = 1127 (wanted 1128)"
    assert row.fix.startswith("sysctl -w user.max_net_namespaces=1128, ")


def test_neighbours_are_a_note(tmp_path: Path) -> None:
    name = "net.ipv6.neigh.default.gc_thresh3"
    assert not list(check.neighbours(name, tmp_path)), "a kernel without IPv6"
    path = tmp_path.joinpath(*name.split("."))
    path.parent.mkdir(parents=True)
    path.write_text("1024\n")
    (row,) = check.neighbours(name, tmp_path)
    assert row.ok and row.subject == "IPv6 neighbours" and f"{name} = 1024" in row.text


@pytest.mark.parametrize(
    ("name", "version", "release", "independent"),
    [
        ("crun", "1.29.1", "7.0.1", True),
        ("crun", "1.30", "7.1", True),
        ("crun", "1.29", "7.0.1", False),
        ("crun", "1.29.1", "6.18.0", False),
        ("runc", "1.30.0", "7.0.1", False),
        ("crun", "", "7.0.1", False),
    ],
)
def test_a_runtime(name: str, version: str, release: str, independent: bool) -> None:
    runtime = Runtime(name=name, path=f"/{name}", version=version, reason="preferred", root="/run")
    row = check.runtime(runtime, release)
    assert row.ok and ("every process" in row.text) == (not independent)


def test_an_init_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_SEARCH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.init() == check.Finding("init", False, "`docker run --init` is refused", "apt install tini")
    (tmp_path / "catatonit").touch(mode=0o755)
    assert check.init() == check.Finding("init", True, f"{tmp_path}/catatonit")
    assert init.program("/bin/true") == "/bin/true"
    with pytest.raises(InvalidParameter, match="Init: /not/there is not an executable file"):
        init.program("/not/there")


def test_ports_and_files() -> None:
    assert check.ports(1023, shared=False).ok
    assert not check.ports(1024, shared=False).ok
    assert "2 networks" in check.ports(1024, shared=False).fix
    assert check.ports(10_000, shared=True).ok
    assert not check.ports(64_000, shared=True).ok
    assert check.open_files(1000, -1).ok
    assert not check.open_files(1000, 1024).ok
    assert "LimitNOFILE=12512" in check.open_files(1000, 1024).fix


def test_ephemeral_ports(tmp_path: Path) -> None:
    known = tmp_path / "range"
    known.write_text("32768\t60999\n")
    assert check.ephemeral_ports(1000, known).ok
    short = check.ephemeral_ports(10_000, known)
    assert not short.ok
    assert "28232 (wanted 41024)" in short.text
    assert '"19976 60999"' in short.fix


def test_cgroups_and_file_systems(tmp_path: Path) -> None:
    (nothing,) = check.control_groups(Cgroups(mode="none", controllers={}))
    assert not nothing.ok
    rows = list(
        check.control_groups(
            Cgroups(mode="v2", controllers={}, unified="/x", unified_controllers=("cpu", "cpuset", "io", "pids"))
        )
    )
    assert [row.ok for row in rows] == [True, False, not (scopes.BOOTED.is_dir() and scopes.lacks())]
    assert "memory" in rows[1].text and "cgroup.procs" in rows[1].fix, "there is a cpu controller, but none below"
    kernel = tmp_path / "cgroups"
    kernel.write_text("#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t0\t9\t1\nmemory\t0\t9\t0\n")
    without_memory = frozenset({"cpu.max", "cpuset.cpus", "io.max", "pids.max"})
    off = Cgroups(mode="v2", controllers={}, unified="/x", unified_files=without_memory)
    row = list(check.control_groups(off, kernel))[1]
    assert row.text == "missing: memory" and row.fix.startswith("boot without cgroup_disable=memory, ")
    known = tmp_path / "filesystems"
    known.write_text("nodev\tsysfs\n\text4\nnodev\toverlay\n")
    assert check.file_system("overlay", known, tmp_path).ok
    assert not check.file_system("zfs", known, tmp_path).ok


def test_system_calls() -> None:
    assert check.system_calls([]).ok
    found = check.system_calls(call for call in calls.CALLS if call.name in ("openat2", "clone3"))
    assert not found.ok
    assert found.text == "missing or denied: clone3, openat2; no builds from repositories"


def test_forwarding() -> None:
    accept = firewall.accepting(0x40)
    found = check.forwarding(
        [Chain("inet", "strict", "all", True), Chain("inet", "firewalld", "filter_FORWARD", False)], accept
    )
    assert not found.ok and found.text == "chain all of table inet strict drops"
    assert found.fix == "nft 'insert rule inet strict all meta mark & 0x40 == 0x40 accept'"
    assert check.forwarding([], accept).ok


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ((), "no VXLAN"),
        (("overlay",), "addresses at published ports are hidden"),
        (("overlay", "egress"), "are seen; no encryption"),
        (("overlay", "egress", "esp"), "encryption works"),
    ],
)
def test_networks_of_a_swarm(features: tuple[str, ...], words: str) -> None:
    row = check.swarm_networks(features)
    assert row.ok and words in row.text


def test_rows_are_printed_with_their_fixes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [check.Finding("a", True, "fine"), check.Finding("longer", False, "1 (wanted 2)", "do it")]
    monkeypatch.setattr(check, "findings", lambda _: iter(rows))
    assert check.main(5) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok    a       fine",
        "FAIL  longer  1 (wanted 2)",
        "              fix: do it",
        "1 of 2 checks failed for 5 containers",
    ]
    rows.pop()
    assert check.main(5) == 0


@pytest.mark.parametrize("rows", [1, 100_000], ids=["one buffer", "many buffers"])
def test_a_reader_that_has_seen_enough(rows: int) -> None:
    """`engined check | head`: no traceback, and the exit status is that of the findings."""
    program = (
        "import sys; from engine.commands import check;"
        f"check.findings = lambda _: [check.Finding('words', False, 'text', 'fix')] * {rows};"
        "sys.exit(check.main(10))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("output", "ok", "words"),
    [
        ("", True, "not installed"),
        ("etcd Version: 3.4.23\n", True, "3.4.23"),
        ("etcd Version: 3.5.1\n", False, "loses data"),
        ("etcd Version: 3.3.25\n", False, "too old"),
        ("cannot execute", False, "unknown version"),
    ],
)
def test_etcd(output: str, ok: bool, words: str) -> None:
    row = check.etcd(output)
    assert row.ok is ok and words in row.text
    assert ok or row.fix


def test_a_configuration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "daemon.json"
    file.write_text('{"log-level": "warn", "live-restore": false, "storage-driver": "btrfs", "nothing": 1}')
    assert check.configuration(str(file)) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "log-level: in force",
        "live-restore: has no meaning here (containers always outlive the daemon)",
        "storage-driver: refused (btrfs: the engine has a store of its own, overlay2)",
        "nothing: refused (is not known)",
    ]
    assert said.err == f"engined: --config {file}: storage-driver btrfs: the engine has a store of its own, overlay2\n"
    file.write_text('{"log-level": "warn", "log-driver": "none", "log-opts": {}}')
    assert check.configuration(str(file)) == 0
    assert capsys.readouterr().out.endswith("log-opts: in force\nconfiguration OK\n")
    file.write_text('{"log-driver": "syslog", "log-opts": {"syslog-address": "corrupted:42"}}')
    assert check.configuration(str(file)) == 1
    assert "syslog-address should be in form proto://address" in capsys.readouterr().err
    assert check.configuration(str(tmp_path / "none.toml")) == 1
    assert "no such file" in capsys.readouterr().err
