"""The Debian package for arm64, in an emulated machine with Debian's arm64 kernel: `engined check`,
and the steps of `make demo`, with crun, with runc, and with an image of 32-bit ARM.

    python -m tests.vm.arm64 [--suite bookworm|trixie] [--kernel PACKAGE]

The root has extracted packages: nothing of arm64 runs on this host, so no maintainer script does
either, and the few files that those would make are written here. The machine starts systemd, runs
`PROGRAM`, and powers off; its console is printed. `--kernel linux-image-arm64-16k` of trixie has
pages of 16 KiB.

Needs root, mmdebstrap, qemu-system-arm, busybox and kmod, and the package in dist/:
make deb ARGS="--suite bookworm --architecture arm64".

ENGINED_VM_DIRECTORY as in `tests.vm`. A run takes some minutes; a machine that is not off after
`--minutes` is ended, and its console printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.vm.__main__ import REPOSITORY, SUITES, WORK, _mirror

PACKAGES = (
    *("base-files", "base-passwd", "bash", "coreutils", "dash", "grep", "hostname", "libc-bin", "login", "mount"),
    *("passwd", "sed", "systemd-sysv", "udev", "kmod", "dbus", "apparmor", "util-linux", "iproute2", "procps"),
    *("python3", "crun", "runc", "libnftables1", "libseccomp2", "libstdc++6", "ca-certificates", "busybox-static"),
)
"""With what they depend on."""

PROGRAM = """#!/bin/bash
# Powers off in any case.
trap 'sync; systemctl poweroff --force --force' EXIT
cd /root
uname -a
echo "pages of $(getconf PAGESIZE) bytes, cgroups of $(stat -fc %T /sys/fs/cgroup)"
modprobe -a overlay br_netfilter nf_tables veth bridge
export PYTHONPATH=/root PYTHONDONTWRITEBYTECODE=1
engined check
python=/usr/lib/engined/bin/python3
$python -m tests.demo && echo "arm64: crun ran it"
[ "$(getconf PAGESIZE)" = 4096 ] && $python - <<END && echo "arm64: it ran 32-bit ARM"
from pathlib import Path
from tests import demo
from tests.support.images import archives

archives.BUSYBOX = Path("/armhf/bin/busybox")
raise SystemExit(demo.main())
END
echo 'runtime = "/usr/sbin/runc"' >/etc/engined/engined.toml
$python -m tests.demo && echo "arm64: runc ran it"
"""

SMALL_PAGES, ARM_32 = "pages of 4096 bytes", "it ran 32-bit ARM"
RESULTS = ("crun ran it", ARM_32, "runc ran it")
"""What a machine says. One with larger pages says nothing of 32-bit ARM: Debian's programs for it
are aligned to 4 KiB, and end with SIGSEGV there.
"""

UNIT = """[Unit]
Description=The demo of engined
After=basic.target dbus.service
[Service]
Type=oneshot
ExecStart=/usr/local/sbin/engined-demo
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyAMA0
Delegate=yes
TimeoutStartSec=infinity
"""

INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
while read -r word module rest; do
    [ "$word" != insmod ] || /bin/busybox insmod "$module"
done </modules
until /bin/busybox mount -t ext4 /dev/vda /new; do /bin/busybox sleep 1; done
/bin/busybox umount /proc
exec /bin/busybox switch_root /new /sbin/init
"""
"""Of the first root file system, which has the modules that the disk needs."""

MODULES = ("virtio_pci", "virtio_blk", "ext4")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vm.arm64", description="The package for arm64, booted.")
    parser.add_argument("--suite", choices=SUITES, default="bookworm", help="Debian's release [bookworm]")
    parser.add_argument("--kernel", default="linux-image-arm64", help="package of the kernel [linux-image-arm64]")
    parser.add_argument("--minutes", type=float, default=60, metavar="N", help="time until it is off [60]")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("must run as root: the root file system has owners")
    packages = sorted((REPOSITORY / "dist").glob(f"engined_*~{SUITES[arguments.suite].label}_arm64.deb"))
    if not packages:
        parser.error(f"no package in dist/: make deb ARGS='--suite {arguments.suite} --architecture arm64'")
    directory = WORK / f"{arguments.suite}-{arguments.kernel}"
    directory.mkdir(parents=True, exist_ok=True)
    base = directory / "base.tar"
    if not base.exists():
        _extract(base, arguments.suite, arguments.kernel)
    with tempfile.TemporaryDirectory(prefix="root", dir=directory) as temporary:
        root = Path(temporary)
        root.chmod(0o755)
        _run("tar", "-xf", base, "--numeric-owner", "-C", root)
        _install(root, arguments.suite, packages[-1])
        _initrd(root, directory / "initrd")
        shutil.copy(next((root / "boot").glob("vmlinuz-*")), directory / "vmlinuz")
        (directory / "disk.ext4").unlink(missing_ok=True)
        _run("mke2fs", "-q", "-t", "ext4", "-d", root, directory / "disk.ext4", "2G")
    return _boot(directory, 60 * arguments.minutes)


def _extract(base: Path, suite: str, kernel: str) -> None:
    unfinished = base.with_suffix(".new.tar")
    names = ",".join((*PACKAGES, kernel))
    options = ("--mode=root", "--variant=extract", "--architectures=arm64", f"--include={names}")
    _run("mmdebstrap", *options, suite, unfinished, _mirror())
    unfinished.rename(base)


def _install(root: Path, suite: str, package: Path) -> None:
    """The package of engined, the demo, and what maintainer scripts would have made."""
    _run("dpkg", "-x", package, root)
    _run(REPOSITORY / ".ci/unpack", suite, "armhf", root / "armhf", "busybox-static")
    for name in ("passwd", "group"):
        accounts = (root / f"usr/share/base-passwd/{name}.master").read_text()
        number = "996" if name == "group" else "996:996::/nonexistent:/usr/sbin/nologin"
        (root / "etc" / name).write_text(f"{accounts}messagebus:x:{number}{':' if name == 'group' else ''}\n")
    (root / "etc/machine-id").write_text(f"{1:032x}\n")  # without one, systemd enables all services
    (root / "etc/hostname").write_text("engined-vm\n")
    shutil.copytree(REPOSITORY / "tests", root / "root/tests", ignore=shutil.ignore_patterns("__pycache__"))
    program = root / "usr/local/sbin/engined-demo"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    patience = root / "etc/systemd/system.conf.d/patience.conf"
    patience.parent.mkdir(parents=True, exist_ok=True)
    patience.write_text("[Manager]\nDefaultTimeoutStartSec=1h\n")  # an emulated processor is slow
    units = root / "etc/systemd/system"
    (units / "multi-user.target.wants").mkdir(parents=True, exist_ok=True)
    (units / "engined-demo.service").write_text(UNIT)
    (units / "multi-user.target.wants/engined-demo.service").symlink_to("../engined-demo.service")
    (version,) = (path.name for path in (root / "lib/modules").iterdir())
    _run("depmod", "-b", root, version)


def _initrd(root: Path, into: Path) -> None:
    (version,) = (path.name for path in (root / "lib/modules").iterdir())
    found = _run("modprobe", "-d", root, "-S", version, "-a", "--show-depends", *MODULES).replace(str(root), "")
    with tempfile.TemporaryDirectory() as temporary:
        first = Path(temporary)
        for name in ("bin", "dev", "proc", "new"):
            (first / name).mkdir()
        shutil.copy(root / "bin/busybox", first / "bin")
        for line in found.splitlines():
            word, path = line.split()[:2]
            if word == "insmod":
                (first / path[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / path[1:], first / path[1:])
        (first / "modules").write_text(found)
        (first / "init").write_text(INIT)
        (first / "init").chmod(0o755)
        _run("sh", "-c", f"cd {first} && find . | busybox cpio -o -H newc >{into} 2>/dev/null")


def _boot(directory: Path, seconds: float) -> int:
    """Print what the machine says until it is off, or `seconds` are over, and what it did not do.
    Returns 0 if it did all.
    """
    command = ["qemu-system-aarch64", "-M", "virt", "-cpu", "max,pauth-impdef=on", "-smp", "2", "-m", "2G"]
    command += ["-nographic", "-nic", "none", "-no-reboot"]
    command += ["-drive", f"file={directory / 'disk.ext4'},format=raw,if=virtio,snapshot=on"]
    command += ["-kernel", str(directory / "vmlinuz"), "-initrd", str(directory / "initrd")]
    # a getty would take the terminal
    command += ["-append", "console=ttyAMA0 quiet panic=-1 systemd.getty_auto=no"]
    failures = []
    with (directory / "console").open("wb") as console:
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            failures.append(f"not off after {seconds / 60:g} minutes")
    said = (directory / "console").read_text(errors="replace").replace("\r", "")
    print(said)
    expected = [result for result in RESULTS if result != ARM_32 or SMALL_PAGES in said]
    failures += [f"not so: {result}" for result in expected if f"arm64: {result}" not in said]
    print("\n".join(f"arm64: {failure}" for failure in failures))
    return 1 if failures else 0


def _run(*command: str | Path) -> str:
    """The standard output of a program that must succeed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
