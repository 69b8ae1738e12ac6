"""AppArmor: the profiles that the kernel has, and the default profile of containers, loaded
when the engine starts.

The default profile is called `docker-default`, as clients name it (`--security-opt
apparmor=docker-default`). If a profile of that name is loaded already, by dockerd for example, it
is used unchanged. The profile is compiled and loaded by apparmor_parser(8), because no library does
that. Without that program the engine logs a warning and containers are unconfined.

Rules: apparmor.d(5), and Docker's documentation of its default profile: a container may use its
       files, network and capabilities. It may neither mount, nor write to files of /proc and /sys
       that belong to the host. Sockets of the kernel's cryptography API (AF_ALG) are denied here
       too, because seccomp cannot see the family in a 32-bit program's socketcall(2)
       (CVE-2026-31431).
"""

from __future__ import annotations

import functools
import logging
import shutil
import subprocess
from pathlib import Path

from engine.errors import words

DEFAULT = "docker-default"

_ENABLED = Path("/sys/module/apparmor/parameters/enabled")
_PROFILES = Path("/sys/kernel/security/apparmor/profiles")
_SECONDS = 30

_log = logging.getLogger(__name__)

TEXT = f"""
profile {DEFAULT} flags=(attach_disconnected, mediate_deleted) {{
  network,
  deny network alg,
  capability,
  file,
  umount,
  signal (receive) peer=unconfined,
  signal (receive) peer={{crun,runc}},
  signal (send, receive) peer={DEFAULT},
  ptrace (read, trace, readby, tracedby) peer={DEFAULT},

  deny mount,

  deny /proc/* w,
  deny /proc/{{acpi,asound,bus,driver,dynamic_debug,fs,irq,scsi,sysvipc,tty}}/** w,
  deny /proc/sys/{{[^k],k[^e]}}** w,
  deny /proc/sys/kernel/{{[^s],s[^h],sh[^m]}}** w,
  deny /proc/{{sysrq-trigger,mem,kmem,kcore}} rwklx,

  deny /sys/{{block,bus,class,dev,devices,hypervisor,kernel,module,power}}/** wklx,
  deny /sys/fs/{{[^c],c[^g]}}** wklx,
  deny /sys/{{firmware,kernel/security}}/** rwklx,
}}
"""


@functools.cache
def enabled() -> bool:
    """Returns True if the kernel enforces AppArmor."""
    try:
        return _ENABLED.read_text().startswith("Y")
    except OSError:
        return False


def profiles() -> set[str] | None:
    """Names of the loaded profiles. None if securityfs is not mounted, so that they are unknown."""
    try:
        lines = _PROFILES.read_text().splitlines()
    except OSError:
        return None
    return {line.rpartition(" (")[0] for line in lines}


@functools.cache
def default() -> str:
    """The profile of containers that request none. The first call loads it and blocks: run it in a
    thread.

    Empty when AppArmor is off, or when the profile cannot be loaded; the reason is logged.
    """
    if not enabled():
        return ""
    loaded = profiles()
    if loaded is None:
        _log.warning("AppArmor: securityfs is not mounted; containers run without a profile")
        return ""
    if DEFAULT in loaded:
        return DEFAULT
    parser = shutil.which("apparmor_parser", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if parser is None:
        _log.warning("AppArmor: apparmor_parser is not installed; containers run without a profile")
        return ""
    try:
        done = subprocess.run(
            [parser, "--replace", "--skip-cache"],
            input=TEXT.encode(),
            capture_output=True,
            check=False,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("AppArmor: %s; containers run without a profile", words(error))
        return ""
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()
        _log.warning("AppArmor: cannot load %s; containers run without a profile: %s", DEFAULT, reason)
        return ""
    return DEFAULT
