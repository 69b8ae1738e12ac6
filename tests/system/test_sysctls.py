"""Sysctls of network namespaces: each is written in its own namespace only."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from engine.system import namespaces, sysctls

NAME = "ipv4/ip_unprivileged_port_start"


def test_each_namespace_has_its_own() -> None:
    here = Path("/proc/sys/net", NAME)
    before = here.read_text()
    sysctls.write({})
    gc.collect()  # frees leftovers of earlier tests
    held = len(os.listdir("/proc/self/fd"))
    for number in range(2 * sysctls.USES):  # and several instances of procfs
        with namespaces.new_network() as descriptor:
            sysctls.write({NAME: str(number)})
            assert here.read_text() == f"{number}\n"
        os.close(descriptor)
    assert here.read_text() == before
    assert len(os.listdir("/proc/self/fd")) == held


def test_one_that_the_kernel_has_not() -> None:
    with namespaces.new_network() as descriptor:
        with pytest.raises(FileNotFoundError):
            sysctls.write({"ipv4/nothing": "1"})
        with pytest.raises(OSError, match="Invalid argument"):
            sysctls.write({NAME: "x"})
    os.close(descriptor)
