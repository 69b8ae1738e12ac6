"""The programs that look for rare faults, most for ENGINED_SOAK_MINUTES each: `make nightly`. Their
choices are new each time; what is printed has the seed that repeats them.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT

MINUTES = float(os.environ.get("ENGINED_SOAK_MINUTES", "1"))
PROGRAMS = {
    "engine": ("tests.soak.engine", f"--minutes={MINUTES}"),
    "delivery": ("tests.soak.delivery", f"--minutes={MINUTES}"),
    "swarm": ("tests.soak.swarm", f"--minutes={MINUTES}"),
    "fuzz": ("tests.fuzz", f"--seconds={60 * MINUTES}"),
    "benchmarks": ("pytest", "-q", "bench/micro", "--benchmark-min-rounds=1", "--benchmark-max-time=0"),
    "properties": ("pytest", "-q", "tests/unit", "-m", "hypothesis", "--hypothesis-profile=night"),
}

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    command = [sys.executable, "-m", *PROGRAMS[name]]
    # a worker's variables would switch benchmarks off in the program's own pytest
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout[-20_000:])
    assert done.returncode == 0, " ".join(command[1:])
