"""Sets of nftables that the kernel resizes while they are read."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from engine.system.netlink import nft, transport
from engine.system.netlink.codec import NetlinkError, Request
from engine.system.netlink.nft import Element, NftSocket

ONE, TWO, THREE = (Element(bytes((10, 0, 0, each)), b"", b"\0\x50") for each in (1, 2, 3))


class Kernel(NftSocket):
    """Answers each read with the next of these lists, one message for each element; the last one
    again and again.
    """

    def __init__(self, *reads: Sequence[Element]) -> None:
        self._reads = [*reads]
        self.reads = 0

    def dump(self, request: Request) -> list[bytes]:
        read = self._reads.pop(0) if len(self._reads) > 1 else self._reads[0]
        self.reads += 1
        return [nft.transaction("t", (), [("s", each)], "x")[1].body for each in read]


def test_a_set_is_read_once() -> None:
    kernel = Kernel([ONE, TWO, THREE])
    assert kernel.elements("t", "s") == {each.key: each for each in (ONE, TWO, THREE)}
    assert kernel.reads == 1


def test_elements_that_moved_during_a_read_are_not_missed() -> None:
    kernel = Kernel([ONE, TWO, ONE], [TWO, TWO, ONE], [THREE, ONE, TWO])
    assert kernel.elements("t", "s") == {each.key: each for each in (ONE, TWO, THREE)}
    assert kernel.reads == 3


def test_a_set_is_not_read_for_ever() -> None:
    kernel = Kernel([ONE, ONE])
    with pytest.raises(NetlinkError, match="set s: the kernel resized it during each of 64 reads") as caught:
        kernel.elements("t", "s")
    assert caught.value.errno == errno.EINTR
    assert kernel.reads == transport.DUMPS
