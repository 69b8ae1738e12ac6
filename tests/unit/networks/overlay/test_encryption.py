"""Keys of encrypted overlays, and what is put into a kernel that has ESP; the kernel here is a
fake."""

from __future__ import annotations

import errno
import re
from ipaddress import IPv4Address
from typing import Any

import msgspec
import pytest

from engine.errors import ServerError
from engine.networks.filter import Filter
from engine.networks.network import Overlay
from engine.networks.overlay import encryption
from engine.networks.overlay.encryption import PERIOD, Encryption, association
from engine.system import netfilter
from engine.system.netlink.codec import NetlinkError, Request
from engine.system.netlink.nft import Element

ONE, TWO, THREE = (IPv4Address(f"192.168.7.{number}") for number in (1, 2, 3))
NETWORK = Overlay(vni=4097, port=4789, local=ONE, encrypted=True, secret=bytes(range(32)))


class Kernel:
    """What was added and not deleted, by the words of the requests."""

    def __init__(self) -> None:
        self.there: list[str] = []
        self.tables: list[str] = []
        self.numbers: set[int] = set()
        self.refuses = 0
        self.port = 1

    def apply(self, *requests: Request, missing: bool = False) -> None:
        for each in requests:
            if self.refuses and each.what.startswith("ESP"):
                raise NetlinkError(self.refuses, each.what)
            if each.what.startswith("removal of "):
                self.there.remove(each.what.removeprefix("removal of "))
            elif each.what not in self.there or each.what.startswith("ESP"):
                self.there.append(each.what)

    def close(self) -> None:
        pass

    def layout(self, table: str) -> tuple[bytes, ...]:
        return tuple(text.encode() for text in self.tables)

    def elements(self, table: str, name: str) -> dict[bytes, Element]:
        made = [dict(encryption._elements(number))[name] for number in self.numbers]
        return {each.key: each for each in made}

    def change(self, table: str, remove: Any, add: Any, what: str) -> None:
        self.numbers -= {int.from_bytes(each.key, "big") for _, each in remove}
        self.numbers |= {int.from_bytes(each.key, "big") for _, each in add}

    def run(self, text: str) -> str:
        self.tables = [] if "delete table" in text else [text]
        if not self.tables:
            self.numbers.clear()
        elif added := re.search(r"numbers \{ ([\d, ]+) \}", text):
            self.numbers |= {*map(int, added[1].split(","))}
        return ""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(encryption, "XfrmSocket", lambda: made)
    monkeypatch.setattr(encryption, "NftSocket", lambda: made)
    monkeypatch.setattr(netfilter, "available", lambda: True)
    monkeypatch.setattr(netfilter, "run", made.run)
    return made


def test_both_ends_derive_the_same_and_nothing_else_does() -> None:
    there = msgspec.structs.replace(NETWORK, local=TWO)
    assert association(NETWORK, ONE, TWO, 7) == association(there, ONE, TWO, 7)
    other = msgspec.structs.replace(NETWORK, secret=bytes(32))
    pairs = [(NETWORK, ONE, TWO, 7), (NETWORK, TWO, ONE, 7), (NETWORK, ONE, TWO, 8), (other, ONE, TWO, 7)]
    made = [association(*each) for each in pairs]
    assert len({each.key for each in made}) == len({each.number for each in made}) == 4
    assert all(len(each.key) == 20 and each.number >= 256 for each in made)


def test_nodes_come_and_go(kernel: Kernel) -> None:
    encrypted = Encryption(Filter("engined-test"))
    encrypted.set(NETWORK, {ONE, TWO})
    assert sorted(kernel.there) == sorted(
        [*[f"ESP {TWO} → {ONE}"] * 3, f"ESP {ONE} → {TWO}", f"encryption {ONE} → {TWO}"]
    )
    encrypted.set(NETWORK, {TWO, THREE})
    encrypted.set(NETWORK, {TWO, THREE})
    assert len(kernel.there) == 10
    encrypted.set(NETWORK, {THREE})
    assert len(kernel.there) == 5 and not any(str(TWO) in each for each in kernel.there)
    (table,) = kernel.tables
    assert "networks { 4097 : 0xe001001 }" in table and "numbers { 4097 }" in table
    encrypted.set(msgspec.structs.replace(NETWORK, vni=4098), {TWO})
    assert kernel.numbers == {4097, 4098}
    encrypted.remove(NETWORK.vni)
    encrypted.remove(NETWORK.vni)
    assert kernel.numbers == {4098} and len(kernel.there) == 5
    encrypted.remove(4098)
    assert not kernel.there and not kernel.tables


def test_the_next_daemon_keeps_networks_until_all_are_adopted(kernel: Kernel) -> None:
    networks = [msgspec.structs.replace(NETWORK, vni=number) for number in range(1, 5)]
    first = Encryption(Filter("engined-test"))
    for each in networks:
        first.set(each, {TWO})
    first.close()
    table = Filter("engined-test")
    second = Encryption(table)
    second.set(networks[0], (), again=True)
    assert kernel.numbers == {1, 2, 3, 4}
    second.remove(2)
    assert kernel.numbers == {1, 3, 4}
    second.settle({4})
    assert kernel.numbers == {1, 4}
    kernel.tables, kernel.numbers = [], set()  # another program
    assert table.companions[0](False) and kernel.numbers == {1, 4}
    assert not table.companions[0](True)
    second.set(networks[3], ())
    second.close()
    assert not table.companions and not table.authors
    third = Encryption(table)
    third.settle(())
    assert not kernel.tables and not kernel.numbers
    third.close()


def test_periods(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of sending changes, and one of receiving comes and one goes. An association counts
    its packets with 32 bits: more in a period than two nodes exchange.
    """
    assert 2**32 / PERIOD > 250_000
    clock = [100 * PERIOD]
    monkeypatch.setattr(encryption.time, "time", lambda: clock[0])
    seen: list[Any] = []
    monkeypatch.setattr(
        encryption.xfrm, "add_association", lambda each, life: seen.append(each) or Request(1, 0, b"", "x")
    )
    monkeypatch.setattr(
        encryption.xfrm, "delete_association", lambda each: seen.remove(each) or Request(1, 0, b"", "y")
    )
    encrypted = Encryption(Filter("engined-test"))
    encrypted.set(NETWORK, {TWO})
    before = {*seen}
    clock[0] += PERIOD
    encrypted.set(NETWORK, {TWO})
    after = {*seen}
    assert after - before == {association(NETWORK, TWO, ONE, 102), association(NETWORK, ONE, TWO, 101)}
    assert before - after == {association(NETWORK, TWO, ONE, 99), association(NETWORK, ONE, TWO, 100)}


def test_refusals(kernel: Kernel) -> None:
    encrypted = Encryption(Filter("engined-test"))
    with pytest.raises(ServerError, match="there is no key"):
        encrypted.set(msgspec.structs.replace(NETWORK, secret=b""), {TWO})
    kernel.refuses = errno.EPROTONOSUPPORT
    with pytest.raises(ServerError, match="ESP with AES-GCM"):
        encrypted.set(NETWORK, {TWO})
    assert not any(each.startswith("encryption") for each in kernel.there)
    kernel.refuses = errno.EEXIST
    encrypted.set(NETWORK, {TWO}, again=True)  # an earlier daemon's
    assert f"encryption {ONE} → {TWO}" in kernel.there
