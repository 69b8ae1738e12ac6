"""What a manager needs of its host: a fit etcd, and Python packages. Imports none of them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess

from engine.errors import ServerError, words

PROGRAM = "etcd"
PACKAGES = ("cryptography",)

OLDEST = (3, 4, 18)
FAULTY = ((3, 5, 0), (3, 5, 2))
"""These lose data when they are killed under load."""


def check(text: str) -> tuple[int, ...]:
    """The version in the output of `etcd --version`. Raises ServerError for one that is unfit."""
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", text)
    if found is None:
        raise ServerError(f"etcd: unknown version: {text.strip()[:100]!r}")
    version = tuple(map(int, found.groups()))
    name = ".".join(found.groups())
    if version < OLDEST:
        raise ServerError(f"etcd {name} is too old: a swarm needs 3.4.18 or newer")
    if FAULTY[0] <= version <= FAULTY[1]:
        raise ServerError(f"etcd {name} loses data in crashes (etcd 3.5.0 to 3.5.2): install another version")
    if version >= (4,):
        raise ServerError(f"etcd {name} is not supported: a swarm needs 3.4.18 or newer 3.x")
    return version


def found() -> str:
    """The output of `etcd --version`; "" when it is not installed."""
    program = shutil.which(PROGRAM)
    if program is None:
        return ""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return words(error)
    return done.stdout + done.stderr


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]
