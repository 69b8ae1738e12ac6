"""Keys of encrypted overlays, and what is put into a kernel that has ESP; the kernel here is a
fake."""

from __future__ import annotations

import errno
from ipaddress import IPv4Address
from typing import Any

import msgspec
import pytest

from engine.errors import ServerError
from engine.networks import encryption
from engine.networks.encryption import PERIOD, Encryption, association
from engine.networks.network import Overlay
from engine.system import netfilter
from engine.system.netlink.codec import NetlinkError, Request

ONE, TWO, THREE = (IPv4Address(f"192.168.7.{number}") for number in (1, 2, 3))
NETWORK = Overlay(vni=4097, port=4789, local=ONE, encrypted=True, secret=bytes(range(32)))


class Kernel:
    """What was added and not deleted, by the words of the requests."""

    def __init__(self) -> None:
        self.there: list[str] = []
        self.tables: list[str] = []
        self.refuses = 0

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

    def run(self, text: str) -> str:
        self.tables = [] if "delete table" in text else [text]
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
    encrypted = Encryption("engined-test-esp")
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
    assert "@th,96,24 4097 meta mark set 0xe001001" in table and "@th,96,24 4097 meta ipsec missing drop" in table
    encrypted.remove(NETWORK.vni)
    encrypted.remove(NETWORK.vni)
    assert not kernel.there and not kernel.tables


def test_periods(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of sending changes, and one of receiving comes and one goes."""
    clock = [100 * PERIOD]
    monkeypatch.setattr(encryption.time, "time", lambda: clock[0])
    seen: list[Any] = []
    monkeypatch.setattr(
        encryption.xfrm, "add_association", lambda each, life: seen.append(each) or Request(1, 0, b"", "x")
    )
    monkeypatch.setattr(
        encryption.xfrm, "delete_association", lambda each: seen.remove(each) or Request(1, 0, b"", "y")
    )
    encrypted = Encryption("engined-test-esp")
    encrypted.set(NETWORK, {TWO})
    before = {*seen}
    clock[0] += PERIOD
    encrypted.set(NETWORK, {TWO})
    after = {*seen}
    assert after - before == {association(NETWORK, TWO, ONE, 102), association(NETWORK, ONE, TWO, 101)}
    assert before - after == {association(NETWORK, TWO, ONE, 99), association(NETWORK, ONE, TWO, 100)}


def test_refusals(kernel: Kernel) -> None:
    encrypted = Encryption("engined-test-esp")
    with pytest.raises(ServerError, match="there is no key"):
        encrypted.set(msgspec.structs.replace(NETWORK, secret=b""), {TWO})
    kernel.refuses = errno.EPROTONOSUPPORT
    with pytest.raises(ServerError, match="ESP with AES-GCM"):
        encrypted.set(NETWORK, {TWO})
    assert not any(each.startswith("encryption") for each in kernel.there)
    kernel.refuses = errno.EEXIST
    encrypted.set(NETWORK, {TWO}, again=True)  # an earlier daemon's
    assert f"encryption {ONE} → {TWO}" in kernel.there
