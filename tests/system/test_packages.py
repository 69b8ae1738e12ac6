"""Wheels and Debian packages are built, and installed and removed as users do it, in roots of
Debian releases (`tests/support/packages/roots.py`). For aarch64 qemu-user runs the programs.
`.ci/roots` has built the packages.
"""

from __future__ import annotations

import email
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import __version__
from tests.support import PATIENCE, ROOT
from tests.support.packages.roots import ROOTS, Root

pytestmark = pytest.mark.nightly

PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
LABELS = {"bookworm": "deb12", "trixie": "deb13"}
DIST = ROOT / "dist"
ARM = ROOTS / "arm64"


@pytest.fixture(scope="module")
def wheels() -> list[Path]:
    return sorted(DIST.glob("engined-*-manylinux_2_28_*.whl"))


@pytest.fixture(scope="module", params=PYTHONS)
def suite(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def deb(suite: str) -> Path:
    return DIST / f"engined_{__version__}~{LABELS[suite]}_amd64.deb"


@pytest.fixture
def root(suite: str, tmp_path: Path) -> Iterator[Root]:
    made = Root(suite, tmp_path)
    yield made
    made.leave()


def test_wheels(wheels: list[Path]) -> None:
    """auditwheel has agreed, or the program fails."""
    assert len(wheels) == 8
    modules = {source.stem for source in (ROOT / "engine/_fast").glob("*.pyx")}
    for wheel in wheels:
        _, _, abi, _, platform = wheel.stem.split("-")
        machine = platform.removeprefix("manylinux_2_28_")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            compiled = {name for name in names if name.endswith(".so")}
            suffix = f".cpython-{abi.removeprefix('cp')}-{machine}-linux-gnu.so"
            assert compiled == {f"engine/_fast/{name}{suffix}" for name in modules}
            shared = {f"engine/share/{name}" for name in ("1", "service", "socket", "toml")}
            assert {re.sub(r"engined\.(\w+)$", r"\1", name) for name in names if "/share/" in name} == shared
            assert not [name for name in names if name.endswith((".c", ".pyx")) or name.startswith("tests/")]
            tags = email.message_from_bytes(archive.read(f"engined-{__version__}.dist-info/WHEEL"))
            assert (tags["Tag"], tags["Root-Is-Purelib"]) == (f"{abi}-{abi}-{platform}", "false")


def contents(wheel: Path) -> dict[str, int]:
    """The files with their checksums. Their times are the commit's."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def test_nothing_is_compiled_twice(wheels: list[Path]) -> None:
    before = [contents(wheel) for wheel in wheels]
    done = subprocess.run([sys.executable, ".ci/wheels.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "compiled 0 of" in done.stderr
    assert [contents(wheel) for wheel in wheels] == before


def test_the_sdist_has_what_a_wheel_is_made_from(tmp_path: Path, wheels: list[Path]) -> None:
    shutil.unpack_archive(ROOT / "dist" / f"engined-{__version__}.tar.gz", tmp_path)
    source = tmp_path / f"engined-{__version__}"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    of_the_clone = {re.sub(r"\.cpython.*", "", name) for name in zipfile.ZipFile(wheels[0]).namelist()}
    assert {re.sub(r"\.cpython.*", "", name) for name in zipfile.ZipFile(wheel).namelist()} == of_the_clone


def runs_a_container(root: Root) -> None:
    container = root.start_container("sh", "-c", "echo from $(hostname); ip -4 addr show eth0")
    assert json.loads(root.ask("POST", f"/containers/{container}/wait"))["StatusCode"] == 0
    said = root.ask("GET", f"/containers/{container}/logs?stdout=1&stderr=1")
    assert f"from {container[:12]}".encode() in said and b"inet 172." in said
    root.ask("DELETE", f"/containers/{container}")


def test_a_wheel(root: Root, suite: str) -> None:
    before = root.names()
    shutil.copytree(ROOTS / f"wheels-{PYTHONS[suite]}", root.path / "opt/wheels")
    root.run("python3", "-m", "venv", "/opt/venv")
    root.run("/opt/venv/bin/pip", "install", "-q", "--no-index", "--find-links=/opt/wheels", "engined")
    root.run("/opt/venv/bin/engined", "install-service")
    assert root.run("engined", "--version") == f"engined {__version__}\n"
    assert "/usr/local/share/man/man1/engined.1" in root.names()
    with root.serving():
        runs_a_container(root)
        assert "stop it first" in root.run("engined", "uninstall", "--state", check=False)
        root.run("engined", "stop")
    root.run("engined", "uninstall", "--state")
    root.run("rm", "-r", "/opt/venv", "/opt/wheels")
    assert root.names() == before


def install(root: Root, deb: Path, version: str = "") -> None:
    """dpkg -i, also as a package of a later version with the same files."""
    copy = root.path / "package.deb"
    shutil.copy(deb, copy)
    if version:
        again = ["dpkg-deb", "-R", "/package.deb", "/opt/again"]
        root.run(*again)
        root.run("sed", "-i", f"s/^Version: .*/Version: {version}/", "/opt/again/DEBIAN/control")
        root.run("dpkg-deb", "-Znone", "--build", "/opt/again", "/package.deb")
        root.run("rm", "-r", "/opt/again")
    root.run("dpkg", "-i", "/package.deb")
    copy.unlink()


def test_a_package(root: Root, deb: Path) -> None:
    before = root.names()
    install(root, deb)
    assert root.run("engined", "--version") == f"engined {__version__}\n"
    assert root.run("dpkg", "--verify", "engined") == ""
    with root.serving():
        runs_a_container(root)
        container = root.start_container("sleep", "1000")
        started = json.loads(root.ask("GET", f"/containers/{container}/json"))["State"]
        install(root, deb, "9.9~later")
        assert json.loads(root.ask("GET", f"/containers/{container}/json"))["State"] == started
    with root.serving():  # as a restart of the service: the new daemon takes the container over
        assert json.loads(root.ask("GET", f"/containers/{container}/json"))["State"] == started
        root.run("dpkg", "--remove", "engined")
    assert "/run/engined" not in root.names()
    assert "is kept" in root.run("dpkg", "--purge", "engined")
    assert "/var/lib/engined" in root.names()
    install(root, deb)
    with root.serving():
        root.ask("DELETE", f"/containers/{container}")
        root.run("engined", "stop")
    root.run("dpkg", "--purge", "engined")
    assert root.names() == before


def test_a_purge_that_was_answered(root: Root, deb: Path) -> None:
    """State with containers is removed if debconf's question is answered so."""
    before = root.names()
    install(root, deb)
    with root.serving():
        root.start_container("true")
        root.run("engined", "stop")
    root.run("sh", "-c", "echo engined engined/remove-state boolean true | debconf-set-selections")
    root.run("dpkg", "--purge", "engined")
    assert root.names() == before


def test_lintian(deb: Path) -> None:
    """Overrides are in .ci/deb/lintian-overrides, with their reasons."""
    done = subprocess.run(["lintian", "--allow-root", deb], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not re.findall("^[EW]: .*", done.stdout, re.MULTILINE), done.stdout


def test_aarch64(tmp_path: Path) -> None:
    """The package for arm64, as far as qemu-user runs it. It has no netlink of netfilter, without
    which `check` and `serve` end.
    """
    subprocess.run(["cp", "-a", ARM, tmp_path], check=True)
    path = tmp_path / ARM.name
    subprocess.run(["dpkg", "-x", DIST / f"engined_{__version__}~{LABELS['bookworm']}_arm64.deb", path], check=True)
    site = path / "usr/lib/engined/lib/python3.11/site-packages"
    python = ["qemu-aarch64-static", "-L", path, "-E", f"PYTHONPATH={site}", path / "usr/bin/python3.11"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*python, *arguments]
        return subprocess.run(
            command, cwd=path, capture_output=True, text=True, check=False, timeout=300 * PATIENCE
        )  # not in the clone, whose `engine` Python would find

    modules = [f"engine._fast.{source.stem}" for source in sorted((ROOT / "engine/_fast").glob("*.pyx"))]
    loaded = run("-c", f"import platform, {', '.join(modules)}; print(platform.machine())")
    assert (loaded.stdout, loaded.stderr) == ("aarch64\n", "")
    assert run("-m", "engine", "--version").stdout == f"engined {__version__}\n"
    assert "Netlink socket: Protocol not supported" in run("-m", "engine", "check").stderr
