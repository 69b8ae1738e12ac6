"""Checks before a start whether the kernel will execute the program. crun finds out only after it
has reported the container as running. The check covers a program for another machine, a script
whose interpreter is missing or whose first line ends in CRLF, and a program whose loader is not in
the image. Without it such a container would run and exit with 1. The files of users and groups are
checked too, because runc opens them and waits where they are FIFOs.

A program that is not found or cannot be read is left to the runtime, which reports it. So is a file
that matches an entry of binfmt_misc.

Rules: execve(2), elf(5), the kernel document binfmt-misc.rst. The root is hostile: everything is
       opened below it (`system/files.py`), read
with bounds, nothing is run.
Raises: InvalidParameter (exec format error) and NotFound (no such file or directory) in the words
        of `runtime/oci.py`.
"""

from __future__ import annotations

import os
import platform
import stat
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.errors import InvalidParameter, NotFound
from engine.system.files import open_directory, open_in_root

MACHINES = {
    "x86_64": {(2, 62): "x86_64", (1, 3): "i386", (1, 62): "x32"},
    "aarch64": {(2, 183): "aarch64", (1, 40): "arm"},
    "riscv64": {(2, 243): "riscv64"},
    "ppc64le": {(2, 21): "ppc64"},
    "s390x": {(2, 22): "s390x"},
}
"""uname(2)'s machine → (ELF class, e_machine) that its kernel runs."""
_NAMES = {3: "i386", 21: "ppc64", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}

_MISC = Path("/proc/sys/fs/binfmt_misc")
_HEAD = 256
"""BINPRM_BUF_SIZE: the bytes that the kernel reads."""
_MOST_HEADERS = 128
_PT_INTERP = 3


def check(
    rootfs: Path | str,
    program: str,
    search: str,
    directory: str,
    mounted: Sequence[tuple[str, str]] = (),
    *,
    machine: str = "",
) -> None:
    """Check `program`. A name without a slash is searched in `search` (a PATH), others are relative
    to `directory`.

    `mounted`: destination and source of binds, where the program may be; an empty source stands for
    a mount that cannot be read from here.
    """
    places = _Places(rootfs, mounted)
    try:
        for path in ("/etc/passwd", "/etc/group"):
            if places.blocks(path):
                raise InvalidParameter(_words(program, f"{path} is not a regular file"))
        for path in _candidates(program, search, directory):
            descriptor = places.open(path)
            if descriptor is None:
                continue
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not os.fstat(descriptor).st_mode & 0o111:
                    continue
                _check(descriptor, program, places, machine or platform.machine())
            finally:
                os.close(descriptor)
            return
    finally:
        places.close()


def _candidates(program: str, search: str, directory: str) -> Iterable[str]:
    if "/" in program:
        return (os.path.join(directory, program),)
    return (os.path.join(directory, each or ".", program) for each in search.split(":")[:64])


def _check(descriptor: int, program: str, places: _Places, machine: str) -> None:
    head = os.pread(descriptor, _HEAD, 0)
    if head.startswith(b"#!"):
        line = head[2:].split(b"\n", 1)[0].strip(b" \t")
        words = line.split(None, 1) if b"\r" not in line else line.split(b" ", 1)
        interpreter = os.fsdecode(words[0]) if words else ""
        if not interpreter:
            raise _format_error(program, "a script without an interpreter")
        if interpreter.startswith("/") and places.missing(interpreter):
            raise NotFound(_words(program, f"{interpreter!r}, its interpreter: no such file or directory"))
    elif head.startswith(b"\x7fELF") and len(head) >= 52:
        kinds = MACHINES.get(machine)
        order = "<" if head[5] == 1 else ">"
        kind = head[4], struct.unpack_from(f"{order}H", head, 18)[0]
        if kinds is not None and kind not in kinds and not _claimed(head, program):
            raise _format_error(
                program, f"a program for {_NAMES.get(kind[1], f'machine {kind[1]}')} on a {machine} host"
            )
        loader = _loader(descriptor, head, order)
        if loader.startswith("/") and places.missing(loader):
            raise NotFound(_words(program, f"{loader!r}, its dynamic loader: no such file or directory"))
    elif not _claimed(head, program):
        raise _format_error(program, "neither a program nor a script that begins with #!")


def _loader(descriptor: int, head: bytes, order: str) -> str:
    """The path in PT_INTERP; empty for a static program and for an unusual header."""
    wide = head[4] == 2
    try:
        offset = struct.unpack_from(f"{order}Q" if wide else f"{order}I", head, 32 if wide else 28)[0]
        size, count = struct.unpack_from(f"{order}HH", head, 54 if wide else 42)
        if count > _MOST_HEADERS or size < (56 if wide else 32):
            return ""
        table = os.pread(descriptor, size * count, offset)
        for at in range(0, len(table) - size + 1, size):
            if struct.unpack_from(f"{order}I", table, at)[0] == _PT_INTERP:
                where, length = (
                    (
                        struct.unpack_from(f"{order}Q", table, at + 8)[0],
                        struct.unpack_from(f"{order}Q", table, at + 32)[0],
                    )
                    if wide
                    else (
                        struct.unpack_from(f"{order}I", table, at + 4)[0],
                        struct.unpack_from(f"{order}I", table, at + 16)[0],
                    )
                )
                return os.fsdecode(os.pread(descriptor, min(length, 4096), where).rstrip(b"\0"))
    except (struct.error, OSError, OverflowError):
        pass
    return ""


def _claimed(head: bytes, program: str) -> bool:
    """True if binfmt_misc has an enabled entry for this magic or file name extension.

    An entry that cannot be read counts as a match.
    """
    try:
        entries = [entry for entry in _MISC.iterdir() if entry.name not in ("register", "status")]
        return any(_claims(entry.read_text(), head, program) for entry in entries)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError):
        return True


def _claims(entry: str, head: bytes, program: str) -> bool:
    first, *lines = entry.splitlines() or [""]
    if first != "enabled":
        return False
    fields = dict(line.split(" ", 1) for line in lines if " " in line)
    if "extension" in fields:
        return program.endswith(fields["extension"])
    magic = bytes.fromhex(fields["magic"])
    mask = bytes.fromhex(fields.get("mask", "ff" * len(magic)))
    found = head[int(fields["offset"]) :][: len(magic)]
    return len(found) == len(magic) and all(
        (one ^ other) & bits == 0 for one, other, bits in zip(found, magic, mask, strict=True)
    )


def _format_error(program: str, what: str) -> InvalidParameter:
    # The docker CLI exits with 126, its documented code for a command that cannot be invoked, only
    # when the error contains "permission denied".
    return InvalidParameter(_words(program, f'exec format error: {what} (not a matter of "permission denied")'))


def _words(program: str, cause: str) -> str:
    return f'OCI runtime create failed: exec: "{program}": {cause}'


def _has_link(top: str, path: str) -> bool:
    """True if a part of the path below the directory `top` of the host is a link: in the container
    it may lead to another mount.
    """
    for part in path.split("/"):
        top = os.path.join(top, part)
        try:
            if stat.S_ISLNK(os.lstat(top).st_mode):
                return True
        except OSError:
            break
    return False


class _Places:
    """The container's root and the binds in it, as far as a path can be followed without
    entering its namespace.
    """

    def __init__(self, rootfs: Path | str, mounted: Sequence[tuple[str, str]]) -> None:
        self._root = open_directory(rootfs)
        self._mounted = sorted(mounted, key=lambda each: len(each[0]), reverse=True)

    def close(self) -> None:
        os.close(self._root)

    def open(self, path: str) -> int | None:
        """A descriptor of the file. None when it does not exist or cannot be reached from here."""
        try:
            return self._open(os.path.normpath(path))
        except OSError:
            return None

    def blocks(self, path: str) -> bool:
        """True if the file is a FIFO or a device: runc reads it, and might wait for ever."""
        try:
            descriptor = self._open(path, os.O_PATH)
        except OSError:
            return False
        if descriptor is None:
            return False
        mode = os.fstat(descriptor).st_mode
        os.close(descriptor)
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

    def missing(self, path: str) -> bool:
        """True if the path certainly does not exist."""
        try:
            descriptor = self._open(os.path.normpath(path), os.O_PATH)
        except FileNotFoundError:
            return self._leads_nowhere(os.path.normpath(path))
        except OSError:
            return False
        if descriptor is not None:
            os.close(descriptor)
        return False

    def _leads_nowhere(self, path: str) -> bool:
        """True if a missing path is missing in the root itself, and not behind a link or below a
        directory that a mount will cover.
        """
        directory, name = os.path.split(path)
        for destination, source in self._mounted:
            if path.startswith(destination.rstrip("/") + "/"):
                return not _has_link(source, path[len(destination) :].strip("/"))
        while True:
            try:
                parent = open_in_root(self._root, directory.lstrip("/"), os.O_PATH)
                break
            except FileNotFoundError:
                directory, name = os.path.split(directory)
            except OSError:
                return False
        try:
            real = os.readlink(f"/proc/self/fd/{parent}").removeprefix(os.readlink(f"/proc/self/fd/{self._root}"))
            if any(f"{real}/".startswith(destination.rstrip("/") + "/") for destination, _ in self._mounted):
                return False
            os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        finally:
            os.close(parent)
        return False

    def _open(self, path: str, flags: int = os.O_RDONLY) -> int | None:
        if not flags & os.O_PATH:
            flags |= os.O_NONBLOCK | os.O_NOCTTY
        for destination, source in self._mounted:
            if path != destination and not path.startswith(destination.rstrip("/") + "/"):
                continue
            if not source:
                return None
            rest = path[len(destination) :].strip("/")
            if not rest:
                return os.open(source, flags | os.O_CLOEXEC)
            below = open_directory(source)
            try:
                return open_in_root(below, rest, flags)
            finally:
                os.close(below)
        return open_in_root(self._root, path.lstrip("/"), flags)
