"""compose 1.29 (Debian's docker-compose) drives the engine: a shop of three services on two
networks, with traffic by names and by ports."""

from __future__ import annotations

import os
import socket
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, free_ports, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# With file format 2.1 compose speaks API 1.24.
SHOP = """
version: "2.1"
services:
  web:
    image: busybox
    command: sh -c 'mkdir -p /www; hostname > /www/index.html; exec httpd -f -h /www'
    hostname: web-host
    ports: ["{everywhere}:80", "127.0.0.1:{loopback}:80", "80"]
    networks:
      front: {{aliases: [shop, www]}}
      back: {{ipv4_address: {subnet}.20}}
    depends_on: [api]
    stop_signal: SIGKILL
    volumes: [pages:/pages]
  api:
    image: busybox
    command: sh -c 'mkdir -p /www; hostname > /www/index.html; exec httpd -f -h /www -p 8000'
    expose: ["8000"]
    networks:
      back: {{aliases: [backend]}}
    links: ["db:database"]
    depends_on: [db]
    stop_signal: SIGKILL
  db:
    image: busybox
    command: sh -c 'while :; do echo -n pong | nc -l -p 5432; done'
    networks: [back, outer]
    stop_signal: SIGKILL
networks:
  front: {{}}
  back:
    driver_opts: {{com.docker.network.driver.mtu: "1400"}}
    ipam: {{config: [{{subnet: {subnet}.0/24, gateway: {subnet}.1, ip_range: {subnet}.128/25}}]}}
  outer: {{external: {{name: of-others}}}}
volumes:
  pages: {{}}
"""

SIDE = """
version: "2.1"
services:
  web:
    image: busybox
    command: httpd -f -h /etc
    stop_signal: SIGKILL
  side:
    image: busybox
    command: sleep 1000
    network_mode: "service:web"
    stop_signal: SIGKILL
  alone:
    image: busybox
    command: sleep 1000
    network_mode: none
    stop_signal: SIGKILL
"""


class Project:
    """A directory with a compose file."""

    def __init__(self, engine: TempEngine, directory: Path, file: str) -> None:
        self.engine = engine
        self.directory = directory
        directory.mkdir()
        (directory / "docker-compose.yml").write_text(file)

    def __call__(self, *arguments: str) -> str:
        """The stdout of `docker-compose ARGUMENTS`. Raises AssertionError if it fails."""
        done = self._run(arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def fails(self, *arguments: str) -> str:
        """The error output of `docker-compose ARGUMENTS`, which must fail."""
        done = self._run(arguments)
        assert done.returncode != 0, (arguments, done.stdout, done.stderr)
        return done.stderr

    def _run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker-compose", "--no-ansi", *arguments],
            cwd=self.directory,
            env=self.engine.environment | {"COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def exec(self, service: str, *command: str) -> str:
        return self("exec", "-T", service, *command)

    def serves(self, service: str, url: str, words: str) -> None:
        """Wait until a service gets an answer from `url`, and assert that it contains `words`."""
        self.exec(
            service, "sh", "-c", f"for i in $(seq 300); do wget -qO /tmp/got {url} && exit; sleep 0.1; done; exit 1"
        )
        assert self.exec(service, "cat", "/tmp/got").strip() == words


def fetched(port: int | str) -> str:
    """The response of 127.0.0.1 at that port. Waits until there is one."""
    found: list[str] = []

    def asked() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5 * PATIENCE) as answer:
                found.append(answer.read().decode().strip())
        except OSError:
            return False
        return True

    until(f"port {port} answers", asked)
    return found[0]


@pytest.mark.nightly
def test_a_shop(own_engine: TempEngine, tmp_path: Path) -> None:
    ports = dict(zip(("everywhere", "loopback"), free_ports(2), strict=True))
    shop = Project(own_engine, tmp_path / "shop", SHOP.format(subnet="10.219.77", **ports))
    assert "of-others declared as external" in shop.fails("up", "-d")
    own_engine.docker("network", "create", "of-others")
    before = own_engine.footprint()
    shop("up", "-d")

    # by names, aliases, links and addresses; only across a common network
    api = shop.exec("api", "hostname").strip()
    for name in ("api", "backend", "shop_api_1", api):
        shop.serves("web", f"http://{name}:8000/", api)
    assert shop.exec("api", "nc", "database", "5432") == "pong"
    for name in ("web", "10.219.77.20"):
        shop.serves("api", f"http://{name}/", "web-host")
    for service, name in (("db", "shop"), ("api", "www")):
        assert "bad address" in shop.fails("exec", "-T", service, "wget", "-qO-", f"http://{name}/")
    assert "mtu 1400" in shop.exec("api", "ip", "link", "show", "eth0")

    # by ports
    chosen = own_engine.inspect("shop_web_1")["NetworkSettings"]["Ports"]["80/tcp"]
    assert {fetched(binding["HostPort"]) for binding in chosen} == {"web-host"}
    assert {int(binding["HostPort"]) for binding in chosen} > set(ports.values())
    assert shop("port", "web", "80").strip() in [f"0.0.0.0:{each['HostPort']}" for each in chosen]
    assert f"127.0.0.1:{ports['loopback']}->80/tcp" in shop("ps")

    # several containers of one service: its name resolves to all of them, in turn
    shop("up", "-d", "--scale", "api=3")
    names = {own_engine.inspect(f"shop_api_{number}")["Config"]["Hostname"] for number in (1, 2, 3)}
    for name in names:
        shop.serves("web", f"http://{name}:8000/", name)
    asked = Counter(shop.exec("web", "wget", "-qO-", "http://api:8000/").strip() for _ in range(9))
    assert set(asked) == names
    shop("scale", "api=1")
    shop.serves("web", "http://api:8000/", api)

    # the same containers restarted, and then other ones with the same addresses
    shop("restart")
    assert fetched(ports["everywhere"]) == "web-host"
    shop.serves("web", "http://backend:8000/", api)
    shop("up", "-d", "--force-recreate")
    assert fetched(ports["loopback"]) == "web-host"
    shop.serves("web", "http://backend:8000/", shop.exec("api", "hostname").strip())
    assert "Address already in use: 10.219.77.20" in shop.fails("run", "--rm", "web", "true")
    shop("run", "--rm", "api", "wget", "-qO-", "http://web/")
    shop("stop", "web")
    shop("start", "web")
    assert fetched(ports["everywhere"]) == "web-host"
    assert "httpd" in shop("top")
    shop("logs")

    shop("down", "-v")
    own_engine.assert_settles(before)
    assert set(own_engine.networks()) == {"of-others"}
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", ports["everywhere"]), 5)


def test_one_network_for_two(own_engine: TempEngine, tmp_path: Path) -> None:
    project = Project(own_engine, tmp_path / "project", SIDE)
    project("up", "-d")
    web = project.exec("web", "hostname").strip()
    project.serves("side", "http://127.0.0.1/hostname", web)
    assert project.exec("side", "ip", "-o", "address") == project.exec("web", "ip", "-o", "address")
    assert "eth0" not in project.exec("alone", "ip", "link")
    project("stop")
    project("start")
    project.serves("web", "http://127.0.0.1/hostname", web)
    project("down")
    assert own_engine.networks() == {}
