"""compose 2.26 and 2.40 of Debian's newer suites at the versions that they negotiate, and the 1.29
of Debian 12.

A second `up` recreates nothing, a change recreates the service that has changed, and `down -v`
leaves nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients import programs
from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, free_ports, until
from tests.support.nightly import nightly

FILE = """
name: shop
services:
  web:
    image: busybox
    command: httpd -f -h /www
    init: true
    stop_grace_period: 1s
    hostname: web-host
    ports: ["127.0.0.1:{port}:80"]
    environment: {{COLOUR: {colour}}}
    networks:
      front: {{aliases: [shop]}}
      back: {{ipv4_address: 10.211.8.20}}
    depends_on: {{db: {{condition: service_healthy}}, seed: {{condition: service_completed_successfully}}}}
    volumes:
      - pages:/www
      - type: tmpfs
        target: /scratch
        tmpfs: {{size: 1m}}
      - type: bind
        source: ./host
        target: /host
        read_only: true
      - /anonymous
    healthcheck: {{test: ["CMD", "test", "-e", "/www/index.html"], interval: 100ms, start_period: 5s}}
    configs: [{{source: settings, target: /settings}}]
    secrets: [word]
    extra_hosts: ["gateway:host-gateway"]
    cap_drop: [ALL]
    cap_add: [NET_BIND_SERVICE]
    security_opt: ["no-new-privileges:true"]
    ulimits: {{nofile: {{soft: 100, hard: 200}}}}
    sysctls: {{net.core.somaxconn: 64}}
    labels: {{a: b}}
    logging: {{driver: json-file, options: {{max-size: 1m}}}}
    deploy: {{resources: {{limits: {{cpus: "0.5", memory: 32M, pids: 50}}}}}}
    restart: unless-stopped
  db:
    image: busybox
    command: sh -c 'touch /ready; exec sleep 1000'
    stop_grace_period: 0s
    networks: [back]
    healthcheck: {{test: test -e /ready, interval: 100ms, retries: 50}}
    shm_size: 2m
  seed:
    image: busybox
    command: sh -c 'echo words > /www/index.html'
    network_mode: none
    volumes: ["pages:/www"]
  extra:
    image: busybox
    command: sleep 1000
    profiles: [more]
    stop_grace_period: 0s
    networks: [back]
networks:
  front: {{}}
  back: {{internal: true, ipam: {{config: [{{subnet: 10.211.8.0/24, gateway: 10.211.8.1}}]}}}}
volumes:
  pages: {{labels: {{kept: "no"}}}}
configs:
  settings: {{file: ./settings}}
secrets:
  word: {{file: ./word}}
"""


class Shop:
    """A project, its engine, and the compose that runs it."""

    def __init__(self, engine: TempEngine, directory: Path, program: programs.Program) -> None:
        self.engine = engine
        self.directory = directory
        self.program = program
        (self.port,) = free_ports(1)
        (directory / "host").mkdir()
        (directory / "host/file").write_text("host")
        (directory / "settings").write_text("settings")
        (directory / "word").write_text("secret")
        self.write("red")

    def write(self, colour: str, more: str = "") -> None:
        (self.directory / "compose.yaml").write_text(FILE.format(port=self.port, colour=colour) + more)

    def __call__(self, *arguments: str, status: int = 0) -> str:
        done = self.program.run(
            self.engine, "compose", "--ansi", "never", *arguments, cwd=self.directory, status=status, timeout=120
        )
        return done.out

    def ids(self) -> dict[str, str]:
        """Ids of the containers, ended ones too, by service."""
        found = {}
        for line in self("ps", "-a", "--format", "json").splitlines():
            values = json.loads(line)
            found.update({each["Service"]: each["ID"] for each in (values if isinstance(values, list) else [values])})
        return found


@pytest.fixture(params=[*nightly(programs.TRIXIE), programs.FORKY], ids=["2.26", "2.40"])
def shop(request: pytest.FixtureRequest, bare: TempEngine, tmp_path: Path) -> Iterator[Shop]:
    yield Shop(bare, tmp_path, request.param)


def test_the_version(shop: Shop) -> None:
    assert shop("version", "--short").strip().startswith(("2.26", "2.40"))


def test_up_change_and_down(shop: Shop) -> None:
    shop("up", "-d", "--wait")
    first = shop.ids()
    assert set(first) == {"web", "db", "seed"}
    script = (
        "cat /host/file /settings /run/secrets/word; touch /host/x 2>&1; id -u; hostname; echo $COLOUR;"
        "wget -qO - http://shop/; grep -c gateway /etc/hosts; cat /proc/1/comm; ulimit -n;"
        "cat /proc/sys/net/core/somaxconn; ip -4 -o addr | grep -c 10.211.8.20/24"
    )
    said = shop("exec", "-T", "web", "sh", "-c", script)
    assert said.startswith("hostsettingssecret") and "Read-only file system" in said
    init, *rest = said.splitlines()[-4:]
    assert said.splitlines()[1:-4] == ["0", "web-host", "red", "words", "1"]
    assert init not in ("httpd", "sh") and rest == ["100", "64", "1"]

    shop("up", "-d", "--wait")
    assert shop.ids() == first, "nothing has changed"

    shop("exec", "-T", "web", "sh", "-c", "echo kept > /anonymous/file")
    shop.write("blue")
    shop("up", "-d", "--wait")
    second = shop.ids()
    assert {name for name in first if first[name] != second[name]} == {"web"}
    assert shop("exec", "-T", "web", "sh", "-c", "echo $COLOUR; cat /anonymous/file") == "blue\nkept\n"
    assert shop("port", "web", "80").strip() == f"127.0.0.1:{shop.port}"

    shop("--profile", "more", "down", "-v", "-t", "0")
    assert shop.engine.containers() == [] and shop.engine.networks() == {}
    (carried,) = [each["Name"] for each in shop.engine.request("GET", "/volumes").json()["Volumes"]]
    # compose gives the second container the anonymous volume of the first one by its name
    assert shop.engine.request("POST", "/v1.55/volumes/prune").json()["VolumesDeleted"] == [carried]


def test_daily_commands(shop: Shop, tmp_path: Path) -> None:
    shop("--profile", "more", "up", "-d", "--wait", "--scale", "extra=2", "extra", "db")
    assert shop("ps", "-q", "extra").count("\n") == 2
    assert shop("--profile", "more", "ps", "--services").split() == ["db", "extra"]
    shop("up", "-d", "--scale", "extra=1", "extra", "--no-recreate")
    assert shop("ps", "-q", "extra").count("\n") == 1
    assert shop("run", "--rm", "-T", "seed", "echo", "once").strip() == "once"
    shop("run", "--rm", "-T", "db", "sh", "-c", "exit 3", status=3)
    (tmp_path / "sent").write_text("sent")
    shop("cp", str(tmp_path / "sent"), "db:/tmp/")
    assert shop("exec", "-T", "db", "cat", "/tmp/sent") == "sent"
    shop("exec", "-T", "db", "sh", "-c", "exit 4", status=4)
    assert "sleep 1000" in shop("top", "db")
    for command in ("pause", "unpause", "restart", "stop", "start"):
        shop(command, "db")
    assert "db" in shop("images", "db")
    before = shop.ids()["db"]
    shop("up", "-d", "--force-recreate", "--wait", "db")
    assert shop.ids()["db"] != before
    shop("kill", "db")
    shop("--profile", "more", "rm", "-fsv")
    assert set(shop("--profile", "more", "ps", "-aq").split()) == set()
    shop("--profile", "more", "down", "-v")


def test_logs_follow_to_the_end(shop: Shop) -> None:
    said = shop("up", "--no-color", "--exit-code-from", "seed", "seed")
    assert "exited with code 0" in said
    assert shop("logs", "--no-log-prefix", "seed") == ""
    shop("down", "-v")


def test_builds(shop: Shop, clean: TempEngine) -> None:
    # It sleeps since compose reads events and output side by side, and drops output that it has not
    # read when it reads of the container's end.
    (shop.directory / "Dockerfile").write_text(
        "FROM busybox\nARG word\nRUN echo $word > /word\nCMD cat /word; sleep 0.5\n"
    )
    (shop.directory / "compose.yaml").write_text(
        "name: built\nservices:\n  job:\n    build: {context: ., args: {word: said}}\n    image: compose-built\n"
        "    network_mode: none\n"
    )
    shop("build")
    assert "said" in shop("up", "--no-log-prefix")
    first = shop.ids()
    shop("up", "-d", "--build")
    assert shop.ids() == first, "the build came from the cache"
    shop("down", "--rmi", "all")
    assert shop.engine.request("GET", "/images/compose-built/json").status == 404


def test_what_newer_files_ask_for(bare: TempEngine, tmp_path: Path) -> None:
    """Fields of compose files that depend on the version of the API, with the newest compose."""
    shop = Shop(bare, tmp_path, programs.FORKY)
    (tmp_path / "compose.yaml").write_text(
        """
name: newer
services:
  one:
    image: busybox
    command: sleep 1000
    stop_grace_period: 0s
    annotations: {org.example: x}
    cgroup: private
    networks:
      a: {gw_priority: 1, interface_name: first0, mac_address: "02:42:0a:d3:09:05"}
      b: {interface_name: second0}
    volumes:
      - {type: image, source: busybox, target: /image}
      - {type: volume, source: data, target: /sub, volume: {subpath: dir}}
      - {type: bind, source: ./made, target: /made, bind: {create_host_path: true}}
    healthcheck: {test: ["CMD", "true"], interval: 30s, start_period: 10s, start_interval: 100ms}
    depends_on: {prepare: {condition: service_completed_successfully}}
  prepare:
    image: busybox
    command: mkdir -p /data/dir
    network_mode: none
    volumes: ["data:/data"]
networks:
  a: {ipam: {config: [{subnet: 10.211.9.0/24}]}}
  b: {}
volumes: {data: {}}
"""
    )
    shop("up", "-d", "--wait")
    first = shop.ids()
    script = "ls /image/bin/busybox; cat /sys/class/net/first0/address; ip route | grep default; ls -d /made /sub"
    said = shop("exec", "-T", "one", "sh", "-c", script).splitlines()
    assert said[:2] == ["/image/bin/busybox", "02:42:0a:d3:09:05"] and "first0" in said[2]
    assert said[3:] == ["/made", "/sub"] and (tmp_path / "made").is_dir()
    shop("up", "-d", "--wait")
    assert shop.ids() == first
    shop("down", "-v")


# --- 1.29 -----------------------------------------------------------------------------------------


@pytest.fixture
def compose(bare: TempEngine, tmp_path: Path) -> Callable[..., str]:
    """docker-compose 1.29, which speaks the newest version that /version names."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DOCKER_", "COMPOSE_"))}
    environment = kept | {"DOCKER_HOST": f"unix://{bare.socket}", "DOCKER_CONFIG": str(bare.base / "docker")}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            ["docker-compose", "--no-ansi", *arguments],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120 * PATIENCE,
            check=False,
        )
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    return run


OLD = """
version: "3.8"
services:
  web:
    image: busybox
    command: httpd -f -h /etc
    init: true
    ports: ["{port}:80"]
    networks: {{default: {{aliases: [shop]}}, other: {{}}}}
    volumes: ["data:/data", "/anonymous", {{type: tmpfs, target: /scratch}}]
    healthcheck: {{test: "true", interval: 1s, start_period: 1s}}
    stop_grace_period: 0s
  seed:
    image: busybox
    command: sh -c 'echo {word} > /data/word'
    network_mode: none
    volumes: ["data:/data"]
networks: {{other: {{}}}}
volumes: {{data: {{}}}}
"""


def test_compose_1_29(bare: TempEngine, compose: Callable[..., str], tmp_path: Path) -> None:
    (port,) = free_ports(1)

    def write(word: str) -> None:
        (tmp_path / "docker-compose.yml").write_text(OLD.format(port=port, word=word))

    def ids() -> dict[str, str]:
        listed = bare.request("GET", "/containers/json?all=1").json()
        return {each["Labels"]["com.docker.compose.service"]: each["Id"] for each in listed}

    write("one")
    compose("up", "-d")
    first = ids()
    until("the volume has its file", lambda: compose("exec", "-T", "web", "ls", "/data") == "word\n")
    assert compose("exec", "-T", "web", "wget", "-qO", "-", "http://shop/passwd").startswith("root:")
    compose("up", "-d")
    assert ids() == first
    write("two")
    compose("up", "-d")
    assert {name for name in first if first[name] != ids()[name]} == {"seed"}
    assert "Up" in compose("ps")
    assert compose("run", "--rm", "seed", "echo", "once").strip() == "once"
    compose("down", "-v")
    assert bare.containers() == [] and bare.request("GET", "/volumes").json()["Volumes"] == []
