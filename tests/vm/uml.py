"""The tests' machine as a process: User-Mode Linux, a kernel that is a program of this host.

Without KVM it is several times faster than emulation, because programs in it run on the processor
itself. Its kernel is compiled here, once: Debian forky's, with the configuration of Debian's
package user-mode-linux and `SETTINGS`. Debian's own has neither cpusets nor nftables for IP.

It is not the kernel of the suite whose root it runs. What depends on that belongs in QEMU.

The machine's memory is a file of the host. A page of a program in the machine is a mapping of its
own in a process of the host, which may have `vm.max_map_count` of them: 65,530 by default, 256 MiB.
At that limit a program in the machine ends with SIGSEGV, or handles the same page fault forever.
`mappings` therefore raises the limit while machines run.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUITE, VERSION = "forky", "7.2"
"""Of the sources. From Linux 6.16 on, a process in it stops at a system call by seccomp instead of
ptrace, which makes a system call and a fork twice as fast.
"""

TOOLS = ("gcc", "libc6-dev", "libelf-dev", "make", "flex", "bison", "bc", "xz-utils", "kmod")

SETTINGS = """
SMP STATIC_LINK CPUSETS PSI CHECKPOINT_RESTORE OVERLAY_FS BLK_DEV_LOOP SQUASHFS AUTOFS_FS
DEFAULT_SECURITY_APPARMOR PERSISTENT_KEYRINGS QFMT_V2 BLK_CGROUP_IOCOST BFQ_GROUP_IOSCHED
IOSCHED_BFQ IKCONFIG FUSE_FS DEBUG_INFO_NONE
BRIDGE VLAN_8021Q VETH DUMMY MACVLAN IPVLAN VXLAN TUN NET_SCH_INGRESS NET_SCH_TBF NET_SCH_HTB
NET_SCH_FQ_CODEL NET_SCH_NETEM NET_CLS_U32 XFRM_USER INET_ESP INET6_ESP XFRM_ALGO CRYPTO_GCM
CRYPTO_SEQIV CRYPTO_CBC CRYPTO_HMAC CRYPTO_USER_API_HASH INET_UDP_DIAG INET_DIAG_DESTROY UNIX_DIAG
NETLINK_DIAG PACKET_DIAG IP_SCTP CRYPTO_DEFLATE NET_VRF
BRIDGE_NETFILTER NF_CONNTRACK NF_CT_NETLINK NF_NAT NF_DEFRAG_IPV4 NF_DEFRAG_IPV6 NF_TABLES
NF_TABLES_INET NF_TABLES_NETDEV NF_TABLES_IPV4 NF_TABLES_IPV6 NF_TABLES_BRIDGE NFT_CT
NFT_CONNLIMIT NFT_LOG NFT_LIMIT NFT_MASQ NFT_REDIR NFT_NAT NFT_QUOTA NFT_REJECT NFT_REJECT_INET
NFT_HASH NFT_NUMGEN NFT_FIB_INET NFT_FIB_IPV4 NFT_FIB_IPV6 NFT_FIB_NETDEV NFT_FIB NFT_COMPAT
NFT_SOCKET NFT_TPROXY NFT_DUP_NETDEV NFT_FWD_NETDEV NFT_DUP_IPV4 NFT_BRIDGE_REJECT NFT_BRIDGE_META
NF_LOG_SYSLOG NETFILTER_XTABLES NETFILTER_XTABLES_LEGACY NETFILTER_XT_MARK NETFILTER_XT_NAT
NETFILTER_XT_MATCH_ADDRTYPE NETFILTER_XT_MATCH_CONNTRACK NETFILTER_XT_MATCH_COMMENT
NETFILTER_XT_TARGET_MASQUERADE NETFILTER_XT_MATCH_MULTIPORT NETFILTER_XT_MATCH_STATE
NETFILTER_XT_MATCH_LIMIT NETFILTER_XT_MATCH_HL NETFILTER_XT_MATCH_RECENT NETFILTER_XT_MATCH_MARK
NETFILTER_XT_TARGET_CHECKSUM NETFILTER_XT_TARGET_LOG IP_NF_IPTABLES IP_NF_FILTER IP_NF_NAT
IP_NF_MANGLE IP_NF_RAW IP6_NF_IPTABLES IP6_NF_FILTER IP6_NF_NAT IP6_NF_MANGLE IP_NF_TARGET_REJECT
IP6_NF_TARGET_REJECT IP_SET IP_SET_HASH_IP IP_SET_HASH_NET IP_SET_HASH_IPPORT
IP_SET_HASH_IPPORTNET IP_SET_HASH_NETPORT NETFILTER_XT_SET IP_VS IP_VS_RR NETFILTER_XT_MATCH_IPVS
IP_NF_IPTABLES_LEGACY IP6_NF_IPTABLES_LEGACY NF_CONNTRACK_ZONES
"""
"""What is built in, besides what Debian's kernel has built in. Its modules are left out."""

LEFT_OUT = """
UML_NET_VECTOR BTRFS_FS XFS_FS SECURITY_SELINUX SECURITY_TOMOYO SECURITY_SMACK MD
"""

MAPPINGS = Path("/proc/sys/vm/max_map_count")
FOUND = Path("/run/engined-vm.max_map_count")
"""What the limit was before the first of the machines that run. They hold a shared lock on it."""


def build(directory: Path, mirror: str) -> Path:
    """Compile the kernel in `directory`, unless it is there with these settings.

    Returns the directory of the program `linux`, and of lib/modules, whose lists say what is built
    in. Raises CalledProcessError.
    """
    made, wanted = directory / "made", SETTINGS + LEFT_OUT
    if (made / "settings").exists() and (made / "settings").read_text() == wanted:
        return made
    root, source = directory / "root", Path("usr/src") / f"linux-source-{VERSION}"
    for old in (root, made):
        subprocess.run(["rm", "-rf", "--one-file-system", old], check=True)
    directory.mkdir(parents=True, exist_ok=True)
    names = ",".join((f"linux-source-{VERSION}", "user-mode-linux", *TOOLS))
    # the mirror may be one of an earlier day
    command = ["mmdebstrap", "--mode=root", "--variant=minbase", "--aptopt=Acquire::Check-Valid-Until false"]
    subprocess.run([*command, f"--include={names}", SUITE, root, mirror], check=True, stdout=sys.stderr)
    subprocess.run(["tar", "-C", root / "usr/src", "-xf", root / f"{source}.tar.xz"], check=True)
    packaged = gzip.decompress((root / "usr/share/doc/user-mode-linux/config.gz").read_bytes()).decode()
    lines = [line for line in packaged.splitlines() if not line.endswith("=m")]
    lines += [f"CONFIG_{name}=y" for name in SETTINGS.split()] + [f"CONFIG_{name}=n" for name in LEFT_OUT.split()]
    (root / source / ".config").write_text("\n".join(lines) + "\n")
    make = ["chroot", str(root), "make", "-s", "ARCH=um", "-C", f"/{source}"]
    subprocess.run([*make, "olddefconfig"], check=True, stdout=sys.stderr)
    subprocess.run([*make, "-j3", "linux", "modules"], check=True, stdout=sys.stderr)
    subprocess.run([*make, "modules_install", "INSTALL_MOD_PATH=/made"], check=True, stdout=sys.stderr)
    (root / "made").rename(made)
    shutil.copy(root / source / "linux", made)
    (made / "settings").write_text(wanted)
    subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)
    return made


@contextmanager
def mappings(memory: int) -> Iterator[None]:
    """Let a process of this host map all `memory` MiB of a machine meanwhile.

    The last of several machines, also of other calls, puts the limit back that the first one found,
    unless another program has changed it. After a kill the next one does.
    """
    wanted = 2 * memory * 2**20 // os.sysconf("SC_PAGE_SIZE")
    with FOUND.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if (limit := int(MAPPINGS.read_text())) < wanted:
            FOUND.write_text(str(limit))
            MAPPINGS.write_text(str(wanted))
        try:
            yield
        finally:
            with suppress(BlockingIOError):  # another machine runs
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = FOUND.read_text()
                if found and int(MAPPINGS.read_text()) == wanted:
                    MAPPINGS.write_text(found)
                lock.truncate(0)


def command(kernel: Path, disk: Path, changes: Path, drives: list[Path], cores: int, memory: int) -> list[str]:
    """The machine's command line. What it writes to `disk` goes to the file `changes`, and it has
    `memory` MiB.

    `kernel` is what `build` returned. It is to run within `mappings`.
    """
    line = [str(kernel / "linux"), "seccomp=on", f"ncpus={cores}", f"mem={memory}M", f"ubd0={changes},{disk}"]
    line += [f"ubd{number}={path}" for number, path in enumerate(drives, 1)]
    line += ["root=/dev/ubda", "rw", "con=null", "con0=null,fd:1", "ssl=null", "panic=-1", "security=apparmor"]
    # Mappings of io_uring corrupt the memory of this kernel.
    return [*line, "fstab=no", "systemd.getty_auto=no", "sysctl.kernel.io_uring_disabled=2"]
