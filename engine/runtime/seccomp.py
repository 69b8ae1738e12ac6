"""Docker's default seccomp profile for a set of capabilities, as JSON and compiled.

An allow-list: other calls fail with EPERM, `clone3` with ENOSYS so that libc falls back to `clone`,
whose flags can be inspected. The names are those that Docker's documentation ("Seccomp security
profiles for Docker") and its published profile allow from version 25 on (io_uring is not among them
any more). libseccomp skips names that it or the architecture does not know, so a list newer than
the host's library is harmless (tested with crun 1.8.1 and runc 1.1.5 over libseccomp 2.5.4).

A profile that a client brings (`custom`) is in Docker's format: rules may depend on capabilities,
architecture and kernel, which is resolved here. The result is the OCI section, which the runtime
compiles.

Owns: a cache of encoded profiles, one per set of those capabilities that matter here.
"""

from __future__ import annotations

import base64
import platform
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec

from engine.errors import InvalidParameter
from engine.system import seccomp
from engine.system.seccomp import Condition, Rule

ENOSYS = 38
EPERM = 1
AF_VSOCK = 40

CLONE_NAMESPACES = 0x7E020000
"""CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET."""

PERSONALITIES = (0x0, 0x0008, 0x20000, 0x20008, 0xFFFFFFFF)
"""PER_LINUX, PER_LINUX32, UNAME26, both, and the query."""

ARCHITECTURES = {
    "x86_64": ("SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"),
    "aarch64": ("SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"),
}


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ALLOWED = _names("""
accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir chmod chown chown32 clock_adjtime clock_adjtime64 clock_getres
clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep clock_nanosleep_time64 close close_range connect copy_file_range creat dup
dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 execve
execveat exit exit_group faccessat faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown fchown32
fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync
ftruncate ftruncate64 futex futex_requeue futex_time64 futex_wait futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu
getcwd getdents getdents64 getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32 getitimer getpeername getpgid getpgrp
getpid getppid getpriority getrandom getresgid getresgid32 getresuid getresuid32 getrlimit getrusage getsid getsockname getsockopt gettid
gettimeofday getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy
io_getevents io_pgetevents io_pgetevents_time64 io_setup io_submit ioctl ioprio_get ioprio_set ipc kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self lchown lchown32 lgetxattr link linkat listen listxattr listxattrat llistxattr _llseek
lremovexattr lseek lsetxattr lstat lstat64 madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat
mlock mlock2 mlockall mmap mmap2 mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend
mq_timedsend_time64 mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at nanosleep newfstatat
_newselect open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll ppoll_time64 prctl
pread64 preadv preadv2 prlimit64 process_mrelease pselect6 pselect6_time64 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv
recv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr removexattrat rename renameat renameat2 restart_syscall rmdir rseq
rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo
sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_rr_get_interval_time64 sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
semtimedop semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto set_robust_list set_thread_area set_tid_address setfsgid
setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid setpriority setregid setregid32 setresgid setresgid32
setresuid setresuid32 setreuid setreuid32 setrlimit setsid setsockopt setuid setuid32 setxattr setxattrat shmat shmctl shmdt shmget shutdown
sigaltstack signalfd signalfd4 sigprocmask sigreturn socketcall socketpair splice stat stat64 statfs statfs64 statx symlink symlinkat sync
sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime
timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64 times tkill truncate truncate64 ugetrlimit
umask uname unlink unlinkat uretprobe utime utimensat utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid write writev
process_vm_readv process_vm_writev ptrace
""")
"""Allowed for every container.

The last three are safe from Linux 4.8 on (before it ptrace could escape seccomp), which the engine
requires anyway.
"""

ALLOWED_ON = {
    "x86_64": _names("arch_prctl modify_ldt"),
    "aarch64": _names("arm_fadvise64_64 arm_sync_file_range sync_file_range2 breakpoint cacheflush set_tls"),
}

ALLOWED_WITH = {
    "CAP_BPF": _names("bpf"),
    "CAP_DAC_READ_SEARCH": _names("open_by_handle_at"),
    "CAP_PERFMON": _names("perf_event_open"),
    "CAP_SYS_ADMIN": _names("""
        bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie lsm_get_self_attr lsm_list_modules lsm_set_self_attr
        listmount mount mount_setattr move_mount open_tree perf_event_open quotactl quotactl_fd setdomainname sethostname setns statmount
        syslog umount umount2 unshare
    """),
    "CAP_SYS_BOOT": _names("reboot"),
    "CAP_SYS_CHROOT": _names("chroot"),
    "CAP_SYS_MODULE": _names("delete_module finit_module init_module"),
    "CAP_SYS_NICE": _names("get_mempolicy mbind set_mempolicy set_mempolicy_home_node"),
    "CAP_SYS_PACCT": _names("acct"),
    "CAP_SYS_PTRACE": _names("kcmp pidfd_getfd process_madvise"),
    "CAP_SYS_RAWIO": _names("ioperm iopl"),
    "CAP_SYS_TIME": _names("clock_settime clock_settime64 settimeofday stime"),
    "CAP_SYS_TTY_CONFIG": _names("vhangup"),
    "CAP_SYSLOG": _names("syslog"),
}


class Profile(NamedTuple):
    """One filter in the two forms that runtimes take."""

    section: msgspec.Raw
    """The JSON of `linux.seccomp`."""
    program: str
    """The compiled filter in base64, for a runtime that takes one ready-made; empty when
    libseccomp is missing.
    """


def profile(capabilities: Iterable[str], machine: str = "") -> Profile:
    """The default profile for a container with these capabilities; `machine` as uname(2) names
    it, this host's when not given.
    """
    return _profile(frozenset(ALLOWED_WITH).intersection(capabilities), machine or platform.machine())


def rules(capabilities: frozenset[str], machine: str) -> list[Rule]:
    """The calls that the profile allows, and `clone3`; others fail with EPERM."""
    names = {*ALLOWED, *ALLOWED_ON.get(machine, ())}
    for capability in capabilities:
        names.update(ALLOWED_WITH.get(capability, ()))
    found = [
        Rule(sorted(names)),
        Rule(["socket"], [Condition(0, AF_VSOCK, "SCMP_CMP_NE")]),
        *(Rule(["personality"], [Condition(0, value, "SCMP_CMP_EQ")]) for value in PERSONALITIES),
    ]
    if "CAP_SYS_ADMIN" not in capabilities:
        found += [
            Rule(["clone"], [Condition(0, CLONE_NAMESPACES, "SCMP_CMP_MASKED_EQ")]),
            Rule(["clone3"], errno=ENOSYS),
        ]
    return found


@lru_cache(maxsize=64)
def _profile(capabilities: frozenset[str], machine: str) -> Profile:
    found = rules(capabilities, machine)
    architectures = ARCHITECTURES.get(machine, ())
    document: dict[str, object] = {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": EPERM}
    if architectures:
        document["architectures"] = architectures
    document["syscalls"] = [_oci(rule) for rule in found]
    compiled = b""
    if architectures and machine == platform.machine() and seccomp.available():
        compiled = seccomp.program(found, default_errno=EPERM, architectures=architectures)
    return Profile(msgspec.Raw(msgspec.json.encode(document)), base64.b64encode(compiled).decode())


def _oci(rule: Rule) -> dict[str, object]:
    section: dict[str, object] = {"names": rule.names, "action": "SCMP_ACT_ALLOW"}
    if rule.errno is not None:
        section |= {"action": "SCMP_ACT_ERRNO", "errnoRet": rule.errno}
    if rule.conditions:
        section["args"] = [
            {"index": test.argument, "value": test.value, "valueTwo": test.value_two, "op": test.op}
            for test in rule.conditions
        ]
    return section


# --- a client's own profile -----------------------------------------------------------------------

_ACTIONS = frozenset(
    f"SCMP_ACT_{name}" for name in ("KILL", "KILL_PROCESS", "KILL_THREAD", "TRAP", "ERRNO", "TRACE", "ALLOW", "LOG")
)
_OPERATORS = frozenset(f"SCMP_CMP_{name}" for name in ("NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"))
_FLAGS = frozenset(f"SECCOMP_FILTER_FLAG_{name}" for name in ("TSYNC", "LOG", "SPEC_ALLOW"))
_DOCKER_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "x86"}
"""uname(2) to the names in `includes` and `excludes`; others are the same."""


class _Struct(msgspec.Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    pass


class _Argument(_Struct, frozen=True, kw_only=True):
    index: int
    value: int = 0
    value_two: int = 0
    op: str


class _Condition(_Struct, frozen=True, kw_only=True):
    """`arches` as Go names them, `min_kernel` as `4.8`; all given conditions must hold."""

    caps: list[str] | None = None
    arches: list[str] | None = None
    min_kernel: str = ""


class _Syscall(_Struct, frozen=True, kw_only=True):
    name: str = ""
    names: list[str] | None = None
    action: str
    errno_ret: int | None = None
    args: list[_Argument] | None = None
    includes: _Condition = _Condition()
    excludes: _Condition = _Condition()


class _ArchitectureMap(_Struct, frozen=True, kw_only=True):
    architecture: str
    sub_architectures: list[str] | None = None


class Custom(_Struct, frozen=True, kw_only=True):
    """A profile in Docker's format."""

    default_action: str
    default_errno_ret: int | None = None
    architectures: list[str] | None = None
    arch_map: list[_ArchitectureMap] | None = None
    flags: list[str] | None = None
    listener_path: str = ""
    syscalls: list[_Syscall] | None = None


_decode = msgspec.json.Decoder(Custom).decode


def custom(text: str) -> Custom:
    """A client's profile, parsed and checked. Raises InvalidParameter with the reason."""
    try:
        found = _decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidParameter(f"SecurityOpt: Decoding seccomp profile failed: {error}") from error
    if found.architectures and found.arch_map:
        raise _wrong("use either 'architectures' or 'archMap'")
    if found.listener_path:
        raise _wrong("'listenerPath' is not supported by this engine")
    for flag in found.flags or ():
        if flag not in _FLAGS:
            raise _wrong(f"unknown flag {flag!r}")
    for call in found.syscalls or ():
        if call.name and call.names:
            raise _wrong("use either 'name' or 'names'")
        if not (call.name or call.names):
            raise _wrong("a rule without 'names'")
        for argument in call.args or ():
            if argument.op not in _OPERATORS or not 0 <= argument.index <= 5:
                raise _wrong(f"rule for {call.name or call.names}: bad argument {argument.index} {argument.op!r}")
    for action in (found.default_action, *(call.action for call in found.syscalls or ())):
        if action not in _ACTIONS:
            raise _wrong(f"unknown or unsupported action {action!r}")
    return found


def _wrong(reason: str) -> InvalidParameter:
    return InvalidParameter(f"SecurityOpt: invalid seccomp profile: {reason}")


def section(profile: Custom, capabilities: Iterable[str], machine: str = "", release: str = "") -> msgspec.Raw:
    """The JSON of `linux.seccomp` for a container with these capabilities, on this host or one
    of that machine and kernel.
    """
    machine, release = machine or platform.machine(), release or platform.release()
    granted = frozenset(capabilities)
    native = f"SCMP_ARCH_{machine.upper()}"
    architectures = profile.architectures or [
        name
        for each in profile.arch_map or ()
        if each.architecture == native
        for name in (each.architecture, *(each.sub_architectures or ()))
    ]
    document: dict[str, object] = {"defaultAction": profile.default_action}
    if profile.default_errno_ret is not None:
        document["defaultErrnoRet"] = profile.default_errno_ret
    if architectures:
        document["architectures"] = architectures
    if profile.flags:
        document["flags"] = profile.flags
    document["syscalls"] = [
        _rule(call)
        for call in profile.syscalls or ()
        if _included(call.includes, granted, machine, release)
        and not _excluded(call.excludes, granted, machine, release)
    ]
    return msgspec.Raw(msgspec.json.encode(document))


def _rule(call: _Syscall) -> dict[str, object]:
    rule: dict[str, object] = {"names": call.names or [call.name], "action": call.action}
    if call.errno_ret is not None:
        rule["errnoRet"] = call.errno_ret
    if call.args:
        rule["args"] = [
            {"index": each.index, "value": each.value, "valueTwo": each.value_two, "op": each.op} for each in call.args
        ]
    return rule


def _included(wanted: _Condition, granted: frozenset[str], machine: str, release: str) -> bool:
    return (
        (not wanted.arches or _DOCKER_ARCHITECTURES.get(machine, machine) in wanted.arches)
        and granted.issuperset(wanted.caps or ())
        and (not wanted.min_kernel or _version(release) >= _version(wanted.min_kernel))
    )


def _excluded(unwanted: _Condition, granted: frozenset[str], machine: str, release: str) -> bool:
    return bool(
        (unwanted.arches and _DOCKER_ARCHITECTURES.get(machine, machine) in unwanted.arches)
        or granted.intersection(unwanted.caps or ())
        or (unwanted.min_kernel and _version(release) >= _version(unwanted.min_kernel))
    )


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d{1,6})\.(\d{1,6})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
