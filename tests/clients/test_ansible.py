"""Ansible's community.docker: a playbook with what a host usually has. The second run changes
nothing, and a changed value changes only its container.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.programs import UNPACKED
from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, free_ports, until

pytestmark = pytest.mark.nightly

HEAD = """
- hosts: localhost
  gather_facts: false
  module_defaults:
    group/community.docker.docker: {{docker_host: "unix://{socket}"}}
  tasks:
"""

PLAYBOOK = """
    - name: info
      community.docker.docker_host_info:
        containers: true
        images: true
        networks: true
        volumes: true
        disk_usage: true
    - name: network
      community.docker.docker_network:
        name: lan
        driver: bridge
        attachable: true
        labels: {{a: b}}
        driver_options: {{com.docker.network.driver.mtu: "1400"}}
        ipam_config: [{{subnet: 10.211.11.0/24, gateway: 10.211.11.1, iprange: 10.211.11.128/25}}]
    - name: volume
      community.docker.docker_volume: {{name: data, labels: {{a: b}}}}
    - name: tag
      community.docker.docker_image_tag: {{name: "busybox:latest", repository: ["web:1"]}}
    - name: web
      community.docker.docker_container:
        name: web
        image: web:1
        command: ["httpd", "-f", "-h", "/www"]
        state: started
        init: true
        env: {{COLOUR: "{colour}"}}
        labels: {{k: v}}
        hostname: web-host
        networks: [{{name: lan, ipv4_address: 10.211.11.20, aliases: [www]}}]
        networks_cli_compatible: true
        published_ports: ["127.0.0.1:{port}:80"]
        exposed_ports: ["90/udp"]
        mounts:
          - {{type: volume, source: data, target: /www}}
          - {{type: tmpfs, target: /scratch, tmpfs_size: 1M, tmpfs_mode: "0700"}}
          - {{type: bind, source: "{directory}", target: /host, read_only: true}}
        cpus: 0.5
        memory: 64M
        memory_swap: 64M
        pids_limit: 50
        restart_policy: unless-stopped
        healthcheck: {{test: ["CMD", "test", "-d", "/www"], interval: 1s, timeout: 5s, retries: 3, start_period: 1s}}
        capabilities: [NET_ADMIN]
        cap_drop: [ALL]
        security_opts: ["no-new-privileges:true"]
        sysctls: {{net.core.somaxconn: "64"}}
        ulimits: ["nofile:100:200"]
        log_driver: json-file
        log_options: {{max-size: 1m}}
        etc_hosts: {{other: 10.211.11.8}}
        dns_servers: [10.211.11.9]
        tmpfs: ["/t:size=1m"]
        shm_size: 1M
        stop_timeout: 1
        stop_signal: SIGKILL
        read_only: true
        comparisons: {{"*": strict}}
    - name: host
      community.docker.docker_container:
        name: host
        image: busybox
        command: sleep 1000
        network_mode: host
        ipc_mode: private
        cgroupns_mode: private
        privileged: true
        stop_signal: SIGKILL
        volumes: ["data:/data:ro", "/anonymous"]
        container_default_behavior: no_defaults
    - name: exec
      community.docker.docker_container_exec:
        container: web
        argv: [sh, -c, "echo $COLOUR; pwd"]
        chdir: /tmp
        env: {{A: b}}
      register: executed
      changed_when: executed.stdout_lines != ["{colour}", "/tmp"]
    - name: file
      community.docker.docker_container_copy_into:
        container: host
        content: words
        container_path: /tmp/file
        mode: "0644"
    - name: container info
      community.docker.docker_container_info: {{name: web}}
"""

CLEAN = """
    - name: remove
      community.docker.docker_container:
        name: "{{{{ item }}}}"
        state: absent
        force_kill: true
        keep_volumes: false
      loop: [web, host]
    - name: network
      community.docker.docker_network: {{name: lan, state: absent}}
    - name: image
      community.docker.docker_image_remove: {{name: "web:1"}}
    - name: prune
      community.docker.docker_prune:
        containers: true
        images: true
        networks: true
        volumes: true
        volumes_filters: {{all: true}}
        builder_cache: true
"""


def played(engine: TempEngine, tasks: str, **values: object) -> dict[str, Any]:
    """Runs a playbook of these tasks, in which `values` are filled in. Returns the result of each
    task by its name.
    """
    home = engine.base / "ansible"
    home.mkdir(exist_ok=True)
    (home / "play.yml").write_text((HEAD + tasks).format(socket=engine.socket, **values))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DOCKER_", "ANSIBLE_"))}
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible-playbook"),
            "-i",
            "localhost,",
            "-c",
            "local",
            "--diff",
            "play.yml",
        ],
        cwd=home,
        env=kept
        | {
            "HOME": str(home),
            "LC_ALL": "C.UTF-8",
            "ANSIBLE_COLLECTIONS_PATH": str(UNPACKED / "ansible"),
            "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "ANSIBLE_LOCALHOST_WARNING": "False",
            "ANSIBLE_PIPELINING": "True",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr)
    (play,) = json.loads(done.stdout)["plays"]
    return {task["task"]["name"]: task["hosts"]["localhost"] for task in play["tasks"]}


def changed(results: dict[str, Any]) -> set[str]:
    return {name for name, result in results.items() if result["changed"]}


def test_a_second_run_changes_nothing(bare: TempEngine, clean: TempEngine) -> None:
    (port,) = free_ports(1)
    values = {"port": port, "directory": bare.base}
    first = played(bare, PLAYBOOK, colour="red", **values)
    assert changed(first) == {"network", "volume", "tag", "web", "host", "file"}
    until("it is healthy", lambda: bare.inspect("web")["State"]["Health"]["Status"] == "healthy")
    ids = bare.containers()
    second = played(bare, PLAYBOOK, colour="red", **values)
    assert changed(second) == set(), [(name, second[name]["diff"]) for name in changed(second)]
    assert bare.containers() == ids
    assert second["container info"]["container"]["Id"] == bare.inspect("web")["Id"]
    third = played(bare, PLAYBOOK, colour="blue", **values)
    assert changed(third) == {"web"}
    removed = played(bare, CLEAN)
    assert changed(removed) >= {"remove", "network", "image", "prune"}
    assert bare.containers() == [] and bare.request("GET", "/volumes").json()["Volumes"] == []
