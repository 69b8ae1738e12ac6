"""The rules of service specs, one by one, and with what hypothesis finds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from engine.errors import EngineError, InvalidParameter, Unimplemented
from engine.manager.control import validate
from engine.wire.services import ServiceSpec
from tests.unit.manager.control.conftest import spec

DEADLINE = settings(deadline=None, max_examples=150)


def checked(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(validate.service_spec(msgspec.convert(body, ServiceSpec)))
    return found


def container(**fields: Any) -> dict[str, Any]:
    return spec(TaskTemplate={"ContainerSpec": {"Image": "busybox", **fields}})


def template(**fields: Any) -> dict[str, Any]:
    return spec(TaskTemplate={"ContainerSpec": {"Image": "busybox"}, **fields})


def mount(**fields: Any) -> dict[str, Any]:
    return container(Mounts=[{"Type": "volume", "Source": "data", "Target": "/data", **fields}])


def port(**fields: Any) -> dict[str, Any]:
    return spec(EndpointSpec={"Ports": [{"TargetPort": 80, "PublishMode": "host", **fields}]})


BAD = [
    (spec("a" * 64), "Name", "63 characters or fewer"),
    (spec("web server"), "Name", "DNS name component"),
    (spec("-web"), "Name", "DNS"),
    (spec("web."), "Name", "DNS"),
    (spec("wéb"), "Name", "DNS"),
    (spec("web\n"), "Name", "DNS"),
    (spec(Labels={"": "x"}), "Labels", "key"),
    ({"Name": "x"}, "TaskTemplate.ContainerSpec", "missing"),
    (spec(TaskTemplate={"ContainerSpec": {}}), "ContainerSpec.Image", "image reference must be provided"),
    (container(Image="Upper/Case"), "ContainerSpec.Image", "not a valid repository/tag"),
    (container(Image="a b"), "ContainerSpec.Image", "'a b'"),
    (container(Image="a" * 64), "ContainerSpec.Image", "64-byte|valid repository"),
    (container(Env=["=x"]), "ContainerSpec.Env", "NAME=value"),
    (container(Env=[""]), "ContainerSpec.Env", "NAME=value"),
    (container(Env=["A=\0"]), "ContainerSpec.Env", "NUL"),
    (container(Command=["a\0"]), "ContainerSpec.Command", "NUL"),
    (container(Args=["a\0"]), "ContainerSpec.Args", "NUL"),
    (container(Env=["A={{.Task.Size}}"]), "ContainerSpec.Env", "Size"),
    (container(Env=["A={{.Task.Slot"]), "ContainerSpec.Env", "template"),
    (container(Hostname="{{nothing}}"), "ContainerSpec.Hostname", "nothing"),
    (container(Hostname="a\nb"), "ContainerSpec.Hostname", "invalid hostname format"),
    (container(Hostname="a" * 65), "ContainerSpec.Hostname", "at most 64 bytes"),
    (container(Hostname="{{.Service.Name}}" + "a" * 62), "ContainerSpec.Hostname", "at most 64 bytes"),
    (spec(Labels={"a": "x\ny"}, **container(Hostname='{{index .Service.Labels "a"}}')), "Hostname", "control"),
    (container(DNSConfig={"Nameservers": ["fe80::1%x\nnameserver 6.6.6.6"]}), "DNSConfig.Nameservers", "IP address"),
    (container(DNSConfig={"Search": ["a\nnameserver 6.6.6.6"]}), "DNSConfig.Search", "a word"),
    (container(DNSConfig={"Options": ["a b"]}), "DNSConfig.Options", "a word"),
    (container(Hosts=["1.2.3.4 a\n6.6.6.6 b"]), "ContainerSpec.Hosts", "an address and a name"),
    (container(Hosts=["1.2.3.4 a\r"]), "ContainerSpec.Hosts", "an address and a name"),
    (container(Hosts=["fe80::1%\x01 a"]), "ContainerSpec.Hosts", "an address and a name"),
    (container(Hosts=["::1 a\x7f"]), "ContainerSpec.Hosts", "an address and a name"),
    (mount(Source="{{.Nothing}}"), "Mounts[0].Source", "Nothing"),
    (mount(VolumeOptions={"Labels": {"a": "{{.Nothing}}"}}), "VolumeOptions.Labels", "Nothing"),
    (container(Dir="here"), "ContainerSpec.Dir", "absolute"),
    (container(StopGracePeriod=-1), "ContainerSpec.StopGracePeriod", "must not be negative"),
    (container(StopSignal="SIGNOTHING"), "ContainerSpec.StopSignal", "'SIGNOTHING'"),
    (container(StopSignal="99"), "ContainerSpec.StopSignal", "'99'"),
    (container(StopSignal="RTMIN+40"), "ContainerSpec.StopSignal", r"'RTMIN\+40'"),
    (container(Hosts=["nonsense"]), "ContainerSpec.Hosts", "'nonsense'"),
    (container(Hosts=["1.2.3 a"]), "ContainerSpec.Hosts", "address"),
    (container(DNSConfig={"Nameservers": ["dns"]}), "ContainerSpec.DNSConfig.Nameservers", "'dns'"),
    (container(OomScoreAdj=1001), "ContainerSpec.OomScoreAdj", "from -1000 to 1000"),
    (container(Isolation="strong"), "ContainerSpec.Isolation", "'strong'"),
    (container(Ulimits=[{"Name": "", "Soft": 1, "Hard": 1}]), "ContainerSpec.Ulimits.Name", "name"),
    (container(Ulimits=[{"Name": "nofile", "Soft": 2, "Hard": 1}]), "ContainerSpec.Ulimits.Soft", "hard limit 1"),
    (container(Ulimits=[{"Name": "nofile", "Soft": -2, "Hard": 1}]), "ContainerSpec.Ulimits.Soft", "-2"),
    (container(Healthcheck={"Test": ["SHELL", "x"]}), "Healthcheck.Test", "'SHELL'"),
    (container(Healthcheck={"Interval": -1}), "Healthcheck.Interval", "cannot be negative"),
    (container(Healthcheck={"Interval": 10}), "Healthcheck.Interval", "less than 1ms"),
    (container(Healthcheck={"Timeout": 10}), "Healthcheck.Timeout", "less than 1ms"),
    (container(Healthcheck={"StartPeriod": -5}), "Healthcheck.StartPeriod", "cannot be negative"),
    (container(Healthcheck={"Retries": -1}), "Healthcheck.Retries", "cannot be negative"),
    (container(Privileges={"Seccomp": {"Mode": "loose"}}), "Seccomp.Mode", "'loose'"),
    (container(Privileges={"Seccomp": {"Mode": "custom"}}), "Seccomp.Profile", "profile"),
    (container(Privileges={"Seccomp": {"Mode": "custom", "Profile": "e30x"}}), "Seccomp.Profile", "JSON"),
    (container(Privileges={"Seccomp": {"Profile": "e30="}}), "Seccomp.Mode", "custom"),
    (container(Privileges={"AppArmor": {"Mode": "loose"}}), "AppArmor.Mode", "'loose'"),
    (mount(Type="floppy"), "Mounts[0].Type", "invalid MountType"),
    (mount(Type=""), "Mounts[0].Type", "invalid MountType"),
    (mount(Target=""), "Mounts[0].Target", "absolute path"),
    (mount(Target="/"), "Mounts[0].Target", "absolute path"),
    (mount(Target="data"), "Mounts[0].Target", "'data'"),
    (mount(Source="/data"), "Mounts[0].Source", "must not be an absolute path"),
    (mount(Source="a/b"), "Mounts[0].Source", "'a/b'"),
    (mount(Type="bind", Source="here"), "Mounts[0].Source", "must be an absolute path"),
    (mount(Type="bind", Source=""), "Mounts[0].Source", "must be an absolute path"),
    (mount(Type="bind", Source="/a", BindOptions={"Propagation": "wide"}), "BindOptions.Propagation", "'wide'"),
    (mount(Type="tmpfs"), "Mounts[0].Source", "must be empty"),
    (mount(Type="tmpfs", Source="", TmpfsOptions={"SizeBytes": -1}), "TmpfsOptions.SizeBytes", "-1"),
    (mount(BindOptions={}), "Mounts[0].BindOptions", "only a mount of type bind"),
    (mount(TmpfsOptions={}), "Mounts[0].TmpfsOptions", "only a mount of type tmpfs"),
    (
        container(Mounts=[{"Type": "tmpfs", "Target": "/a"}, {"Type": "tmpfs", "Target": "/a/"}]),
        "Mounts[1].Target",
        "duplicate mount point",
    ),
    (template(Resources={"Limits": {"NanoCPUs": 1000}}), "Limits.NanoCPUs", "invalid cpu value 1e-06"),
    (template(Resources={"Limits": {"NanoCPUs": -1}}), "Limits.NanoCPUs", "invalid cpu value"),
    (template(Resources={"Limits": {"MemoryBytes": 4096}}), "Limits.MemoryBytes", "invalid memory value 4096"),
    (template(Resources={"Reservations": {"MemoryBytes": -4}}), "Reservations.MemoryBytes", "at least 4MiB"),
    (template(Resources={"Limits": {"Pids": -1}}), "Limits.Pids", "must not be negative"),
    (template(Resources={"SwapBytes": -2}), "Resources.SwapBytes", "-2"),
    (template(Resources={"SwapBytes": 1}), "Resources.SwapBytes", "needs Limits.MemoryBytes"),
    (template(Resources={"MemorySwappiness": 101}), "Resources.MemorySwappiness", "from -1 to 100"),
    (template(Resources={"Reservations": {"GenericResources": [{}]}}), "GenericResources[0]", "one of"),
    (
        template(
            Resources={"Reservations": {"GenericResources": [{"NamedResourceSpec": {"Kind": "g", "Value": "1"}}]}}
        ),
        "NamedResourceSpec",
        "'g=1'",
    ),
    (
        template(
            Resources={"Reservations": {"GenericResources": [{"DiscreteResourceSpec": {"Kind": "", "Value": 1}}]}}
        ),
        "DiscreteResourceSpec.Kind",
        "empty",
    ),
    (
        template(
            Resources={"Reservations": {"GenericResources": [{"DiscreteResourceSpec": {"Kind": "g", "Value": 0}}]}}
        ),
        "DiscreteResourceSpec.Value",
        "0",
    ),
    (template(RestartPolicy={"Condition": "always"}), "RestartPolicy.Condition", "'always'"),
    (template(RestartPolicy={"Delay": -1}), "RestartPolicy.Delay", "restart-delay cannot be negative"),
    (template(RestartPolicy={"Window": -1}), "RestartPolicy.Window", "restart-window cannot be negative"),
    (template(RestartPolicy={"MaxAttempts": -1}), "RestartPolicy.MaxAttempts", "-1"),
    (template(Placement={"Constraints": ["node.role"]}), "constraint", "node.role"),
    (template(Placement={"Constraints": ["node.role = manager"]}), "constraint", "operator"),
    (template(Placement={"Constraints": ["== x"]}), "constraint", "key"),
    (template(Networks=[{"Target": "bridge"}, {"Target": "host"}]), "TaskTemplate.Networks", "must be the only one"),
    (template(Networks=[{"Target": "none"}, {"Target": "web"}]), "TaskTemplate.Networks", "must be the only one"),
    (template(Placement={"MaxReplicas": -1}), "Placement.MaxReplicas", "-1"),
    (template(Placement={"Preferences": [{}]}), "Placement.Preferences[0]", "Spread"),
    (
        template(Placement={"Preferences": [{"Spread": {"SpreadDescriptor": "node.color"}}]}),
        "preference",
        "node.color",
    ),
    (template(Networks=[{"Target": ""}]), "TaskTemplate.Networks[0].Target", "name or id"),
    (template(Networks=[{"Target": "host"}, {"Target": "host"}]), "TaskTemplate.Networks", "duplicate"),
    (template(ForceUpdate=-1), "TaskTemplate.ForceUpdate", "-1"),
    (template(Runtime="vm"), "TaskTemplate.Runtime", "'vm'"),
    (template(Runtime="attachment"), "TaskTemplate.Runtime", "attachment"),
    (template(LogDriver={"Options": {"a": "b"}}), "LogDriver.Name", "driver"),
    (
        template(LogDriver={"Name": "gelf", "Options": {"a": "b"}}),
        "LogDriver",
        "unknown log opt 'a' for gelf log driver",
    ),
    (template(LogDriver={"Name": "gelf"}), "TaskTemplate.LogDriver", "gelf-address is a required parameter"),
    (spec(Mode={"Replicated": {"Replicas": -1}}), "Mode.Replicated.Replicas", "non-negative"),
    (spec(Mode={"Replicated": {"Replicas": 100_001}}), "Mode.Replicated.Replicas", "at most 100000"),
    (spec(Mode={"ReplicatedJob": {"MaxConcurrent": 100_001}}), "Mode.ReplicatedJob.MaxConcurrent", "100000"),
    (spec(Mode={"ReplicatedJob": {"TotalCompletions": 100_001}}), "Mode.ReplicatedJob.TotalCompletions", "100000"),
    (spec(Mode={"Replicated": {"Replicas": 1 << 63}}), "Mode.Replicated.Replicas", "non-negative"),
    (spec(Mode={"Replicated": {}, "Global": {}}), "Mode", "must specify only one service mode"),
    (spec(Mode={"ReplicatedJob": {"MaxConcurrent": -1}}), "Mode.ReplicatedJob.MaxConcurrent", "-1"),
    (spec(Mode={"ReplicatedJob": {"TotalCompletions": -1}}), "Mode.ReplicatedJob.TotalCompletions", "-1"),
    (spec(Mode={"GlobalJob": {}}, UpdateConfig={}), "UpdateConfig", "Jobs may not have an update config"),
    (spec(UpdateConfig={"Parallelism": -1}), "UpdateConfig.Parallelism", "-1"),
    (spec(UpdateConfig={"Delay": -1}), "UpdateConfig.Delay", "-1"),
    (spec(UpdateConfig={"Monitor": -1}), "UpdateConfig.Monitor", "-1"),
    (spec(UpdateConfig={"FailureAction": "stop"}), "UpdateConfig.FailureAction", "'stop'"),
    (spec(RollbackConfig={"FailureAction": "rollback"}), "RollbackConfig.FailureAction", "'rollback'"),
    (spec(UpdateConfig={"MaxFailureRatio": 1.1}), "UpdateConfig.MaxFailureRatio", "bigger than 1"),
    (spec(UpdateConfig={"MaxFailureRatio": -0.1}), "UpdateConfig.MaxFailureRatio", "less than 0"),
    (spec(UpdateConfig={"Order": "any"}), "UpdateConfig.Order", "'any'"),
    (spec(EndpointSpec={"Mode": "magic"}), "EndpointSpec.Mode", "'magic'"),
    (port(Protocol="icmp"), "EndpointSpec.Ports[0].Protocol", "'icmp'"),
    (port(TargetPort=0), "EndpointSpec.Ports[0].TargetPort", "from 1 to 65535"),
    (port(PublishedPort=65536), "EndpointSpec.Ports[0].PublishedPort", "from 0 to 65535"),
    (port(PublishMode="both"), "EndpointSpec.Ports[0].PublishMode", "'both'"),
    (
        spec(EndpointSpec={"Mode": "dnsrr", "Ports": [{"TargetPort": 80}]}),
        "EndpointSpec.Ports[0].PublishMode",
        "can't be used with dnsrr mode",
    ),
    (
        spec(
            EndpointSpec={
                "Ports": [
                    {"TargetPort": 80, "PublishedPort": 8080, "PublishMode": "host"},
                    {"TargetPort": 81, "PublishedPort": 8080, "PublishMode": "host"},
                ]
            }
        ),
        "EndpointSpec.Ports[1].PublishedPort",
        "duplicate published ports provided",
    ),
]


@pytest.mark.parametrize(("body", "field", "words"), BAD, ids=[f"{field}-{n}" for n, (_, field, _) in enumerate(BAD)])
def test_bad_specs(body: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as caught:
        checked(body)
    assert field in caught.value.message


MISSING = [
    (template(Runtime="plugin"), "TaskTemplate.Runtime"),
    (template(PluginSpec={"Name": "x"}), "TaskTemplate.Runtime"),
    (container(Privileges={"CredentialSpec": {"File": "x"}}), "Privileges.CredentialSpec"),
    (container(Isolation="hyperv"), "ContainerSpec.Isolation"),
    (mount(Type="cluster"), "Mounts[0].Type"),
]


@pytest.mark.parametrize(("body", "field"), MISSING)
def test_what_this_version_does_not_have(body: dict[str, Any], field: str) -> None:
    with pytest.raises(Unimplemented) as caught:
        checked(body)
    assert field in caught.value.message


GOOD = [
    spec(EndpointSpec={"Ports": [{"TargetPort": 80}]}),
    port(PublishMode="ingress", PublishedPort=80, Protocol="sctp"),
    container(Env=["A=b", "PATH", "A="], Dir="/srv", User="1:2", Hostname="{{.Node.Hostname}}-{{.Task.Slot}}"),
    container(Hostname="{{.Service.Name}}_{{.Task.Slot}}"),
    container(Hostname="my_app"),
    container(Hosts=["fe80::1%eth0 a_b"], DNSConfig={"Nameservers": ["fe80::1%eth0"]}),
    container(StopSignal="SIGTERM"),
    container(StopSignal="quit"),
    container(StopSignal="37"),
    container(StopSignal="SIGRTMIN+3"),
    container(Hosts=["1.2.3.4 \t a  b ", "::1 c", "host-gateway d"]),
    container(DNSConfig={"Nameservers": ["8.8.8.8", "2001:db8::1"], "Search": ["a"], "Options": ["ndots:1"]}),
    container(Healthcheck={"Test": ["CMD-SHELL", "true"], "Interval": 1_000_000, "Retries": 3}),
    container(Healthcheck={"Test": ["NONE"]}),
    container(Healthcheck={"Test": []}),
    container(Ulimits=[{"Name": "nofile", "Soft": 5, "Hard": 6}, {"Name": "core", "Soft": -1, "Hard": -1}]),
    container(Image="registry:5000/team/app:v1@sha256:" + "a" * 64),
    container(Privileges={"Seccomp": {"Mode": "custom", "Profile": "e30="}, "AppArmor": {"Mode": "disabled"}}),
    container(Isolation="default", Init=True, ReadOnly=True, TTY=True, Sysctls={"net.core.somaxconn": "1"}),
    mount(Source="{{.Task.Slot}}-data"),
    mount(Source=""),
    mount(Type="bind", Source="/{{.Node.ID}}", BindOptions={"Propagation": "rslave"}),
    mount(Type="tmpfs", Source="", TmpfsOptions={"SizeBytes": 1 << 20, "Mode": 0o1777}),
    template(Resources={"Limits": {"NanoCPUs": 1_000_000, "MemoryBytes": 4 << 20, "Pids": 5}, "SwapBytes": -1}),
    template(Placement={"Constraints": ["node.role==manager", "node.labels.a != b"], "MaxReplicas": 2}),
    template(Placement={"Preferences": [{"Spread": {"SpreadDescriptor": "node.labels.zone"}}]}),
    template(RestartPolicy={"Condition": "on-failure", "Delay": 0, "MaxAttempts": 3, "Window": 5}),
    template(ForceUpdate=(1 << 64) - 1),
    template(LogDriver={"Name": "papyrus", "Options": {"a": "b"}}),
    template(Networks=[{"Target": "host"}], LogDriver={"Name": "json-file", "Options": {"max-size": "1m"}}),
    spec(Mode={"Replicated": {"Replicas": 0}}),
    spec(Mode={"Global": {}}, UpdateConfig={"FailureAction": "rollback", "Order": "start-first"}),
    spec(EndpointSpec={"Mode": "dnsrr"}),
    port(PublishedPort=0),
    port(PublishedPort=53, Protocol="udp"),
    spec(
        EndpointSpec={
            "Ports": [
                {"TargetPort": 53, "PublishedPort": 53, "PublishMode": "host", "Protocol": protocol}
                for protocol in ("tcp", "udp", "sctp")
            ]
        }
    ),
    spec("a"),
    spec("a" * 63),
    spec("my_web.app-1"),
]


@pytest.mark.parametrize("body", GOOD)
def test_good_specs(body: dict[str, Any]) -> None:
    """Checking twice changes nothing more: clients send back what inspect has shown."""
    once = checked(body)
    assert checked(once) == once


def test_what_is_filled_in() -> None:
    found = checked(port(Protocol="") | {"UpdateConfig": {}, "RollbackConfig": {}})
    assert found["Mode"] == {"Replicated": {"Replicas": 1}}
    assert found["EndpointSpec"]["Mode"] == "vip"
    assert found["EndpointSpec"]["Ports"][0]["Protocol"] == "tcp"
    assert found["UpdateConfig"]["FailureAction"] == "pause" and found["UpdateConfig"]["Order"] == "stop-first"
    assert found["TaskTemplate"]["Runtime"] == "container"
    assert checked(template(RestartPolicy={}))["TaskTemplate"]["RestartPolicy"] == {
        "Condition": "any",
        "MaxAttempts": 0,
    }
    job = checked(spec(Mode={"ReplicatedJob": {}}))
    assert job["Mode"] == {"ReplicatedJob": {"MaxConcurrent": 1, "TotalCompletions": 1}}


def test_networks_of_both_places() -> None:
    networks = [{"Target": "host"}]
    for body in (
        spec(Networks=networks),
        template(Networks=networks),
        template(Networks=networks) | {"Networks": networks},
    ):
        found = checked(body)
        assert found["TaskTemplate"]["Networks"] == networks and "Networks" not in found
    with pytest.raises(InvalidParameter, match="Networks: differs"):
        checked(template(Networks=networks) | {"Networks": [{"Target": "none"}]})


WORDS = some.sampled_from(
    [
        "",
        "a",
        "/",
        "/a",
        "{{",
        "{{.Task.Slot}}",
        "\0",
        "host",
        "any",
        "global",
        "SIGKILL",
        "CMD",
        "é",
        "-",
        "bind",
        "x=y",
    ]
) | some.text(max_size=5)
NUMBERS = some.sampled_from([0, 1, -1, 1 << 31, 1 << 63, -(1 << 63), 65535, 65536])


def values_of(of: Any) -> some.SearchStrategy[Any]:
    """Any value of a wire struct's field, by its type."""
    info = msgspec.inspect.type_info(of)
    return _of(info, 0)


def _of(info: Any, depth: int) -> some.SearchStrategy[Any]:
    kind = type(info).__name__
    if kind == "StructType":
        if depth > 6:
            return some.just({})
        fields = {field.encode_name: _of(field.type, depth + 1) for field in info.fields}
        return some.fixed_dictionaries({}, optional=fields)
    if kind == "ListType":
        return some.lists(_of(info.item_type, depth + 1), max_size=2)
    if kind == "DictType":
        return some.dictionaries(WORDS, WORDS, max_size=2)
    if kind == "UnionType":
        return some.one_of(*(_of(one, depth) for one in info.types if type(one).__name__ != "NoneType"))
    return {
        "StrType": WORDS, "IntType": NUMBERS, "BoolType": some.booleans(), "BytesType": some.just(""),
        "FloatType": some.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]),
    }[kind]  # fmt: skip


@DEADLINE
@given(values_of(ServiceSpec))
def test_any_spec_is_taken_or_refused(body: dict[str, Any]) -> None:
    """Never another error; and what is taken is taken again."""
    body = {"Name": "web"} | body
    body.setdefault("TaskTemplate", {}).setdefault("ContainerSpec", {})["Image"] = "busybox"
    try:
        once = checked(body)
    except (EngineError, msgspec.ValidationError) as error:  # by a rule, or by a field's type
        assert str(error)
    else:
        assert checked(once) == once


@DEADLINE
@given(some.text(max_size=70))
def test_any_name(name: str) -> None:
    try:
        validate.service_name(name)
    except InvalidParameter:
        return
    assert 0 < len(name) <= 63 and name.isascii() and name[0].isalnum() and name[-1].isalnum()


@pytest.mark.parametrize("other", ["a", "./a", "a/", ".//a"])
def test_one_file_for_two_secrets(other: str) -> None:
    """Two spellings of one path are in conflict."""
    references = [
        {
            "SecretID": f"id{number}",
            "SecretName": f"s{number}",
            "File": {"Name": name, "UID": "0", "GID": "0", "Mode": 256},
        }
        for number, name in enumerate(("a", other))
    ]
    with pytest.raises(InvalidParameter, match="'s0' and 's1' have a conflicting target"):
        checked(container(Secrets=references))
