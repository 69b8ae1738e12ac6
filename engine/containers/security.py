"""SecurityOpt: parses the entries, and checks that this host supports them.

Rules: Docker's `--security-opt`: `no-new-privileges[=BOOL]`, `seccomp=unconfined|builtin|PROFILE`
(the CLI sends the profile's JSON, not its file), `apparmor=PROFILE`, `label=…`,
`writable-cgroups[=BOOL]`. Old clients separate with `:` instead of `=`. Not here: compiling a
profile to a filter (`runtime/seccomp.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.common import booleans
from engine.common.seccomp_profiles import BUILTIN, Document
from engine.errors import InvalidParameter
from engine.runtime import apparmor, seccomp

MASKED_PATHS = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)

READONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""With `MASKED_PATHS` Docker's defaults for MaskedPaths and ReadonlyPaths of HostConfig."""

UNCONFINED = "unconfined"
_WITHOUT_APPARMOR = ("", UNCONFINED, apparmor.DEFAULT)
"""Values that a host without AppArmor accepts and ignores, as Docker does."""


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed entries."""

    no_new_privileges: bool | None = None
    """None: the engine's default."""
    confined: bool | None = None
    """Whether a seccomp profile applies, if the entries say so. Otherwise the default one does, but
    not to a privileged container.
    """
    profile: Document | None = None
    """The client's own profile instead of the default one."""
    writable_cgroups: bool | None = None
    """Whether /sys/fs/cgroup is writable, if the entries say so."""
    apparmor: str = ""
    """The requested profile; empty: the engine's default."""

    @property
    def apparmor_profile(self) -> str:
        """The effective profile, as in inspect; empty where AppArmor is off."""
        if not apparmor.enabled():
            return ""
        return self.apparmor or apparmor.default()


def parse(options: Iterable[str]) -> Security:
    """Raises InvalidParameter with the entry in it: unknown, ill-formed, or unsupported by this
    host.

    A later entry of a kind replaces an earlier one.
    """
    confined: bool | None = None
    apparmor_profile = ""
    switches: dict[str, bool | None] = {"no-new-privileges": None, "writable-cgroups": None}
    profile: Document | None = None
    for option in options:
        if option in switches:
            switches[option] = True
            continue
        if option == "disable":  # of old clients, for label=disable
            continue
        name, separator, value = _split(option)
        if not separator:
            raise InvalidParameter(f"SecurityOpt: invalid --security-opt 1: {_shown(option)}")
        if name in switches:
            if value not in booleans.WORDS:
                raise InvalidParameter(f"SecurityOpt: invalid --security-opt 2: {_shown(option)}: not a boolean")
            switches[name] = booleans.WORDS[value]
        elif name == "seccomp":
            confined = value != UNCONFINED if value else None
            profile = None if value in (UNCONFINED, BUILTIN, "") else seccomp.custom(value)
        elif name == "apparmor":
            if value not in _WITHOUT_APPARMOR and not apparmor.enabled():
                raise InvalidParameter(f"SecurityOpt: apparmor={value}: AppArmor is not enabled on this host")
            apparmor_profile = value if apparmor.enabled() else ""
            if apparmor_profile not in ("", UNCONFINED):
                _check_loaded(apparmor_profile)
        elif name != "label":
            raise InvalidParameter(f"SecurityOpt: invalid --security-opt 2: {_shown(option)}")
    return Security(
        no_new_privileges=switches["no-new-privileges"],
        writable_cgroups=switches["writable-cgroups"],
        confined=confined,
        profile=profile,
        apparmor=apparmor_profile,
    )


def shown_apparmor_profile(options: Iterable[str]) -> str:
    """The profile as inspect shows it, even if the host no longer has it; empty where AppArmor
    is off.
    """
    if not apparmor.enabled():
        return ""
    chosen = ""
    for option in options:
        name, _, value = _split(option)
        if name == "apparmor":
            chosen = value
    return chosen or apparmor.default()


def _split(option: str) -> tuple[str, str, str]:
    """Name, separator and value of an entry."""
    return option.partition("=" if "=" in option.partition(":")[0] or ":" not in option else ":")


def _check_loaded(profile: str) -> None:
    """Raises InvalidParameter unless the kernel has the profile."""
    loaded = apparmor.profiles()
    if loaded is not None and profile not in loaded:
        raise InvalidParameter(f"SecurityOpt: apparmor={profile}: this host has no such AppArmor profile loaded")


def _shown(option: str) -> str:
    return msgspec.json.encode(option[:100]).decode()
