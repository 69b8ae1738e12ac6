"""Handlers of swarm, nodes, services, tasks, secrets and configs on a manager that is a fake: what
they ask it, and what they make of its answer in each version.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from engine.api.application import Application
from engine.errors import Conflict, NoSwarm, NotFound, ServerError, Unavailable, WrongState
from engine.http.messages import Reply, StreamReply
from engine.swarm_session.messages import LogLine
from engine.wire.images import DistributionDescriptor, DistributionInspect
from engine.wire.secrets import Secret, SecretSpec
from engine.wire.services import Service, ServiceCreated, ServiceSpec, ServiceUpdated
from engine.wire.swarm import InitRequest, JoinRequest, JoinTokens, Swarm, SwarmSpec
from engine.wire.tasks import ContainerSpec, Task, TaskSpec, TaskStatus
from tests.support.fakes.cluster import FakeCluster
from tests.unit.api.parts import engine, headed, shown

TIMES: dict[str, str] = {"created_at": "2026-01-02T03:04:05Z", "updated_at": "2026-01-02T03:04:06.5Z"}
SPEC = ServiceSpec(name="web", task_template=TaskSpec(container_spec=ContainerSpec(image="busybox", tty=False)))
SERVICE = Service(id="s1", **TIMES, spec=SPEC)
TASK = Task(id="t1", **TIMES, spec=SPEC.task_template, status=TaskStatus(state="orphaned"), desired_state="remove")
encode = msgspec.json.encode


class Registry:
    """Of `engine.remote`: the digest of an image, or its failure."""

    def __init__(self, digest: str = "") -> None:
        self.digest = digest
        self.asked: list[str] = []

    async def described(self, image: str, _credentials: object) -> DistributionInspect:
        self.asked.append(image)
        if not self.digest:
            raise NotFound("no such image")
        return DistributionInspect(
            descriptor=DistributionDescriptor(media_type="m", digest=self.digest, size=1), platforms=[]
        )


class NoNetworks(list[Any]):
    """Of `engine.networks`: this engine has none."""

    def get(self, text: str) -> object:
        raise NotFound(f"network {text} not found")


class Api:
    """One engine's API on a fake membership."""

    def __init__(self, state: str = "active", *, manager: bool = True, digest: str = "") -> None:
        self.cluster = FakeCluster(state, manager=manager)
        self.registry = Registry(digest)
        registry: Any = self.registry
        networks: Any = NoNetworks()
        self.app = Application(dataclasses.replace(engine(), cluster=self.cluster, remote=registry, networks=networks))

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        version: str = "1.55",
        query: str = "",
        headers: dict[str, str] | None = None,
    ) -> Reply | StreamReply:
        content = body if isinstance(body, bytes) else b"" if body is None else encode(body)
        typed = {"Content-Type": "application/json"} | (headers or {})

        async def run() -> Any:
            try:
                return await self.app(  # type: ignore[misc]
                    headed(f"/v{version}{path}", method, query=query, body=content, headers=typed)
                )
            except Exception as error:
                return self.app.error_reply(error)

        reply = asyncio.run(run())
        assert isinstance(reply, Reply | StreamReply)
        return reply

    def json(self, method: str, path: str, body: Any = None, *, status: int = 200, **more: Any) -> Any:
        reply = self.ask(method, path, body, **more)
        assert isinstance(reply, Reply) and reply.status == status, (reply.status, getattr(reply, "body", b""))
        return shown(reply) if reply.body else None

    def sent(self, of: type = dict) -> Any:
        """The body of the last call."""
        return msgspec.json.decode(self.cluster.asked[-1][3], type=of)


def test_nothing_is_loaded_outside_of_a_swarm() -> None:
    """Requests that are refused load nothing either."""
    program = (
        "import sys, engine.daemon; from tests.unit.api.parts import application, ask;"
        "replies = [ask(application(), path).status for path in ('/services', '/info', '/_ping')];"
        "parts = ('engine.manager', 'engine.wire.swarm', 'engine.wire.services', 'engine.api.services',"
        "         'engine.api.versions.swarm', 'cryptography', 'grpc');"
        "print(replies, [name for name in sys.modules if name.startswith(parts)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[503, 200, 200] []\n"


def test_no_manager_is_asked_outside_of_a_swarm() -> None:
    for state, manager in (("inactive", False), ("pending", False), ("active", False)):
        api = Api(state, manager=manager)
        for version, status in (("1.24", 406), ("1.25", 503), ("1.55", 503)):
            found = api.json("GET", "/services", version=version, status=status)
            assert found["message"].startswith("This node is not a swarm manager.")
        assert api.cluster.asked == []


def test_networks_while_the_manager_does_not_serve() -> None:
    api = Api()
    starting = NoSwarm("This node is not a swarm manager: its manager is still starting")
    api.cluster.answers |= dict.fromkeys(("networks.inspect", "networks.create", "networks.remove"), starting)
    for method, path, body in (
        ("GET", "/networks/n", None),
        ("DELETE", "/networks/n", None),
        ("POST", "/networks/create", {"Name": "n", "Driver": "overlay"}),
    ):
        for version, status in (("1.24", 406), ("1.25", 503), ("1.55", 503)):
            found = api.json(method, path, body, version=version, status=status)
            assert found == {"message": starting.message}, (method, path)


@pytest.mark.parametrize(
    ("method", "path", "verb", "name"),
    [
        ("GET", "/swarm", "swarm.inspect", ""),
        ("GET", "/swarm/unlockkey", "swarm.unlockkey", ""),
        ("GET", "/nodes/n", "nodes.inspect", "n"),
        ("GET", "/services/s", "services.inspect", "s"),
        ("GET", "/tasks/t", "tasks.inspect", "t"),
        ("GET", "/secrets/x", "secrets.inspect", "x"),
        ("GET", "/configs/x", "configs.inspect", "x"),
    ],
)
def test_an_answer_is_passed_on(method: str, path: str, verb: str, name: str) -> None:
    """At the newest version byte for byte."""
    api = Api()
    api.cluster.answers[verb] = b'{"ID":"1",  "New":[1]}'
    reply = api.ask(method, path)
    assert isinstance(reply, Reply) and reply.body == b'{"ID":"1",  "New":[1]}\n'
    assert api.cluster.asked[0][:2] == (verb, name)
    api.cluster.answers[verb] = NotFound("it is not found")
    assert api.json(method, path, status=404) == {"message": "it is not found"}


@pytest.mark.parametrize(
    ("path", "verb", "status"),
    [
        ("/nodes/n", "nodes.remove", 200),
        ("/services/s", "services.remove", 200),
        ("/secrets/x", "secrets.remove", 204),
        ("/configs/x", "configs.remove", 204),
    ],
)
def test_removals(path: str, verb: str, status: int) -> None:
    api = Api()
    reply = api.ask("DELETE", path)
    assert isinstance(reply, Reply) and (reply.status, reply.body) == (status, b"")
    assert api.cluster.asked[0][0] == verb
    api.cluster.answers[verb] = Conflict("in use")
    assert api.json("DELETE", path, status=409) == {"message": "in use"}


@pytest.mark.parametrize(
    ("path", "allowed", "wrong"),
    [
        ("/nodes", "id name membership role label node.label", "mode"),
        ("/services", "id name label mode runtime", "node"),
        ("/tasks", "id name service node label desired-state _up-to-date", "role"),
        ("/secrets", "id name names label", "service"),
        ("/configs", "id name names label", "service"),
    ],
)
def test_lists_and_their_filters(path: str, allowed: str, wrong: str) -> None:
    api = Api()
    api.cluster.answers[f"{path[1:]}.list"] = b"[]"
    assert api.json("GET", path) == []
    for key in allowed.split():
        for form in (f'{{"{key}":["a","b"]}}', f'{{"{key}":{{"a":true,"b":true}}}}'):
            assert api.json("GET", path, query=f"filters={form}") == []
            assert api.cluster.asked[-1][2]["filters"] == {key: ["a", "b"]}
    found = api.json("GET", path, query=f'filters={{"{wrong}":["a"]}}', status=400)
    assert found["message"] == f"Invalid filter '{wrong}'"


def test_an_answer_that_may_be_old_has_a_warning() -> None:
    api = Api()
    api.cluster.answers["tasks.list"] = b"[]"
    api.cluster.warning = 'no leader, "m1"\nis lost'
    reply = api.ask("GET", "/tasks")
    assert isinstance(reply, Reply) and reply.headers == (("Warning", "110 engined \"no leader, 'm1' is lost\""),)


# --- swarm ----------------------------------------------------------------------------------------


def test_init() -> None:
    api = Api("inactive")
    api.cluster.answers["init"] = b"node1"
    body = {"ListenAddr": "0.0.0.0:2377", "spec": {"labels": None, "Raft": {"ElectionTick": 3}}, "SubnetSize": 20}
    assert api.json("POST", "/swarm/init", body) == "node1"
    made = api.cluster.asked[-1][2]["request"]
    assert isinstance(made, InitRequest) and made.listen_addr == "0.0.0.0:2377" and made.subnet_size == 20
    assert made.spec.raft.election_tick == 3 and made.spec.labels == {}
    api.json("POST", "/swarm/init", body | {"DefaultAddrPool": ["10.9.0.0/16"], "DataPathPort": 9}, version="1.38")
    made = api.cluster.asked[-1][2]["request"]
    assert (made.default_addr_pool, made.subnet_size, made.data_path_port) == ([], 0, 0)
    assert "empty" in api.json("POST", "/swarm/init", b"", status=400)["message"]
    assert "Raft" in api.json("POST", "/swarm/init", {"Spec": {"Raft": 1}}, status=400)["message"]


@pytest.mark.parametrize(
    "spelling", [{"ExternalCA": {"URL": "u"}}, {"ExternalCA": [{"URL": "u"}]}, {"ExternalCAs": [{"URL": "u"}]}]
)
def test_both_names_of_external_cas(spelling: dict[str, Any]) -> None:
    api = Api("inactive")
    api.json("POST", "/swarm/init", {"Spec": {"CAConfig": spelling}})
    made = api.cluster.asked[-1][2]["request"]
    assert [ca.url for ca in made.spec.ca_config.external_cas] == ["u"]
    api = Api()
    api.json("POST", "/swarm/update", {"CAConfig": spelling}, query="version=3")
    assert api.sent()["CAConfig"]["ExternalCAs"] == [{"Protocol": "", "URL": "u"}]


@pytest.mark.parametrize(
    "spelling",
    [
        {"RemoteAddr": "a:1"},
        {"RemoteAddr": ["a:1"]},
        {"RemoteAddrs": ["a:1"]},
        {"RemoteAddrs": ["a:1"], "RemoteAddr": "b"},
    ],
)
def test_join(spelling: dict[str, Any]) -> None:
    api = Api("inactive")
    assert api.json("POST", "/swarm/join", spelling | {"JoinToken": "t"}) is None
    made = api.cluster.asked[-1][2]["request"]
    assert isinstance(made, JoinRequest) and (made.remote_addrs, made.join_token) == (["a:1"], "t")
    api.cluster.answers["join"] = ServerError("Timeout was reached before node was joined")
    assert "Timeout" in api.json("POST", "/swarm/join", spelling, status=500)["message"]


def test_leave() -> None:
    api = Api()
    assert api.json("POST", "/swarm/leave") is None and api.cluster.asked[-1][2] == {"force": False}
    assert api.json("POST", "/swarm/leave", query="force=true") is None
    assert api.cluster.asked[-1][2] == {"force": True}
    api.cluster.answers["leave"] = WrongState("the last manager")
    assert api.json("POST", "/swarm/leave", version="1.24", status=500) == {"message": "the last manager"}
    assert api.json("POST", "/swarm/leave", status=503) == {"message": "the last manager"}
    for version, status in (("1.24", 406), ("1.55", 503)):
        found = Api("inactive").json("POST", "/swarm/leave", version=version, status=status)
        assert found == {"message": "This node is not part of a swarm"}


def test_update_of_a_swarm() -> None:
    api = Api()
    for query, worker, manager in (
        ("version=7", False, False),
        ("version=7&rotateWorkerToken=true", True, False),
        ("version=7&rotationWorkerToken=1&rotationManagerToken=true", True, True),
        ("version=7&rotateManagerToken=t", False, True),
    ):
        assert (
            api.json("POST", "/swarm/update", {"Name": "default", "JoinTokens": {"Worker": "x"}}, query=query) is None
        )
        verb, _, asked, _ = api.cluster.asked[-1]
        assert (verb, asked["version"]) == ("swarm.update", 7)
        assert (asked["rotate_worker_token"], asked["rotate_manager_token"]) == (worker, manager)
        assert api.sent(SwarmSpec) == SwarmSpec(name="default")
    found = api.json("POST", "/swarm/update", {}, query="version=7&rotateWorkerToken=yes", status=400)
    assert found["message"] == "invalid value for rotateWorkerToken: yes"


@pytest.mark.parametrize("text", ["", "x", "-1", "1.0", "18446744073709551616", "1e3", "%D9%A1"])
@pytest.mark.parametrize("path", ["/swarm", "/nodes/x", "/services/x", "/secrets/x", "/configs/x"])
def test_the_version_of_an_update(path: str, text: str) -> None:
    api = Api()
    found = api.json("POST", f"{path}/update", {}, query=f"version={text}", status=400)
    assert found["message"].startswith(f"invalid {path.split('/')[1].rstrip('s')} version '")
    assert api.cluster.asked == []


def test_a_swarm_in_older_versions() -> None:
    api = Api()
    swarm = Swarm(id="c", **TIMES, spec=SwarmSpec(), join_tokens=JoinTokens(worker="w", manager="m"))
    api.cluster.answers["swarm.inspect"] = encode(swarm)
    assert api.json("GET", "/swarm") == msgspec.to_builtins(swarm)
    assert "DataPathPort" not in api.json("GET", "/swarm", version="1.39")
    oldest = api.json("GET", "/swarm", version="1.24")
    assert set(oldest) == {"ID", "Version", "CreatedAt", "UpdatedAt", "Spec", "JoinTokens"}
    assert oldest["JoinTokens"] == {"Worker": "w", "Manager": "m"}


def test_unlock() -> None:
    api = Api()
    assert "not locked" in api.json("POST", "/swarm/unlock", {"UnlockKey": "k"}, status=503)["message"]
    assert "not locked" in api.json("POST", "/swarm/unlock", {"UnlockKey": "k"}, status=500, version="1.24")["message"]
    assert "part of a swarm" in Api("inactive").json("POST", "/swarm/unlock", {}, status=503)["message"]


def test_info_and_ping() -> None:
    api = Api()
    api.cluster.shown = {
        "NodeID": "n",
        "NodeAddr": "10.0.0.1",
        "LocalNodeState": "active",
        "ControlAvailable": True,
        "Error": "",
        "RemoteManagers": [{"NodeID": "n", "Addr": "10.0.0.1:2377"}],
        "Nodes": 1,
        "Managers": 1,
        "Cluster": {"ID": "c", "CreatedAt": "a", "UpdatedAt": "b", "Spec": {}, "DataPathPort": 9, "JoinTokens": {}},
    }
    found = api.json("GET", "/info")["Swarm"]
    assert found["RemoteManagers"] == [{"NodeID": "n", "Addr": "10.0.0.1:2377"}] and found["ControlAvailable"]
    assert (found["Cluster"]["ID"], found["Cluster"]["DataPathPort"]) == ("c", 9)
    assert "JoinTokens" not in found["Cluster"] and "Warnings" not in found
    assert "DataPathPort" not in api.json("GET", "/info", version="1.39")["Swarm"]["Cluster"]
    api.cluster.shown = {"LocalNodeState": "active", "NodeID": "n"}
    assert "Cluster" not in api.json("GET", "/info")["Swarm"], "a worker"
    assert "Swarm" not in api.json("GET", "/info", version="1.23")
    for state, manager, header in (
        ("inactive", False, "inactive"),
        ("pending", False, "pending"),
        ("active", False, "active/worker"),
        ("active", True, "active/manager"),
    ):
        for method in ("GET", "HEAD"):
            app = Api(state, manager=manager).app
            reply = app(headed("/_ping", method))
            assert isinstance(reply, Reply) and ("Swarm", header) in reply.headers
            assert reply.body == (b"OK" if method == "GET" else b"")


# --- nodes ----------------------------------------------------------------------------------------


def test_update_of_a_node() -> None:
    api = Api()
    body = {"Role": "worker", "availability": "drain", "Labels": {"a": "b"}}
    assert api.json("POST", "/nodes/n1/update", body, query="version=9") is None
    assert api.cluster.asked[-1][:3] == ("nodes.update", "n1", {"version": 9})
    assert api.sent() == {"Labels": {"a": "b"}, "Role": "worker", "Availability": "drain"}
    for force in ("1", "0"):
        api.ask("DELETE", "/nodes/n1", query=f"force={force}")
        assert api.cluster.asked[-1][2] == {"force": force == "1"}


# --- services -------------------------------------------------------------------------------------


def test_create_of_a_service() -> None:
    api = Api()
    api.cluster.answers["services.create"] = encode(ServiceCreated(id="s1"))
    body = {"name": "web", "Labels": None, "TaskTemplate": {"containerSpec": {"Image": "busybox", "Env": None}}}
    assert api.json("POST", "/services/create", body, status=201) == {"ID": "s1", "Warnings": None}
    verb, _, query, _ = api.cluster.asked[-1]
    wanted = {"registry_auth": "", "node_local_networks": True, "local_networks": []}
    assert (verb, query) == ("services.create", wanted)
    assert api.sent(ServiceSpec) == SPEC
    assert api.json("POST", "/services/create", body, status=201, version="1.24") == {"ID": "s1"}
    assert api.cluster.asked[-1][2]["node_local_networks"] is False
    auth = base64.b64encode(b'{"username":"u","password":"p"}').decode()
    api.json("POST", "/services/create", body, status=201, headers={"X-Registry-Auth": auth})
    assert api.cluster.asked[-1][2]["registry_auth"] == auth
    unreadable = {"X-Registry-Auth": "?"}
    assert api.json("POST", "/services/create", body, status=400, version="1.24", headers=unreadable)
    api.json("POST", "/services/create", body, status=201, headers=unreadable)
    assert api.cluster.asked[-1][2]["registry_auth"] == ""


def test_nano_cpu() -> None:
    api = Api()
    api.cluster.answers["services.create"] = encode(ServiceCreated(id="s1"))
    resources = {"Limits": {"NanoCPU": 5}, "Reservations": {"NanoCPUs": 7, "NanoCPU": 6}}
    api.json("POST", "/services/create", {"TaskTemplate": {"Resources": resources}}, status=201)
    made = api.sent(ServiceSpec).task_template.resources
    assert (made.limits.nano_cpus, made.reservations.nano_cpus) == (5, 7)
    service = msgspec.structs.replace(SERVICE, spec=api.sent(ServiceSpec))
    api.cluster.answers["services.inspect"] = encode(service)
    shown = api.json("GET", "/services/s1", version="1.24")["Spec"]["TaskTemplate"]["Resources"]
    assert shown == {"Limits": {"NanoCPUs": 5, "NanoCPU": 5}, "Reservations": {"NanoCPUs": 7, "NanoCPU": 7}}


def test_digests() -> None:
    """The daemon pins images for 1.25 to 1.29: earlier and later clients know no such thing, or do
    it themselves.
    """
    api = Api(digest="sha256:" + "a" * 64)
    api.cluster.answers["services.create"] = encode(ServiceCreated(id="s1"))
    api.cluster.answers["services.update"] = encode(ServiceUpdated())
    for version in ("1.24", "1.30", "1.55"):
        api.json("POST", "/services/create", SPEC, status=201, version=version)
        assert api.sent(ServiceSpec) == SPEC and api.registry.asked == []
    for method in ("create", "s1/update"):
        query = "version=1" if method != "create" else ""
        api.json("POST", f"/services/{method}", SPEC, status=201 if not query else 200, version="1.29", query=query)
        made = api.sent(ServiceSpec).task_template.container_spec
        assert made is not None and made.image == "busybox:latest@sha256:" + "a" * 64
    pinned = {"TaskTemplate": {"ContainerSpec": {"Image": made.image}}}
    api.registry.asked.clear()
    api.json("POST", "/services/create", pinned, status=201, version="1.25")
    assert api.registry.asked == []
    api.registry.digest = ""
    found = api.json("POST", "/services/create", SPEC, status=201, version="1.25")
    assert len(found["Warnings"]) == 1 and "could not be accessed on a registry" in found["Warnings"][0]
    assert api.sent(ServiceSpec) == SPEC


def test_update_of_a_service() -> None:
    api = Api()
    api.cluster.answers["services.update"] = encode(ServiceUpdated(["w"]))
    assert api.json("POST", "/services/web/update", SPEC, query="version=5") == {"Warnings": ["w"]}
    verb, name, query, _ = api.cluster.asked[-1]
    assert (verb, name, query["version"], query["rollback"]) == ("services.update", "web", 5, "")
    assert api.json("POST", "/services/web/update", SPEC, query="version=5", version="1.24") == {"Warnings": ["w"]}
    for given, made in (("previous", "previous"), ("none", "")):
        api.json("POST", "/services/web/update", SPEC, query=f"version=5&rollback={given}")
        assert api.cluster.asked[-1][2]["rollback"] == made
    api.json("POST", "/services/web/update", SPEC, query="version=5&registryAuthFrom=previous-spec")
    assert api.cluster.asked[-1][2]["registry_auth_from"] == "previous-spec"
    for query in ("rollback=x", "registryAuthFrom=x"):
        found = api.json("POST", "/services/web/update", SPEC, query=f"version=5&{query}", status=400)
        assert found["message"].startswith(f"invalid value for {query[:-2]}: 'x'")
    api.cluster.answers["services.update"] = WrongState("update out of sequence")
    assert api.json("POST", "/services/web/update", SPEC, query="version=5", status=500)


def test_parameters_of_services() -> None:
    api = Api()
    api.cluster.answers |= {"services.list": b"[]", "services.inspect": encode(SERVICE)}
    api.json("GET", "/services", query="status=true")
    assert api.cluster.asked[-1][2]["status"] is True
    api.json("GET", "/services", query="status=x", version="1.40")
    assert api.cluster.asked[-1][2]["status"] is False
    assert api.json("GET", "/services", query="status=x", status=400)["message"] == "invalid value for status: x"
    api.json("GET", "/services/web", query="insertDefaults=true")
    assert api.cluster.asked[-1][2] == {"insert_defaults": True}
    assert api.json("GET", "/services/web", query="insertDefaults=maybe", status=400)


def test_lists_in_older_versions() -> None:
    api = Api()
    api.cluster.answers |= {"services.list": encode([SERVICE, SERVICE]), "tasks.list": encode([TASK])}
    assert api.json("GET", "/services") == [msgspec.to_builtins(SERVICE)] * 2
    assert "ForceUpdate" not in api.json("GET", "/services", version="1.24")[1]["Spec"]["TaskTemplate"]
    assert api.json("GET", "/tasks", version="1.37")[0]["DesiredState"] == "remove"
    found = api.json("GET", "/tasks", version="1.36")[0]
    assert (found["Status"]["State"], found["DesiredState"]) == ("shutdown", "shutdown")


# --- secrets and configs --------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["secret", "config"])
def test_secrets_and_configs(of: str) -> None:
    api = Api()
    api.cluster.answers[f"{of}s.create"] = b'{"ID":"x1"}'
    for data in ("+/8=", "-_8=", "-_8"):
        assert api.json("POST", f"/{of}s/create", {"Name": "a", "data": data}, status=201) == {"ID": "x1"}
        assert api.sent() == {"Name": "a", "Labels": {}, "Data": "+/8="}
    assert api.json("POST", f"/{of}s/create", {"Name": "a", "Data": "?"}, status=400)
    templated = {"Name": "a", "Templating": {"Name": "golang"}}
    assert api.json("POST", f"/{of}s/create", templated, status=201)
    found = api.json("POST", f"/{of}s/create", templated, status=400, version="1.36")
    assert found["message"] == f"Templating: {of} templating needs API v1.37 or newer"
    assert api.json("POST", f"/{of}s/x1/update", {"Name": "a", "Labels": {"b": "c"}}, query="version=4") is None
    assert api.cluster.asked[-1][:3] == (f"{of}s.update", "x1", {"version": 4})
    secret = Secret(id="x1", **TIMES, spec=SecretSpec(name="a"))
    api.cluster.answers["secrets.list"] = encode([secret])
    assert api.json("GET", "/secrets", version="1.25") == [msgspec.to_builtins(secret)]


# --- logs -----------------------------------------------------------------------------------------

LINES = (
    LogLine(task="t1", stream=1, time=1_500_000_000, data=b"out\n", node="n1", service="s1", details={"k": "a b"}),
    LogLine(task="t1", stream=2, time=0, data=b"err\n", node="n1", service="s1"),
)


def read(api: Api, query: str, path: str = "/services/web", version: str = "1.55") -> tuple[str, bytes]:
    reply = api.ask("GET", f"{path}/logs", query=query, version=version)
    assert isinstance(reply, StreamReply), reply.body

    async def whole() -> bytes:
        return b"".join([chunk async for chunk in reply.chunks])

    return reply.content_type, asyncio.run(whole())


def logging_api(*, tty: bool = False) -> Api:
    api = Api()
    template = TaskSpec(container_spec=ContainerSpec(image="b", tty=tty))
    service = msgspec.structs.replace(SERVICE, spec=ServiceSpec(task_template=template))
    task = msgspec.structs.replace(TASK, spec=template)
    api.cluster.answers |= {"services.inspect": encode(service), "tasks.inspect": encode(task)}
    api.cluster.lines = [LINES]
    return api


def frame(stream: int, text: bytes) -> bytes:
    return bytes((stream, 0, 0, 0)) + len(text).to_bytes(4, "big") + text


def test_logs_of_a_service() -> None:
    api = logging_api()
    kind, body = read(api, "stdout=1&stderr=1")
    assert kind == "application/vnd.docker.multiplexed-stream"
    assert body == frame(1, b"out\n") + frame(2, b"err\n")
    assert read(api, "stdout=1&stderr=0")[1] == frame(1, b"out\n")
    assert read(api, "stderr=1", version="1.41")[0] == "application/vnd.docker.raw-stream"
    verb, name, query, _ = api.cluster.asked[-1]
    assert (verb, name) == ("follow", "s1"), "by id"
    assert query == {
        "of": "service", "stdout": False, "stderr": True, "follow": False, "details": False,
        "timestamps": False, "since": 0, "tail": -1,
    }  # fmt: skip
    read(api, "stdout=1&follow=1&tail=7&since=12.5")
    query = api.cluster.asked[-1][2]
    assert (query["follow"], query["tail"], query["since"]) == (True, 7, 12_500_000_000)


def test_logs_with_details_and_timestamps() -> None:
    context = b"com.docker.swarm.node.id=n1,com.docker.swarm.service.id=s1,com.docker.swarm.task.id=t1"
    api = logging_api()
    assert read(api, "stdout=1&details=1")[1] == frame(1, context + b",k=a+b out\n")
    assert read(api, "stderr=1&details=1&timestamps=1")[1] == frame(
        2, b"1970-01-01T00:00:00.000000000Z " + context + b" err\n"
    )
    assert read(api, "stdout=1&timestamps=1")[1] == frame(1, b"1970-01-01T00:00:01.500000000Z out\n")


def test_logs_of_a_terminal_are_raw() -> None:
    kind, body = read(logging_api(tty=True), "stdout=1&stderr=1", "/tasks/t1")
    assert (kind, body) == ("application/vnd.docker.raw-stream", b"out\nerr\n")


def test_a_log_that_cannot_be_read() -> None:
    api = logging_api()
    unreadable = LogLine(task="t1", stream=3, time=0, data=b"no reading")
    api.cluster.lines = [(unreadable,), LINES[:1], Unavailable("the manager is gone")]
    assert read(api, "stdout=1")[1] == (
        frame(3, b"Error grabbing logs: no reading\n")
        + frame(1, b"out\n")
        + frame(3, b"Error grabbing logs: the manager is gone\n")
    )
    found = api.json("GET", "/services/web/logs", status=400)
    assert found["message"] == "Bad parameters: you must choose at least one stream"
    api.cluster.answers["services.inspect"] = NotFound("service web not found")
    assert api.json("GET", "/services/web/logs", query="stdout=1", status=404)
