"""Options of `docker network` and of `docker run --network` that came after 20.10."""

from __future__ import annotations

import json
from typing import Any

from tests.clients.conftest import Docker

OPTION = "driver-opt=com.docker.network.endpoint."


def inspected(docker: Docker, kind: str, name: str) -> Any:
    (found,) = json.loads(docker(kind, "inspect", name).out)
    return found


def test_several_networks(docker: Docker) -> None:
    for name, subnet in (("one", "10.211.16.0/24"), ("two", "10.211.17.0/24")):
        docker("network", "create", "--subnet", subnet, name)
    networks = ["--network", "name=one,ip=10.211.16.9,alias=nick", "--network", "name=two"]
    if docker.minor >= 44:
        networks[3] += ",mac-address=02:42:00:00:06:01"
    if docker.minor >= 48:
        networks[3] += f",gw-priority=1,{OPTION}ifname=back,{OPTION}sysctls=net.ipv4.conf.IFNAME.log_martians=1"
    if docker.minor < 44:
        refused = docker("run", "-d", "--name", "c", *networks, "busybox", "top", status=125)
        assert "cannot be connected to network endpoints: one, two" in refused.err
        docker("run", "-d", "--name", "c", *networks[:2], "busybox", "top")
        docker("network", "connect", "two", "c")
    else:
        docker("run", "-d", "--name", "c", *networks, "busybox", "top")
    seen = inspected(docker, "container", "c")["NetworkSettings"]["Networks"]
    assert seen["one"]["IPAddress"] == "10.211.16.9" and seen["two"]["IPAddress"].startswith("10.211.17.")
    if docker.minor >= 44:
        assert seen["two"]["MacAddress"] == "02:42:00:00:06:01" and "nick" in seen["one"]["DNSNames"]
    if docker.minor >= 48:
        assert "via 10.211.17.1" in docker("exec", "c", "ip", "route", "show", "default").out
        assert docker("exec", "c", "cat", "/proc/sys/net/ipv4/conf/back/log_martians").out == "1\n"
        docker("network", "create", "--subnet", "10.211.18.0/24", "three")
        docker("network", "connect", "--gw-priority", "2", "--driver-opt", f"{OPTION[11:]}ifname=third", "three", "c")
        assert "via 10.211.18.1 dev third" in docker("exec", "c", "ip", "route", "show", "default").out


def test_kinds_of_networks(docker: Docker) -> None:
    docker("network", "create", "--config-only", "--subnet", "10.211.19.0/24", "--label", "a=b", "conf")
    docker("network", "create", "--config-from", "conf", "--scope", "local", "mine")
    shown = inspected(docker, "network", "mine")
    assert shown["IPAM"]["Config"][0]["Subnet"] == "10.211.19.0/24" and shown["ConfigFrom"] == {"Network": "conf"}
    assert "is in use" in docker("network", "rm", "conf", status=1).err
    assert "already exists" in docker("network", "create", "mine", status=1).err
    if docker.minor >= 48:
        docker("network", "create", "--ipv4=false", "--ipv6", "six")
        docker("run", "-d", "--name", "c", "--network", "six", "busybox", "top")
        endpoint = inspected(docker, "container", "c")["NetworkSettings"]["Networks"]["six"]
        assert endpoint["IPAddress"] == "" and endpoint["GlobalIPv6Address"].startswith("fd")
        docker("rm", "-f", "c")
    pruned = docker.lines("network", "prune", "-f", "--filter", "label!=x")
    assert "mine" in pruned and "conf" not in pruned
    docker("network", "rm", "conf")
