"""A swarm of three managers and two workers under random faults, with services that change.

    python -m tests.soak.swarm [--minutes 10] [--seed N]

Kills of managers, of etcd and daemons, stopped processes, links that are down, packets that pass in
one direction only; services are created, scaled, updated and removed, nodes are drained. At the end
everything is healed, and these must hold:

- one leader; all managers are reachable and have the same records
- each service has one running task for each slot, and as many as it should have
- each running task has one running container, on its node, and no other task container runs
- each network's namespace leads to the running tasks on it and to nothing else, on each node that
  has one; every node leads its published ports to all running tasks of the service

Prints each action, and the seed that repeats the choices.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.support.engine import packets
from tests.support.engine.harness import until
from tests.support.swarm.clusters import SERVER, VERSION, Cluster, Node
from tests.support.swarm.networks import host_names, overlay, published, until_overlays, until_routed

MANAGERS = 3
NETWORK = "net"
PORTS = 8000
"""The first service with a published port has the next one."""
CALM = 120.0
"""Seconds until everything must hold after the last fault."""


class Soak:
    """One run. Calls `say` with a line for each action."""

    def __init__(self, cluster: Cluster, chance: random.Random, say: Callable[[str], None]) -> None:
        self.cluster, self.chance, self.say = cluster, chance, say
        self.names: set[str] = set()
        self.numbers = 0
        self.drained = ""
        self.heals: list[tuple[float, Callable[[], None]]] = []

    @property
    def managers(self) -> list[Node]:
        return self.cluster.nodes[:MANAGERS]

    def run(self, seconds: float) -> None:
        self.say("form")
        self.cluster.form(MANAGERS).network(NETWORK)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self._heal(time.monotonic())
            if self.chance.random() < 0.5:
                self._change()
            else:
                self._fault()
            time.sleep(self.chance.random() * 3)  # how far the swarm recovers varies too
        self._heal(float("inf"))

    def _heal(self, until_: float) -> None:
        due = [heal for at, heal in self.heals if at <= until_]
        self.heals = [(at, heal) for at, heal in self.heals if at > until_]
        for heal in due:
            heal()

    # --- requests of users ------------------------------------------------------------------------

    def _change(self) -> None:
        """One request at a manager. Without quorum it may fail, though it was carried out."""
        node = self.chance.choice(self.managers)
        names = sorted(self.names)
        verb = self.chance.choice(["create", "scale", "scale", "update", "remove", "drain"])
        with contextlib.suppress(AssertionError, OSError):
            if verb == "create" and len(names) < 4:
                self.numbers += 1
                name, replicas = f"s{self.numbers}", self.chance.randrange(1, 6)
                self.say(f"create {name} {replicas} at {node.address}")
                self.names.add(name)
                if self.numbers % 2:
                    port = published((PORTS + self.numbers, 80))
                    node.service(name, *SERVER, replicas=replicas, template=overlay(NETWORK), EndpointSpec=port)
                else:
                    node.service(name, replicas=replicas)
            elif verb == "scale" and names:
                name, replicas = self.chance.choice(names), self.chance.randrange(0, 7)
                self.say(f"scale {name} {replicas} at {node.address}")
                self._update(node, name, lambda spec: spec["Mode"]["Replicated"].update(Replicas=replicas))
            elif verb == "update" and names:
                name, value = self.chance.choice(names), self.chance.randrange(1 << 30)
                self.say(f"update {name} at {node.address}")
                self._update(
                    node, name, lambda spec: spec["TaskTemplate"]["ContainerSpec"].update(Env=[f"VALUE={value}"])
                )
            elif verb == "remove" and len(names) > 2:
                name = self.chance.choice(names)
                self.say(f"remove {name} at {node.address}")
                self.names.discard(name)
                node.ask("DELETE", f"/services/{name}", timeout=30)
            elif verb == "drain":
                worker = self.cluster.nodes[-1]
                wish = "active" if self.drained else "drain"
                self.say(f"{wish} {worker.address} at {node.address}")
                self.drained = "" if self.drained else worker.node_id
                now = node.ask("GET", f"/nodes/{worker.node_id}")
                path = f"/nodes/{worker.node_id}/update?version={now['Version']['Index']}"
                node.ask("POST", path, now["Spec"] | {"Availability": wish}, timeout=30)

    def _update(self, node: Node, name: str, change: Callable[[Any], None]) -> None:
        now = node.ask("GET", f"/services/{name}")
        change(now["Spec"])
        path = f"/v{VERSION}/services/{name}/update?version={now['Version']['Index']}"
        node.request("POST", path, now["Spec"], timeout=30)

    # --- faults -----------------------------------------------------------------------------------

    def _fault(self) -> None:
        kinds: list[Callable[[], None]] = [self._kill, self._kill, self._daemon, self._freeze, self._unplug, self._drop]
        self.chance.choice(kinds)()

    def _kill(self) -> None:
        node = self.chance.choice(self.managers)
        what = self.chance.choice(["manager", "etcd"])
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(node.manager_pid() if what == "manager" else node.etcd_pid(), signal.SIGKILL)
            self.say(f"kill {what} of {node.address}")

    def _daemon(self) -> None:
        node = self.chance.choice(self.cluster.nodes)
        self.say(f"kill daemon of {node.address}")
        node.kill9()
        time.sleep(self.chance.random() * 2)  # how much the others notice varies too
        node.start()

    def _freeze(self) -> None:
        node = self.chance.choice(self.managers)
        whole = self.chance.random() < 0.5
        with contextlib.suppress(AssertionError):
            pids = [node.manager_pid()] + ([node.etcd_pid()] if whole else [])
            seconds = 2 + self.chance.random() * 8
            self.say(f"stop {'manager and etcd' if whole else 'manager'} of {node.address} for {seconds:.1f} s")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            self._later(seconds, lambda: _go_on(pids))

    def _unplug(self) -> None:
        node = self.chance.choice(self.cluster.nodes)
        seconds = 2 + self.chance.random() * 20
        self.say(f"unplug {node.address} for {seconds:.1f} s")
        node.unplug()
        self._later(seconds, node.plug)

    def _drop(self) -> None:
        one, other = self.chance.sample(self.cluster.nodes, 2)
        share = self.chance.choice([0.2, 1.0])
        seconds = 2 + self.chance.random() * 15
        self.say(f"drop {share:.0%} from {other.address} at {one.address} for {seconds:.1f} s")
        one.heal()
        one.drop_from(other, share=share)
        self._later(seconds, one.heal)

    def _later(self, seconds: float, heal: Callable[[], None]) -> None:
        self.heals.append((time.monotonic() + seconds, heal))

    # --- conditions at the end --------------------------------------------------------------------

    def settle(self) -> None:
        """Raises AssertionError with the failed condition, unless all hold within `CALM`."""
        problem = "nothing was looked at"
        ends = time.monotonic() + CALM
        while time.monotonic() < ends:
            try:
                problem = self._problem()
            except (AssertionError, OSError, StopIteration) as error:
                problem = f"{type(error).__name__}: {error}"
            if not problem:
                return
            time.sleep(1)  # each look asks every node for all records
        raise AssertionError(problem)

    def _problem(self) -> str:
        """The first condition that does not hold, or ""."""
        seen = []
        for node in self.managers:
            nodes = node.nodes()
            found = [each["ManagerStatus"] for each in nodes.values() if "ManagerStatus" in each]
            if sum(bool(each.get("Leader")) for each in found) != 1 or len(found) != MANAGERS:
                return f"managers that {node.address} lists: {found}"
            if any(each["Reachability"] != "reachable" for each in found):
                return f"managers that {node.address} lists: {found}"
            down = [each["Status"] for each in nodes.values() if each["Status"]["State"] != "ready"]
            if down:
                return f"nodes that are not ready at {node.address}: {down}"
            services = {each["ID"]: each for each in node.ask("GET", "/services")}
            tasks = {each["ID"]: each["Version"]["Index"] for each in node.tasks(desired="")}
            seen.append((sorted((key, each["Version"]["Index"]) for key, each in services.items()), tasks))
        if not seen[0] == seen[1] == seen[2]:
            return "the managers have different records"
        return self._tasks(services) or self._containers() or self._networks(services)

    def _tasks(self, services: dict[str, Any]) -> str:
        tasks = self.managers[0].tasks()
        for key, service in services.items():
            of = [task for task in tasks if task["ServiceID"] == key]
            wanted = service["Spec"]["Mode"]["Replicated"]["Replicas"]
            runs = [task for task in of if task["Status"]["State"] == "running"]
            slots = Counter(task["Slot"] for task in of)
            if len(of) != wanted or len(runs) != wanted or max(slots.values(), default=1) > 1:
                states = [(task["Slot"], task["Status"]["State"], task["Status"].get("Err", "")) for task in of]
                return f"{service['Spec']['Name']}: {wanted} tasks wanted, there are {states}"
        strangers = [task["ID"] for task in tasks if task["ServiceID"] not in services]
        return f"tasks of no service: {strangers}" if strangers else ""

    def _containers(self) -> str:
        wanted = {task["ID"]: task["NodeID"] for task in self.managers[0].running()}
        found: dict[str, str] = {}
        for node in self.cluster.nodes:
            for task in node.task_containers():
                if task in found:
                    return f"task {task} has a container on two nodes"
                found[task] = node.node_id
        if found != wanted:
            strangers, lost = found.keys() - wanted.keys(), wanted.keys() - found.keys()
            return f"containers without a task: {strangers}; tasks without one: {lost}"
        return ""

    def _networks(self, services: dict[str, Any]) -> str:
        first, outside = self.managers[0], self.cluster.outside().place
        tasks = [task for task in first.running() if task.get("NetworksAttachments")]
        until_routed(self.cluster, NETWORK, lambda: tasks, 1)
        for key, service in services.items():
            of = host_names(self.cluster, [task for task in tasks if task["ServiceID"] == key])
            for port in service["Endpoint"].get("Ports") or ():
                for node in self.cluster.nodes:
                    seen = {packets.got(outside, node.address, port["PublishedPort"]) for _ in range(10 * len(of) or 1)}
                    if seen != (of or {""}):
                        return f"port {port['PublishedPort']} of {node.address} is answered by {seen}, not {of}"
        return ""


def _go_on(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _removed(first: Node) -> bool:
    return first.request("DELETE", f"/v{VERSION}/networks/{NETWORK}").status in (204, 404)


def soak(minutes: float, seed: int, say: Callable[[str], None]) -> None:
    began = time.monotonic()

    def timed(text: str) -> None:
        say(f"{time.monotonic() - began:6.1f} {text}")

    with Cluster(5) as cluster:
        run = Soak(cluster, random.Random(seed), timed)
        run.run(minutes * 60)
        timed("healed")
        try:
            run.settle()
        except AssertionError as error:
            logs = "\n".join(f"--- {node.address}\n{node.log()[-8000:]}" for node in cluster.nodes)
            raise AssertionError(f"seed {seed}: {error}\n{logs}") from None
        timed("everything holds")
        first = run.managers[0]
        for service in first.ask("GET", "/services"):
            first.ask("DELETE", f"/services/{service['ID']}")
        until("all containers are gone", lambda: not any(node.task_containers() for node in cluster.nodes), 60)
        until("its network is removed", lambda: _removed(first), 60)
        for node in cluster.nodes:
            until_overlays(node, set())
        timed("nothing is left")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.swarm", description="A swarm under random faults.")
    parser.add_argument("--minutes", type=float, default=10, help="how long [default: 10]")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    try:
        soak(arguments.minutes, arguments.seed, lambda text: print(text, flush=True))
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
