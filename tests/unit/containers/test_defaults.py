"""What containers have whose create says nothing: Docker's defaults, the operator's, and a create
that says something.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import Config
from engine.containers import defaults, security
from engine.errors import ServerError
from engine.runtime import seccomp
from engine.wire.containers import HostConfig, Ulimit

PROFILE = {
    "defaultAction": "SCMP_ACT_ERRNO",
    "archMap": [{"architecture": "SCMP_ARCH_X86_64"}, {"architecture": "SCMP_ARCH_AARCH64"}],
    "syscalls": [
        {"names": ["read", "write"], "action": "SCMP_ACT_ALLOW"},
        {"name": "mkdir", "action": "SCMP_ACT_ERRNO", "errnoRet": 2, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
    ],
}


@pytest.mark.parametrize("unified", [False, True])
def test_dockers(unified: bool) -> None:
    host = defaults.DOCKERS.applied(HostConfig(), unified=unified)
    assert (host.ipc_mode, host.shm_size, host.ulimits) == ("private", 64 << 20, None)
    assert host.cgroupns_mode == ("private" if unified else "host")
    assert defaults.of(Config()) == defaults.DOCKERS


def test_the_operators_hold_where_a_create_says_nothing() -> None:
    chosen = defaults.of(
        Config(ipc_mode="shareable", cgroupns_mode="host", shm_size="1.5k", ulimits=("nofile=5:10", "core=0"))
    )
    host = chosen.applied(HostConfig(), unified=True)
    assert (host.ipc_mode, host.cgroupns_mode, host.shm_size) == ("shareable", "host", 1536)
    assert host.ulimits == [Ulimit(name="nofile", soft=5, hard=10), Ulimit(name="core")]
    own = HostConfig(
        ipc_mode="none", cgroupns_mode="private", shm_size=7, ulimits=[Ulimit(name="core", soft=1, hard=1)]
    )
    host = chosen.applied(own, unified=True)
    assert (host.ipc_mode, host.cgroupns_mode, host.shm_size) == ("none", "private", 7)
    assert host.ulimits == [Ulimit(name="core", soft=1, hard=1), Ulimit(name="nofile", soft=5, hard=10)]


def test_the_cgroup_namespace_of_a_privileged_container_is_the_hosts_unless_v2() -> None:
    chosen = defaults.of(Config(cgroupns_mode="private"))
    privileged = HostConfig(privileged=True)
    assert chosen.applied(privileged, unified=False).cgroupns_mode == "host"
    assert chosen.applied(privileged, unified=True).cgroupns_mode == "private"
    assert chosen.applied(HostConfig(), unified=False).cgroupns_mode == "private"


def test_without_the_operators() -> None:
    """A client's own entries come last, and win."""
    host = defaults.without(HostConfig(security_opt=["seccomp=unconfined"]))
    found = security.parse(host.security_opt or ())
    assert (host.init, found.no_new_privileges, found.confined) == (False, False, False)
    assert security.parse(defaults.without(HostConfig()).security_opt or ()).confined is True
    assert defaults.without(HostConfig(init=True)).init is True


def test_the_seccomp_profile(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(PROFILE))
    filters = defaults.of(Config(seccomp_profile=str(file))).filters
    assert filters is not None and filters.capabilities == {"CAP_SYS_ADMIN"}
    first, second = filters.profile(["CAP_CHOWN"]), filters.profile(["CAP_SYS_ADMIN"])
    assert filters.profile(["CAP_KILL"]) is first and first is not second
    section = msgspec.json.decode(first.section)
    assert {"names": ["mkdir"], "action": "SCMP_ACT_ERRNO", "errnoRet": 2} in section["syscalls"]
    assert len(msgspec.json.decode(second.section)["syscalls"]) == 1
    assert bool(first.program) == seccomp.seccomp.available()
    assert defaults.of(Config(seccomp_profile="unconfined")).filters is None
    assert defaults.of(Config()).filters is seccomp.builtin()


@pytest.mark.parametrize("change", [{"defaultAction": "SCMP_ACT_ALLOW"}, {"flags": ["SECCOMP_FILTER_FLAG_LOG"]}])
def test_only_allow_lists_are_compiled(change: dict[str, Any]) -> None:
    """The runtime compiles other profiles itself."""
    filters = seccomp.Filters(msgspec.convert(PROFILE | change, seccomp.Document))
    assert filters.profile([]).program == "" and b"mkdir" in bytes(filters.profile([]).section)


def test_what_the_host_does_not_permit_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"^--seccomp-profile .*gone\.json: no such file or directory$"):
        defaults.of(Config(seccomp_profile=str(tmp_path / "gone.json")))
    with pytest.raises(ServerError, match=r"^--default-ulimit: Ulimits: nofile: "):
        defaults.of(Config(ulimits=("nofile=-1",)))
