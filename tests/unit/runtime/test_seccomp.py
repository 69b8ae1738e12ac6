"""The profile as JSON, and the compiled filter run by a small interpreter of classic BPF."""

from __future__ import annotations

import base64
import json
import platform
import socket
import struct
from collections.abc import Iterable

import pytest

from engine.runtime import capabilities, seccomp
from engine.system import seccomp as compiler
from tests.support.engine import seccomp as comparison

ALLOW = 0x7FFF0000
EPERM, ENOSYS = 0x50001, 0x50026
X86_64, I386, ARM64, ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86_64")


def decide(program: bytes, number: int, *arguments: int, arch: int = X86_64) -> int:
    """The result that the kernel would compute (linux/seccomp.h, linux/filter.h)."""
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


def allowed(granted: Iterable[str] = (), machine: str = "x86_64", release: str = "6.1") -> set[str]:
    """Calls that are allowed whatever their arguments."""
    return {
        name
        for rule in seccomp.rules(granted, machine, release)
        for name in rule.names
        if rule.errno is None and not rule.conditions
    }


def test_section_is_an_allow_list() -> None:
    section = json.loads(bytes(seccomp.profile(capabilities.DEFAULT, "x86_64").section))
    assert section["defaultAction"] == "SCMP_ACT_ERRNO"
    assert section["defaultErrnoRet"] == 1
    assert section["architectures"] == ["SCMP_ARCH_X86_64", "SCMP_ARCH_X32", "SCMP_ARCH_X86"]
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


@pytest.mark.parametrize(
    ("capability", "calls"),
    [
        ("CAP_BPF", "bpf"),
        ("CAP_DAC_READ_SEARCH", "open_by_handle_at"),
        ("CAP_PERFMON", "perf_event_open"),
        ("CAP_SYSLOG", "syslog"),
        (
            "CAP_SYS_ADMIN",
            "bpf clone clone3 fsopen mount open_tree perf_event_open quotactl setns syslog umount2 unshare",
        ),
        ("CAP_SYS_BOOT", "reboot"),
        ("CAP_SYS_CHROOT", "chroot"),
        ("CAP_SYS_MODULE", "delete_module finit_module init_module"),
        ("CAP_SYS_NICE", "get_mempolicy mbind set_mempolicy set_mempolicy_home_node"),
        ("CAP_SYS_PACCT", "acct"),
        ("CAP_SYS_PTRACE", "kcmp pidfd_getfd process_madvise"),
        ("CAP_SYS_RAWIO", "ioperm iopl"),
        ("CAP_SYS_TIME", "clock_settime clock_settime64 settimeofday stime"),
        ("CAP_SYS_TTY_CONFIG", "vhangup"),
    ],
)
def test_capabilities_open_their_calls(capability: str, calls: str) -> None:
    assert capability in capabilities.NAMES
    assert not allowed() & set(calls.split())
    assert set(calls.split()) <= allowed([capability])


def test_only_known_capabilities_matter() -> None:
    assert seccomp.builtin().capabilities <= set(capabilities.NAMES)


@pytest.mark.parametrize(
    ("machine", "architectures", "own"),
    [
        ("x86_64", ["X86_64", "X32", "X86"], "arch_prctl modify_ldt"),
        ("aarch64", ["AARCH64", "ARM"], "arm_fadvise64_64 cacheflush set_tls sync_file_range2"),
        ("riscv64", ["RISCV64"], "riscv_flush_icache"),
        ("s390x", ["S390X", "S390"], "s390_pci_mmio_read"),
        ("ppc64le", [], "swapcontext sync_file_range2"),
    ],
)
def test_architectures(machine: str, architectures: list[str], own: str) -> None:
    section = json.loads(bytes(seccomp.profile((), machine).section))
    assert section.get("architectures", []) == [f"SCMP_ARCH_{name}" for name in architectures]
    others = {"arch_prctl", "modify_ldt", "set_tls", "swapcontext", "riscv_flush_icache", "s390_pci_mmio_read"}
    assert set(own.split()) <= allowed(machine=machine)
    assert not (others - set(own.split())) & allowed(machine=machine)
    (clone,) = [rule for rule in seccomp.rules((), machine, "6.1") if rule.names == ["clone"]]
    assert clone.conditions[0].argument == (1 if machine == "s390x" else 0)


def test_old_kernels_where_ptrace_escapes_the_filter() -> None:
    assert "ptrace" in allowed(release="4.8.0-generic")
    assert "ptrace" not in allowed(release="4.7.10")
    assert "ptrace" in allowed(["CAP_SYS_PTRACE"], release="4.7.10")


def test_the_file_is_in_its_form() -> None:
    text = seccomp.DEFAULT.read_text()
    assert comparison.written(json.loads(text)) == text


def test_comparison_with_another_profile() -> None:
    ours = json.loads(seccomp.DEFAULT.read_text())
    theirs = json.loads(seccomp.DEFAULT.read_text())
    theirs["syscalls"].reverse()
    for rule in theirs["syscalls"]:
        rule["comment"] = "why"
        rule["names"].reverse()
    assert list(comparison.differences(ours, theirs)) == []
    general = next(rule for rule in theirs["syscalls"] if "read" in rule["names"])
    general["names"].remove("read")
    general["names"].append("reed")
    theirs["archMap"].pop()
    assert [line.partition(": ")[0] for line in comparison.differences(ours, theirs)] == [
        "SCMP_ARCH_LOONGARCH64",
        "+ reed",
        "- read",
    ]


def test_profiles_are_made_once() -> None:
    first = seccomp.profile(["CAP_CHOWN", "CAP_SYS_CHROOT"])
    assert seccomp.profile(["CAP_KILL", "CAP_SYS_CHROOT"]) is first


def test_newer_numbers_have_no_gap() -> None:
    numbers = [*compiler.NEWER.values()]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]


@on_x86
def test_filter_decides() -> None:
    program = compiled(*capabilities.DEFAULT)
    read, mount, unshare, clone, clone3, personality, keyctl = 0, 165, 272, 56, 435, 135, 250
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
    assert decide(program, 3, arch=I386) == ALLOW
    assert decide(program, 21, arch=I386) == EPERM, "mount"
    assert decide(program, read, arch=ARM64) == 0, "a foreign architecture is killed"
    assert decide(program, compiler.X32 | 0) == ALLOW
    assert decide(program, compiler.X32 | mount) == EPERM


@on_x86
def test_families_of_sockets() -> None:
    """AF_ALG and AF_VSOCK are denied, and families that kernels have no longer."""
    program = compiled(*capabilities.DEFAULT)
    denied = {12, 19, 20, 23, 25, 34, 37, socket.AF_ALG, socket.AF_VSOCK, 46, 2**31}
    for number, arch in ((41, X86_64), (359, I386)):
        for family in (*range(1, 47), 2**31):
            assert decide(program, number, family, arch=arch) == (EPERM if family in denied else ALLOW), family


@on_x86
def test_calls_newer_than_the_library() -> None:
    program = compiled(*capabilities.DEFAULT)
    for arch in (X86_64, I386):
        for name in ("fchmodat2", "cachestat", "futex_wait", "listmount", "statmount", "mseal", "getxattrat"):
            assert decide(program, compiler.NEWER[name], arch=arch) == ALLOW, name
        # not allowed, and either known to the library (EPERM) or not (ENOSYS)
        assert decide(program, compiler.NEWER["lsm_list_modules"], arch=arch) in (EPERM, ENOSYS)
        assert decide(program, 500, arch=arch) == ENOSYS
        assert decide(program, 0x3FFFFFFF, arch=arch) == ENOSYS
    assert decide(program, compiler.X32 | 500) == EPERM
    assert decide(compiled("CAP_SYS_ADMIN"), compiler.NEWER["lsm_list_modules"]) == ALLOW
    assert decide(compiled("CAP_SYS_ADMIN"), 435) == ALLOW


def filter_of(machine: str, *granted: str) -> bytes:
    """The filter for a machine, which need not be this one: libseccomp knows all of them."""
    section = json.loads(bytes(seccomp.profile((), machine).section))
    return compiler.program(
        seccomp.rules(granted, machine, "6.1"), default_errno=1, architectures=section["architectures"]
    )


def test_arm64_and_its_32_bit_programs() -> None:
    program = filter_of("aarch64", *capabilities.DEFAULT)
    read, mount, clone, clone3, unshare, personality = 63, 40, 220, 435, 97, 92
    assert decide(program, read, arch=ARM64) == ALLOW
    for number in (mount, unshare):
        assert decide(program, number, arch=ARM64) == EPERM
    assert decide(program, clone, 17, arch=ARM64) == ALLOW
    assert decide(program, clone, 0x10000000 | 17, arch=ARM64) == EPERM
    assert decide(program, personality, 8, arch=ARM64) == ALLOW  # PER_LINUX32
    read, mount, clone = 3, 21, 120
    assert decide(program, read, arch=ARM) == ALLOW
    assert decide(program, mount, arch=ARM) == EPERM
    assert decide(program, clone, 17, arch=ARM) == ALLOW
    for arch in (ARM64, ARM):
        assert decide(program, clone3, arch=arch) == ENOSYS
        for name in ("fchmodat2", "cachestat", "futex_wait", "mseal"):
            assert decide(program, compiler.NEWER[name], arch=arch) == ALLOW, name
        assert decide(program, 500, arch=arch) == ENOSYS
        assert decide(program, compiler.ARM_PRIVATE - 1, arch=arch) == ENOSYS
    # set_tls, without which no 32-bit program starts
    breakpoint_, cacheflush, usr26, set_tls = (compiler.ARM_PRIVATE + number for number in (1, 2, 3, 5))
    for number in (breakpoint_, cacheflush, set_tls):
        assert decide(program, number, arch=ARM) == ALLOW
    assert decide(program, usr26, arch=ARM) == EPERM


@on_x86
def test_filter_agrees_with_the_rules_for_every_name() -> None:
    program = compiled()
    library = compiler._library()
    assert library is not None
    plain = allowed(release=platform.release())
    for name in plain:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            assert decide(program, number) == ALLOW, name
    numbers = {library.seccomp_syscall_resolve_name(name.encode()) for name in plain} | {
        compiler.NEWER[name] for name in plain & compiler.NEWER.keys()
    }
    for number in range(600):
        if number not in numbers and number not in (56, 41, 135):
            assert decide(program, number) in (EPERM, ENOSYS), number
