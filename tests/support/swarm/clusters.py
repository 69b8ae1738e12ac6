"""Several engines on one host, each in a network namespace of its own, as the nodes of a swarm.

The namespaces are on one bridge with the addresses 10.77.0.1, 10.77.0.2 …, which are never routed.
Links between them can be cut in each direction. Like `harness`, this sees engines from outside
only. `packets` looks into their networks.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engine.system import namespaces
from tests.support.engine import client, packets
from tests.support.engine.harness import TempEngine, kill_and_wait, until

NET = "10.77.0"
SECOND = 1_000_000_000
VERSION = "1.44"
"""API version of the requests here, unless a test asks in another one."""

WEB = """
mkdir -p /tmp/w/cgi-bin; cd /tmp/w; hostname > index.html
printf '#!/bin/sh\nprintf "Content-Type: text/plain\\\\r\\\\n\\\\r\\\\n$REMOTE_ADDR"\n' > cgi-bin/who
chmod +x cgi-bin/who
nc -ll -p 81 -e cat &
nc -ll -p 82 -e cat /dev/zero &
"""
SERVER = ("sh", "-c", f"{WEB} exec httpd -f -p 80 -h /tmp/w")
"""Answers / on port 80 with its host name and /cgi-bin/who with its peer's address; echoes on port
81; sends zeros on port 82.
"""
DRAINING = ("sh", "-c", f"trap 'sleep 1; exit 0' TERM; {WEB} httpd -f -p 80 -h /tmp/w & wait")
"""The same, and serves for another second after SIGTERM. Needs a StopGracePeriod."""
LISTENS = {
    "Test": ["CMD-SHELL", "wget -q -O /dev/null http://127.0.0.1/"],
    "Interval": 30 * SECOND,
    "Timeout": 20 * SECOND,
    "StartPeriod": 60 * SECOND,
    "StartInterval": SECOND // 5,
    "Retries": 3,
}
"""A Healthcheck of both, so that a task is running when it listens."""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


class Host:
    """A network namespace on the bridge."""

    def __init__(self, number: int, bridge: str) -> None:
        """`number`, from 1, is the last byte of the host's address."""
        self.address = f"{NET}.{number}"
        with namespaces.new_network() as self.namespace:
            pass
        self.place = f"/proc/{os.getpid()}/fd/{self.namespace}"
        self.link = f"sw{secrets.token_hex(4)}"
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.place)
        run("ip", "link", "set", self.link, "master", bridge, "up")
        for command in (
            "ip link set lo up",
            "ip link set eth0 up",
            f"ip address add {self.address}/24 dev eth0",
        ):
            self.inside(*command.split())

    def inside(self, *command: str) -> str:
        """Run a command in the network namespace of this host."""
        return run("nsenter", f"--net={self.place}", *command)

    def remove(self) -> None:
        with contextlib.suppress(AssertionError):
            run("ip", "link", "delete", self.link)
        os.close(self.namespace)

    # --- its link ---------------------------------------------------------------------------------

    def unplug(self) -> None:
        run("ip", "link", "set", self.link, "down")

    def plug(self) -> None:
        run("ip", "link", "set", self.link, "up")

    def drop_from(self, *others: Host, share: float = 1.0) -> None:
        """Drop what comes from these hosts, or a share of it, until `heal`."""
        rules = ["add table inet cut", "add chain inet cut in { type filter hook input priority -300; }"]
        chance = "" if share >= 1 else f"numgen random mod 100 < {round(share * 100)} "
        rules += [f"add rule inet cut in ip saddr {other.address} {chance}drop" for other in others]
        self._nft("; ".join(rules))

    def heal(self) -> None:
        with contextlib.suppress(AssertionError):  # nothing was cut
            self._nft("delete table inet cut")

    def _nft(self, rules: str) -> None:
        """Through libnftables, as the program may not be installed."""
        script = (
            "import ctypes, sys; nft = ctypes.CDLL('libnftables.so.1'); nft.nft_ctx_new.restype = ctypes.c_void_p;"
            "sys.exit(nft.nft_run_cmd_from_buffer(ctypes.c_void_p(nft.nft_ctx_new(0)), sys.argv[1].encode()) != 0)"
        )
        self.inside("python3", "-c", script, rules)


class Node(Host, TempEngine):
    """One engine on a host of its own."""

    def __init__(self, number: int, bridge: str, *arguments: str) -> None:
        """`number` as of `Host`; `arguments` for `serve`."""
        Host.__init__(self, number, bridge)
        TempEngine.__init__(self, *arguments, within=("nsenter", f"--net={self.place}"))
        self.node_id = ""

    def close(self) -> None:
        """As `TempEngine.close`, and removes the host."""
        try:
            super().close()
        finally:
            self.remove()

    def assert_gone(self) -> None:
        """As `TempEngine.assert_gone`, and the host has no link but its own."""
        super().assert_gone()
        surplus: set[str] = set()

        def none() -> bool:
            surplus.clear()
            surplus.update(packets.link_names(self.place) - {"lo", "eth0"})
            return not surplus

        try:
            until("no link of networks is left", none)
        except AssertionError as error:
            raise AssertionError(f"{error}: {surplus}\n{self.log()[-3000:]}") from None

    # --- its swarm --------------------------------------------------------------------------------

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        status: int | None = None,
        version: str = VERSION,
        **more: Any,
    ) -> Any:
        """A request, whose JSON is returned. Raises AssertionError unless it has this status, or
        any status below 300.
        """
        answer = self.request(method, f"/v{version}{path}", body, **more)
        wanted = answer.status < 300 if status is None else answer.status == status
        assert wanted, f"{method} {path}: {answer.status} {answer.body[:2000]!r}"
        return json.loads(answer.body) if answer.body.strip() else None

    def swarm_info(self) -> Any:
        """Swarm of /info."""
        return self.ask("GET", "/info")["Swarm"]

    def init(self, **fields: Any) -> str:
        """`docker swarm init` on this host's address; returns the node's id."""
        body = {"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": self.address} | fields
        self.node_id = self.ask("POST", "/swarm/init", body, timeout=60)
        return self.node_id

    def tokens(self) -> Any:
        """Worker and Manager of JoinTokens."""
        return self.ask("GET", "/swarm")["JoinTokens"]

    def join(self, to: Node, *, manager: bool = False, **fields: Any) -> str:
        """`docker swarm join`; returns the node's id."""
        body = {
            "ListenAddr": "0.0.0.0:2377",
            "AdvertiseAddr": self.address,
            "RemoteAddrs": [f"{to.address}:2377"],
            "JoinToken": to.tokens()["Manager" if manager else "Worker"],
        } | fields
        self.ask("POST", "/swarm/join", body, timeout=60)
        self.node_id = str(self.swarm_info()["NodeID"])
        return self.node_id

    def leave(self, *, force: bool = False) -> None:
        self.ask("POST", f"/swarm/leave?force={int(force)}", timeout=60)

    def nodes(self) -> dict[str, Any]:
        """Nodes by id."""
        return {node["ID"]: node for node in self.ask("GET", "/nodes")}

    def update_node(self, node: str, **fields: Any) -> None:
        """Change fields of a node's spec, again when it has changed meanwhile."""

        def changed() -> bool:
            now = self.ask("GET", f"/nodes/{node}")
            answer = self.request(
                "POST", f"/v{VERSION}/nodes/{node}/update?version={now['Version']['Index']}", now["Spec"] | fields
            )
            assert answer.status == 200 or b"out of sequence" in answer.body, answer
            return answer.status == 200

        until(f"node {node} is updated", changed)

    def service(self, name: str, *command: str, replicas: int | None = 1, **fields: Any) -> str:
        """Create a busybox service, global with `replicas=None`; returns its id.

        `container` has fields of ContainerSpec, `template` of TaskTemplate, the rest of the spec.
        """
        container = {"Image": "busybox", "Command": list(command) or ["sleep", "1000000"], "StopGracePeriod": 0}
        template = {"ContainerSpec": container | fields.pop("container", {})} | fields.pop("template", {})
        mode = {"Global": {}} if replicas is None else {"Replicated": {"Replicas": replicas}}
        spec = {"Name": name, "TaskTemplate": template, "Mode": mode} | fields
        return str(self.ask("POST", "/services/create", spec, timeout=60)["ID"])

    def update_service(self, service: str, change: Callable[[Any], None], query: str = "") -> None:
        """Change a service's spec in place, again when it has changed meanwhile."""

        def changed() -> bool:
            now = self.ask("GET", f"/services/{service}")
            change(now["Spec"])
            answer = self.request(
                "POST", f"/v{VERSION}/services/{service}/update?version={now['Version']['Index']}{query}", now["Spec"]
            )
            assert answer.status == 200 or b"out of sequence" in answer.body, answer
            return answer.status == 200

        until(f"service {service} is updated", changed)

    def tasks(self, service: str = "", *, desired: str = "running") -> list[Any]:
        """Tasks of a service, or all, newest first. `desired`: "" for every desired state."""
        filters = ({"service": [service]} if service else {}) | ({"desired-state": [desired]} if desired else {})
        found = self.ask("GET", f"/tasks?filters={quote(json.dumps(filters))}")
        return sorted(found, key=lambda task: str(task["CreatedAt"]), reverse=True)

    def running(self, service: str = "") -> list[Any]:
        """Tasks that should run and do."""
        return [task for task in self.tasks(service) if task["Status"]["State"] == "running"]

    def until_running(self, service: str, count: int, seconds: float = 60.0) -> list[Any]:
        """Wait until exactly `count` tasks of a service should run and do; returns them."""

        def settled() -> tuple[list[Any]] | None:
            tasks = self.tasks(service)
            runs = [task for task in tasks if task["Status"]["State"] == "running"]
            return (tasks,) if len(tasks) == len(runs) == count else None

        try:
            return list(until(f"{count} tasks of {service} run", settled, seconds)[0])
        except AssertionError as error:
            seen = [
                (task.get("Slot"), task["DesiredState"], task["Status"].get("State"), task["Status"].get("Err"))
                for task in self.tasks(service, desired="")
            ]
            raise AssertionError(f"{error}\ntasks: {seen}\n{self.log()[-6000:]}") from None

    def task_containers(self) -> dict[str, Any]:
        """Running containers of tasks on this host, by task id."""
        found = self.ask("GET", "/containers/json?filters=" + quote('{"label":["com.docker.swarm.task.id"]}'))
        return {entry["Labels"]["com.docker.swarm.task.id"]: entry for entry in found}

    # --- its networks -----------------------------------------------------------------------------

    def network(self, name: str, **fields: Any) -> str:
        """Create an overlay network; returns its id."""
        body = {"Name": name, "Driver": "overlay", "CheckDuplicate": True} | fields
        return str(self.ask("POST", "/networks/create", body, status=201)["Id"])

    def virtual_address(self, service: str, network: str) -> str:
        """Of a service on the network with this id."""

        def found() -> str:
            endpoint = self.ask("GET", f"/services/{service}").get("Endpoint") or {}
            known = {each["NetworkID"]: each["Addr"] for each in endpoint.get("VirtualIPs") or ()}
            return str(known.get(network, "")).partition("/")[0]

        return str(until(f"{service} has an address on {network}", found))

    def pid_of(self, task: Any) -> int:
        """Pid of a task's container on this host, as every process here sees it."""
        return int(self.inspect(self.task_containers()[task["ID"]]["Id"])["State"]["Pid"])

    def place_of(self, task: Any) -> str:
        """Path of the network namespace of a task on this host."""
        return f"/proc/{self.pid_of(task)}/ns/net"

    def overlays(self) -> dict[int, str]:
        """Paths of the namespaces of overlay networks here, by VNI, as daemon and monitor hold
        them.
        """
        found = {}
        for pid in (self.pid, self.monitor_pid()):
            for place in packets.held_namespaces(pid):
                for link in packets.links(place):
                    if (vni := link.get("linkinfo", {}).get("info_data", {}).get("id")) is not None:
                        found.setdefault(int(vni), place)
        return found

    # --- its processes ----------------------------------------------------------------------------

    def manager_pid(self) -> int:
        """Pid of the manager's process. Raises AssertionError unless there is one."""
        found = self._running("engine.manager")
        assert len(found) == 1, f"manager processes: {found}"
        return found[0]

    def has_manager(self) -> bool:
        """True while the manager's process runs."""
        return bool(self._running("engine.manager"))

    def etcd_pid(self) -> int:
        found = self._running("etcd")
        assert len(found) == 1, f"etcd processes: {found}"
        return found[0]

    def _running(self, program: str) -> list[int]:
        mark = os.fsencode(self.root) + b"/swarm"
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                named = os.fsencode(program) in words[:4] or os.path.basename(words[0]) == os.fsencode(program)
                if named and any(mark in word for word in words):
                    found.append(int(entry))
        return found

    def kill(self, *programs: str) -> None:
        """kill -9 its "daemon", "manager" (the process) and "etcd", or some of them."""
        if "daemon" in programs:
            self.kill9()
        for program, name in (("manager", "engine.manager"), ("etcd", "etcd")):
            for pid in self._running(name) if program in programs else ():
                kill_and_wait(pid)

    def kill_manager(self) -> None:
        """Send SIGKILL to the manager's process and wait until it has exited."""
        kill_and_wait(self.manager_pid())

    def freeze_manager(self, seconds: float) -> None:
        """SIGSTOP the manager's process and its etcd for so long."""
        pids = [self.manager_pid(), self.etcd_pid()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def power_off(self) -> None:
        """Kill every process of this host at once and lose what is in memory; `start` turns it on
        again.
        """
        self.remember()
        self._demolish()
        shutil.rmtree(self.run)


def address_of(task: Any, network: str) -> str:
    """A task's address on the network with this id or name; "" without one."""
    for each in task.get("NetworksAttachments") or ():
        if network in (each["Network"]["ID"], each["Network"]["Spec"]["Name"]):
            return str(each["Addresses"][0]).partition("/")[0]
    return ""


class Cluster:
    """Hosts on one bridge. A context manager that starts and closes all engines."""

    def __init__(self, count: int, *arguments: str) -> None:
        """`arguments` are those of every engine's `serve`."""
        self.bridge = f"sb{secrets.token_hex(4)}"
        run("ip", "link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
        run("ip", "link", "set", self.bridge, "up")
        self.nodes: list[Node] = []
        self._outside: list[Host] = []
        try:
            for number in range(1, count + 1):
                self.nodes.append(Node(number, self.bridge, *arguments))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        try:
            self._each(Node.start)
            self._each(Node.load_busybox)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            for number, node in enumerate(self.nodes):
                error.add_note(f"log of node {number}:\n{node.log()}")
        self.close()

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]

    def form(self, managers: int) -> Node:
        """Make a swarm: the first `managers` hosts manage, the others work. Returns the first."""
        first = self.nodes[0]
        first.init()
        for node in self.nodes[1:managers]:
            node.join(first, manager=True)
        for node in self.nodes[managers:]:
            node.join(first)
        return first

    def outside(self) -> Host:
        """Another host on the bridge, without an engine."""
        if not self._outside:
            self._outside.append(Host(100, self.bridge))
        return self._outside[0]

    def node_of(self, task: Any) -> Node:
        """The node that a task is on."""
        return next(node for node in self.nodes if node.node_id == task["NodeID"])

    def leader(self, of: Iterable[Node] | None = None) -> Node:
        """The node that leads, as the first that answers says. A leader whose manager has just been
        killed is not taken for one.
        """

        def found() -> Node | None:
            for node in list(of or self.nodes):
                if node.process is None or not node.swarm_info()["ControlAvailable"]:
                    continue
                with contextlib.suppress(AssertionError, OSError):
                    for entry in node.nodes().values():
                        if entry.get("ManagerStatus", {}).get("Leader"):
                            leader = next(each for each in self.nodes if each.node_id == entry["ID"])
                            return leader if leader.has_manager() else None
            return None

        return until("a leader is known", found)

    def all_well(self, managers: int = 3) -> bool:
        """True if every node is ready and so many managers are reachable."""
        try:
            nodes = self[0].nodes().values()
        except (AssertionError, OSError):
            return False
        reachable = [node for node in nodes if node.get("ManagerStatus", {}).get("Reachability") == "reachable"]
        return all(node["Status"]["State"] == "ready" for node in nodes) and len(reachable) == managers

    def containers(self) -> list[set[str]]:
        """Ids of the tasks' containers, by node."""
        return [set(node.task_containers()) for node in self.nodes]

    def cut(self, one: Sequence[Node], other: Sequence[Node]) -> None:
        """No packet passes between the two groups, until `heal`."""
        for node in one:
            node.drop_from(*other)
        for node in other:
            node.drop_from(*one)

    def heal(self) -> None:
        for node in self.nodes:
            node.heal()

    def close(self) -> None:
        """Close every engine, whatever fails, and remove the bridge."""
        try:
            self._each(Node.close)
        finally:
            for host in self._outside:
                host.remove()
            run("ip", "link", "delete", self.bridge)

    def _each(self, work: Callable[[Node], object]) -> None:
        """Do it at all nodes, at once. Raises the first failure when all have ended."""
        with ThreadPoolExecutor(max(len(self.nodes), 1)) as pool:
            done = [pool.submit(work, node) for node in self.nodes]
        for each in done:
            each.result()


__all__ = ["DRAINING", "LISTENS", "NET", "SERVER", "VERSION", "Cluster", "Host", "Node", "client", "run"]
