"""The profile as JSON, and the compiled filter run by a small interpreter of classic BPF."""

from __future__ import annotations

import base64
import json
import platform
import struct

import pytest

from engine.runtime import capabilities, seccomp
from engine.system import seccomp as compiler

ALLOW = 0x7FFF0000
EPERM, ENOSYS = 0x50001, 0x50026
X86_64, I386, ARM64 = 0xC000003E, 0x40000003, 0xC00000B7

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86_64")


def decide(program: bytes, number: int, *arguments: int, arch: int = X86_64) -> int:
    """What the kernel would answer (linux/seccomp.h, linux/filter.h)."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(arguments + (0,) * (6 - len(arguments))))
    instructions = [struct.unpack_from("=HBBI", program, offset) for offset in range(0, len(program), 8)]
    accumulator, counter = 0, 0
    while True:
        code, if_true, if_false, value = instructions[counter]
        counter += 1
        match code:
            case 0x20:
                accumulator = struct.unpack_from("=I", data, value)[0]
            case 0x54:
                accumulator &= value
            case 0x06:
                return value
            case 0x05:
                counter += value
            case 0x15:
                counter += if_true if accumulator == value else if_false
            case 0x25:
                counter += if_true if accumulator > value else if_false
            case 0x35:
                counter += if_true if accumulator >= value else if_false
            case _:
                raise AssertionError(f"instruction {code:#x}")


def compiled(*granted: str) -> bytes:
    return base64.b64decode(seccomp.profile(granted).program)


def test_section_is_an_allow_list() -> None:
    section = json.loads(bytes(seccomp.profile(capabilities.DEFAULT, "x86_64").section))
    assert section["defaultAction"] == "SCMP_ACT_ERRNO"
    assert section["defaultErrnoRet"] == 1
    assert section["architectures"] == ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"]
    plain = set(section["syscalls"][0]["names"])
    assert {"read", "execve", "chroot", "arch_prctl", "ptrace"} <= plain
    assert (
        not {"mount", "unshare", "clone", "clone3", "keyctl", "bpf", "io_uring_setup", "userfaultfd", "kexec_load"}
        & plain
    )
    clone3 = next(rule for rule in section["syscalls"] if rule["names"] == ["clone3"])
    assert clone3 == {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}
    clone = next(rule for rule in section["syscalls"] if rule["names"] == ["clone"])
    assert clone["args"] == [{"index": 0, "value": 2114060288, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]
    assert sum(rule["names"] == ["personality"] for rule in section["syscalls"]) == 5


def test_capabilities_open_their_calls() -> None:
    def names(*granted: str) -> set[str]:
        return {
            name
            for rule in seccomp.rules(frozenset(granted), "x86_64")
            for name in rule.names
            if rule.errno is None and not rule.conditions
        }

    assert "chroot" not in names()
    assert {"mount", "clone3", "setns", "bpf"} <= names("CAP_SYS_ADMIN")
    assert "settimeofday" in names("CAP_SYS_TIME")
    for capability, calls in seccomp.ALLOWED_WITH.items():
        assert set(calls) <= names(capability)
        assert capability in capabilities.NAMES


def test_other_architectures() -> None:
    section = json.loads(bytes(seccomp.profile((), "aarch64").section))
    assert section["architectures"] == ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"]
    assert "arch_prctl" not in section["syscalls"][0]["names"]
    assert "architectures" not in json.loads(bytes(seccomp.profile((), "riscv64").section))


def test_profiles_are_made_once() -> None:
    first = seccomp.profile(["CAP_CHOWN", "CAP_SYS_CHROOT"])
    assert seccomp.profile(["CAP_KILL", "CAP_SYS_CHROOT"]) is first


def test_newer_numbers_have_no_gap() -> None:
    numbers = [*compiler.NEWER.values()]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]


@on_x86
def test_filter_decides() -> None:
    program = compiled(*capabilities.DEFAULT)
    read, mount, unshare, clone, clone3, personality, socket, keyctl = 0, 165, 272, 56, 435, 135, 41, 250
    assert decide(program, read) == ALLOW
    for number in (mount, unshare, keyctl, 425):
        assert decide(program, number) == EPERM
    assert decide(program, clone3) == ENOSYS
    assert decide(program, clone, 0x1200011) == ALLOW
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(program, clone, flag | 17) == EPERM
    assert decide(program, personality, 8) == ALLOW
    assert decide(program, personality, 0xFFFFFFFF) == ALLOW
    assert decide(program, personality, 0x40000) == EPERM
    assert decide(program, socket, 2) == ALLOW
    assert decide(program, socket, 40) == EPERM
    assert decide(program, 3, arch=I386) == ALLOW
    assert decide(program, 21, arch=I386) == EPERM, "mount"
    assert decide(program, read, arch=ARM64) == 0, "a foreign architecture is killed"
    assert decide(program, compiler.X32 | 0) == ALLOW
    assert decide(program, compiler.X32 | mount) == EPERM


@on_x86
def test_calls_newer_than_the_library() -> None:
    program = compiled(*capabilities.DEFAULT)
    for arch in (X86_64, I386):
        for name in ("fchmodat2", "cachestat", "futex_wait", "mseal", "getxattrat"):
            assert decide(program, compiler.NEWER[name], arch=arch) == ALLOW, name
        # not allowed, and either known to the library (EPERM) or not (ENOSYS)
        assert decide(program, compiler.NEWER["listmount"], arch=arch) in (EPERM, ENOSYS)
        assert decide(program, 500, arch=arch) == ENOSYS
        assert decide(program, 0x3FFFFFFF, arch=arch) == ENOSYS
    assert decide(program, compiler.X32 | 500) == EPERM
    assert decide(compiled("CAP_SYS_ADMIN"), compiler.NEWER["listmount"]) == ALLOW
    assert decide(compiled("CAP_SYS_ADMIN"), 435) == ALLOW


@on_x86
def test_filter_agrees_with_the_rules_for_every_name() -> None:
    program = compiled()
    library = compiler._library()
    assert library is not None
    plain = {
        name
        for rule in seccomp.rules(frozenset(), "x86_64")
        if not rule.conditions and rule.errno is None
        for name in rule.names
    }
    for name in plain:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            assert decide(program, number) == ALLOW, name
    allowed = {library.seccomp_syscall_resolve_name(name.encode()) for name in plain} | {
        compiler.NEWER[name] for name in plain & compiler.NEWER.keys()
    }
    for number in range(600):
        if number not in allowed and number not in (56, 41, 135):
            assert decide(program, number) in (EPERM, ENOSYS), number
