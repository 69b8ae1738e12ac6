"""SecurityOpt: what its entries say, and whether this host can do it.

Rules: Docker's `--security-opt`: `no-new-privileges[=BOOL]`, `seccomp=unconfined|builtin|PROFILE` (the CLI sends the profile's JSON, not its
file), `apparmor=PROFILE`, `label=…`; `:` separates as well as `=`, as old clients write it.
Not here: how a profile becomes a filter (`runtime/seccomp.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from engine.errors import InvalidParameter
from engine.runtime import seccomp

UNCONFINED = "unconfined"
_APPARMOR = Path("/sys/module/apparmor/parameters/enabled")
_APPARMOR_PROFILES = Path("/sys/kernel/security/apparmor/profiles")
_NO_APPARMOR = ("", UNCONFINED, "docker-default")
"""What a host without AppArmor may be asked for: nothing, and Docker's default, which Docker leaves out there too."""

_BOOLEANS = dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True) | dict.fromkeys(
    ("0", "f", "F", "false", "FALSE", "False"), False
)


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """The entries, read."""

    no_new_privileges: bool = False
    confined: bool = True
    """Under a seccomp profile."""
    profile: seccomp.Custom | None = None
    """The client's own instead of the default one."""
    apparmor: str = ""


def parse(options: Iterable[str]) -> Security:
    """Raises InvalidParameter with the entry in it: unknown, ill-formed, or beyond this host. A later entry of a kind replaces an earlier one."""
    no_new_privileges, confined, apparmor = False, True, ""
    profile: seccomp.Custom | None = None
    for option in options:
        if option == "no-new-privileges":
            no_new_privileges = True
            continue
        if option == "disable":  # of old clients, for label=disable
            continue
        name, separator, value = option.partition("=" if "=" in option.partition(":")[0] or ":" not in option else ":")
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
            if value not in _NO_APPARMOR and not _has_apparmor():
                raise InvalidParameter(f"SecurityOpt: apparmor={value}: AppArmor is not enabled on this host")
            apparmor = value if _has_apparmor() else ""
            if apparmor not in ("", UNCONFINED):
                _check_loaded(apparmor)
        elif name != "label":
            raise InvalidParameter(f"SecurityOpt: invalid --security-opt: {_shown(option)}")
    return Security(no_new_privileges=no_new_privileges, confined=confined, profile=profile, apparmor=apparmor)


def _has_apparmor() -> bool:
    try:
        return _APPARMOR.read_text().startswith("Y")
    except OSError:
        return False


def _check_loaded(profile: str) -> None:
    """This engine loads no profile, and gives none that was not asked for."""
    try:
        lines = _APPARMOR_PROFILES.read_text().splitlines()
    except OSError:  # securityfs is not mounted: the runtime will see
        return
    if profile not in (line.rpartition(" (")[0] for line in lines):
        raise InvalidParameter(f"SecurityOpt: apparmor={profile}: this host has no such AppArmor profile loaded")


def _shown(option: str) -> str:
    return repr(option[:100])
