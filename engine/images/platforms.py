"""Platforms of images: `linux/arm64/v8` and the JSON form, and which images suit a platform.

Names and rules: github.com/containerd/platforms (`Parse`, `Normalize`, `Only`), and the levels of
amd64 (`GOAMD64`). Pure, but for the facts about this host.
Raises: InvalidParameter for a malformed platform, NotFound for an image of another one.
"""

from __future__ import annotations

import functools
import platform as host
import re
from collections.abc import Set
from typing import TypeVar

import msgspec

from engine.errors import InvalidParameter, NotFound, decoding_reason
from engine.wire.images import ImageConfig, Platform

T = TypeVar("T")

_COMPONENT = re.compile(r"[A-Za-z0-9_.-]+")
# fmt: off
_SYSTEMS = frozenset((
    "aix", "android", "darwin", "dragonfly", "freebsd", "hurd", "illumos", "ios", "js", "linux", "nacl",
    "netbsd", "openbsd", "plan9", "solaris", "windows", "zos",
))
_ARCHITECTURES = frozenset((
    "386", "amd64", "amd64p32", "arm", "armbe", "arm64", "arm64be", "ppc64", "ppc64le", "loong64", "mips",
    "mipsle", "mips64", "mips64le", "mips64p32", "mips64p32le", "ppc", "riscv", "riscv64", "s390", "s390x",
    "sparc", "sparc64", "wasm",
))
# fmt: on
_SYNONYMS = {"i386": "386", "x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64"}
_ARM = {"armhf": "v7", "armel": "v6"}
_MACHINES = {"armv7l": "arm", "armv6l": "arm", "i686": "386"}
_LEVELS = (
    {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"},
    {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"},
    {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
)
"""Flags that the levels 2, 3 and 4 of amd64 add, by their names in /proc/cpuinfo: x86-64 psABI,
3.1.1.
"""
_ARM_VARIANTS = ("v8", "v7", "v6", "v5")


def normal(given: Platform) -> Platform:
    """With the usual names: `x86_64` is amd64, and `arm` without a variant is v7."""
    system = given.os.lower()
    architecture, variant = given.architecture.lower(), given.variant.lower()
    if architecture in _ARM:
        architecture, variant = "arm", _ARM[architecture]
    architecture = _SYNONYMS.get(architecture, architecture)
    if (
        architecture == "386"
        or (architecture, variant) == ("amd64", "v1")
        or (architecture == "arm64" and variant in ("8", "v8"))
    ):
        variant = ""
    elif architecture == "arm":
        variant = f"v{variant}" if variant in ("5", "6", "7", "8") else variant or "v7"
    return msgspec.structs.replace(
        given, os="darwin" if system == "macos" else system, architecture=architecture, variant=variant
    )


HOST = normal(
    Platform(
        os="linux",
        architecture=_MACHINES.get(host.machine(), host.machine()),
        variant="v6" if host.machine() == "armv6l" else "",
    )
)
"""The platform of this host."""


def level_of(flags: Set[str]) -> int:
    """The level of amd64 that a CPU with these flags has, 1 to 4."""
    level = 1
    for needed in _LEVELS:
        if not flags >= needed:
            break
        level += 1
    return level


@functools.cache
def _host_level() -> int:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "flags":
                    return level_of(set(value.split()))
    except OSError:
        pass
    return 1


def parse(text: str) -> Platform:
    """`OS`, `ARCHITECTURE`, `OS/ARCHITECTURE` or `OS/ARCHITECTURE/VARIANT`; what is not given is
    this host's.
    """
    parts = text.split("/")
    if len(parts) > 3 or not all(map(_COMPONENT.fullmatch, parts)):
        raise InvalidParameter(f'"{text[:100]}": cannot parse platform specifier: invalid argument')
    if len(parts) > 1:
        return normal(Platform(os=parts[0], architecture=parts[1], variant=parts[2] if len(parts) == 3 else ""))
    system = normal(Platform(os=text))
    if system.os in _SYSTEMS:
        same = system.os == HOST.os
        return Platform(os=system.os, architecture=HOST.architecture, variant=HOST.variant if same else "")
    machine = normal(Platform(os=HOST.os, architecture=text))
    if machine.architecture in _ARCHITECTURES:
        return machine
    raise InvalidParameter(f'"{text[:100]}": unknown operating system or architecture: invalid argument')


def from_json(text: str) -> Platform:
    """`{"os":"linux","architecture":"arm64","variant":"v8"}`."""
    try:
        given = msgspec.json.decode(text.encode(errors="replace"), type=Platform)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidParameter(f"failed to parse platform: {decoding_reason(error)}") from None
    if not given.os and not given.architecture and (given.variant or given.os_version or given.os_features):
        raise InvalidParameter("optional platform fields provided, but OS and Architecture are missing")
    if not given.os or not given.architecture:
        raise InvalidParameter("both OS and Architecture must be provided")
    return given


def text_of(given: Platform) -> str:
    """`linux/arm64/v8`."""
    return "/".join(part for part in (given.os, given.architecture, given.variant) if part)


def accepted(wanted: Platform) -> list[Platform]:
    """The platforms whose images run on the wanted one, best first. Of this host's amd64 these are
    all levels that its CPU has, unless a level was named.
    """
    wanted = normal(wanted)
    machines = [(wanted.architecture, wanted.variant)]
    if wanted.architecture == "amd64":
        level = wanted.variant.removeprefix("v")
        if not level and (wanted.os, wanted.architecture) == (HOST.os, HOST.architecture):
            level = str(_host_level())
        if level in ("1", "2", "3", "4"):
            machines = [("amd64", f"v{each}" if each > 1 else "") for each in range(int(level), 0, -1)]
        machines.append(("386", ""))
    elif wanted.architecture == "arm64":
        machines += [("arm64", "")] if wanted.variant else []
        machines += [("arm", variant) for variant in _ARM_VARIANTS]
    elif wanted.architecture == "arm" and wanted.variant in _ARM_VARIANTS:
        machines += [("arm", each) for each in _ARM_VARIANTS[_ARM_VARIANTS.index(wanted.variant) + 1 :]]
    return [Platform(os=wanted.os, architecture=machine, variant=variant) for machine, variant in machines]


def best(wanted: Platform, offered: list[tuple[Platform | None, T]]) -> T | None:
    """The offer for the wanted platform, or for the best one of those that suit it; None without
    one. Offers that do not name their platform come last.
    """
    order = {_key(each): at for at, each in enumerate(accepted(wanted))}
    suitable = [
        (order[_key(normal(platform))] if platform is not None else len(order), at)
        for at, (platform, _) in enumerate(offered)
        if platform is None or _key(normal(platform)) in order
    ]
    return offered[min(suitable)[1]][1] if suitable else None


def suits(wanted: Platform, found: Platform) -> bool:
    """True if an image of the platform `found` is one for the wanted one. An image may have left
    out its variant.
    """
    wanted, have = normal(wanted), normal(found)
    if not found.variant and (have.os, have.architecture) == (wanted.os, wanted.architecture):
        return True
    return _key(have) in map(_key, accepted(wanted))


def _key(each: Platform) -> tuple[str, str, str]:
    return each.os, each.architecture, each.variant


def of_image(config: ImageConfig) -> Platform:
    """An image's platform; what it does not say is this host's."""
    return Platform(
        os=config.os or HOST.os, architecture=config.architecture or HOST.architecture, variant=config.variant
    )


def mismatch(name: str, config: ImageConfig, wanted: Platform) -> str:
    """Docker's words for an image of another platform. Empty when it suits."""
    found = of_image(config)
    if suits(wanted, found):
        return ""
    return (
        f"image with reference {name} was found but its platform ({text_of(found)}) "
        f"does not match the specified platform ({text_of(wanted)})"
    )


def check(name: str, config: ImageConfig, wanted: Platform | None) -> None:
    """Raises NotFound for an image of another platform."""
    if wanted is not None and (words := mismatch(name, config, wanted)):
        raise NotFound(words)


__all__ = [
    "HOST",
    "accepted",
    "best",
    "check",
    "from_json",
    "mismatch",
    "normal",
    "of_image",
    "parse",
    "suits",
    "text_of",
]
