"""`make test-vm`: the tests in a virtual machine with Debian's own kernel, cgroup v2 and AppArmor.

Builds a Debian root with mmdebstrap (packages of .ci/packages, this checkout, its virtual
environment), makes a disk image of it, and boots it under QEMU once per part of the tests, each
time from the unchanged image. The guest runs pytest under systemd, writes its results to a second
disk as a tar archive, and powers off. A test that hangs for 300 s times ENGINED_TEST_PATIENCE, or
ends its process, fails, and the rest goes on.

Needs root, and this host's access to Debian's mirror and PyPI. KVM is used if it works, otherwise
emulation, which is about ten times slower; ENGINED_TEST_PATIENCE then scales the tests' waits.

    python -m tests.vm [PART …]        parts: see PARTS; default all
    python -m tests.vm --suite trixie  Debian 13; default bookworm, Debian 12
    python -m tests.vm --jobs 2 …      so many machines at once
    python -m tests.vm --uml …         User-Mode Linux in place of QEMU: see tests/vm/uml.py
    python -m tests.vm --build         only the disk image
    python -m tests.vm --built …       with the disk image of an earlier call, and its checkout
    python -m tests.vm -- ARGUMENTS    one part: pytest with these arguments
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from tests.vm import uml

REPOSITORY = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
WORK = Path(os.environ.get("ENGINED_VM_DIRECTORY", "/var/tmp/engined-vm"))
"""A directory of each suite's disk image and results. Outside of the repository, because they take
some gigabytes.
"""


class Suite(NamedTuple):
    """A release of Debian: the version of its Python, and its name in versions of packages."""

    python: str
    label: str


SUITES = {"bookworm": Suite("3.11", "deb12"), "trixie": Suite("3.13", "deb13")}
PACKAGES = (
    *("linux-image-amd64", "systemd-sysv", "dbus", "udev", "kmod", "initramfs-tools", "apparmor", "nftables"),
    *("python3", "python3-venv", "python3-dev", "docker.io", "docker-compose", "iptables"),
)
"""Packages besides .ci/packages. docker.io needs iptables.

No service is started except pytest's.
"""

DISK = "6G"
MEMORY = 4096
"""MiB of a machine."""
RESULTS = 256 * 2**20
"""Bytes of the disk that the guest writes its results to."""

REBOOT = "reboot"
"""In place of a file of tests: those after it run when the machine has started again."""

PARTS = {
    "unit": ("tests/unit", "tests/contract"),
    "api-1": ("tests/api/test_[a-e]*.py",),
    "api-2": ("tests/api/test_[f-n]*.py",),
    "api-3": ("tests/api/test_[o-z]*.py",),
    "system-1": ("tests/system/test_[a-m]*.py",),
    "system-2": ("tests/system/test_[n-z]*.py",),
    "clients": ("tests/clients",),
    "packages": ("tests/vm/install.py", "reboot", "tests/vm/after_reboot.py"),
}
"""The parts of the tests. Each takes an hour at most under emulation."""

PATIENCE = {"KVM": 2, "UML": 5, "emulation": 10}
"""What the tests' waits are multiplied by."""

EMULATED_KERNEL = "tsc=reliable mitigations=off"
"""Kernel parameters. Without the first, each look at the clock is a call of an emulated device."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vm", description="The tests in a virtual machine.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} [all]")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="machines at once [1]")
    parser.add_argument("--uml", action="store_true", help="User-Mode Linux in place of QEMU")
    parser.add_argument("--cores", type=int, metavar="N", help="processors of a machine [2 at least; with --uml 1]")
    parser.add_argument("--suite", choices=SUITES, default="bookworm", help="Debian's release [bookworm]")
    image = parser.add_mutually_exclusive_group()
    image.add_argument("--build", action="store_true", help="only build the disk image")
    image.add_argument("--built", action="store_true", help="use the disk image of an earlier call")
    arguments, words = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, words = arguments[:at], arguments[at + 1 :]
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if os.geteuid() != 0:
        parser.error("must run as root: mmdebstrap makes a root file system with its owners")
    machine = Machine(chosen.suite, uml.build(WORK / "uml", _mirror()) if chosen.uml else None)
    if not chosen.built:
        machine.build()
    if chosen.build:
        return 0
    jobs = {"chosen": words} if words else {name: _files(PARTS[name]) for name in chosen.parts or PARTS}
    # Tests of cpusets want two. A second one makes User-Mode Linux slow: each fork stops the other.
    cores = chosen.cores or (1 if chosen.uml else max(2, (os.cpu_count() or 1) // chosen.jobs))
    with ThreadPoolExecutor(chosen.jobs) as machines:
        return max(machines.map(lambda job: machine.run(job[0], job[1], cores), jobs.items()))


def _files(patterns: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for pattern in patterns:
        paths = [pattern] if pattern == REBOOT else sorted(REPOSITORY.glob(pattern))
        assert paths, f"no tests match {pattern}"
        found += [str(Path(path).relative_to(REPOSITORY)) if path != REBOOT else REBOOT for path in paths]
    return found


class Machine:
    """A virtual machine with a release of Debian: in QEMU, or with a kernel that `uml.build` has
    made.
    """

    def __init__(self, suite: str, uml_kernel: Path | None = None) -> None:
        self.suite = suite
        self.uml_kernel = uml_kernel
        self.directory = WORK / suite

    # --- the image ---

    def build(self) -> None:
        """Make root file system, kernel and disk image. All kinds of machines have the same image.

        The Debian part is kept until .ci/packages changes.
        """
        lines = (REPOSITORY / ".ci/packages").read_text().splitlines()
        wanted = [line.split()[0] for line in lines if line and line[0] != "#"]
        base, stamp = self.directory / "base.tar", self.directory / "base.packages"
        self.directory.mkdir(parents=True, exist_ok=True)
        names = ",".join(sorted({*wanted, *PACKAGES}))
        if not base.exists() or not stamp.exists() or stamp.read_text() != names:
            _say("building a Debian root with mmdebstrap")
            command = ["mmdebstrap", "--mode=root", "--variant=minbase", f"--include={names}"]
            # Packages of services must not start them in the guest: it runs nothing but the tests.
            command += [
                "--customize-hook=systemctl --root=$1 mask "
                "docker.service docker.socket containerd.service docker-registry.service firewalld.service"
            ]
            subprocess.run([*command, self.suite, base, _mirror()], check=True, stdout=sys.stderr)
            stamp.write_text(names)
        _say("installing this checkout into it")
        root = Path(tempfile.mkdtemp(prefix="root", dir=self.directory))
        try:
            subprocess.run(["tar", "-xf", base, "--numeric-owner", "--xattrs", "-C", root], check=True)
            self._install(root)
            for name, pattern in (("vmlinuz", "vmlinuz-*"), ("initrd", "initrd.img-*")):
                shutil.copy(next(iter((root / "boot").glob(pattern))), self.directory / name)
            image = self.directory / "disk.ext4"
            image.unlink(missing_ok=True)
            subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", root, image, DISK], check=True)
        finally:
            subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)

    def _install(self, root: Path) -> None:
        """Install the checkout, its virtual environment, and the unit that runs the tests."""
        place = root / "root/engined"
        place.mkdir()
        place.parent.chmod(0o711)  # tests run clients as other users
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True).stdout
        subprocess.run(
            ["tar", "-c", "--null", "-T", "-"],
            cwd=REPOSITORY,
            input=tracked,
            check=True,
            stdout=(place / ".tar").open("wb"),
        )
        subprocess.run(["tar", "-xf", ".tar"], cwd=place, check=True)
        (place / ".tar").unlink()
        # The packages of PyPI and the clients are fetched here, with this host's settings, and
        # installed there without a network.
        subprocess.run([".ci/clients", "bookworm", "trixie", "forky", "npm", "ansible"], cwd=REPOSITORY, check=True)
        wheels = root / "wheels"
        requires = subprocess.run(
            [sys.executable, "-c", _REQUIREMENTS], cwd=REPOSITORY, check=True, capture_output=True, text=True
        ).stdout.split("\n")
        subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "-w", wheels, *filter(None, requires)], check=True)
        _replace_binaries(wheels, SUITES[self.suite].python)
        shutil.copytree(REPOSITORY / ".venv/clients", root / "clients", symlinks=True)
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": "/wheels",
            "HOME": "/root",
        }
        # With /proc and /dev, in a mount namespace of its own: nothing stays mounted whatever
        # happens.
        script = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" sh -c "$1"'
        for command in (".ci/prepare build", "mv /clients .venv/", ".ci/prepare test"):
            subprocess.run(
                ["unshare", "--mount", "sh", "-c", script, root, f"cd /root/engined && {command}"],
                check=True,
                env=environment,
                stdout=sys.stderr,
            )
        shutil.rmtree(wheels)
        (place / "dist").mkdir()
        for package in (REPOSITORY / "dist").glob(f"engined_*~{SUITES[self.suite].label}_amd64.deb"):
            shutil.copy(package, place / "dist")
        docker = shutil.which("docker")
        if docker is not None:
            shutil.copy(docker, root / "usr/local/bin/docker")
        shutil.copy(HERE / "guest", root / "usr/local/sbin/engined-tests")
        (root / "etc/systemd/system/engined-tests.service").write_text(UNIT)
        target = root / "etc/systemd/system/multi-user.target.wants"
        target.mkdir(parents=True, exist_ok=True)
        (target / "engined-tests.service").symlink_to("../engined-tests.service")
        (root / "etc/fstab").write_text("/dev/vda / ext4 rw 0 1\n")
        (root / "etc/hostname").write_text("engined-vm\n")

    # --- a run ---

    def run(self, name: str, targets: list[str], cores: int) -> int:
        """Boot, run pytest on `targets`, and collect the results in results/NAME of its directory.
        Returns pytest's exit status.
        """
        kind = "UML" if self.uml_kernel else "KVM" if _kvm_works() else "emulation"
        patience = PATIENCE[kind]
        results = self.directory / "results" / name
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir(parents=True)
        orders, inbox, outbox = results / "orders", results / "orders.tar", results / "results.img"
        orders.write_text("\n".join([str(patience), *targets]) + "\n")
        with tarfile.open(inbox, "w") as archive:
            archive.add(orders, "orders")
            if self.uml_kernel:
                archive.add(self.uml_kernel / "lib", "lib")
        whole_sectors = -(-inbox.stat().st_size // 4096) * 4096
        for path, size in ((inbox, whole_sectors), (outbox, RESULTS)):
            with path.open("ab") as file:
                file.truncate(size)
        disk, changes = self.directory / "disk.ext4", results / "changes"
        if self.uml_kernel:
            command = uml.command(self.uml_kernel, disk, changes, [outbox, inbox], cores, MEMORY)
        else:
            command = self._qemu(kind == "KVM", changes if REBOOT in targets else None, [outbox, inbox], cores)
        _say(f"{name}: booting ({kind}, waits times {patience})")
        began = time.monotonic()
        room = uml.mappings(MEMORY) if self.uml_kernel else nullcontext()
        with room, (results / "console").open("wb") as console:
            # A process for each boot: QEMU keeps the code that it has translated when a machine is
            # reset, and is then so slow that the kernel reports soft lockups.
            for _ in range(1 + targets.count(REBOOT)):
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, check=False)
                with outbox.open("rb") as file:
                    if any(file.read(512)):  # the results: it has gone no further
                        break
        try:
            with tarfile.open(outbox, "r:") as archive:
                archive.extractall(results, filter="data")
            status = int((results / "status").read_text())
            outbox.unlink()
            changes.unlink(missing_ok=True)
        except (OSError, tarfile.TarError, ValueError) as error:
            _say(f"{name}: no results ({error}); see {results / 'console'}")
            return 70
        lines = (results / "pytest").read_text(errors="replace").splitlines()
        print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))))
        _say(f"{name}: {lines[-1] if lines else 'no output'} ({time.monotonic() - began:.0f} s; {results})")
        return status

    def _qemu(self, kvm: bool, changes: Path | None, drives: list[Path], cores: int) -> list[str]:
        """The command line. What the machine writes to its disk goes to the file `changes`, and is
        there at the next boot; without, it is forgotten.
        """
        disk = self.directory / "disk.ext4"
        first = f"file={disk},format=raw,snapshot=on"
        if changes is not None:
            base = ("-b", disk, "-F", "raw")
            subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *base, changes], check=True)
            first = f"file={changes},format=qcow2,cache=unsafe"
        line = ["qemu-system-x86_64", "-accel", "kvm" if kvm else "tcg,thread=multi"]
        line += ["-cpu", "host" if kvm else "max"]
        line += ["-smp", str(cores), "-m", f"{MEMORY}M", "-nographic", "-vga", "none", "-nic", "none", "-no-reboot"]
        for drive in (first, *(f"file={path},format=raw" for path in drives)):
            line += ["-drive", f"{drive},if=virtio"]
        line += ["-kernel", str(self.directory / "vmlinuz"), "-initrd", str(self.directory / "initrd")]
        words = "root=/dev/vda rw console=ttyS0 panic=-1 systemd.unified_cgroup_hierarchy=1 security=apparmor"
        return [*line, "-append", words if kvm else f"{words} {EMULATED_KERNEL}"]


def _mirror() -> str:
    """The mirror of this host."""
    line = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian", "Component: main")
    found = subprocess.run(line, check=True, capture_output=True, text=True).stdout.split()
    return next(each for each in found if "security" not in each)


def _replace_binaries(wheels: Path, version: str) -> None:
    """Have PyPI's wheels for this version of Python in place of those that only this one can
    use.
    """
    here, there = (f"cp{sys.version_info[0]}{sys.version_info[1]}", "cp" + version.replace(".", ""))
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 37)] + ["manylinux2014_x86_64"]
    for wheel in wheels.glob(f"*-{here}-{here}-*.whl") if here != there else ():
        name, release = wheel.name.split("-")[:2]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        command += ["--implementation", "cp", "--python-version", version, "-d", str(wheels)]
        command += [word for each in platforms for word in ("--platform", each)]
        subprocess.run([*command, f"{name}=={release}"], check=True)
        wheel.unlink()


_REQUIREMENTS = """
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
print(*project["build-system"]["requires"], "wheel", "pip", "setuptools", sep="\\n")
extras = project["project"]["optional-dependencies"]
print(*project["project"]["dependencies"], *extras["swarm"], *extras["test"], sep="\\n")
"""

UNIT = """[Unit]
Description=The tests of engined
After=basic.target apparmor.service
[Service]
Type=oneshot
ExecStart=/usr/local/sbin/engined-tests
StandardOutput=journal+console
StandardError=journal+console
Delegate=yes
TimeoutStartSec=infinity
LimitNOFILE=1048576
TasksMax=infinity
"""


def _kvm_works() -> bool:
    """Returns True if KVM has the CPU's own virtualization.

    A /dev/kvm without it may exist and hang a guest.
    """
    flags = Path("/proc/cpuinfo").read_text().split()
    return os.access("/dev/kvm", os.R_OK | os.W_OK) and bool({"vmx", "svm"} & set(flags))


def _say(text: str) -> None:
    print(f"test-vm: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
