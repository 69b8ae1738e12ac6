"""`make wheels`: a manylinux_2_28 wheel for each CPython and machine in `TARGETS`, and an sdist, in
dist/.

    python .ci/wheels.py [--python X.Y]... [--machine NAME]... [--here]

The extensions are C, and `zig cc` of PyPI's ziglang compiles them for every target. Headers of
CPython come from Debian's packages (`SUITES`). No Debian suite has CPython 3.12: its headers are
those of a python3.12 on PATH or of pyenv. Of CPython's public headers only pyconfig.h differs
between x86_64 and aarch64, in macros that no other public header reads for Linux
(HAVE_GCC_ASM_FOR_X64 and _X87, HAVE_USABLE_WCHAR_T, PY_SUPPORT_TIER), so they serve both machines.

Cython's C files lie beside their sources. An object is compiled again only if its C file, the
options or the compiler have changed; build/objects keeps them. auditwheel says whether a wheel
is what its name says.

--here: only the wheel for this Python and machine, of the modules that `make build` has compiled.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wheel.wheelfile import WheelFile

ROOT = Path(__file__).resolve().parent.parent
FAST = ROOT / "engine" / "_fast"
BUILD = ROOT / "build"
DIST = ROOT / "dist"

SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
"""CPython's version -> the Debian suite whose headers are used."""

VERSIONS = ("3.11", "3.12", "3.13", "3.14")

MACHINES = {"x86_64": ("amd64", "x86_64_v2"), "aarch64": ("arm64", "generic")}
"""Machine -> Debian's name of the architecture, and the least processor that a wheel runs on."""

GLIBC = "2.28"


@dataclass(frozen=True)
class Target:
    """What a wheel is for."""

    version: str
    machine: str

    @property
    def abi(self) -> str:
        return "cp" + self.version.replace(".", "")

    @property
    def suffix(self) -> str:
        """Of the extension modules' file names."""
        return f".cpython-{self.abi[2:]}-{self.machine}-linux-gnu.so"

    @property
    def tag(self) -> str:
        return f"{self.abi}-{self.abi}-manylinux_{GLIBC.replace('.', '_')}_{self.machine}"


TARGETS = tuple(Target(version, machine) for version in VERSIONS for machine in MACHINES)


class Failure(Exception):
    """Ends the program, with one line."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make wheels", description="Builds wheels and an sdist in dist/.")
    parser.add_argument("--python", action="append", choices=VERSIONS, help="only for this CPython; repeatable")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="only for this machine; repeatable")
    parser.add_argument("--here", action="store_true", help="only the wheel for this Python, of what is compiled")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("SOURCE_DATE_EPOCH", _time_of_the_commit())
    DIST.mkdir(exist_ok=True)
    BUILD.mkdir(exist_ok=True)
    claim = os.open(BUILD / "wheels.lock", os.O_CREAT | os.O_RDWR)  # until this process ends
    fcntl.flock(claim, fcntl.LOCK_EX)
    try:
        if arguments.here:
            print(_wheel_here())
            return 0
        targets = [
            target
            for target in TARGETS
            if target.version in (arguments.python or VERSIONS) and target.machine in (arguments.machine or MACHINES)
        ]
        for path in _wheels(targets):
            print(path)
        print(_sdist())
    except Failure as error:
        print(f"engined: {error}", file=sys.stderr)
        return 1
    return 0


def _time_of_the_commit() -> str:
    """The wheels of one commit are equal to the byte."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "315532800"  # 1980, where the times of zip files begin


def _wheel_here() -> Path:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    modules = {source.stem: FAST / (source.stem + suffix) for source in FAST.glob("*.pyx")}
    return _assemble(_pure_wheel(), f"{abi}-{abi}-{platform}", suffix, modules)


def _wheels(targets: list[Target]) -> Iterator[Path]:
    """Compile everything first, so that all processors have work until the end."""
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="setup_of_engined")
    _run("Cython", [sys.executable, "-c", _CYTHONIZE])
    headers = {target: _headers(target) for target in targets}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {
            target: {
                source.stem: pool.submit(_object, source.with_suffix(".c"), target, headers[target], setup)
                for source in sorted(FAST.glob("*.pyx"))
            }
            for target in targets
        }
        compiled = {target: {name: job.result() for name, job in jobs.items()} for target, jobs in objects.items()}
    count = sum(new for modules in compiled.values() for _, new in modules.values())
    print(f"engined: compiled {count} of {sum(len(modules) for modules in compiled.values())} modules", file=sys.stderr)
    pure = _pure_wheel()
    for target, modules in compiled.items():
        wheel = _assemble(pure, target.tag, target.suffix, {name: path for name, (path, _) in modules.items()})
        _audit(wheel, target)
        yield wheel


_CYTHONIZE = "import runpy; runpy.run_path('setup.py', run_name='setup_of_engined')['extensions']()"
"""In a process of its own, because it changes Cython's global options."""


def _headers(target: Target) -> list[str]:
    """The compiler's options that name the directories of CPython's headers."""
    suite = SUITES.get(target.version)
    if suite is None:
        return ["-I", str(_include_of(target.version))]
    architecture, _ = MACHINES[target.machine]
    unpacked = BUILD / "headers" / f"{target.version}-{architecture}"
    include = unpacked / "usr" / "include"
    directory = include / f"python{target.version}"
    if not (directory / "Python.h").exists():
        print(f"engined: fetching headers of CPython {target.version} for {target.machine}", file=sys.stderr)
        _run(
            "fetching headers",
            [".ci/unpack", suite, architecture, str(unpacked), f"libpython{target.version}-dev"],
        )
    return ["-I", str(directory), "-I", str(include)]


@functools.cache
def _include_of(version: str) -> Path:
    """The headers of an interpreter of this machine."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    for program in (f"python{version}", *sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))):
        program_text = "import sysconfig; print(sysconfig.get_path('include'))"
        try:
            done = subprocess.run([program, "-c", program_text], capture_output=True, text=True, check=False)
        except OSError:
            continue
        include = Path(done.stdout.strip())
        if done.returncode == 0 and (include / "Python.h").exists():
            return include
    raise Failure(
        f"the headers of CPython {version} are in no Debian suite: install python{version} with Python.h so that it "
        f"is on PATH or pyenv has it, or leave it out: make wheels ARGS='--python 3.11 --python 3.13 --python 3.14'"
    )


def _object(source: Path, target: Target, headers: list[str], setup: dict[str, Any]) -> tuple[Path, bool]:
    """The module that is compiled from `source`, and whether it was compiled now."""
    _, processor = MACHINES[target.machine]
    options = [
        *("-target", f"{target.machine}-linux-gnu.{GLIBC}", f"-mcpu={processor}", "-shared", "-fPIC"),
        "-fno-sanitize=undefined",  # which zig has by default
        *("-DNDEBUG", "-w", *setup["compiled"](source.stem, target.machine), *setup["LINKED"]),
    ]
    said = [*options, _compiler(), _digest_of_headers(headers[1])]
    digest = hashlib.sha256(source.read_bytes() + "\0".join(said).encode()).hexdigest()[:20]
    directory = BUILD / "objects" / f"{target.abi}-{target.machine}"
    compiled = directory / f"{source.stem}.{digest}.so"
    if compiled.exists():
        return compiled, False
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob(f"{source.stem}.*.so"):
        old.unlink()
    unfinished = compiled.with_suffix(".new")
    command = [sys.executable, "-m", "ziglang", "cc", *options, *headers, str(source), "-o", str(unfinished)]
    cache = {"ZIG_GLOBAL_CACHE_DIR": str(BUILD / "zig"), "ZIG_LOCAL_CACHE_DIR": str(BUILD / "zig")}
    _run(f"compiling {source.name} for {target.abi} on {target.machine}", command, **cache)
    unfinished.rename(compiled)
    return compiled, True


@functools.cache
def _compiler() -> str:
    return _run("ziglang", [sys.executable, "-m", "ziglang", "version"]).strip()


@functools.cache
def _digest_of_headers(directory: str) -> str:
    """Of patchlevel.h, which has CPython's whole version."""
    return hashlib.sha256(Path(directory, "patchlevel.h").read_bytes()).hexdigest()


def _pure_wheel() -> Path:
    """The wheel without the extensions."""
    for stale in (BUILD / "lib", BUILD / "pure"):  # modules of earlier versions
        shutil.rmtree(stale, ignore_errors=True)
    _run(
        "building the wheel",
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "build/pure", "."],
        ENGINED_COMPILED="1",
    )
    (path,) = (BUILD / "pure").glob("*.whl")
    return path


def _assemble(pure: Path, tag: str, suffix: str, modules: dict[str, Path]) -> Path:
    """The wheel `pure` with compiled modules, named and tagged for its target."""
    name, version = pure.name.split("-")[:2]
    wheel = DIST / f"{name}-{version}-{tag}.whl"
    wheel.unlink(missing_ok=True)
    with WheelFile(pure) as source, WheelFile(wheel, "w") as into:
        information = f"{name}-{version}.dist-info"
        for entry in sorted(source.namelist()):
            data = source.read(entry)
            if entry == f"{information}/RECORD":
                continue  # WheelFile writes it
            if entry == f"{information}/WHEEL":
                text = re.sub(r"(?m)^Tag: .*$", f"Tag: {tag}", data.decode())
                data = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
            into.writestr(entry, data)
        for module, path in sorted(modules.items()):
            if not path.exists():
                raise Failure(f"{path.name} is missing: make build")
            into.writestr(f"engine/_fast/{module}{suffix}", path.read_bytes())
    return wheel.relative_to(ROOT)


def _audit(wheel: Path, target: Target) -> None:
    report = json.loads(_run("auditwheel", [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]))
    platform = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{target.machine}", report["overall_tag"])
    allowed = tuple(map(int, GLIBC.split(".")))
    if not platform or (int(platform[1]), int(platform[2])) > allowed or report["external_libs"]:
        raise Failure(f"{wheel}: auditwheel finds {report['overall_tag']} and {report['external_libs']}")


def _sdist() -> Path:
    program = "import setuptools.build_meta as backend; print(backend.build_sdist('dist'))"
    said = _run("sdist", [sys.executable, "-c", program], ENGINED_COMPILED="1")
    return Path("dist", said.split()[-1])


def _run(what: str, command: list[str], **environment: str) -> str:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or "?").splitlines()
        errors = [line for line in reason if "error:" in line.lower()]
        raise Failure(f"{what} failed: {(errors or reason[-1:])[0]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
