"""The reserve for small objects, in processes whose address space is limited."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
from pathlib import Path
from engine._fast import reserve

def size():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

assert size() and resident()
held = None
before = resident()
pieces = reserve.fill() if {with_it} else 0
assert resident() - before < 1 << 20, "nothing is touched"
limit = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size(), limit[1]))
try:
    bytearray(4 << 20)
    raise AssertionError("much memory is refused")
except MemoryError:
    pass
got = 0
try:
    while got < 6 << 20:
        held = held, bytes({each})
        got += {each}
except MemoryError:
    pass
resource.setrlimit(resource.RLIMIT_AS, limit)
left = reserve.fill() if {with_it} else 0
while held: held = held[0]
print(got >= 6 << 20, left == pieces)
"""


@pytest.mark.parametrize("each", [100, 5000, 60_000])
def test_small_objects_come_from_it(each: int) -> None:
    def run(with_it: bool) -> str:
        script = SCRIPT.format(each=each, with_it=with_it)
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert run(with_it=True) == "True True\n"
    assert run(with_it=False) == "False True\n"
