"""SecurityOpt, and profiles in Docker's format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.containers import security
from engine.errors import InvalidParameter
from engine.runtime import apparmor, seccomp


def section(document: dict[str, Any], *granted: str, machine: str = "x86_64", release: str = "6.1.0-1") -> Any:
    profile = security.parse([f"seccomp={msgspec.json.encode(document).decode()}"]).profile
    assert profile is not None
    return msgspec.json.decode(seccomp.section(profile, granted, machine, release))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (None, None)),
        (["no-new-privileges"], (True, None)),
        (["no-new-privileges:true", "no-new-privileges=false", "seccomp="], (False, None)),
        (["seccomp:unconfined"], (None, False)),
        (["seccomp=builtin", "disable", "label=level:s0", "label:disable", "apparmor=unconfined"], (None, True)),
    ],
)
def test_entries(options: list[str], expected: tuple[bool | None, bool | None]) -> None:
    found = security.parse(options)
    assert (found.no_new_privileges, found.confined) == expected


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("word", 'invalid --security-opt 1: "word"'),
        ("name=x", 'invalid --security-opt 2: "name=x"'),
        ("writable-cgroups=2", 'invalid --security-opt 2: "writable-cgroups=2": not a boolean'),
    ],
)
def test_entries_that_are_none(option: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        security.parse([option])


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stands for the kernel's files of AppArmor, and for apparmor_parser, which is not
    installed.
    """
    monkeypatch.setattr(apparmor, "_ENABLED", tmp_path / "enabled")
    monkeypatch.setattr(apparmor, "_PROFILES", tmp_path / "profiles")
    monkeypatch.setattr(apparmor.shutil, "which", lambda *_, **__: None)
    for cached in (apparmor.enabled, apparmor.default):
        cached.cache_clear()
    yield tmp_path
    for cached in (apparmor.enabled, apparmor.default):
        cached.cache_clear()


def test_without_apparmor_only_the_default_can_be_asked_for(host: Path) -> None:
    found = security.parse(["apparmor=docker-default"])
    assert (found.apparmor, found.apparmor_profile) == ("", "")
    with pytest.raises(InvalidParameter, match="not enabled"):
        security.parse(["apparmor=mine"])


def test_apparmor_profiles_must_be_loaded(host: Path) -> None:
    (host / "enabled").write_text("Y\n")
    assert security.parse(["apparmor=mine"]).apparmor_profile == "mine", "securityfs is not mounted"
    (host / "profiles").write_text("mine (enforce)\nmine//part (enforce)\n/usr/bin/a b (complain)\n")
    for name in ("mine", "/usr/bin/a b", "unconfined"):
        assert security.parse([f"apparmor={name}"]).apparmor_profile == name
    for name in ("docker-default", "min", "enforce"):
        with pytest.raises(InvalidParameter, match=f"apparmor={name}: this host has no such AppArmor profile"):
            security.parse([f"apparmor={name}"])


def test_a_profile_that_the_host_no_longer_has_is_still_shown(host: Path) -> None:
    (host / "enabled").write_text("Y\n")
    (host / "profiles").write_text("docker-default (enforce)\n")
    assert security.shown_apparmor_profile(["seccomp=unconfined", "apparmor=gone"]) == "gone"
    assert security.shown_apparmor_profile(["apparmor:unconfined"]) == "unconfined"
    assert security.shown_apparmor_profile([]) == "docker-default"


def test_the_default_profile_is_used_as_it_is_loaded(host: Path) -> None:
    (host / "enabled").write_text("Y\n")
    (host / "profiles").write_text("docker-default (enforce)\n")
    assert security.parse([]).apparmor_profile == "docker-default"


def test_containers_are_unconfined_where_the_default_cannot_be_loaded(
    host: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (host / "enabled").write_text("Y\n")
    (host / "profiles").write_text("")
    assert security.parse([]).apparmor_profile == ""
    assert "apparmor_parser is not installed" in caplog.text


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("nonsense", "nonsense"),
        ("what=ever", "what=ever"),
        ("no-new-privileges=perhaps", "perhaps"),
        ("seccomp=/profile.json", "Decoding seccomp profile failed"),
        ("seccomp=[]", "Decoding seccomp profile failed"),
        ('seccomp={"syscalls":[]}', "defaultAction"),
        ('seccomp={"defaultAction":"SCMP_ACT_NOTIFY"}', "SCMP_ACT_NOTIFY"),
        ('seccomp={"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/x"}', "listenerPath"),
        ('seccomp={"defaultAction":"SCMP_ACT_ALLOW","flags":["X"]}', "'X'"),
        (
            'seccomp={"defaultAction":"SCMP_ACT_ALLOW","architectures":["A"],"archMap":[{"architecture":"B"}]}',
            "archMap",
        ),
        ('seccomp={"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"action":"SCMP_ACT_LOG"}]}', "names"),
        (
            'seccomp={"defaultAction":"SCMP_ACT_ALLOW",'
            '"syscalls":[{"name":"a","names":["b"],"action":"SCMP_ACT_LOG"}]}',
            "either 'name' or 'names'",
        ),
        (
            'seccomp={"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"name":"a","action":"SCMP_ACT_LOG",'
            '"args":[{"index":6,"op":"SCMP_CMP_EQ"}]}]}',
            "argument",
        ),
    ],
)
def test_refused(option: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match="SecurityOpt") as raised:
        security.parse([option])
    assert words in raised.value.message


def test_a_profile_without_conditions_is_passed_on() -> None:
    document = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 38,
        "architectures": ["SCMP_ARCH_X86_64"],
        "flags": ["SECCOMP_FILTER_FLAG_LOG"],
        "syscalls": [
            {"names": ["read"], "action": "SCMP_ACT_ALLOW"},
            {
                "names": ["socket"],
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": 1,
                "args": [{"index": 0, "value": 40, "valueTwo": 0, "op": "SCMP_CMP_EQ"}],
            },
        ],
    }
    assert section(document) == document


def names(document: Any) -> list[str]:
    return [name for rule in document["syscalls"] for name in rule["names"]]


def test_conditions() -> None:
    def rule(name: str, **fields: Any) -> dict[str, Any]:
        return {"name": name, "action": "SCMP_ACT_ALLOW", "args": None, **fields}

    document = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "architectures": None,
        "archMap": [
            {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]},
            {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": None},
        ],
        "syscalls": [
            rule("always"),
            rule("mount", includes={"caps": ["CAP_SYS_ADMIN"]}),
            rule("clone", excludes={"caps": ["CAP_SYS_ADMIN"]}),
            rule("arch_prctl", includes={"arches": ["amd64", "x32"]}),
            rule("set_tls", includes={"arches": ["arm64"]}),
            rule("ptrace", includes={"minKernel": "4.8"}),
            rule("future", includes={"minKernel": "9.0"}),
            rule("old", excludes={"minKernel": "4.8"}),
        ],
    }
    plain = section(document)
    assert plain["architectures"] == ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"]
    assert names(plain) == ["always", "clone", "arch_prctl", "ptrace"]
    assert names(section(document, "CAP_SYS_ADMIN")) == ["always", "mount", "arch_prctl", "ptrace"]
    assert names(section(document, machine="aarch64", release="3.10")) == ["always", "clone", "set_tls", "old"]
