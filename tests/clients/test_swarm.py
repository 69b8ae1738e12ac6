"""The docker CLIs' commands of swarm mode on a swarm of one: swarm, node, service, secret, config,
stack, and what info, events and inspect show of them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import programs
from tests.clients.conftest import Docker
from tests.support.engine.harness import until
from tests.support.swarm.clusters import NET, Cluster, Node


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Cluster(1, "--label", "rack=7", "--node-generic-resource", "gpu=2") as cluster:
        yield cluster[0]


@pytest.fixture(params=programs.PARAMETERS, ids=lambda program: program.name)
def docker(request: pytest.FixtureRequest, node: Node) -> Iterator[Docker]:
    """One docker CLI on an engine that it has made a swarm of."""
    cli = Docker(request.param, node)
    made = cli("swarm", "init", "--advertise-addr", "eth0")
    assert "is now a manager" in made.out and "docker swarm join --token SWMTKN-1-" in made.out
    assert f"{NET}.1:2377" in made.out
    node.node_id = str(node.swarm_info()["NodeID"])
    yield cli
    assert "Node left the swarm." in cli("swarm", "leave", "--force").out
    until("the containers of tasks have gone", lambda: not node.task_containers())


oldest_and_newest = pytest.mark.parametrize(
    "docker", (programs.BOOKWORM, programs.FORKY), indirect=True, ids=lambda program: program.name
)
"""For tests that wait long."""


def service(docker: Docker, *arguments: str, **more: Any) -> str:
    """`docker service create -d ARGUMENTS`, without a registry, and with tasks that end at once."""
    fast = ("-d", "--no-resolve-image", "--stop-grace-period", "0s")
    return docker("service", "create", *fast, *arguments, **more).out.strip()


def inspected(docker: Docker, *arguments: str) -> Any:
    return json.loads(docker(*arguments).out)[0]


def running(docker: Docker, name: str, count: int) -> list[str]:
    """Wait until so many tasks run; returns their names."""

    def names() -> list[str]:
        lines = docker.lines(
            "service", "ps", "-f", "desired-state=running", "--format", "{{.Name}} {{.CurrentState}}", name
        )
        found = [line.split()[0] for line in lines if line.split()[1] == "Running"]
        return found if len(found) == len(lines) == count else []

    return until(f"{count} tasks of {name} run", names, 60)  # type: ignore[no-any-return]


def test_swarm(docker: Docker) -> None:
    info = docker("info").out
    assert "Swarm: active" in info and "Is Manager: true" in info and "Managers: 1" in info
    assert "Node Address: 10.77.0.1" in info and "Heartbeat Period: 5 seconds" in info
    token = docker("swarm", "join-token", "-q", "worker").out.strip()
    assert re.fullmatch(r"SWMTKN-1-[0-9a-z]{50}-[0-9a-z]{25}", token)
    rotated = docker("swarm", "join-token", "--rotate", "worker").out
    assert "Successfully rotated worker join token" in rotated and token not in rotated
    assert "Swarm updated" in docker("swarm", "update", "--task-history-limit", "2", "--cert-expiry", "720h").out
    assert "Task History Retention Limit: 2" in docker("info").out
    assert "BEGIN CERTIFICATE" in docker("swarm", "ca").out
    assert (
        "no unlock key is set"
        in docker("swarm", "unlock-key", status=None).out + docker("swarm", "unlock-key", status=None).err
    )
    again = docker("swarm", "init", "--advertise-addr", "eth0", status=1)
    assert "This node is already part of a swarm" in again.err
    refused = docker("swarm", "leave", status=1)
    assert "last manager" in refused.err


def test_nodes(docker: Docker, node: Node) -> None:
    [line] = docker.lines(
        "node", "ls", "--format", "{{.ID}} {{.Self}} {{.Status}} {{.Availability}} {{.ManagerStatus}}"
    )
    assert line == f"{node.node_id} true Ready Active Leader"
    assert docker("node", "update", "--label-add", "zone=a", node.node_id).status == 0
    assert inspected(docker, "node", "inspect", "self")["Spec"]["Labels"] == {"zone": "a"}
    pretty = docker("node", "inspect", "--pretty", "self").out
    assert "zone=a" in pretty and "Leader:" in pretty and "TLS Info" in pretty
    service(docker, "--name", "web", "busybox", "sleep", "99999")
    running(docker, "web", 1)
    assert "web.1" in docker("node", "ps").out
    docker("node", "update", "--availability", "drain", node.node_id)
    until("the node is drained", lambda: not node.task_containers())
    docker("node", "update", "--availability", "active", node.node_id)
    running(docker, "web", 1)
    assert "last manager" in docker("node", "demote", node.node_id, status=1).err
    assert "must be demoted" in docker("node", "rm", "--force", node.node_id, status=1).err


def test_services(docker: Docker, node: Node) -> None:
    name = service(
        docker,
        *("--name", "web", "--replicas", "2", "--env", "A=b", "--label", "tier=front", "--container-label", "c=d"),
        *("--constraint", "node.role==manager", "--limit-memory", "32M", "--limit-cpu", "0.5", "--user", "7"),
        *("--mount", "type=volume,src=data,dst=/data", "--mount", "type=tmpfs,dst=/scratch", "--workdir", "/tmp"),
        *("--restart-condition", "any", "--restart-delay", "1s", "--update-delay", "0s"),
        *("--update-monitor", "500ms", "--rollback-monitor", "500ms"),
        *("--publish", "mode=host,target=80", "--network", "host", "--log-driver", "json-file"),
        *("busybox", "sh", "-c", "echo said; exec sleep 99999"),
    )
    assert re.fullmatch("[0-9a-z]{25}", name)
    assert sorted(running(docker, "web", 2)) == ["web.1", "web.2"]
    [line] = docker.lines("service", "ls", "--format", "{{.Name}} {{.Mode}} {{.Replicas}} {{.Image}}")
    assert line == "web replicated 2/2 busybox:latest"
    pretty = docker("service", "inspect", "--pretty", "web").out
    assert "Replicas:\t2" in pretty and "node.role==manager" in pretty and "tier=front" in pretty
    found = inspected(docker, "service", "inspect", "web")
    assert found["Spec"]["TaskTemplate"]["ContainerSpec"]["Env"] == ["A=b"]
    assert inspected(docker, "inspect", "web")["ID"] == name, "without its type"
    for container in node.task_containers():
        task = inspected(docker, "inspect", container)
        assert task["ServiceID"] == name, "a task, without its type"
    until("both said it", lambda: docker("service", "logs", "--raw", "web").out == "said\nsaid\n")
    lines = docker.lines("service", "logs", "-t", "web")
    assert all(re.fullmatch(r"\S+Z web\.[12]\.[0-9a-z]{12}@\S+ +\| said", line) for line in lines), lines
    docker("service", "scale", "-d", "web=1")
    running(docker, "web", 1)
    docker("service", "update", "-d", "--no-resolve-image", "--env-add", "B=c", "--label-add", "x=y", "web")
    until(
        "it is updated",
        lambda: inspected(docker, "service", "inspect", "web").get("UpdateStatus", {}).get("State") == "completed",
        60,
    )
    container = inspected(docker, "service", "inspect", "web")["Spec"]["TaskTemplate"]["ContainerSpec"]
    assert sorted(container["Env"]) == ["A=b", "B=c"]
    docker("service", "rollback", "-d", "web")
    until(
        "it is rolled back",
        lambda: inspected(docker, "service", "inspect", "web")["UpdateStatus"]["State"] == "rollback_completed",
        60,
    )
    docker("service", "update", "-d", "--force", "web")
    assert docker("service", "rm", "web").out == "web\n"
    assert docker.lines("service", "ls", "-q") == []
    assert "no such service" in docker("service", "ps", "web", status=1).err
    for command in ("inspect", "rm"):
        assert re.search(
            "no such service: web|service web not found", docker("service", command, "web", status=1).err, re.I
        )


@oldest_and_newest
def test_progress(docker: Docker) -> None:
    """Commands that wait until the tasks run: they list tasks that are up to date."""
    # the CLI waits for the time of the monitor too, 5 seconds without an option
    fast = ("--no-resolve-image", "--stop-grace-period", "0s", "--update-monitor", "500ms")
    made = docker(
        "service", "create", *fast, "--rollback-monitor", "500ms", "--name", "web", "busybox", "sleep", "99999"
    )
    assert "converged" in made.out
    done = docker("service", "update", "--no-resolve-image", "--env-add", "A=b", "web")
    assert "converged" in done.out
    docker("service", "create", *fast, "--mode", "global", "--name", "all", "busybox", "sleep", "9999")
    assert "converged" in docker("service", "scale", "web=2").out
    assert "converged" in docker("service", "rollback", "web").out


@oldest_and_newest
def test_jobs(docker: Docker) -> None:
    service(docker, "--name", "job", "--mode", "replicated-job", "--replicas", "2", "busybox", "true")
    until("the job is complete", lambda: "(2/2 completed)" in docker("service", "ls").out, 60)
    # without --detach the CLI follows the tasks by their slots
    for mode in ("replicated-job", "global-job"):
        seen = docker("service", "create", "--name", f"seen-{mode}", "--mode", mode, "busybox", "true")
        assert "job complete" in seen.out
        docker("service", "rm", f"seen-{mode}")
    service(docker, "--name", "jobs", "--mode", "global-job", "busybox", "true")
    until("the job is complete", lambda: docker("service", "ls").out.count("completed)") == 2, 60)


def test_secrets_and_configs(docker: Docker, node: Node) -> None:
    for of in ("secret", "config"):
        made = docker(of, "create", "--label", "a=b", "key", "-", input="hidden").out.strip()
        assert re.fullmatch("[0-9a-z]{25}", made)
        assert "already exists" in docker(of, "create", "key", "-", input="x", status=1).err
        assert docker.lines(of, "ls", "--format", "{{.Name}}", "-f", "label=a=b") == ["key"]
        assert inspected(docker, of, "inspect", "key")["ID"] == made
        assert "key" in docker(of, "inspect", "--pretty", "key").out
    service(
        docker,
        *("--name", "web", "--secret", "source=key,target=inner,mode=0400", "--config", "source=key,target=/etc/key"),
        *("busybox", "sleep", "99999"),
    )
    running(docker, "web", 1)
    [container] = docker.lines("ps", "-q", "-f", "label=com.docker.swarm.service.name=web")
    assert docker("exec", container, "cat", "/run/secrets/inner", "/etc/key").out == "hiddenhidden"
    assert "in use by the following service: web" in docker("secret", "rm", "key", status=1).err
    docker("service", "update", "-d", "--no-resolve-image", "--secret-rm", "key", "--config-rm", "key", "web")
    for of in ("secret", "config"):
        assert docker(of, "rm", "key").out == "key\n" or docker(of, "ls", "-q").out == ""


EVERY_OPTION = """
--cap-add NET_ADMIN --cap-drop CHOWN --config source=made,target=/etc/made --secret key
--constraint engine.labels.rack==7 --container-label a=b --dns 10.1.1.1 --dns-option ndots:2
--dns-search x.org --endpoint-mode dnsrr --entrypoint sh --env A=b --generic-resource gpu=1
--group 20 --health-cmd true --health-interval 1s --health-retries 2 --health-start-period 1s
--health-timeout 1s --host db:10.1.1.2 --hostname h-{{.Task.Slot}} --init --label l=m
--limit-cpu 0.5 --limit-memory 50M --limit-pids 20 --log-driver json-file --log-opt max-size=1m
--mount type=bind,src=/tmp,dst=/host,ro --mount type=volume,dst=/anonymous
--mount type=tmpfs,dst=/t,tmpfs-size=1m,tmpfs-mode=0700 --network bridge
--placement-pref spread=node.labels.dc --read-only --replicas-max-per-node 1 --reserve-cpu 0.1
--reserve-memory 10M --restart-condition on-failure --restart-delay 1s --restart-max-attempts 3
--restart-window 5s --rollback-delay 1s --rollback-failure-action continue
--rollback-max-failure-ratio 0.2 --rollback-monitor 1s --rollback-order start-first
--rollback-parallelism 2 --stop-signal SIGTERM --sysctl net.core.somaxconn=50 --tty
--ulimit nofile=100:200 --update-delay 1s --update-failure-action rollback
--update-max-failure-ratio 0.1 --update-monitor 1s --update-order start-first
--update-parallelism 1 --user 0 --workdir /tmp
"""
UNDO = """
--cap-drop NET_ADMIN --config-rm made --secret-rm key --constraint-rm engine.labels.rack==7
--container-label-rm a --dns-rm 10.1.1.1 --env-rm A --env-add Z=y --generic-resource-rm gpu
--host-rm db:10.1.1.2 --label-rm l --mount-rm /anonymous --network-rm bridge --network-add host
--placement-pref-rm spread=node.labels.dc --sysctl-rm net.core.somaxconn --ulimit-rm nofile
--hostname other --no-healthcheck --limit-memory 60M --replicas-max-per-node 0 --restart-delay 0s
--update-order stop-first --update-delay 0s
"""


@oldest_and_newest
def test_every_option(docker: Docker, node: Node) -> None:
    template = '{{.Service.Name}} {{.Task.Slot}} {{secret "key"}} {{env "A"}}'
    docker("config", "create", "--template-driver", "golang", "made", "-", input=template)
    docker("secret", "create", "key", "-", input="hidden")
    service(docker, "--name", "full", *EVERY_OPTION.split(), "busybox", "-c", "cat /etc/made; echo; exec sleep 9999")
    running(docker, "full", 1)
    until("it is logged", lambda: docker("service", "logs", "--raw", "full").out.strip() == "full 1 hidden b")
    [task] = node.tasks("full")
    found = node.inspect(task["Status"]["ContainerStatus"]["ContainerID"])
    assert "DOCKER_RESOURCE_GPU=1" in found["Config"]["Env"] and found["Config"]["Hostname"] == "h-1"
    assert found["HostConfig"]["PidsLimit"] == 20 and found["HostConfig"]["Dns"] == ["10.1.1.1"]
    docker("service", "update", "-d", "--no-resolve-image", *UNDO.split(), "full")
    until("another task runs", lambda: [each for each in node.running("full") if each["ID"] != task["ID"]])
    spec = inspected(docker, "service", "inspect", "full")["Spec"]["TaskTemplate"]
    assert spec["ContainerSpec"]["Env"] == ["Z=y"] and len(spec["ContainerSpec"]["Mounts"]) == 2
    assert not {"Secrets", "Configs", "Sysctls", "Ulimits", "Hosts"} & set(spec["ContainerSpec"])
    assert spec["Networks"] == [{"Target": "host"}] and spec["Resources"]["Limits"]["MemoryBytes"] == 60 << 20


STACK = """
version: "3.8"
services:
  web:
    image: busybox
    command: ["sleep", "99999"]
    stop_grace_period: 0s
    networks: [host]
    environment: {A: b}
    deploy:
      replicas: 2
      labels: {tier: front}
      resources: {limits: {memory: 32M}}
      restart_policy: {condition: any, delay: 1s}
      update_config: {parallelism: 2, order: stop-first}
    configs: [settings]
    secrets: [key]
    volumes: [data:/data]
  all:
    image: busybox
    command: ["sleep", "99999"]
    stop_grace_period: 0s
    networks: [host]
    deploy: {mode: global}
networks:
  host: {external: true, name: host}
configs:
  settings: {file: ./settings}
secrets:
  key: {file: ./key}
volumes:
  data: {}
"""


@oldest_and_newest
def test_stacks(docker: Docker, node: Node, tmp_path: Path) -> None:
    (tmp_path / "stack.yml").write_text(STACK)
    for name in ("settings", "key"):
        (tmp_path / name).write_text(name)
    deploy = ("stack", "deploy", "--resolve-image", "never", *(("--detach=true",) if docker.minor >= 45 else ()))
    docker(*deploy, "-c", "stack.yml", "shop", cwd=tmp_path)
    assert len(running(docker, "shop_web", 2)) == 2 and len(running(docker, "shop_all", 1)) == 1
    [line] = docker.lines("stack", "ls", "--format", "{{.Name}} {{.Services}}")
    assert line == "shop 2"
    assert sorted(docker.lines("stack", "services", "--format", "{{.Name}} {{.Replicas}}", "shop")) == [
        "shop_all 1/1",
        "shop_web 2/2",
    ]
    assert len(docker.lines("stack", "ps", "-q", "shop")) == 3
    before = node.tasks("shop_web")
    docker(*deploy, "-c", "stack.yml", "shop", cwd=tmp_path)
    time.sleep(1)
    assert {task["ID"] for task in node.tasks("shop_web")} == {task["ID"] for task in before}, "nothing has changed"
    (tmp_path / "stack.yml").write_text(STACK.replace("A: b", "A: c"))
    docker(*deploy, "-c", "stack.yml", "shop", cwd=tmp_path)
    until("both are updated", lambda: not {t["ID"] for t in node.running("shop_web")} & {t["ID"] for t in before}, 60)
    removed = docker("stack", "rm", "shop")
    assert "Removing service shop_web" in removed.out + removed.err
    until("all is removed", lambda: docker("service", "ls", "-q").out + docker("secret", "ls", "-q").out == "")
    docker("volume", "rm", "-f", "shop_data", status=None)


def test_events(docker: Docker) -> None:
    since = str(time.time())
    service(docker, "--name", "web", "busybox", "sleep", "9999")
    running(docker, "web", 1)
    docker("service", "rm", "web")
    time.sleep(0.5)
    lines = docker.lines("events", "--since", since, "--until", str(time.time()), "--filter", "scope=swarm")
    found = [line for line in lines if " service " in line]
    assert " service create " in found[0] and " service remove " in found[-1] and "name=web" in found[0]


def test_refusals(docker: Docker) -> None:
    for arguments, words in (
        (("--publish", "8080:80", "--publish", "8080:81"), "8080"),
        (("--network", "no-such"), "no-such"),
        (("--constraint", "node.role"), "node.role"),
        (("--limit-memory", "1k"), "emory"),
        (("--secret", "no-such"), "no-such"),
    ):
        assert (
            words
            in service(docker, *arguments, "busybox", status=1)
            + docker("service", "create", "-d", "--no-resolve-image", *arguments, "busybox", status=1).err
        )
    assert docker.lines("service", "ls", "-q") == []


@pytest.mark.parametrize("docker", (programs.BOOKWORM,), indirect=True, ids=("bookworm",))
def test_a_cli_of_1_24(docker: Docker, node: Node) -> None:
    """The `docker` fixture makes the swarm. `node.docker` runs a CLI at API version 1.24."""
    node.docker("service", "create", "--name", "web", "--stop-grace-period", "0s", "busybox", "sleep", "99999")
    running(docker, "web", 1)
    assert node.docker("service", "ls").out.splitlines()[1].split()[1:4] == ["web", "replicated", "1/1"]
    node.docker("service", "update", "--env-add", "A=b", "web")
    node.docker("service", "scale", "web=2")
    running(docker, "web", 2)
    pretty = node.docker("service", "inspect", "--pretty", "web").out
    assert "Replicas:\t2" in pretty and "A=b" in pretty
    node.docker("node", "update", "--label-add", "a=b", node.node_id)
    assert "a=b" in node.docker("node", "inspect", "--pretty", "self").out
    assert "web.1" in node.docker("node", "ps").out
    assert "web.1" in node.docker("service", "ps", "web").out
    node.docker("service", "rm", "web")
