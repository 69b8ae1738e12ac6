"""Containers run under AppArmor's docker-default where the kernel has AppArmor, and show no profile
otherwise."""

from pathlib import Path

import pytest

from tests.support.engine.harness import TempEngine

ENABLED = Path("/sys/module/apparmor/parameters/enabled")
HERE = ENABLED.exists() and ENABLED.read_text().startswith("Y")


def test_a_container_runs_under_the_default_profile(engine: TempEngine) -> None:
    container = engine.started("cat", "/proc/self/attr/current")
    assert engine.wait(container) == 0 or not HERE
    shown = engine.inspect(container)["AppArmorProfile"]
    if HERE:
        assert engine.logs(container).strip() == b"docker-default (enforce)"
        assert shown == "docker-default"
    else:
        assert shown == ""


@pytest.mark.skipif(not HERE, reason="the kernel has no AppArmor")
def test_the_default_profile_forbids_mounts_that_a_capability_allows(engine: TempEngine) -> None:
    options = {"CapAdd": ["SYS_ADMIN"], "SecurityOpt": ["seccomp=unconfined"]}
    confined = engine.started("mount", "-t", "tmpfs", "none", "/tmp", host=options)
    assert engine.wait(confined) != 0
    options["SecurityOpt"].append("apparmor=unconfined")
    free = engine.started("mount", "-t", "tmpfs", "none", "/tmp", host=options)
    assert engine.wait(free) == 0, engine.logs(free)
    assert engine.inspect(free)["AppArmorProfile"] == "unconfined"


@pytest.mark.skipif(not HERE, reason="the kernel has no AppArmor")
def test_an_exec_is_confined_as_its_container_is(engine: TempEngine) -> None:
    container = engine.started("sleep", "100")
    done = engine.docker("exec", container, "cat", "/proc/self/attr/current")
    assert done.out.strip() == "docker-default (enforce)"
    done = engine.docker("exec", "--privileged", container, "cat", "/proc/self/attr/current")
    assert done.out.strip() == "docker-default (enforce)"


@pytest.mark.skipif(not HERE, reason="the kernel has no AppArmor")
def test_privileged_is_unconfined_whatever_it_asks_for(engine: TempEngine) -> None:
    body = {"Image": "busybox", "Cmd": ["cat", "/proc/self/attr/current"]}
    body["HostConfig"] = {"Privileged": True, "SecurityOpt": ["apparmor=docker-default"]}
    answer = engine.request("POST", "/v1.44/containers/create", body).json()
    assert answer["Warnings"] == ["The AppArmor profile of SecurityOpt has no effect in privileged mode."]
    engine.post(f"/containers/{answer['Id']}/start")
    assert engine.wait(answer["Id"]) == 0
    assert engine.logs(answer["Id"]).strip() == b"unconfined"
