"""Programs that the kernel would not execute are detected before a start. Undecidable cases are
left to the runtime.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from engine.containers import program
from engine.errors import EngineError, InvalidParameter, NotFound


def elf(machine: int, *, wide: bool = True, loader: bytes = b"") -> bytes:
    """An ELF header, and one program header when it has an interpreter."""
    head = bytearray(b"\x7fELF" + bytes([2 if wide else 1, 1, 1]) + bytes(9) + struct.pack("<HH", 2, machine))
    head = head.ljust(64 if wide else 52, b"\0")
    entry = 56 if wide else 32
    struct.pack_into("<Q" if wide else "<I", head, 32 if wide else 28, len(head))
    struct.pack_into("<HH", head, 54 if wide else 42, entry, 1 if loader else 0)
    if not loader:
        return bytes(head)
    table = bytearray(entry)
    struct.pack_into("<I", table, 0, 3)
    struct.pack_into("<Q" if wide else "<I", table, 8 if wide else 4, len(head) + entry)
    struct.pack_into("<Q" if wide else "<I", table, 32 if wide else 16, len(loader) + 1)
    return bytes(head + table) + loader + b"\0"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(program, "_MISC", tmp_path / "no-binfmt-misc")
    (tmp_path / "root" / "bin").mkdir(parents=True)
    put(tmp_path / "root" / "bin" / "sh", elf(62))
    return tmp_path / "root"


def put(path: Path, content: bytes, mode: int = 0o755) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def look(root: Path, name: str = "/f", *, mounted: tuple[tuple[str, str], ...] = (), machine: str = "x86_64") -> None:
    program.check(root, name, "/nowhere:/bin", "/", mounted, machine=machine)


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"text\n", InvalidParameter, "exec format error"),
        (b"", InvalidParameter, "exec format error"),
        (b"#!\n", InvalidParameter, "exec format error"),
        (elf(183), InvalidParameter, "exec format error: a program for aarch64 on a x86_64 host"),
        (elf(999), InvalidParameter, "exec format error: a program for machine 999"),
        (elf(62, loader=b"/lib/ld.so"), NotFound, "'/lib/ld.so', its dynamic loader: no such file or directory"),
        (elf(3, wide=False, loader=b"/lib/ld.so"), NotFound, "no such file or directory"),
        (b"#!/bin/sh\r\n", NotFound, "its interpreter: no such file or directory"),
        (b"#! /usr/bin/env python\n", NotFound, "no such file or directory"),
    ],
)
def test_found_before_the_start(root: Path, content: bytes, kind: type[EngineError], words: str) -> None:
    put(root / "f", content)
    with pytest.raises(kind) as raised:
        look(root)
    assert words in raised.value.message and 'exec: "/f"' in raised.value.message


@pytest.mark.parametrize(
    "content",
    [
        elf(62),
        elf(3, wide=False),
        elf(62, loader=b"/bin/sh"),
        b"#!/bin/sh\necho\n",
        b"#! \t/bin/sh -e\n",
        b"#!relative\n",
        elf(62)[:40] + b"\xff" * 24,
        elf(62)[:52],
    ],
)
def test_fine(root: Path, content: bytes) -> None:
    put(root / "f", content)
    look(root)


def test_left_to_the_runtime(root: Path) -> None:
    look(root, "/missing")
    look(root, "missing")
    put(root / "f", b"text", 0o644)
    look(root)
    look(root, "/bin")
    os.mkfifo(root / "pipe", 0o755)
    look(root, "/pipe")
    (root / "out").symlink_to("../../../../etc/passwd")
    look(root, "/out")


def test_search_takes_the_first_that_may_run(root: Path) -> None:
    put(root / "bin" / "x", b"text")
    with pytest.raises(InvalidParameter):
        look(root, "x")
    (root / "nowhere").mkdir()
    put(root / "nowhere" / "x", elf(62))
    look(root, "x")


def test_mounts(root: Path, tmp_path: Path) -> None:
    """A program or interpreter may be in a bind; below other mounts the check does not decide."""
    (tmp_path / "data" / "bin").mkdir(parents=True)
    put(tmp_path / "data" / "bin" / "tool", b"text")
    put(tmp_path / "data" / "bin" / "python", elf(62))
    bind = ("/opt", str(tmp_path / "data"))
    with pytest.raises(InvalidParameter):
        look(root, "/opt/bin/tool", mounted=(bind,))
    put(root / "f", b"#!/opt/bin/python\n")
    look(root, mounted=(bind,))
    put(root / "f", b"#!/opt/bin/ruby\n")
    with pytest.raises(NotFound):
        look(root, mounted=(bind,))
    put(root / "f", b"#!/usr/bin/python\n")
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "usr" / "bin" / "python").symlink_to("/opt/bin/python")
    look(root, mounted=(bind,))
    put(root / "f", b"#!/dev/shm/x\n")
    look(root, mounted=(("/dev", ""),))
    file = put(tmp_path / "script", b"#!/bin/sh\n")
    look(root, "/single", mounted=(("/single", str(file)),))


def test_a_kernel_that_runs_more(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files that match a binfmt_misc entry are left to the kernel, and only those. Debian's python3
    registers such an entry."""
    misc = tmp_path / "misc"
    misc.mkdir()
    monkeypatch.setattr(program, "_MISC", misc)
    machine = "magic 7f454c460201010000000000000000000200b700\nmask ffffffffffffff00fffffffffffffffffeffffff\n"
    (misc / "python3.11").write_text("enabled\ninterpreter /usr/bin/python3.11\nflags: \noffset 0\nmagic a70d0d0a\n")
    for content in (elf(183), b"MZ", b"no program"):
        put(root / "f", content)
        with pytest.raises(InvalidParameter, match="exec format error"):
            look(root)
    put(root / "f", b"\xa7\r\r\n")
    look(root)
    (misc / "qemu-aarch64").write_text(f"disabled\ninterpreter /q\nflags: F\noffset 0\n{machine}")
    put(root / "f", elf(183))
    with pytest.raises(InvalidParameter, match="exec format error"):
        look(root)
    (misc / "qemu-aarch64").write_text(f"enabled\ninterpreter /q\nflags: F\noffset 0\n{machine}")
    look(root)
    put(root / "f", b"MZ")
    with pytest.raises(InvalidParameter, match="exec format error"):
        look(root)
    (misc / "wine").write_text("enabled\ninterpreter /wine\nflags: \nextension .exe\n")
    put(root / "f.exe", b"MZ")
    look(root, "/f.exe")
    (misc / "odd").write_text("enabled\nof a kernel to come\n")
    look(root)


@pytest.mark.parametrize("name", ["passwd", "group"])
def test_files_that_the_runtime_would_wait_for(root: Path, name: str) -> None:
    put(root / "f", elf(62))
    (root / "etc").mkdir()
    look(root)
    put(root / "etc" / name, b"root:x:0:\n")
    look(root)
    (root / "etc" / name).unlink()
    os.mkfifo(root / "etc" / name)
    with pytest.raises(InvalidParameter, match=f"/etc/{name} is not a regular file"):
        look(root)


def test_a_link_from_one_bind_into_another(root: Path, tmp_path: Path) -> None:
    """As /lib64/ld-linux-x86-64.so.2 of Debian, where /lib and /lib64 are bound."""
    lib, lib64 = tmp_path / "lib", tmp_path / "lib64"
    for directory in (lib, lib64):
        directory.mkdir()
    put(lib / "ld.so", elf(62))
    (lib64 / "ld.so").symlink_to("/lib/ld.so")
    put(root / "f", elf(62, loader=b"/lib64/ld.so"))
    mounted = (("/lib", str(lib)), ("/lib64", str(lib64)))
    look(root, mounted=mounted)
    put(root / "f", elf(62, loader=b"/lib64/below/ld.so"))
    with pytest.raises(NotFound, match="dynamic loader"):
        look(root, mounted=mounted)
    (lib64 / "below").symlink_to("/lib")
    look(root, mounted=mounted)
