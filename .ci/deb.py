"""`make deb`: engined_VERSION~SUITE_ARCHITECTURE.deb for the suites of `SUITES`, in dist/.

    python .ci/deb.py [--suite NAME]... [--architecture NAME]

A package has the engine in a virtual environment of its own, /usr/lib/engined, filled from the wheel
of `.ci/wheels.py` and from PyPI's wheels, so that it depends on the distribution's Python alone.
Nothing of it runs here, so each package is made on any Debian machine. What belongs into the
package besides is in .ci/deb: control, maintainer scripts, debconf's question, lintian's overrides.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine import __version__  # noqa: E402
from engine.__main__ import _parser  # noqa: E402
from engine.commands import service  # noqa: E402

PARTS = ROOT / ".ci" / "deb"
EXTRAS = "swarm,awslogs"
PROGRAM = "/usr/bin/engined"
SHEBANG = "#!/usr/lib/engined/bin/python3 -I"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Suite:
    """A release of a distribution."""

    label: str
    """In the package's version. A newer release of a distribution has one that sorts later."""
    python: str
    glibc: int
    """Its C library is 2.GLIBC."""


SUITES = {
    "bookworm": Suite("deb12", "3.11", 36),
    "trixie": Suite("deb13", "3.13", 41),
    "noble": Suite("ubuntu24.04", "3.12", 39),
}


class Failure(Exception):
    """Ends the program, with one line."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make deb", description="Builds Debian packages in dist/.")
    parser.add_argument("--suite", action="append", choices=SUITES, help="only for this release; repeatable")
    parser.add_argument("--architecture", choices=MACHINES, help="[default: this machine's]")
    parser.add_argument("--version", default=__version__, help=f"of the package [default: {__version__}]")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    try:
        architecture = arguments.architecture or _run("dpkg", ["dpkg", "--print-architecture"]).strip()
        if architecture not in MACHINES:
            raise Failure(f"no package is made for {architecture}: --architecture {' or '.join(MACHINES)}")
        for name in arguments.suite or SUITES:
            print(_package(SUITES[name], architecture, arguments.version))
    except Failure as error:
        print(f"engined: {error}", file=sys.stderr)
        return 1
    return 0


def _package(suite: Suite, architecture: str, version: str) -> Path:
    machine = MACHINES[architecture]
    version = f"{version}~{suite.label}"
    print(f"engined: making the package {version} for {architecture}", file=sys.stderr)
    made = _run("wheel", [sys.executable, ".ci/wheels.py", "--python", suite.python, "--machine", machine])
    wheel = next(line for line in made.splitlines() if line.endswith(".whl"))
    tree = ROOT / "build" / "deb" / f"{suite.label}-{architecture}"
    shutil.rmtree(tree, ignore_errors=True)
    _environment(tree / "usr/lib/engined", suite, machine, wheel)
    _link(tree / PROGRAM[1:], "../lib/engined/bin/engined")
    _host_files(tree, version)
    _control(tree, suite, architecture, version)
    path = Path("dist", f"engined_{version}_{architecture}.deb")
    _run("dpkg-deb", ["dpkg-deb", "--root-owner-group", "-Zxz", "-z2", "--build", str(tree), str(path)])
    return path


def _environment(place: Path, suite: Suite, machine: str, wheel: str) -> None:
    """A virtual environment as `python3 -m venv` makes it, without pip."""
    packages = place / "lib" / f"python{suite.python}" / "site-packages"
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(5, suite.glibc + 1)]
    platforms += [f"{name}_{machine}" for name in ("manylinux1", "manylinux2010", "manylinux2014")]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--only-binary", ":all:"]
    command += ["--target", str(packages), "--implementation", "cp", "--python-version", suite.python]
    for platform in platforms:
        command += ["--platform", platform]
    _run("pip", [*command, f"{wheel}[{EXTRAS}]"])
    shutil.rmtree(packages / "bin", ignore_errors=True)  # programs of other packages
    for record in packages.glob("*.dist-info/direct_url.json"):  # has a path of this machine
        record.unlink()
    _link(place / "bin/python3", f"/usr/bin/python{suite.python}")
    _link(place / f"bin/python{suite.python}", "python3")
    script = f"{SHEBANG}\nimport sys\n\nfrom engine.__main__ import main\n\nsys.exit(main())\n"
    _write(place / "bin/engined", script)
    _write(place / "pyvenv.cfg", f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {suite.python}\n")


def _host_files(tree: Path, version: str) -> None:
    """Everything outside of the environment."""
    for name in service.UNITS:
        text = service.unit(name, PROGRAM, "/etc/engined/engined.toml")
        _write(tree / "usr/lib/systemd/system" / name, text)
    _write(tree / "etc/engined/engined.toml", service.shared("engined.toml"))
    _write(tree / "etc/default/engined", (PARTS / "default").read_text())
    places = service.COMPLETIONS | {"zsh": "share/zsh/vendor-completions/_engined"}
    for shell, script in service.completions(_parser()).items():
        _write(tree / "usr" / places[shell], script)
    _compressed(tree / "usr/share/man/man1/engined.1.gz", service.shared("engined.1"))
    documents = tree / "usr/share/doc/engined"
    _write(documents / "copyright", (PARTS / "copyright").read_text())
    _compressed(documents / "NEWS.gz", (ROOT / "CHANGELOG.md").read_text())
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        _write(documents / ("README.md" if page.parent == ROOT else f"docs/{page.name}"), page.read_text())
    when = formatdate(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    entry = f"engined ({version}) stable; urgency=medium\n\n  * See NEWS.gz.\n\n"
    _compressed(
        documents / "changelog.gz", f"{entry} -- The engined maintainers <maintainers@engined.invalid>  {when}\n"
    )
    overrides = PARTS / "lintian-overrides"
    if overrides.exists():
        _write(tree / "usr/share/lintian/overrides/engined", overrides.read_text())


def _control(tree: Path, suite: Suite, architecture: str, version: str) -> None:
    """The directory DEBIAN."""
    files = [path for path in sorted(tree.rglob("*")) if path.is_file() and not path.is_symlink()]
    size = sum(path.stat().st_size for path in files) // 1024
    values = {"VERSION": version, "ARCHITECTURE": architecture, "SIZE": str(size)}
    major, minor = suite.python.split(".")
    values["PYTHON"] = f"python3 (>= {suite.python}), python3 (<< {major}.{int(minor) + 1}), python{suite.python}"
    control = (PARTS / "control").read_text()
    for name, value in values.items():
        control = control.replace(f"@{name}@", value)
    directory = tree / "DEBIAN"
    sums = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(tree)}\n" for path in files]
    _write(directory / "control", control)
    _write(directory / "md5sums", "".join(sums))
    settings = [path for path in files if path.is_relative_to(tree / "etc")]
    _write(directory / "conffiles", "".join(f"/{path.relative_to(tree)}\n" for path in settings))
    _write(directory / "templates", (PARTS / "templates").read_text())
    scripts = ("postinst", "prerm", "postrm")
    for script in scripts:
        _write(directory / script, (PARTS / script).read_text())
    programs = {tree / "usr/lib/engined/bin/engined", *(directory / script for script in scripts)}
    for path in [tree, *tree.rglob("*")]:  # whatever this process's umask and the wheels' modes are
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path in programs else 0o644)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _compressed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _run(what: str, command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"{what} failed: {(done.stderr.strip() or done.stdout.strip() or '?').splitlines()[-1]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
