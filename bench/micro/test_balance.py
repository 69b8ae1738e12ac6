"""Changes of services in a network's namespace: what one ready backend more or less costs, and a
whole view at the start of the daemon. Needs root.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from ipaddress import IPv4Address
from typing import Any

import pytest

from engine.networks.overlay.balance import Balance
from engine.system import namespaces

SERVICES = 1_000
BACKENDS = [IPv4Address("10.9.0.1") + number for number in range(5 * SERVICES)]
VIRTUAL = [IPv4Address("10.5.0.1") + number for number in range(SERVICES)]
GATEWAY = IPv4Address("10.4.0.1")


@pytest.fixture
def balance() -> Iterator[Balance]:
    with namespaces.new_network() as namespace:
        pass
    made = Balance(namespace, GATEWAY)
    made.set({address: BACKENDS[5 * at : 5 * at + 5] for at, address in enumerate(VIRTUAL)})
    yield made
    assert not made.mend()
    made.close()
    os.close(namespace)


@pytest.mark.parametrize("backends", [5, 60, 600])
def test_one_backend_comes_or_goes(benchmark: Any, balance: Balance, backends: int) -> None:
    """One of 1,000 services."""
    balance.set({VIRTUAL[7]: BACKENDS[:backends]})
    turns = itertools.count()
    benchmark(lambda: balance.set({VIRTUAL[7]: BACKENDS[: backends + (next(turns) + 1) % 2]}))


def test_a_whole_view(benchmark: Any, balance: Balance) -> None:
    """1,000 services of five backends that become four and five again."""
    views = itertools.cycle(
        {address: BACKENDS[5 * at : 5 * at + more] for at, address in enumerate(VIRTUAL)} for more in (4, 5)
    )
    benchmark(lambda: balance.set(next(views)))
