"""Builds the Cython extensions of engine/_fast, and adds the files of docs/ that a wheel carries
(`SHARED`); everything else is in pyproject.toml.

ENGINED_COMPILED=1: leave the extensions out, because they are compiled elsewhere (.ci/prepare,
.ci/wheels.py). ENGINED_SANITIZE=1: build them with AddressSanitizer and
UndefinedBehaviorSanitizer (.ci/sanitize). `.ci/wheels.py` takes `compiled` and `LINKED` from here.
"""

import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

SHARED = ("engined.1", "engined.service", "engined.socket", "engined.toml")
"""Files of docs/ that `engined install-service` needs. They are in engine/share of a wheel."""

HARDENED = ["-fstack-protector-strong", "-fstack-clash-protection", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"]
LINKED = ["-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack", "-Wl,--strip-all"]
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",  # in Cython's wrappers: `self`, the code object of a traceback
    "-Wno-missing-field-initializers",  # in CPython's static types
    "-Wno-cast-function-type",  # in CPython's method tables
]
SANITIZED = [
    *("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "-funsigned-char",  # as on aarch64; the other builds on x86_64 have it signed
]

FASTER = dict.fromkeys(("jsonentry", "logwriter", "logreader"), "-O3")
"""Modules for which bench/micro has shown that -O3 pays: name -> option. Here test_logreader took
1.5 ms with -O2 and 1.0 ms with -O3, and test_write[disk-ascii] 321 and 272 ms.
"""


def compiled(name: str, machine: str) -> list[str]:
    """Options that the module `name` is compiled with for a machine."""
    branches = ["-fcf-protection"] if machine == "x86_64" else []
    return [FASTER.get(name, "-O2"), "-g0", *HARDENED, *branches]


def extension(source: Path) -> Extension:
    name = source.stem
    if os.environ.get("ENGINED_SANITIZE"):
        options, linked = SANITIZED, ["-fsanitize=address,undefined"]
    else:
        options, linked = compiled(name, platform.machine()), LINKED
    return Extension(
        f"engine._fast.{name}", [str(source)], extra_compile_args=[*WARNINGS, *options], extra_link_args=linked
    )


def extensions() -> list[Extension]:
    if os.environ.get("ENGINED_COMPILED"):
        return []
    from Cython.Build import cythonize
    from Cython.Compiler import Options

    Options.emit_code_comments = False
    return cythonize(
        [extension(source) for source in sorted(Path("engine/_fast").glob("*.pyx"))],
        nthreads=os.cpu_count() or 1,
        build_dir=os.environ.get("ENGINED_BUILD"),
        compiler_directives={"language_level": "3", "binding": False, "auto_pickle": False},
    )


class Parallel(build_ext):
    """`build_ext` with one compiler per processor, also when run by `pip install` and
    `bdist_wheel`.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()


class WithShared(build_py):
    """`build_py` with the files of docs/ in engine/share.

    An editable installation finds them in docs/.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            directory = Path(self.build_lib, "engine", "share")
            directory.mkdir(parents=True, exist_ok=True)
            for name in SHARED:
                self.copy_file(str(Path("docs", name)), str(directory / name))


class WithSources(sdist):
    """`sdist` with Cython's sources, which setuptools does not know, and `SHARED`."""

    def make_distribution(self) -> None:
        self.filelist.extend(str(source) for source in sorted(Path("engine/_fast").glob("*.pyx")))
        self.filelist.extend(f"docs/{name}" for name in SHARED)
        self.filelist.append("CHANGELOG.md")
        super().make_distribution()


if __name__ == "__main__":
    commands = {"build_ext": Parallel, "build_py": WithShared, "sdist": WithSources}
    setup(ext_modules=extensions(), cmdclass=commands)
