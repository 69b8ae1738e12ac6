"""The compiled extensions: hardened and stripped as setup.py says."""

from __future__ import annotations

import importlib
import re
import struct
from pathlib import Path

import pytest

FAST = Path(__file__).parents[3] / "engine" / "_fast"
MODULES = sorted(source.stem for source in FAST.glob("*.pyx"))

PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 2, 0x6474E551, 0x6474E552
DT_NULL, DT_FLAGS, DT_FLAGS_1 = 0, 30, 0x6FFFFFFB
DF_BIND_NOW, DF_1_NOW = 8, 1


class Elf:
    """The parts of an ELF64 shared object that the tests need (elf(5))."""

    def __init__(self, path: Path) -> None:
        self.data = data = path.read_bytes()
        assert data[:6] == b"\x7fELF\x02\x01", "64-bit, little-endian"
        headers, sections = struct.unpack_from("<QQ", data, 32)
        size, count, section_size, section_count, names = struct.unpack_from("<5H", data, 54)
        self.segments = {}  # type -> (flags, offset, size)
        for at in range(headers, headers + size * count, size):
            kind, flags, offset, _, _, file_size = struct.unpack_from("<IIQQQQ", data, at)
            self.segments[kind] = (flags, offset, file_size)
        (text,) = struct.unpack_from("<Q", data, sections + names * section_size + 24)
        self.sections = set()
        for at in range(sections, sections + section_size * section_count, section_size):
            start = text + struct.unpack_from("<I", data, at)[0]
            self.sections.add(data[start : data.index(b"\0", start)].decode())

    def dynamic(self) -> dict[int, int]:
        _, offset, size = self.segments[PT_DYNAMIC]
        return dict(struct.iter_unpack("<QQ", self.data[offset : offset + size]))


@pytest.fixture(params=MODULES)
def extension(request: pytest.FixtureRequest) -> Elf:
    path = importlib.import_module(f"engine._fast.{request.param}").__file__
    assert path is not None and path.endswith(".so")
    return Elf(Path(path))


def test_hardened(extension: Elf) -> None:
    dynamic = extension.dynamic()
    assert dynamic.get(DT_FLAGS, 0) & DF_BIND_NOW or dynamic.get(DT_FLAGS_1, 0) & DF_1_NOW
    assert PT_GNU_RELRO in extension.segments
    flags, _, _ = extension.segments[PT_GNU_STACK]
    assert not flags & 1, "an executable stack"


def test_stripped(extension: Elf) -> None:
    assert not {name for name in extension.sections if name.startswith(".debug") or name == ".symtab"}


def test_stack_protector_and_fortify() -> None:
    """Checked in the modules that have arrays on the stack and copy into memory of known size."""
    for name in ("layer", "pack", "tar"):
        path = importlib.import_module(f"engine._fast.{name}").__file__
        assert path is not None
        data = Path(path).read_bytes()
        assert b"\0__stack_chk_fail\0" in data and b"_chk\0" in data, name


def test_linux_is_declared_in_one_place() -> None:
    """C functions of headers are declared in linux.pxd; other modules may declare C of their own,
    and CPython's.
    """
    for source in sorted(FAST.glob("*.p[xy][xd]")):
        headers = re.findall(r"^cdef extern from \"(<.*>)\"", source.read_text(), re.MULTILINE)
        assert source.name == "linux.pxd" or not headers, f"{source.name}: {headers}"
