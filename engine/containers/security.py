"""SecurityOpt: parses the entries, and checks that this host supports them.

Rules: Docker's `--security-opt`: `no-new-privileges[=BOOL]`, `seccomp=unconfined|builtin|PROFILE`
(the CLI sends the profile's JSON, not its file), `apparmor=PROFILE`, `label=…`. Old clients
separate with `:` instead of `=`. Not here: compiling a profile to a filter (`runtime/seccomp.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

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

"""Docker's defaults, for HostConfig.MaskedPaths and ReadonlyPaths that are not given."""

UNCONFINED = "unconfined"
_WITHOUT_APPARMOR = ("", UNCONFINED, apparmor.DEFAULT)
"""Values that a host without AppArmor accepts and ignores, as Docker does."""

_BOOLEANS = dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True) | dict.fromkeys(
    ("0", "f", "F", "false", "FALSE", "False"), False
)


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed entries."""

    no_new_privileges: bool = False
    confined: bool = True
    """Under a seccomp profile."""
    profile: seccomp.Custom | None = None
    """The client's own profile instead of the default one."""
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
    no_new_privileges, confined, apparmor_profile = False, True, ""
    profile: seccomp.Custom | None = None
    for option in options:
        if option == "no-new-privileges":
            no_new_privileges = True
            continue
        if option == "disable":  # of old clients, for label=disable
            continue
        name, separator, value = _split(option)
        if not separator:
            raise InvalidParameter(f"SecurityOpt: invalid --security-opt: {_shown(option)}")
        if name == "no-new-privileges":
            if value not in _BOOLEANS:
                raise InvalidParameter(f"SecurityOpt: invalid value of no-new-privileges: {_shown(option)}")
            no_new_privileges = _BOOLEANS[value]
        elif name == "seccomp":
            confined = value != UNCONFINED
            profile = None if value in (UNCONFINED, "builtin", "") else seccomp.custom(value)
        elif name == "apparmor":
            if value not in _WITHOUT_APPARMOR and not apparmor.enabled():
                raise InvalidParameter(f"SecurityOpt: apparmor={value}: AppArmor is not enabled on this host")
            apparmor_profile = value if apparmor.enabled() else ""
            if apparmor_profile not in ("", UNCONFINED):
                _check_loaded(apparmor_profile)
        elif name != "label":
            raise InvalidParameter(f"SecurityOpt: invalid --security-opt: {_shown(option)}")
    return Security(no_new_privileges=no_new_privileges, confined=confined, profile=profile, apparmor=apparmor_profile)


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
    return repr(option[:100])
