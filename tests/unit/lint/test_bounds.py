"""Which bounds in seconds `tests.lint.bounds` finds."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.lint import bounds

BEGAN = "began = time.monotonic()\n"


def found(source: str) -> list[int]:
    text = "def test():\n" + textwrap.indent(source, "    ")
    return [line for line, _ in bounds.check(Path("test_x.py"), text)]


@pytest.mark.parametrize(
    "source",
    [
        BEGAN + "assert time.monotonic() - began < 5",
        BEGAN + "assert 5 > time.monotonic() - began",
        BEGAN + "assert 1 <= time.monotonic() - began < LIMIT + 2",
        BEGAN + "took = time.monotonic() - began\nassert took < 5",
        "took = []\n" + BEGAN + "took.append(time.monotonic() - began)\nassert max(took) < 0.5",
        "await asyncio.wait_for(work, 5)",
        "async with asyncio.timeout(10):\n    pass",
        "began = monotonic()\nassert monotonic() - began < 5",
        BEGAN + "took: float = time.monotonic() - began\nassert took < 5",
        BEGAN + "if time.monotonic() - began > 0.9:\n    pass",
        "queue.get(timeout=5)",
        "thread.join(5)",
        "end = time.monotonic() + 20",
        "subprocess.run(command, timeout=20)",
    ],
)
def test_what_a_slow_host_breaks(source: str) -> None:
    assert found(source) == [source.count("\n") + 2 - source.endswith("pass")]


@pytest.mark.parametrize(
    "source",
    [
        BEGAN + "assert time.monotonic() - began < 5 * PATIENCE",
        BEGAN + "assert time.monotonic() - began > 5",
        BEGAN + "assert time.monotonic() - began < 3600",
        BEGAN + "assert time.monotonic() - began < 5  # seconds: of a fake clock",
        BEGAN + "# seconds: the other case takes 30\nassert time.monotonic() - began < 5",
        BEGAN + "if time.monotonic() - began < 5:\n    pass",
        "assert len(found) < 5",
        "await asyncio.wait_for(work, 5 * PATIENCE)",
        "await asyncio.wait_for(work, 60)",
        "await asyncio.wait_for(work, 0.1)",
        "with pytest.raises(TimeoutError):\n    await asyncio.wait_for(work, 5)",
        "request(path, timeout=5)",
        "end = time.monotonic() + 60",
        "'.'.join(words)",
    ],
)
def test_what_holds_on_a_slow_host(source: str) -> None:
    assert found(source) == []
