"""Creating a table through libnftables, in a process with many open descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from engine._fast import nftables
from engine.system import namespaces

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

DESCRIPTORS = 2000
"""More than select(2) supports, with which the library waits."""


@pytest.fixture(autouse=True)
def many_open() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(DESCRIPTORS)]
    with namespaces.new_network() as made:
        yield
    os.close(made)
    for each in opened:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_lay(benchmark: Any) -> None:
    assert nftables.load()
    text = (
        b"add table inet t\ndelete table inet t\nadd table inet t\n"
        b"add chain inet t c { type filter hook forward priority 0; }\n"
    )
    taken, said = benchmark(nftables.run, text)
    assert taken, said
