"""Ansible's community.docker in swarm mode: a swarm of one with its node, a secret, a config and a
service. The second run changes nothing, and a changed value changes only its object.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.test_ansible import changed, played
from tests.support.swarm.clusters import Cluster, Node

pytestmark = pytest.mark.nightly

PLAYBOOK = """
    - name: swarm
      community.docker.docker_swarm:
        state: present
        advertise_addr: eth0
        task_history_retention_limit: {history}
        dispatcher_heartbeat_period: 5000000000
        labels: {{a: b}}
    - name: node
      community.docker.docker_node: {{hostname: "{node}", labels: {{zone: a}}, availability: active}}
    - name: secret
      community.docker.docker_secret: {{name: key, data: hidden, labels: {{a: b}}}}
    - name: config
      community.docker.docker_config: {{name: settings, data: shown}}
    - name: service
      community.docker.docker_swarm_service:
        name: web
        image: busybox
        resolve_image: false
        command: ["sleep", "99999"]
        replicas: 2
        env: {{COLOUR: "{colour}"}}
        labels: {{tier: front}}
        container_labels: {{c: d}}
        hostname: "h-{{% raw %}}{{{{.Task.Slot}}}}{{% endraw %}}"
        mounts:
          - {{type: volume, source: data, target: /data}}
          - {{type: tmpfs, target: /scratch, tmpfs_size: 1M}}
        secrets: [{{secret_name: key, filename: inner, mode: 0400}}]
        configs: [{{config_name: settings, filename: /etc/settings}}]
        limits: {{cpus: 0.5, memory: 32M}}
        reservations: {{cpus: 0.1, memory: 8M}}
        placement: {{constraints: ["node.role==manager"], preferences: [{{spread: node.labels.zone}}]}}
        restart_config: {{condition: any, delay: 1s, max_attempts: 0}}
        update_config: {{parallelism: 2, delay: 1s, order: stop-first, failure_action: pause}}
        rollback_config: {{parallelism: 1, delay: 1s, order: stop-first, failure_action: pause}}
        healthcheck: {{test: ["CMD", "true"], interval: 1s, retries: 3}}
        logging: {{driver: json-file, options: {{max-size: 1m}}}}
        stop_grace_period: 0s
        stop_signal: SIGTERM
        user: "0"
        working_dir: /tmp
        read_only: true
        init: true
    - name: info
      community.docker.docker_swarm_info: {{nodes: true, services: true, tasks: true, unlock_key: false}}
"""


@pytest.fixture
def node() -> Iterator[Node]:
    with Cluster(1) as cluster:
        yield cluster[0]
        cluster[0].leave(force=True)


def test_a_swarm(node: Node) -> None:
    name = node.ask("GET", "/info")["Name"]

    def run(**more: object) -> set[str]:
        results = played(node, PLAYBOOK, **{"history": 3, "node": name, "colour": "red"} | more)
        found = changed(results)
        print({task: results[task].get("diff") for task in found})
        return found

    assert run() == {"swarm", "node", "secret", "config", "service"}
    assert node.ask("GET", "/swarm")["Spec"]["Orchestration"] == {"TaskHistoryRetentionLimit": 3}
    assert node.ask("GET", f"/nodes/{name}")["Spec"]["Labels"] == {"zone": "a"}
    before = {task["ID"] for task in node.until_running("web", 2)}
    assert run() == set()
    assert run(history=4) == {"swarm"}
    assert {task["ID"] for task in node.until_running("web", 2)} == before
    assert run(history=4, colour="blue") == {"service"}
    spec = node.ask("GET", "/services/web")["Spec"]["TaskTemplate"]["ContainerSpec"]
    assert spec["Env"] == ["COLOUR=blue"]
    node.until_running("web", 2)
