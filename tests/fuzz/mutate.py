"""Mutations of byte strings, drawn from a `random.Random`. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

INTERESTING = [
    *(b"\0", b"\xff", b"\x80", b"\x7f", b"\n", b"\r\n", b" ", b"/", b"..", b"=", b'"', b"\\", b"{", b"}"),
    *(b"\0" * 8, b"\xff" * 8, b"\x80" + b"\0" * 11, b"\xff" * 12, b"77777777777\0", b"-1", b"99999999999999999999"),
    *(b"9223372036854775807", b"18446744073709551616", b"\xe2\x80\xa8", b"\xf0\x9f\x98\x80", b"\\ud800", b"\xc0\x0c"),
]


FIELDS = [
    *((0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8)),
    *((329, 8), (337, 8), (345, 155), (386, 96), (482, 1), (483, 12)),
]
"""(offset, size) of the fields of a tar header, except the checksum."""


def flip(data: bytearray, noise: random.Random) -> None:
    data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)


def replace(data: bytearray, noise: random.Random) -> None:
    data[noise.randrange(len(data))] = noise.randrange(256)


def overwrite(data: bytearray, noise: random.Random) -> None:
    at, text = noise.randrange(len(data)), noise.choice(INTERESTING)
    data[at : at + len(text)] = text


def insert(data: bytearray, noise: random.Random) -> None:
    at = noise.randrange(len(data) + 1)
    data[at:at] = noise.choice([*INTERESTING, noise.randbytes(noise.randrange(1, 16))])


def delete(data: bytearray, noise: random.Random) -> None:
    at = noise.randrange(len(data))
    del data[at : at + noise.choice([1, 2, 8, 512, noise.randrange(1, len(data) + 1)])]


def repeat(data: bytearray, noise: random.Random) -> None:
    at = noise.randrange(len(data))
    part = data[at : at + noise.choice([1, 8, 100, 512, 1024])]
    data[at:at] = part * noise.choice([1, 1, 2, 50])


def cut(data: bytearray, noise: random.Random) -> None:
    del data[noise.randrange(len(data)) :]


MUTATIONS: Sequence[Callable[[bytearray, random.Random], None]] = (
    *(flip, flip, replace, replace, overwrite, overwrite, insert, delete, repeat, cut),
)


def mutated(seed: bytes, noise: random.Random, others: Sequence[bytes] = (), most: int = 1 << 18) -> bytes:
    """`seed` with some mutations, and at times the tail of another seed."""
    data = bytearray(seed)
    if others and noise.random() < 0.2:
        other = noise.choice(others)
        at = noise.randrange(len(data) + 1)
        data[at:] = other[noise.randrange(len(other) + 1) :]
    for _ in range(noise.choice([0, 1, 1, 2, 3, 8])):
        if data:
            noise.choice(MUTATIONS)(data, noise)
    return bytes(data[:most])


def mutated_tar(seed: bytes, noise: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """As `mutated`, but mostly within headers, and mostly with corrected checksums, so that the
    reader accepts them.
    """
    data = bytearray(seed)
    blocks = [at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b"ustar"]
    for _ in range(noise.choice([1, 1, 2, 4])):
        if blocks and noise.random() < 0.7:
            block = noise.choice(blocks)
            begin, size = noise.choice(FIELDS)
            at = block + begin + noise.randrange(size)
            text = noise.choice(
                [*INTERESTING, noise.randbytes(1), b"0", b"1", b"2", b"5", b"6", b"L", b"K", b"x", b"S"]
            )
            text = text[: block + 512 - at]
            data[at : at + len(text)] = text
    found = bytes(data)
    if noise.random() < 0.5:
        found = mutated(found, noise, others)
    if noise.random() < 0.9:
        data = bytearray(found)
        for at in range(0, len(data) - 511, 512):
            if data[at + 257 : at + 262] == b"ustar":
                data[at + 148 : at + 156] = b" " * 8
                data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
        found = bytes(data)
    return found


def pieces(data: bytes, noise: random.Random) -> list[bytes]:
    """`data` in pieces of any size."""
    found = []
    at = 0
    while at < len(data):
        size = noise.choice([1, 2, 7, 100, 4096, len(data)])
        found.append(data[at : at + size])
        at += size
    return found
