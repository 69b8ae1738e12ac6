"""Samples of every struct that has rows, in all versions; and the checks of a row at its version
and just before.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.api import parameters
from engine.api.versions import VERSIONS
from engine.wire.containers import (
    Config,
    ContainerInspect,
    ContainerState,
    ContainerSummary,
    CreateBody,
    Created,
    DeviceRequest,
    EndpointSettings,
    GraphDriver,
    Healthcheck,
    HealthState,
    HealthSummary,
    HostConfig,
    MountPoint,
    NetworkSettings,
    SummaryHostConfig,
    SummaryNetworks,
    UpdateBody,
)
from engine.wire.events import Actor, Message
from engine.wire.exec import ExecCreate, ExecCreated, ExecStart
from engine.wire.images import DefaultConfig, HistoryItem, ImageInspect, ImageMetadata, ImageSummary, InspectRootFS
from engine.wire.images import GraphDriver as ImageGraphDriver
from engine.wire.networks import (
    IPAM,
    ConfigReference,
    IPAMStatus,
    Network,
    NetworkConnect,
    NetworkCreate,
    NetworkDisconnect,
    NetworkInspect,
    NetworkStatus,
)
from engine.wire.plugins import (
    PluginConfig,
    PluginDevice,
    PluginInspect,
    PluginInterface,
    PluginLinux,
    PluginMount,
    PluginRootfs,
    PluginSettings,
)
from engine.wire.stats import NetworkStats, Stats
from engine.wire.system import (
    CacheRecord,
    Commit,
    Component,
    DefaultAddressPool,
    DiscoveredDevice,
    DiskUsage,
    FirewallBackend,
    IndexInfo,
    Info,
    InfoPlugins,
    KindUsage,
    Platform,
    RegistryConfig,
    Runtime,
    SwarmInfo,
    VersionInfo,
)
from engine.wire.volumes import Volume, VolumeCreate

MOUNTS = [
    MountPoint(name="v", source="/volumes/v", destination="/data", driver="local", mode="z"),
    MountPoint(source="/srv", destination="/srv", mode="ro", rw=False),
]

INSPECT = ContainerInspect(
    id="c" * 64,
    created="2026-01-02T03:04:05Z",
    path="top",
    args=["-b"],
    state=ContainerState(
        status="running",
        running=True,
        paused=False,
        restarting=False,
        oom_killed=False,
        dead=False,
        pid=4711,
        exit_code=0,
        error="",
        started_at="2026-01-02T03:04:06Z",
        finished_at="0001-01-01T00:00:00Z",
        health=HealthState(status="healthy", failing_streak=0, log=[]),
    ),
    image="sha256:" + "1" * 64,
    resolv_conf_path="/r",
    hostname_path="/h",
    hosts_path="/e",
    log_path="/l",
    name="/web",
    restart_count=0,
    driver="overlay2",
    host_config=HostConfig(
        binds=["/srv:/srv:ro"],
        memory=64 << 20,
        memory_swap=128 << 20,
        cpu_shares=512,
        cpuset_cpus="0-1",
        volume_driver="local",
        tmpfs={"/run": ""},
        storage_opt={"size": "1G"},
        sysctls={"net.core.somaxconn": "1"},
        pids_limit=4,
        memory_swappiness=9,
        kernel_memory=8,
        oom_kill_disable=True,
        ipc_mode="private",
        auto_remove=True,
        nano_cpus=5,
        runtime="crun",
        cgroupns_mode="host",
        device_cgroup_rules=["c 1:1 r"],
        device_requests=[DeviceRequest(count=-1)],
        masked_paths=["/proc/kcore"],
        readonly_paths=["/proc/sys"],
        cpu_realtime_period=1,
        cpu_realtime_runtime=1,
    ),
    graph_driver=GraphDriver("overlay2", {"UpperDir": "/u"}),
    mounts=MOUNTS,
    config=Config(
        hostname="web",
        env=["A=b"],
        cmd=["top"],
        image="busybox",
        labels={"a": "b"},
        exposed_ports={"80/tcp": {}},
        healthcheck=Healthcheck(test=["CMD", "true"]),
        stop_signal="SIGINT",
    ),
    network_settings=NetworkSettings(
        networks={
            "bridge": EndpointSettings(
                endpoint_id="e" * 64,
                gateway="172.17.0.1",
                ip_address="172.17.0.2",
                ip_prefix_len=16,
                mac_address="02:42:ac:11:00:02",
            ),
            "mine": EndpointSettings(
                aliases=["a"],
                driver_opts={"x": "y"},
                gw_priority=3,
                ip_address="172.18.0.2",
                dns_names=["web", "a", "c" * 12],
            ),
        },
    ),
)

SUMMARY = ContainerSummary(
    id="c" * 64,
    names=["/web"],
    image="busybox",
    image_id="sha256:" + "1" * 64,
    command="top",
    created=1,
    ports=[],
    labels={},
    state="running",
    health=HealthSummary("healthy", 0),
    status="Up 2 seconds",
    host_config=SummaryHostConfig("default", {"a": "b"}),
    network_settings=SummaryNetworks({}),
    mounts=MOUNTS,
)

COMMIT = Commit("1.8.1")

INFO = Info(
    id="ABCD",
    containers=0,
    containers_running=0,
    containers_paused=0,
    containers_stopped=0,
    images=0,
    driver="overlay2",
    driver_status=[],
    plugins=InfoPlugins(volume=["local"], network=["bridge"]),
    memory_limit=True,
    swap_limit=False,
    kernel_memory=True,
    cpu_cfs_period=True,
    cpu_cfs_quota=True,
    cpu_shares=True,
    cpu_set=True,
    pids_limit=True,
    ipv4_forwarding=True,
    bridge_nf_iptables=True,
    bridge_nf_ip6tables=True,
    debug=False,
    nfd=1,
    oom_kill_disable=True,
    n_goroutines=1,
    system_time="",
    logging_driver="json-file",
    cgroup_driver="cgroupfs",
    cgroup_version="2",
    n_events_listener=0,
    kernel_version="6.1",
    operating_system="Debian",
    os_version="12",
    os_type="linux",
    architecture="x86_64",
    index_server_address="",
    registry_config=RegistryConfig(
        insecure_registry_cidrs=[],
        index_configs={"docker.io": IndexInfo(name="docker.io", mirrors=[], secure=True, official=True)},
        mirrors=[],
    ),
    ncpu=1,
    mem_total=1,
    docker_root_dir="/",
    engine_root_dir="/",
    http_proxy="",
    https_proxy="",
    no_proxy="",
    name="node",
    labels=[],
    experimental_build=False,
    server_version="1",
    security_options=["name=apparmor", "name=seccomp,profile=builtin"],
    runtimes={"crun": Runtime("/usr/bin/crun", status={"features": "{}"})},
    default_runtime="crun",
    swarm=SwarmInfo(),
    live_restore_enabled=True,
    init_binary="docker-init",
    containerd_commit=Commit("N/A"),
    runc_commit=COMMIT,
    init_commit=Commit("N/A"),
    default_address_pools=[DefaultAddressPool("10.0.0.0/8", 24)],
    firewall_backend=FirewallBackend("nftables"),
    cdi_spec_dirs=["/etc/cdi"],
    discovered_devices=[DiscoveredDevice("cdi", "example.com/lamp=1")],
    warnings=["WARNING: No swap limit support"],
)

VERSION = VersionInfo(
    platform=Platform("engined"),
    components=[Component(name="Engine", version="1", details={})],
    version="1",
    api_version="1.55",
    min_api_version="1.18",
    git_commit="",
    go_version="",
    os="linux",
    arch="amd64",
    kernel_version="6.1",
    build_time="",
)

STATS = Stats(
    read="2026-01-02T03:04:05Z",
    networks={"eth0": NetworkStats(1, 2, 3, 4, 5, 6, 7, 8), "eth1": NetworkStats(*[10] * 8)},
)

NETWORK_FIELDS: dict[str, Any] = {
    "name": "n",
    "id": "n" * 64,
    "created": "2026-01-02T03:04:05Z",
    "scope": "local",
    "driver": "bridge",
    "enable_ipv4": True,
    "enable_ipv6": False,
    "ipam": IPAM(),
    "internal": False,
    "attachable": False,
    "ingress": False,
    "config_from": ConfigReference(),
    "config_only": False,
    "options": {},
    "labels": {},
}

NETWORK = Network(**NETWORK_FIELDS)
NETWORK_INSPECT = NetworkInspect(
    **NETWORK_FIELDS, containers={}, peers=[], services={}, status=NetworkStatus(ipam=IPAMStatus(subnets={}))
)

CACHE_RECORD = CacheRecord(
    id="2",
    parents=["1"],
    blank_parents=["1"],
    type="regular",
    description="RUN true",
    in_use=False,
    shared=False,
    size=7,
    created_at="2026-01-02T03:04:05Z",
    usage_count=1,
)

KIND_USAGE = KindUsage(active_count=1, total_count=2, reclaimable=3, total_size=4)

DISK_USAGE = DiskUsage(
    layers_size=1,
    images=msgspec.Raw(b"[]"),
    containers=msgspec.Raw(b"[]"),
    volumes=msgspec.Raw(b"[]"),
    build_cache=msgspec.Raw(b"[]"),
    image_usage=KIND_USAGE,
    container_usage=KIND_USAGE,
    volume_usage=KIND_USAGE,
    build_cache_usage=KIND_USAGE,
)

MESSAGE = Message(
    type="container",
    action="start",
    actor=Actor("c1", {"image": "busybox"}),
    time=1,
    time_nano=1,
)

IMAGE = ImageSummary(id="i", repo_tags=["a:1"], repo_digests=[], created=1, size=1, labels={})

IMAGE_INSPECT = ImageInspect(
    id="sha256:" + "1" * 64,
    repo_tags=["a:1"],
    repo_digests=[],
    config=DefaultConfig(cmd=["sh"], exposed_ports={"80/tcp": {}}),
    architecture="arm64",
    variant="v8",
    os="linux",
    os_version="1",
    size=7,
    graph_driver=ImageGraphDriver(name="overlay2", data={}),
    root_fs=InspectRootFS(type="layers", layers=[]),
    metadata=ImageMetadata(last_tag_time="2026-01-02T03:04:05Z"),
)

HISTORY = HistoryItem(id="i", created=1, created_by="sh", tags=None, size=1, comment="")

VOLUME = Volume(name="v", driver="local", mountpoint="/v", created_at="2026-01-02T03:04:05Z", options={"type": "tmpfs"})

CREATED = Created(
    "c" * 64, ["Following container port(s) have an empty list of port-bindings: 80/tcp. Such …", "another"]
)

PLUGIN = PluginInspect(
    id="c" * 64,
    name="h.example:5000/vendor/p:v1",
    enabled=True,
    settings=PluginSettings(
        mounts=[PluginMount(name="m", source="/mine", destination="/m", type="bind", options=["rbind"])],
        env=["DEBUG=1"],
        args=["-v"],
        devices=[PluginDevice(name="d", path="/dev/fuse")],
    ),
    plugin_reference="h.example:5000/vendor/p:v1",
    config=PluginConfig(
        docker_version="17.06",
        description="a plugin",
        interface=PluginInterface(
            types=["docker.volumedriver/1.0"], socket="p.sock", protocol_scheme="moby.plugins.http/v1"
        ),
        entrypoint=["/p"],
        work_dir="/w",
        linux=PluginLinux(capabilities=["CAP_SYS_ADMIN"], devices=[PluginDevice(name="d", path="/dev/x")]),
        ipc_host=True,
        pid_host=True,
        rootfs=PluginRootfs(diff_ids=["sha256:" + "0" * 64]),
    ),
)

ENDPOINT = EndpointSettings(driver_opts={"a": "b"}, gw_priority=1, dns_names=["web"])

REPLIES: tuple[Any, ...] = (
    ENDPOINT,
    INSPECT,
    SUMMARY,
    INFO,
    COMMIT,
    INFO.runtimes["crun"],
    INFO.registry_config,
    VERSION,
    CACHE_RECORD,
    DISK_USAGE,
    STATS,
    NETWORK,
    NETWORK_INSPECT,
    MESSAGE,
    IMAGE,
    IMAGE_INSPECT,
    HISTORY,
    VOLUME,
    CREATED,
    ExecCreated("e" * 64),
    PLUGIN,
)

BODIES: dict[type, dict[str, Any]] = {
    CreateBody: {
        "Image": "busybox",
        "StopSignal": "SIGINT",
        "Healthcheck": {"Test": ["CMD", "true"], "StartInterval": 1_000_000},
        "NetworkingConfig": {"EndpointsConfig": {"n": {"Aliases": ["a"]}}},
        "HostConfig": {
            "CpuPercent": 1,
            "IOMaximumBandwidth": 2,
            "IOMaximumIOps": 3,
            "PidsLimit": 4,
            "UsernsMode": "host",
            "Sysctls": {"a": "b"},
            "StorageOpt": {"size": "1G"},
            "Tmpfs": {"/run": ""},
            "BlkioWeightDevice": [{"Path": "/dev/a", "Weight": 10}],
            "BlkioDeviceReadBps": [{"Path": "/dev/a", "Rate": 10}],
            "BlkioDeviceWriteBps": [{"Path": "/dev/a", "Rate": 10}],
            "BlkioDeviceReadIOps": [{"Path": "/dev/a", "Rate": 10}],
            "BlkioDeviceWriteIOps": [{"Path": "/dev/a", "Rate": 10}],
            "OomScoreAdj": 5,
            "ShmSize": 6,
            "MemoryReservation": 7,
            "KernelMemory": 8,
            "DnsOptions": ["ndots:1"],
            "VolumeDriver": "local",
            "GroupAdd": ["audio"],
            "MemorySwappiness": 9,
            "CpuPeriod": 10,
            "CpuQuota": 11,
            "CpusetMems": "0",
            "BlkioWeight": 12,
            "OomKillDisable": True,
            "Memory": 13,
            "ConsoleSize": [24, 80],
            "Annotations": {"a": "b"},
            "KernelMemoryTCP": 14,
        },
    },
    ExecCreate: {"Cmd": ["sh"], "Tty": True, "ConsoleSize": [24, 80]},
    ExecStart: {"Tty": True, "ConsoleSize": [24, 80]},
    UpdateBody: {
        "Memory": 1,
        "RestartPolicy": {"Name": "always"},
        "PidsLimit": 2,
        "BlkioWeightDevice": [{"Path": "/dev/a", "Weight": 10}],
        "BlkioDeviceReadBps": [{"Path": "/dev/a", "Rate": 10}],
        "BlkioDeviceWriteBps": [{"Path": "/dev/a", "Rate": 10}],
        "BlkioDeviceReadIOps": [{"Path": "/dev/a", "Rate": 10}],
        "BlkioDeviceWriteIOps": [{"Path": "/dev/a", "Rate": 10}],
    },
    NetworkCreate: {"Name": "n", "EnableIPv6": True, "Labels": {"a": "b"}, "Internal": True},
    NetworkConnect: {"Container": "c", "EndpointConfig": {"Aliases": ["a"]}},
    NetworkDisconnect: {"Container": "c", "Force": True},
    VolumeCreate: {"Name": "v", "ClusterVolumeSpec": {"Group": "g"}},
}
"""Requests in which every field that has a row is given with a value other than the default."""


def reply(value: Any, version: str) -> dict[str, Any]:
    """The JSON of a struct at `version`."""
    found = msgspec.json.decode(VERSIONS[version].shape(type(value)).encode(value))
    assert isinstance(found, dict)
    return found


def request(of: type, version: str) -> dict[str, Any]:
    """The struct that a handler gets for the sample body from a client of `version`."""
    body = msgspec.json.encode(BODIES[of])
    decoded: dict[str, Any] = msgspec.to_builtins(parameters.decode_json(body, of, VERSIONS[version].upgrade(of)))
    return decoded


def at(shape: Any, path: str) -> Any:
    """The value at a path, or `ABSENT`."""
    for name in path.split("."):
        if not isinstance(shape, dict) or name not in shape:
            return ABSENT
        shape = shape[name]
    return shape


ABSENT = "absent"


def check_new_field(value: Any, path: str, since: str, before: str) -> None:
    """Assert that the reply has the field from `since` on, and not at `before`."""
    assert at(reply(value, since), path) == at(msgspec.json.decode(msgspec.json.encode(value)), path) != ABSENT
    assert at(reply(value, before), path) == ABSENT


def check_new_parameter(of: type, path: str, since: str, before: str) -> None:
    """Assert that the request's field takes effect from `since` on, and is ignored at `before`. At
    1.24 it takes effect too, except in updates."""
    default = at(msgspec.to_builtins(msgspec.convert({}, of)), path)
    assert at(request(of, since), path) != default
    assert (at(request(of, "1.24"), path) == default) == (of is UpdateBody and since != "1.24")
    assert at(request(of, before), path) == default
