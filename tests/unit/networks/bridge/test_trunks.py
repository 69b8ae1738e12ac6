"""Which trunk an endpoint is on, and how the macvlans of a network treat each other."""

from collections import Counter
from ipaddress import ip_interface
from types import SimpleNamespace
from typing import Any

import pytest

from engine.networks.bridge import trunks
from engine.networks.network import Options


def test_addresses_in_a_row_share_a_trunk() -> None:
    numbers = Counter(trunks.number_of(ip_interface(f"172.17.{each >> 8}.{each & 255}/16")) for each in range(1 << 16))
    assert {*numbers} == {*range(trunks.TRUNKS)}
    assert max(numbers.values()) <= 2 * trunks.LEAVES
    assert trunks.number_of(ip_interface("10.0.0.2/8")) == trunks.number_of(ip_interface("fd00::2/64")) == 0
    assert trunks.number_of(ip_interface("fd00::1:0/64")) == 65_536 // 1000 % 63


def test_the_kernel_takes_the_names() -> None:
    network: Any = SimpleNamespace(record=SimpleNamespace(id="f" * 64))
    every = [name for number in range(trunks.TRUNKS) for name in trunks.names(network, number)]
    assert len({*every}) == 2 * trunks.TRUNKS
    assert all(len(name) <= 15 and not name.startswith("veth") for name in every)


@pytest.mark.parametrize(
    ("icc", "seen", "mode"),
    [(True, False, "bridge"), (True, True, "bridge"), (False, False, "private"), (False, True, "vepa")],
)
def test_modes(monkeypatch: pytest.MonkeyPatch, icc: bool, seen: bool, mode: str) -> None:
    monkeypatch.setattr(trunks, "bridges_call_netfilter", lambda: seen)
    assert trunks.mode(Options(icc=icc)) == mode
