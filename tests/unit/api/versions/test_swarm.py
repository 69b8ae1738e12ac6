"""The rows of a swarm's objects: each at its version and just before, and what a round trip through
an older client keeps.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import parameters, versions
from engine.api.swarm_mode import _loaded
from engine.api.versions import VERSIONS
from engine.api.versions.swarm import CHANGES, dropping, refusing, values
from engine.errors import InvalidParameter
from engine.wire.containers import Healthcheck, Mount, TmpfsOptions, Ulimit
from engine.wire.nodes import (
    DiscreteResource,
    GenericResource,
    Node,
    NodeDescription,
    NodeSpec,
    NodeStatus,
    Resources,
)
from engine.wire.secrets import Config, ConfigSpec, Secret, SecretSpec
from engine.wire.services import (
    EndpointSpec,
    GlobalJob,
    JobStatus,
    ReplicatedJob,
    Service,
    ServiceCreated,
    ServiceMode,
    ServiceSpec,
    ServiceStatus,
    UpdateConfig,
)
from engine.wire.swarm import (
    CAConfig,
    ClusterInfo,
    ExternalCA,
    InitRequest,
    JoinRequest,
    JoinTokens,
    Swarm,
    SwarmSpec,
    TLSInfo,
    Version,
)
from engine.wire.tasks import (
    AppArmorOptions,
    ConfigReference,
    ContainerSpec,
    CredentialSpec,
    DNSConfig,
    FileTarget,
    Limits,
    NetworkAttachmentConfig,
    NetworkAttachmentSpec,
    Placement,
    PlacementPreference,
    PluginSpec,
    PortConfig,
    Privileges,
    ResourceRequirements,
    RuntimeTarget,
    SeccompOptions,
    SecretReference,
    SpreadOver,
    Task,
    TaskPorts,
    TaskSpec,
    TaskStatus,
)
from tests.support.engine import strict
from tests.unit.api.versions.rows import ABSENT, at, reply

_loaded()

TIMES: dict[str, str] = {"created_at": "2026-01-02T03:04:05Z", "updated_at": "2026-01-02T03:04:05Z"}
GENERIC = [GenericResource(discrete_resource_spec=DiscreteResource("gpu", 2))]
TEMPLATE = TaskSpec(
    container_spec=ContainerSpec(
        image="busybox",
        hostname="h",
        groups=["g"],
        tty=True,
        open_stdin=True,
        read_only=True,
        stop_signal="SIGINT",
        init=True,
        isolation="default",
        hosts=["1.2.3.4 a"],
        dns_config=DNSConfig(search=["a"]),
        privileges=Privileges(
            credential_spec=CredentialSpec(config="c", file="f"),
            seccomp=SeccompOptions(mode="unconfined"),
            app_armor=AppArmorOptions(mode="disabled"),
            no_new_privileges=True,
        ),
        mounts=[Mount(type="tmpfs", target="/t", tmpfs_options=TmpfsOptions(size_bytes=1, options=[["exec"]]))],
        healthcheck=Healthcheck(test=["CMD", "true"], start_interval=5),
        secrets=[SecretReference(file=FileTarget(name="s"), secret_id="s1", secret_name="s")],
        configs=[ConfigReference(runtime=RuntimeTarget(), config_id="c1", config_name="c")],
        sysctls={"a": "b"},
        capability_add=["NET_ADMIN"],
        capability_drop=["CHOWN"],
        ulimits=[Ulimit(name="nofile", hard=1, soft=1)],
        oom_score_adj=5,
    ),
    plugin_spec=PluginSpec(name="p"),
    network_attachment_spec=NetworkAttachmentSpec(container_id="c"),
    resources=ResourceRequirements(
        limits=Limits(nano_cpus=1, memory_bytes=2, pids=3),
        reservations=Resources(nano_cpus=4, generic_resources=GENERIC),
        swap_bytes=5,
        memory_swappiness=6,
    ),
    placement=Placement(
        constraints=["node.role==worker"],
        preferences=[PlacementPreference(SpreadOver("node.labels.a"))],
        max_replicas=2,
    ),
    networks=[NetworkAttachmentConfig(target="n")],
    force_update=3,
    runtime="container",
)
SPEC = ServiceSpec(
    name="web",
    labels={"a": "b"},
    task_template=TEMPLATE,
    mode=ServiceMode(replicated_job=ReplicatedJob(max_concurrent=2), global_job=GlobalJob()),
    update_config=UpdateConfig(parallelism=1, monitor=2, max_failure_ratio=0.5, order="start-first"),
    rollback_config=UpdateConfig(),
    endpoint_spec=EndpointSpec(ports=[PortConfig(protocol="tcp", target_port=80, publish_mode="host")]),
)
SERVICE = Service(
    id="s1",
    **TIMES,
    spec=SPEC,
    previous_spec=SPEC,
    service_status=ServiceStatus(running_tasks=1),
    job_status=JobStatus(job_iteration=Version(2)),
)
TASK = Task(
    id="t1",
    **TIMES,
    spec=TEMPLATE,
    status=TaskStatus(state="running", port_status=TaskPorts([PortConfig(target_port=80)])),
    desired_state="running",
    generic_resources=GENERIC,
    assigned_generic_resources=GENERIC,
    job_iteration=Version(3),
)
NODE = Node(
    id="n1",
    **TIMES,
    spec=NodeSpec(role="worker", availability="active"),
    description=NodeDescription(
        hostname="h", resources=Resources(nano_cpus=1, generic_resources=GENERIC), tls_info=TLSInfo(trust_root="PEM")
    ),
    status=NodeStatus(state="ready", addr="10.0.0.1"),
)
SWARM = Swarm(
    id="c1",
    **TIMES,
    spec=SwarmSpec(
        ca_config=CAConfig(
            external_cas=[ExternalCA(protocol="cfssl", url="https://a", ca_cert="PEM")],
            signing_ca_cert="PEM",
            force_rotate=2,
        )
    ),
    default_addr_pool=["10.0.0.0/8"],
    join_tokens=JoinTokens(worker="w", manager="m"),
)
CLUSTER = ClusterInfo(id="c1", **TIMES, spec=SWARM.spec, default_addr_pool=["10.0.0.0/8"])

CONTAINER = "Spec.TaskTemplate.ContainerSpec"

FIELDS = [
    ("1.52", SERVICE, "Spec.TaskTemplate.Resources.SwapBytes"),
    ("1.52", SERVICE, "Spec.TaskTemplate.Resources.MemorySwappiness"),
    ("1.46", SERVICE, f"{CONTAINER}.OomScoreAdj"),
    ("1.44", SERVICE, f"{CONTAINER}.Privileges.Seccomp"),
    ("1.44", SERVICE, f"{CONTAINER}.Privileges.AppArmor"),
    ("1.44", SERVICE, f"{CONTAINER}.Privileges.NoNewPrivileges"),
    ("1.44", SERVICE, f"{CONTAINER}.Healthcheck.StartInterval"),
    ("1.41", SERVICE, f"{CONTAINER}.CapabilityAdd"),
    ("1.41", SERVICE, f"{CONTAINER}.CapabilityDrop"),
    ("1.41", SERVICE, f"{CONTAINER}.Ulimits"),
    ("1.41", SERVICE, "Spec.TaskTemplate.Resources.Limits.Pids"),
    ("1.41", SERVICE, "Spec.Mode.ReplicatedJob"),
    ("1.41", SERVICE, "Spec.Mode.GlobalJob"),
    ("1.41", SERVICE, "ServiceStatus"),
    ("1.41", SERVICE, "JobStatus"),
    ("1.41", TASK, "JobIteration"),
    ("1.40", SERVICE, f"{CONTAINER}.Sysctls"),
    ("1.40", SERVICE, f"{CONTAINER}.Privileges.CredentialSpec.Config"),
    ("1.40", SERVICE, "Spec.TaskTemplate.Placement.MaxReplicas"),
    ("1.40", SWARM, "DataPathPort"),
    ("1.40", CLUSTER, "DataPathPort"),
    ("1.39", SWARM, "DefaultAddrPool"),
    ("1.39", CLUSTER, "SubnetSize"),
    *(
        ("1.25", SERVICE, f"{CONTAINER}.{name}")
        for name in [
            *("Hostname", "Groups", "Privileges", "Init", "StopSignal", "TTY", "OpenStdin", "ReadOnly"),
            *("Healthcheck", "Hosts", "DNSConfig", "Secrets", "Configs", "Isolation"),
        ]
    ),
    *(
        ("1.25", SERVICE, f"Spec.{name}")
        for name in [
            *(f"TaskTemplate.{name}" for name in ("ForceUpdate", "Runtime", "PluginSpec", "NetworkAttachmentSpec")),
            *("TaskTemplate.Placement.Preferences", "TaskTemplate.Resources.Reservations.GenericResources"),
            *("UpdateConfig.Monitor", "UpdateConfig.MaxFailureRatio", "UpdateConfig.Order", "RollbackConfig"),
        ]
    ),
    ("1.25", SERVICE, "PreviousSpec"),
    ("1.25", NODE, "Status.Addr"),
    ("1.25", NODE, "Description.TLSInfo"),
    ("1.25", NODE, "Description.Resources.GenericResources"),
    ("1.25", TASK, "GenericResources"),
    ("1.25", TASK, "AssignedGenericResources"),
    ("1.25", TASK, "Status.PortStatus"),
    ("1.25", SWARM, "TLSInfo"),
    ("1.25", CLUSTER, "RootRotationInProgress"),
    ("1.25", SWARM, "Spec.EncryptionConfig"),
    ("1.25", SWARM, "Spec.CAConfig.SigningCACert"),
    ("1.25", SWARM, "Spec.CAConfig.ForceRotate"),
    ("1.25", ServiceCreated(id="s", warnings=["w"]), "Warnings"),
]


def before(version: str) -> str:
    return f"1.{int(version[2:]) - 1}"


@pytest.mark.parametrize(
    ("since", "value", "path"), FIELDS, ids=[f"{since} {type(value).__name__}.{path}" for since, value, path in FIELDS]
)
def test_new_fields(since: str, value: Any, path: str) -> None:
    newest = msgspec.json.decode(msgspec.json.encode(value))
    assert at(newest, path) != ABSENT != at(reply(value, since), path)
    assert at(reply(value, before(since)), path) == ABSENT


def test_fields_in_lists() -> None:
    port = {"Protocol": "tcp", "TargetPort": 80}
    assert reply(SERVICE, "1.25")["Spec"]["EndpointSpec"]["Ports"] == [port | {"PublishMode": "host"}]
    assert reply(SERVICE, "1.24")["Spec"]["EndpointSpec"]["Ports"] == [port]
    configs = [
        reply(SERVICE, version)["Spec"]["TaskTemplate"]["ContainerSpec"]["Configs"] for version in ("1.40", "1.39")
    ]
    assert configs == [
        [{"Runtime": {}, "ConfigID": "c1", "ConfigName": "c"}],
        [{"ConfigID": "c1", "ConfigName": "c"}],
    ]
    cas = [reply(SWARM, version)["Spec"]["CAConfig"]["ExternalCAs"][0] for version in ("1.25", "1.24")]
    assert [set(ca) for ca in cas] == [{"Protocol", "URL", "CACert"}, {"Protocol", "URL"}]
    assert reply(SWARM, "1.24")["Spec"]["CAConfig"]["ExternalCA"] == cas[1]


def test_networks_of_a_service() -> None:
    assert "Networks" not in reply(SERVICE, "1.25")["Spec"]
    assert reply(SERVICE, "1.24")["Spec"]["Networks"] == [{"Target": "n"}]
    for version, template, service in (("1.43", ["n"], []), ("1.44", [], ["n"])):
        found = decoded({"Networks": [{"Target": "n"}]}, version)
        assert [each.target for each in found.task_template.networks] == template
        assert [each.target for each in found.networks] == service
    both = {"Networks": [{"Target": "a"}], "TaskTemplate": {"Networks": [{"Target": "b"}]}}
    assert [each.target for each in decoded(both, "1.24").task_template.networks] == ["b"]


def test_states_of_tasks() -> None:
    for state in ("orphaned", "remove"):
        task = msgspec.structs.replace(TASK, status=TaskStatus(state=state), desired_state=state)
        for version, shown in (("1.37", state), ("1.36", "shutdown"), ("1.24", "shutdown")):
            found = reply(task, version)
            assert (found["Status"]["State"], found["DesiredState"]) == (shown, shown)


def decoded(body: Any, version: str, of: Any = ServiceSpec) -> Any:
    return parameters.decode_json(msgspec.json.encode(body), of, VERSIONS[version].upgrade(of))


DROPPED = {
    "1.52": {"SwapBytes": 5, "MemorySwappiness": 6},
    "1.46": {"OomScoreAdj": 5, "Options": [["exec"]]},
    "1.44": {"Seccomp": {"Mode": "unconfined"}, "AppArmor": {"Mode": "disabled"}, "StartInterval": 5},
    "1.41": {"CapabilityAdd": ["NET_ADMIN"], "Pids": 3, "ReplicatedJob": {"MaxConcurrent": 2}},
    "1.40": {"Sysctls": {"a": "b"}, "MaxReplicas": 2, "Runtime": {}, "Config": "c"},
}
"""Fields of `SPEC` that the versions before do not take."""


@pytest.mark.parametrize("since", DROPPED)
def test_fields_that_older_requests_lose(since: str) -> None:
    """From 1.25 to just before the version. Earlier ones take all, as nothing is dropped silently
    there.
    """
    for name, value in DROPPED[since].items():
        mark = msgspec.json.encode({name: value})[1:-1]
        assert mark in msgspec.json.encode(decoded(SPEC, since)), name
        for version in (before(since), "1.25"):
            assert mark not in msgspec.json.encode(decoded(SPEC, version)), (name, version)


def test_what_1_24_refuses() -> None:
    refused = {
        "TaskTemplate.ForceUpdate: 3 needs API v1.25": {"TaskTemplate": {"ForceUpdate": 3}},
        "TaskTemplate.ContainerSpec.Secrets needs API v1.25": {"TaskTemplate": {"ContainerSpec": {"Secrets": [{}]}}},
        "TaskTemplate.ContainerSpec.Configs needs API v1.30": {"TaskTemplate": {"ContainerSpec": {"Configs": [{}]}}},
        "TaskTemplate.Runtime: 'plugin' needs API v1.30": {"TaskTemplate": {"Runtime": "plugin"}},
        "TaskTemplate.Placement.Preferences needs API v1.28": {"TaskTemplate": {"Placement": {"Preferences": [{}]}}},
        "UpdateConfig.Order: 'start-first' needs API v1.29": {"UpdateConfig": {"Order": "start-first"}},
        "EndpointSpec.Ports.PublishMode: 'host' needs API v1.25": {
            "EndpointSpec": {"Ports": [{"PublishMode": "ingress"}, {"PublishMode": "host"}]}
        },
    }
    for words, body in refused.items():
        with pytest.raises(InvalidParameter, match=f"^{words} or newer$"):
            decoded(body, "1.24")
        decoded(body, "1.25")
    zeros = {
        "TaskTemplate": {"ForceUpdate": 0, "Runtime": "container", "ContainerSpec": {"Secrets": [], "Configs": None}},
        "UpdateConfig": {"Order": "stop-first"},
        "EndpointSpec": {"Ports": [{"PublishMode": "ingress"}]},
    }
    decoded(zeros, "1.24")
    for of in (InitRequest, JoinRequest):
        decoded({"DataPathAddr": ""}, "1.24", of)
        with pytest.raises(InvalidParameter, match=r"DataPathAddr: 'eth1' needs API v1\.30"):
            decoded({"DataPathAddr": "eth1"}, "1.24", of)


def test_templates_of_secrets_and_configs() -> None:
    for of in (SecretSpec, ConfigSpec):
        decoded({"Templating": {"Name": "golang"}}, "1.37", of)
        decoded({"Templating": None}, "1.36", of)
        with pytest.raises(InvalidParameter, match=r"needs API v1\.37"):
            decoded({"Templating": {"Name": "golang"}}, "1.36", of)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_spec_survives_a_client_that_sends_it_back(version: str) -> None:
    """What a version shows of a service is what it takes; at 1.24 what is refused is not shown."""
    shown = msgspec.json.decode(VERSIONS[version].shape(Service).encode(SERVICE))["Spec"]
    again = msgspec.structs.replace(SERVICE, spec=decoded(shown, version))
    assert msgspec.json.decode(VERSIONS[version].shape(Service).encode(again))["Spec"] == shown


@pytest.mark.parametrize("version", list(VERSIONS)[6:])
def test_go_clients_can_decode_every_version(version: str) -> None:
    for value, shape in (
        (SERVICE, strict.SERVICE),
        (TASK, strict.TASK),
        (NODE, strict.NODE),
        (SWARM, strict.SWARM),
        (Secret(id="x", **TIMES, spec=SecretSpec(name="a", data=b"b")), strict.SECRET),
        (Config(id="x", **TIMES, spec=ConfigSpec(name="a", data=b"b")), strict.CONFIG_OBJECT),
    ):
        assert strict.faults(reply(value, version), shape) == []


def test_every_row_has_an_effect() -> None:
    """Replies: of some value above. Requests: of the functions that the tests above call."""
    orphan = msgspec.structs.replace(TASK, status=TaskStatus(state="orphaned"), desired_state="remove")
    samples = [SERVICE, TASK, orphan, NODE, SWARM, CLUSTER, ServiceCreated(id="s", warnings=["w"])]
    for change in CHANGES:
        since = f"{change.since[0]}.{change.since[1]}"
        if change.downgrade is not None:
            assert any(reply(value, since) != reply(value, before(since)) for value in samples), change
        assert change.upgrade is None or VERSIONS[before(since)].upgrade(change.of or object) is not None, change


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=10,
)


@given(JSON.filter(lambda value: isinstance(value, dict)))
def test_rows_bear_any_body(body: dict[str, Any]) -> None:
    """Values that do not fit are left to the decoder."""
    list(values(body, "a.b.c"))
    dropping("a.b", "c.a")(body)
    dropping("a", "b")(body)
    try:
        refusing("a.b", "1.25")(body)
    except InvalidParameter as error:
        assert error.message.startswith("a.b")


@given(JSON.filter(lambda value: isinstance(value, dict)), st.sampled_from(["1.24", "1.25", "1.43", "1.55"]))
def test_requests_bear_any_body(body: dict[str, Any], version: str) -> None:
    names = {"a": "TaskTemplate", "b": "ContainerSpec", "c": "Mounts"}

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {names[key]: named(each) for key, each in value.items()}
        return [named(each) for each in value] if isinstance(value, list) else value

    try:
        decoded(named(body), version)
    except InvalidParameter as error:
        assert error.message


def test_rows_are_known_once() -> None:
    assert _loaded() is _loaded()
    assert versions.VERSIONS["1.55"].shape(Service).newest
