"""Paths as clients write them, and modes as Go writes them."""

from __future__ import annotations

import asyncio
import stat

import pytest

from engine.containers import archive
from engine.errors import InvalidParameter
from engine.system.feed import Feed


@pytest.mark.parametrize(
    ("path", "parent", "base", "directory", "name"),
    [
        ("/etc/passwd", "etc", "passwd", False, "passwd"),
        ("etc/passwd", "etc", "passwd", False, "passwd"),
        ("passwd", "", "passwd", False, "passwd"),
        ("/etc/", "", "etc", True, "etc"),
        ("/etc/.", "", "etc", True, "."),
        ("/etc//./ssl//", "etc", "ssl", True, "ssl"),
        ("/../../etc", "", "etc", False, "etc"),
        ("/etc/..", "", "", True, "/"),
        ("/", "", "", True, "/"),
        ("//", "", "", True, "/"),
        (".", "", "", True, "."),
        ("/.", "", "", True, "."),
        ("./", "", "", True, "."),
        ("/./", "", "", True, "."),
        ("/etc/.././/", "", "", True, "."),
        ("/a/./", "", "a", True, "."),
        ("/a/.//", "", "a", True, "."),
        ("/a.", "", "a.", False, "a."),
        ("/a/..b", "a", "..b", False, "..b"),
    ],
)
def test_paths(path: str, parent: str, base: str, directory: bool, name: str) -> None:
    asked = archive.parse(path)
    assert (asked.parent, asked.base, asked.directory, asked.name) == (parent, base, directory, name)


def test_no_path() -> None:
    with pytest.raises(InvalidParameter, match="path cannot be empty"):
        archive.parse("")


@pytest.mark.parametrize(
    ("mode", "go"),
    [
        (stat.S_IFREG | 0o644, 0o644),
        (stat.S_IFDIR | 0o1777, 1 << 31 | 1 << 20 | 0o777),
        (stat.S_IFLNK | 0o777, 1 << 27 | 0o777),
        (stat.S_IFBLK | 0o660, 1 << 26 | 0o660),
        (stat.S_IFCHR | 0o666, 1 << 26 | 1 << 21 | 0o666),
        (stat.S_IFIFO, 1 << 25),
        (stat.S_IFSOCK | 0o755, 1 << 24 | 0o755),
        (stat.S_IFREG | 0o6755, 1 << 23 | 1 << 22 | 0o755),
    ],
)
def test_modes(mode: int, go: int) -> None:
    assert archive.go_mode(mode) == go


@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 1000])
def test_a_body_reaches_its_thread_whole(size: int) -> None:
    data = bytes(range(256)) * 20

    async def body():  # type: ignore[no-untyped-def]
        for at in range(0, len(data), size):
            yield data[at : at + size]
            yield b""

    async def run() -> bytes:
        incoming = Feed()
        feeding = asyncio.ensure_future(incoming.feed(body()))

        def read() -> bytes:
            assert incoming.head(8) == data[:8]
            found = bytearray()
            buffer = memoryview(bytearray(100))
            while got := incoming.readinto(buffer):
                found += buffer[:got]
            return bytes(found)

        found = await asyncio.to_thread(read)
        await feeding
        return found

    assert asyncio.run(run()) == data


def test_a_body_that_breaks_off_tells_its_thread() -> None:
    async def body():  # type: ignore[no-untyped-def]
        yield b"some"
        raise InvalidParameter("the client left")

    async def run() -> None:
        incoming = Feed()
        feeding = asyncio.ensure_future(incoming.feed(body()))
        with pytest.raises(InvalidParameter, match="the client left"):
            await asyncio.to_thread(incoming.head, 8)
        await feeding

    asyncio.run(run())
