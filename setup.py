"""Builds the Cython extensions of engine/_fast; everything else is in pyproject.toml."""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

sources = sorted(Path("engine/_fast").glob("*.pyx"))
setup(
    ext_modules=cythonize(
        [Extension(f"engine._fast.{source.stem}", [str(source)], extra_compile_args=["-O3"]) for source in sources],
        compiler_directives={"language_level": "3", "embedsignature": False},
    )
)
