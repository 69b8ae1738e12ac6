"""The metrics of `metrics-addr`: Prometheus' own parser reads them, their names, types and labels
are dockerd's, and they count what happens.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from bench.engines import Dockerd, _Peer
from tests.support import PATIENCE, ROOT
from tests.support.builds.table import TAR
from tests.support.engine.harness import TempEngine, free_ports, until
from tests.support.images.archives import Node, tar

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

MISSING = ("etcd_", "go_", "promhttp_", "swarm_", "process_network_", "process_virtual_memory_max_", "logger_")
"""Beginnings of names that dockerd has beyond the engine's: of its libraries."""
OWN = {"swarm_node_manager", "logger_log_write_operations_failed"}


class Measured:
    """An engine with metrics."""

    def __init__(self, engine: TempEngine, port: int) -> None:
        self.engine = engine
        self.port = port

    def ask(self, method: str = "GET", path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30 * PATIENCE)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): each for name, each in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
        finally:
            connection.close()

    def families(self) -> dict[str, Metric]:
        status, kind, text = self.ask()
        assert status == 200 and kind == "text/plain; version=0.0.4; charset=utf-8"
        return parsed(text)

    def value(self, name: str, **labels: str) -> float:
        (found,) = [
            sample.value
            for family in self.families().values()
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        ]
        return float(found)


def parsed(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    (port,) = free_ports(1)
    file = tmp_path_factory.mktemp("metrics") / "daemon.json"
    file.write_text(json.dumps({"metrics-addr": f"127.0.0.1:{port}"}))
    with TempEngine("--config", str(file)) as engine:
        engine.load_busybox()
        yield Measured(engine, port)


def test_containers(measured: Measured) -> None:
    engine = measured.engine

    def counted() -> list[float]:
        name = "engine_daemon_container_actions_seconds_count"
        return [measured.value(name, action=action) for action in ("create", "start", "delete", "changes", "commit")]

    assert counted() == [0, 0, 0, 0, 0]
    name = "engine_daemon_container_states_containers"
    made = engine.create("sleep", "100", network="bridge")
    assert measured.value(name, state="stopped") == 1
    engine.docker("start", made)
    assert measured.value(name, state="running") == 1
    engine.docker("pause", made)
    assert (measured.value(name, state="paused"), measured.value(name, state="running")) == (1, 0)
    engine.docker("unpause", made)
    engine.docker("diff", made)
    engine.docker("commit", made)
    refused = engine.docker("run", "--network", "none", "busybox", "/no-such-program", status=None)
    assert refused.status == 127
    engine.docker("rm", "-f", made)
    assert counted() == [2, 1, 1, 1, 1]
    start = "engine_daemon_container_actions_seconds"
    assert 0 < measured.value(f"{start}_sum", action="start") < 60
    assert measured.value(f"{start}_bucket", action="start", le="+Inf") == 1
    network = "engine_daemon_network_actions_seconds_count"
    assert measured.value(network, action="allocate") >= 1 and measured.value(network, action="release") >= 1


def test_images_networks_and_the_host(measured: Measured) -> None:
    engine = measured.engine
    engine.docker("history", "busybox")
    engine.docker("tag", "busybox", "gone:1")
    engine.docker("rmi", "gone:1")
    engine.docker("info")
    image = "engine_daemon_image_actions_seconds_count"
    assert measured.value(image, action="history") == 1 and measured.value(image, action="delete") == 1
    assert measured.value("engine_daemon_host_info_functions_seconds_count", function="system_info") >= 1
    assert measured.value("engine_daemon_engine_cpus_cpus") == os.cpu_count()
    info = json.loads(engine.request("GET", "/v1.44/info").body)
    assert measured.value("engine_daemon_engine_memory_bytes") == info["MemTotal"]
    (sample,) = measured.families()["engine_daemon_engine_info"].samples
    assert sample.labels["daemon_id"] == info["ID"] and sample.labels["version"] == info["ServerVersion"]
    assert sample.labels["os"] == info["OperatingSystem"] and sample.labels["graphdriver"] == info["Driver"]


def test_events_and_their_readers(measured: Measured) -> None:
    before = measured.value("engine_daemon_events_total")
    assert measured.value("engine_daemon_events_subscribers_total") == 0
    with subprocess.Popen(["docker", "events"], env=measured.engine.environment, stdout=subprocess.DEVNULL) as reader:
        until("a reader", lambda: measured.value("engine_daemon_events_subscribers_total") == 1)
        measured.engine.create("true")
        assert measured.value("engine_daemon_events_total") == before + 1
        reader.kill()


def test_builds(measured: Measured) -> None:
    def build(text: str, query: str = "") -> None:
        body = tar([Node("Dockerfile", text.encode())])
        measured.engine.request("POST", f"/v1.44/build?x=1{query}", body, TAR)

    def failed() -> dict[str, float]:
        family = measured.families()["builder_builds_failed"]
        return {sample.labels["reason"]: sample.value for sample in family.samples if sample.value}

    build("FROM busybox\nLABEL a=b\n")
    assert (measured.value("builder_builds_triggered_total"), failed()) == (1, {})
    build("FROM busybox\nRUN false\n")  # not a failure of the build itself, as in dockerd
    build("FROM busybox\nNONSENSE\n")
    build("\n")
    build("FROM busybox\nFROM busybox AS a\n", "&target=other")
    build("FROM\n")
    assert measured.value("builder_builds_triggered_total") == 6
    assert failed() == {
        "unknown_instruction_error": 1,
        "dockerfile_empty_error": 1,
        "build_target_not_reachable_error": 1,
        "dockerfile_syntax_error": 1,
    }


def test_health_checks(measured: Measured) -> None:
    made = measured.engine.docker(
        *("run", "-d", "--network", "none", "--health-cmd", "false", "--health-interval", "100ms", "busybox"),
        *("sleep", "100"),
    ).line
    until("checks", lambda: measured.value("engine_daemon_health_checks_failed_total") >= 2)
    measured.engine.docker("rm", "-f", made)
    checks = measured.value("engine_daemon_health_checks_total")
    assert checks >= 2 and measured.value("engine_daemon_health_check_start_duration_seconds_count") == checks


def test_the_process(measured: Measured) -> None:
    assert 0 < measured.value("process_cpu_seconds_total") < 1000
    assert 10 < measured.value("process_open_fds") < measured.value("process_max_fds")
    assert 1 << 20 < measured.value("process_resident_memory_bytes") < measured.value("process_virtual_memory_bytes")
    assert time.time() - 3600 < measured.value("process_start_time_seconds") <= time.time() + 1


def test_nothing_else_is_served(measured: Measured) -> None:
    assert [measured.ask(path=path)[0] for path in ("/", "/v1.44/containers/json", "/_ping")] == [404, 404, 404]
    assert measured.ask("POST")[0] == 405
    assert measured.ask("HEAD")[::2] == (200, "")
    assert measured.ask(Host="evil.example", User_Agent="Mozilla/5.0")[0] == 403


def test_the_address_must_be_free(measured: Measured) -> None:
    other = TempEngine("--metrics-addr", f"127.0.0.1:{measured.port}")
    try:
        with pytest.raises(AssertionError, match="Address already in use"):
            other.start()
    finally:
        other.close()


@pytest.mark.nightly
@pytest.mark.skipif(bool(Dockerd.missing()), reason="needs the newest dockerd")
def test_names_types_and_texts_are_dockerds(measured: Measured) -> None:
    class Peer(Dockerd):
        def start(self) -> None:
            (self.base / "none.json").write_text('{"metrics-addr": "127.0.0.1:9323"}')
            _Peer.start(self)

    peer = Peer()
    try:
        peer.start()
        ask = "import urllib.request as u; o = u.build_opener(u.ProxyHandler({}))"
        code = f"{ask}; print(o.open('http://127.0.0.1:9323/metrics').read().decode())"
        within = peer.namespaces.command(directory=ROOT)[:-1]
        text = subprocess.run([*within, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    finally:
        peer.close()
    measured.engine.docker("info")  # dockerd asks itself at its start
    theirs, ours = parsed(text), measured.families()
    assert ours.keys() >= OWN
    expected = {name for name in theirs if not name.startswith(MISSING)} | OWN
    later = {name for name in expected if name not in ours}
    assert not later, later
    for name in theirs.keys() & ours.keys():
        assert (ours[name].type, ours[name].documentation) == (theirs[name].type, theirs[name].documentation), name
        labels = {frozenset(sample.labels) for sample in theirs[name].samples}
        assert labels == {frozenset(sample.labels) for sample in ours[name].samples}, name
