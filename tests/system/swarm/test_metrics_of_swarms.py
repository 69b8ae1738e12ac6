"""Metrics of managers and workers of a swarm."""

from __future__ import annotations

import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine.harness import until
from tests.support.swarm.clusters import Cluster, Node

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

PORT = 9323


def values(node: Node) -> dict[str, float]:
    """The samples about the swarm, those of nodes by their state."""
    code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{PORT}/metrics').read().decode())"
    found = text_string_to_metric_families(node.inside("env", "-u", "http_proxy", "python3", "-c", code))
    return {
        sample.labels.get("state", sample.name): sample.value
        for family in found
        if family.name.startswith("swarm_")
        for sample in family.samples
    }


def test_managers_and_workers() -> None:
    with Cluster(2, "--metrics-addr", f"127.0.0.1:{PORT}") as cluster:
        assert values(cluster[0]) == {"swarm_node_manager": 0}
        cluster.form(1)
        cluster[0].ask("POST", "/secrets/create", {"Name": "one", "Data": "eA=="})
        expected = {
            "swarm_node_manager": 1,
            "swarm_manager_leader": 1,
            "swarm_manager_configs_total": 0,
            "swarm_manager_secrets_total": 1,
            "swarm_manager_services_total": 0,
            **{"disconnected": 0, "down": 0, "ready": 2, "unknown": 0},
        }
        until("both are ready", lambda: values(cluster[0])["ready"] == 2)
        found = values(cluster[0])
        assert found.pop("swarm_manager_networks_total") >= 1  # ingress
        assert found == expected
        assert values(cluster[1]) == {"swarm_node_manager": 0}
        cluster[1].kill9()
        until("one is down", lambda: values(cluster[0])["down"] == 1)
