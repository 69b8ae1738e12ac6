"""Statistics over HTTP: every documented field changes with the container's activity, and has the
form of its API version."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until

BUSY = "i=0; while :; do i=$((i+1)); done"


def once(engine: TempEngine, identifier: str, version: str = "1.24") -> Any:
    answer = engine.request("GET", f"/v{version}/containers/{identifier}/stats?stream=0")
    assert answer.status == 200, answer
    return answer.json()


def stream(engine: TempEngine, identifier: str, count: int) -> list[Any]:
    return list(itertools.islice(client.json_stream(engine.socket, f"/v1.24/containers/{identifier}/stats"), count))


@pytest.mark.own  # the first precpu_stats of dockerd 20.10 are empty
def test_the_processor(engine: TempEngine) -> None:
    busy, idle = (engine.started("sh", "-c", script) for script in (BUSY, "sleep 600"))
    first, second = stream(engine, busy, 2)
    for sample in (first, second):
        now, before = sample["cpu_stats"], sample["precpu_stats"]
        assert now.keys() >= {"cpu_usage", "system_cpu_usage", "throttling_data"}
        assert now.keys() == before.keys()
        assert now["cpu_usage"]["total_usage"] > before["cpu_usage"]["total_usage"]
        assert now["system_cpu_usage"] >= now["cpu_usage"]["total_usage"]
        assert sum(now["cpu_usage"]["percpu_usage"]) > 0
        assert sorted(now["throttling_data"]) == ["periods", "throttled_periods", "throttled_time"]
    assert second["precpu_stats"] == first["cpu_stats"]
    assert second["cpu_stats"]["system_cpu_usage"] > first["cpu_stats"]["system_cpu_usage"]
    assert second["read"] > first["read"]
    assert second["cpu_stats"]["cpu_usage"]["usage_in_usermode"] > 0
    still = stream(engine, idle, 2)[1]
    work, rest = (
        sample["cpu_stats"]["cpu_usage"]["total_usage"] - sample["precpu_stats"]["cpu_usage"]["total_usage"]
        for sample in (second, still)
    )
    assert work > 10 * rest


def test_a_quota_throttles(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", BUSY, host={"CpuPeriod": 10_000, "CpuQuota": 1_000})

    def throttled() -> bool:
        found = once(engine, identifier)["cpu_stats"]["throttling_data"]
        return bool(found["throttled_time"] and found["periods"] >= found["throttled_periods"] > 0)

    until("it has been throttled", throttled)


def test_memory_and_processes(engine: TempEngine) -> None:
    script = "dd if=/dev/zero of=/dev/shm/f bs=1M count=20 2>/dev/null; sleep 600 & sleep 600 & echo done; wait"
    identifier = engine.started("sh", "-c", script, host={"Memory": 96 << 20})
    until("it holds 20 MiB", lambda: engine.logs(identifier) == b"done\n")
    found = once(engine, identifier)
    memory = found["memory_stats"]
    assert memory["limit"] == 96 << 20
    assert 20 << 20 <= memory["usage"] <= memory["max_usage"] <= 96 << 20
    assert memory.get("failcnt", 0) == 0  # dockerd 20.10 leaves out what is 0
    assert memory["stats"]["cache"] >= 20 << 20
    assert memory["stats"]["hierarchical_memory_limit"] == 96 << 20
    for name in (
        *("cache", "rss", "rss_huge", "mapped_file", "writeback", "pgpgin", "pgpgout", "pgfault", "pgmajfault"),
        *("active_anon", "inactive_anon", "active_file", "inactive_file", "unevictable"),
    ):
        assert {name, f"total_{name}"} <= memory["stats"].keys()
    assert found["pids_stats"]["current"] == 3
    assert once(engine, engine.started("sleep", "600"))["memory_stats"]["limit"] > 96 << 20, "the host's, without one"


def test_networks(engine: TempEngine) -> None:
    gateway = engine.inspect(engine.started("sleep", "600", network="bridge"))["NetworkSettings"]["Gateway"]
    pinging = engine.started(
        "sh", "-c", f"ping -c 3 -i 0.1 {gateway} >/dev/null; echo done; sleep 600", network="bridge"
    )
    until("it has sent", lambda: engine.logs(pinging) == b"done\n")
    found = once(engine, pinging)["networks"]
    assert list(found) == ["eth0"]
    assert sorted(found["eth0"]) == sorted(
        f"{way}_{what}" for way in ("rx", "tx") for what in ("bytes", "dropped", "errors", "packets")
    )
    assert found["eth0"]["tx_packets"] >= 3 and found["eth0"]["rx_packets"] >= 3
    assert found["eth0"]["tx_bytes"] > 3 * 64


@pytest.mark.own  # dockerd 20.10 has no versions of the object
def test_as_the_version_has_it(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", network="bridge")
    assert "networks" in once(engine, identifier) and "pids_stats" in once(engine, identifier)
    assert "pids_stats" not in once(engine, identifier, "1.23")
    named = once(engine, identifier, "1.21")
    assert (named["name"], named["id"]) == ("/" + engine.inspect(identifier)["Name"].strip("/"), identifier)
    older = once(engine, identifier, "1.20")
    assert "name" not in older and "id" not in older
    assert "networks" not in older and "rx_bytes" in older["network"]
    oldest = once(engine, identifier, "1.18")
    assert "precpu_stats" not in oldest and oldest["cpu_stats"]["throttling_data"] == {}


def test_one_sample_alone(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600")

    def previous(version: str) -> str:
        answer = engine.request("GET", f"{version}/containers/{identifier}/stats?stream=false&one-shot=1")
        assert answer.status == 200, answer
        found = answer.json()
        assert found["cpu_stats"]["system_cpu_usage"] > 0
        alone = found["precpu_stats"]["system_cpu_usage"] == 0
        assert alone == found.get("preread", "0001").startswith("0001")
        return "alone" if alone else "compared"

    assert [previous(version) for version in ("", "/v1.41", "/v1.40", "/v1.25")] == [
        *("alone", "alone", "compared", "compared")
    ]
    sample = next(client.json_stream(engine.socket, f"/containers/{identifier}/stats?one-shot=1"))
    assert sample["precpu_stats"]["system_cpu_usage"] > 0


def test_a_stream_lasts_as_long_as_its_container(engine: TempEngine) -> None:
    identifier = engine.create("sleep", "600")
    assert once(engine, identifier)["cpu_stats"]["cpu_usage"]["total_usage"] == 0
    samples = client.json_stream(engine.socket, f"/v1.24/containers/{identifier}/stats")
    engine.post(f"/containers/{identifier}/start")
    assert any(sample["cpu_stats"]["cpu_usage"]["total_usage"] for sample in samples)
    engine.post(f"/containers/{identifier}/kill")
    assert any(not sample["cpu_stats"]["cpu_usage"]["total_usage"] for sample in samples)
    engine.post(f"/containers/{identifier}/start")
    assert any(sample["cpu_stats"]["cpu_usage"]["total_usage"] for sample in samples)
    engine.request("DELETE", f"/v1.24/containers/{identifier}?force=1")
    for _ in samples:  # the stream ends with its container
        pass


def test_docker_stats(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", name="watched", host={"Memory": 64 << 20, "PidsLimit": 50})
    words = "{{.Name}} {{.ID}} {{.MemUsage}} {{.PIDs}}"
    shown = engine.docker("stats", "--no-stream", "--format", words, "watched").line
    assert shown.startswith(f"watched {identifier[:12]} ") and shown.endswith("/ 64MiB 1"), shown
    engine.post("/containers/watched/rename?name=renamed")
    assert engine.docker("stats", "--no-stream", "--format", "{{.Name}}", identifier).line == "renamed"
    engine.post("/containers/renamed/kill")
    assert engine.docker("stats", "--no-stream", "--format", "{{.Name}}", identifier).line == "renamed"
