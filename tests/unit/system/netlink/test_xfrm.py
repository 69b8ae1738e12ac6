"""IPsec requests. The sizes and places of their fields are those of linux/xfrm.h; iproute2 shows
the policy as meant (tests/system/test_overlay.py)."""

from __future__ import annotations

from ipaddress import IPv4Address

from engine.system.netlink import codec, xfrm

ONE = xfrm.Association(IPv4Address("10.0.0.1"), IPv4Address("10.0.0.2"), 0x1234, 7, bytes(range(xfrm.KEY)))


def test_association() -> None:
    body = xfrm.add_association(ONE).body
    assert body[56:60] == b"\x0a\0\0\x02" and body[72:77] == b"\0\0\x12\x34\x32", "the receiver, SPI, ESP"
    assert body[80:84] == b"\x0a\0\0\x01", "the sender"
    (key,) = codec.read_attributes(body, 224).values()
    assert key[:18] == b"rfc4106(gcm(aes))\0" and key[64:72] == b"\xa0\0\0\0\x80\0\0\0" and key[72:] == ONE.key


def test_removal_of_an_association() -> None:
    assert xfrm.delete_association(ONE).body == b"\x0a\0\0\x02" + bytes(12) + b"\0\0\x12\x34" + b"\x02\0\x32\0"


def test_policy() -> None:
    body = xfrm.set_policy(ONE, port=4789, mark=0xD0C4E3).body
    selector = body[:56]
    assert selector[:4] == b"\x0a\0\0\x02" and selector[16:20] == b"\x0a\0\0\x01"
    assert selector[32:36] == b"\x12\xb5\xff\xff" and selector[42:45] == bytes((32, 32, 17))
    template, mark = codec.read_attributes(body, 168).values()
    assert len(template) == 64 and mark == b"\xe3\xc4\xd0\0\xff\xff\xff\xff"
    removal = xfrm.delete_policy(ONE, port=4789, mark=0xD0C4E3)
    assert removal.body[:56] == selector and codec.read_attributes(removal.body, 64) == {21: mark}
