"""Builds the Cython extensions of engine/_fast; everything else is in pyproject.toml.

ENGINED_COMPILED=1: leave the extensions out, because `build_ext --inplace` has built them
(.ci/prepare). ENGINED_SANITIZE=1: build them with AddressSanitizer and UndefinedBehaviorSanitizer
(.ci/sanitize).
"""

import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HARDENED = ["-fstack-protector-strong", "-fstack-clash-protection", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"]
if platform.machine() == "x86_64":
    HARDENED.append("-fcf-protection")
LINKED = ["-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack", "-Wl,--strip-all"]
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",  # in Cython's wrappers: `self`, the code object of a traceback
    "-Wno-missing-field-initializers",  # in CPython's static types
    "-Wno-cast-function-type",  # in CPython's method tables
]
SANITIZED = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]

FASTER = dict.fromkeys(("jsonentry", "logwriter", "logreader"), "-O3")
"""Modules for which bench/micro has shown that -O3 pays: name -> option. Here test_logreader took
1.5 ms with -O2 and 1.0 ms with -O3, and test_write[disk-ascii] 321 and 272 ms.
"""


def extension(source: Path) -> Extension:
    name = source.stem
    if os.environ.get("ENGINED_SANITIZE"):
        compiled, linked = SANITIZED, ["-fsanitize=address,undefined"]
    else:
        compiled, linked = [FASTER.get(name, "-O2"), "-g0", *HARDENED], LINKED
    return Extension(
        f"engine._fast.{name}", [str(source)], extra_compile_args=[*WARNINGS, *compiled], extra_link_args=linked
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


setup(ext_modules=extensions(), cmdclass={"build_ext": Parallel})
