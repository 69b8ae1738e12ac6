"""Parses answers of the engine as Go clients do: docker CLI, compose, Traefik, Testcontainers.

A Go program decodes an answer into typed fields. One value that its field cannot hold (an empty
time, an address with a prefix length, a negative unsigned number) makes the whole answer an error.
The shapes below are the structs of moby's api module at API 1.55. A field that is absent or null
stays zero; fields that no struct has are ignored, as in Go. Names match in any case.

    faults(answer, INSPECT) -> ["NetworkSettings.Networks.a.Gateway: not an address: '10.0.0.1/8'"]

Not here: whether a value is right. Imports nothing of the engine.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Callable, Iterator
from typing import Any

Shape = Callable[[Any, str], Iterator[str]]
"""Yields the faults of a value at a path."""


def faults(value: Any, shape: Shape) -> list[str]:
    """The values that a Go client could not decode, each with its path."""
    return list(shape(value, ""))


# --- values ---------------------------------------------------------------------------------------


def _whole(low: int, high: int) -> Shape:
    def number(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, bool) or not isinstance(value, int | None):
            yield f"{path}: not an integer: {value!r}"
        elif value is not None and not low <= value <= high:
            yield f"{path}: out of range: {value!r}"

    return number


INT = _whole(-(1 << 63), (1 << 63) - 1)
UINT64 = _whole(0, (1 << 64) - 1)
UINT32 = _whole(0, (1 << 32) - 1)
UINT16 = _whole(0, (1 << 16) - 1)
UINT8 = _whole(0, 255)


def ANY(value: Any, path: str) -> Iterator[str]:
    return iter(())


def BOOL(value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, bool | None):
        yield f"{path}: not a boolean: {value!r}"


def TEXT(value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, str | None):
        yield f"{path}: not a string: {value!r}"


def FLOAT(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        yield f"{path}: not a number: {value!r}"


def _text(what: str, fits: Callable[[str], bool], empty: bool) -> Shape:
    def parsed(value: Any, path: str) -> Iterator[str]:
        if value is None or (empty and value == ""):
            return
        if not isinstance(value, str) or not fits(value):
            yield f"{path}: not {what}: {value!r}"

    return parsed


def is_address(text: str) -> bool:
    """netip.ParseAddr, without zones."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def is_prefix(text: str) -> bool:
    """netip.ParsePrefix: an address, a slash, and a number without leading zeros."""
    address, slash, bits = text.partition("/")
    if not slash or not is_address(address) or not re.fullmatch(r"0|[1-9][0-9]{0,2}", bits, re.ASCII):
        return False
    return int(bits) <= ipaddress.ip_address(address).max_prefixlen


def is_hardware_address(text: str) -> bool:
    """net.ParseMAC with colons: 6 or 8 octets."""
    return re.fullmatch(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}((:[0-9a-fA-F]{2}){2})?", text) is not None


def is_time(text: str) -> bool:
    """RFC 3339 as time.Time.UnmarshalJSON reads it."""
    found = re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:Z|[+-](\d\d):(\d\d))", text, re.ASCII)
    if found is None:
        return False
    year, month, day, hour, minute, second, *zone = (int(part or 0) for part in found.groups())
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    days = (31, 29 if leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
    return (
        1 <= month <= 12
        and 1 <= day <= days[month - 1]
        and hour < 24
        and minute < 60
        and second < 60
        and zone[0] < 24
        and zone[1] < 60
    )


def is_port(text: str) -> bool:
    """network.ParsePort: `80/tcp` or `80`."""
    found = re.fullmatch(r"(\d{1,5})(/(tcp|udp|sctp))?", text, re.ASCII)
    return found is not None and int(found[1]) < 1 << 16


def is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return True


ADDRESS = _text("an address", is_address, empty=True)
PREFIX = _text("a prefix", is_prefix, empty=True)
MAC = _text("a hardware address", is_hardware_address, empty=True)
TIME = _text("a time", is_time, empty=False)
PRINTED_TIME = _text("a time", is_time, empty=True)
"""A string in Go's struct, which compose and the docker CLI parse."""
PORT = _text("a port", is_port, empty=False)
HOST_PORT = _text("a port number", lambda text: re.fullmatch(r"\d{1,5}(-\d{1,5})?", text) is not None, empty=True)
BYTES = _text("base64", is_base64, empty=True)


# --- collections ----------------------------------------------------------------------------------


def listed(shape: Shape, length: int | None = None) -> Shape:
    """A slice; with a length, an array.

    Go ignores what is beyond an array, which hides a mistake.
    """

    def items(value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, list | None):
            yield f"{path}: not a list: {value!r}"
        elif value is not None and length is not None and len(value) != length:
            yield f"{path}: not {length} items: {value!r}"
        else:
            for index, item in enumerate(value or ()):
                yield from shape(item, f"{path}[{index}]")

    return items


def mapped(shape: Shape, key: Shape = TEXT) -> Shape:
    """A map."""

    def items(value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, dict | None):
            yield f"{path}: not an object: {value!r}"
        else:
            for name, item in (value or {}).items():
                yield from key(name, f"{path} (key)")
                yield from shape(item, f"{path}.{name}")

    return items


def struct(**fields: Shape) -> Shape:
    """A struct. Names of fields match in any case."""
    known = {name.lower(): shape for name, shape in fields.items()}
    assert len(known) == len(fields)

    def members(value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, dict | None):
            yield f"{path}: not an object: {value!r}"
        else:
            for name, item in (value or {}).items():
                if shape := known.get(name.lower()):
                    yield from shape(item, f"{path}.{name}".lstrip("."))

    return members


def fields(names: str, shape: Shape) -> dict[str, Shape]:
    """The same shape for each name."""
    return dict.fromkeys(names.split(), shape)


def STRINGS_OR_STRING(value: Any, path: str) -> Iterator[str]:
    """strslice.StrSlice."""
    if not isinstance(value, str):
        yield from STRINGS(value, path)


STRINGS = listed(TEXT)
LABELS = mapped(TEXT)
SET = mapped(struct())
PORT_SET = mapped(struct(), key=PORT)
PORT_MAP = mapped(listed(struct(HostIp=ADDRESS, HostPort=HOST_PORT)), key=PORT)
PAIRS = listed(listed(TEXT, 2))

# --- containers -----------------------------------------------------------------------------------

ENDPOINT = struct(
    IPAMConfig=struct(IPv4Address=ADDRESS, IPv6Address=ADDRESS, LinkLocalIPs=listed(ADDRESS)),
    **fields("Links Aliases DNSNames", STRINGS),
    DriverOpts=LABELS,
    **fields("GwPriority IPPrefixLen GlobalIPv6PrefixLen", INT),
    **fields("NetworkID EndpointID", TEXT),
    **fields("Gateway IPAddress IPv6Gateway GlobalIPv6Address", ADDRESS),
    MacAddress=MAC,
)
MOUNT_POINT = struct(**fields("Type Name Source Destination Driver Mode Propagation", TEXT), RW=BOOL)
MOUNT = struct(
    **fields("Type Source Target Consistency", TEXT),
    ReadOnly=BOOL,
    BindOptions=struct(
        Propagation=TEXT,
        **fields("NonRecursive CreateMountpoint ReadOnlyNonRecursive ReadOnlyForceRecursive", BOOL),
    ),
    VolumeOptions=struct(NoCopy=BOOL, Labels=LABELS, Subpath=TEXT, DriverConfig=struct(Name=TEXT, Options=LABELS)),
    ImageOptions=struct(Subpath=TEXT),
    TmpfsOptions=struct(SizeBytes=INT, Mode=UINT32, Options=listed(STRINGS)),
    ClusterOptions=struct(),
)
HEALTHCHECK = struct(Test=STRINGS, **fields("Interval Timeout StartPeriod StartInterval Retries", INT))
CONFIG = struct(
    **fields("Hostname Domainname User Image WorkingDir StopSignal", TEXT),
    **fields("AttachStdin AttachStdout AttachStderr Tty OpenStdin StdinOnce ArgsEscaped NetworkDisabled", BOOL),
    ExposedPorts=PORT_SET,
    **fields("Env OnBuild", STRINGS),
    **fields("Cmd Entrypoint Shell", STRINGS_OR_STRING),
    Healthcheck=HEALTHCHECK,
    Volumes=SET,
    MacAddress=MAC,
    Labels=LABELS,
    StopTimeout=INT,
)
_RATES = listed(struct(Path=TEXT, Rate=UINT64))
HOST_CONFIG = struct(
    **fields("Binds VolumesFrom CapAdd CapDrop DnsOptions DnsSearch ExtraHosts GroupAdd Links", STRINGS),
    **fields("SecurityOpt DeviceCgroupRules MaskedPaths ReadonlyPaths", STRINGS),
    **fields("ContainerIDFile NetworkMode VolumeDriver CgroupnsMode IpcMode Cgroup PidMode UTSMode", TEXT),
    **fields("UsernsMode Runtime Isolation CgroupParent CpusetCpus CpusetMems", TEXT),
    **fields("AutoRemove Privileged PublishAllPorts ReadonlyRootfs OomKillDisable Init", BOOL),
    **fields("OomScoreAdj ShmSize CpuShares Memory NanoCpus CpuPeriod CpuQuota CpuRealtimePeriod", INT),
    **fields("CpuRealtimeRuntime MemoryReservation MemorySwap MemorySwappiness PidsLimit", INT),
    **fields("CpuCount CpuPercent KernelMemory KernelMemoryTCP", INT),
    **fields("IOMaximumIOps IOMaximumBandwidth", UINT64),
    **fields("Annotations StorageOpt Tmpfs Sysctls", LABELS),
    LogConfig=struct(Type=TEXT, Config=LABELS),
    PortBindings=PORT_MAP,
    RestartPolicy=struct(Name=TEXT, MaximumRetryCount=INT),
    ConsoleSize=listed(UINT32, 2),
    Dns=listed(ADDRESS),
    BlkioWeight=UINT16,
    BlkioWeightDevice=listed(struct(Path=TEXT, Weight=UINT16)),
    **fields("BlkioDeviceReadBps BlkioDeviceWriteBps BlkioDeviceReadIOps BlkioDeviceWriteIOps", _RATES),
    Devices=listed(struct(**fields("PathOnHost PathInContainer CgroupPermissions", TEXT))),
    DeviceRequests=listed(
        struct(Driver=TEXT, Count=INT, DeviceIDs=STRINGS, Capabilities=listed(STRINGS), Options=LABELS)
    ),
    Ulimits=listed(struct(Name=TEXT, Hard=INT, Soft=INT)),
    Mounts=listed(MOUNT),
)
STATE = struct(
    **fields("Status Error", TEXT),
    **fields("Running Paused Restarting OOMKilled Dead", BOOL),
    **fields("Pid ExitCode", INT),
    **fields("StartedAt FinishedAt", PRINTED_TIME),
    Health=struct(
        Status=TEXT,
        FailingStreak=INT,
        Log=listed(struct(Start=TIME, End=TIME, ExitCode=INT, Output=TEXT)),
    ),
)
DRIVER_DATA = struct(Name=TEXT, Data=LABELS)
STORAGE = struct(RootFS=struct(Snapshot=struct(Name=TEXT)))
DESCRIPTOR = struct(mediaType=TEXT, digest=TEXT, size=INT, urls=STRINGS, annotations=LABELS)
INSPECT = struct(
    **fields("Id Path Image ResolvConfPath HostnamePath HostsPath LogPath Name Driver Platform", TEXT),
    **fields("MountLabel ProcessLabel AppArmorProfile", TEXT),
    Created=PRINTED_TIME,
    **fields("Args ExecIDs", STRINGS),
    State=STATE,
    **fields("RestartCount SizeRw SizeRootFs", INT),
    HostConfig=HOST_CONFIG,
    GraphDriver=DRIVER_DATA,
    Storage=STORAGE,
    Mounts=listed(MOUNT_POINT),
    Config=CONFIG,
    ImageManifestDescriptor=DESCRIPTOR,
    NetworkSettings=struct(
        **fields("Bridge SandboxID SandboxKey EndpointID", TEXT),
        HairpinMode=BOOL,
        **fields("LinkLocalIPv6Address Gateway GlobalIPv6Address IPAddress IPv6Gateway", ADDRESS),
        **fields("LinkLocalIPv6PrefixLen GlobalIPv6PrefixLen IPPrefixLen", INT),
        **fields("SecondaryIPAddresses SecondaryIPv6Addresses", listed(struct(Addr=ADDRESS, PrefixLen=INT))),
        MacAddress=MAC,
        Ports=PORT_MAP,
        Networks=mapped(ENDPOINT),
    ),
)
SUMMARY = struct(
    **fields("Id Image ImageID Command State Status", TEXT),
    Names=STRINGS,
    **fields("Created SizeRw SizeRootFs", INT),
    Ports=listed(struct(IP=ADDRESS, PrivatePort=UINT16, PublicPort=UINT16, Type=TEXT)),
    Labels=LABELS,
    HostConfig=struct(NetworkMode=TEXT, Annotations=LABELS),
    Health=struct(Status=TEXT, FailingStreak=INT),
    NetworkSettings=struct(Networks=mapped(ENDPOINT)),
    Mounts=listed(MOUNT_POINT),
    ImageManifestDescriptor=DESCRIPTOR,
)
EXEC = struct(
    **fields("ID ContainerID", TEXT),
    **fields("Running OpenStdin OpenStderr OpenStdout CanRemove", BOOL),
    **fields("ExitCode Pid", INT),
    ProcessConfig=struct(tty=BOOL, privileged=BOOL, entrypoint=TEXT, user=TEXT, arguments=STRINGS),
    DetachKeys=BYTES,
)
TOP = struct(Titles=STRINGS, Processes=listed(STRINGS))
CHANGES = listed(struct(Path=TEXT, Kind=UINT8))
WAITED = struct(StatusCode=INT, Error=struct(Message=TEXT))
CREATED = struct(Id=TEXT, Warnings=STRINGS)

_CPU = struct(
    cpu_usage=struct(
        **fields("total_usage usage_in_kernelmode usage_in_usermode", UINT64), percpu_usage=listed(UINT64)
    ),
    system_cpu_usage=UINT64,
    online_cpus=UINT32,
    throttling_data=struct(**fields("periods throttled_periods throttled_time", UINT64)),
)
_BLOCKS = listed(struct(**fields("major minor value", UINT64), op=TEXT))
STATS = struct(
    **fields("id name os_type", TEXT),
    **fields("read preread", TIME),
    pids_stats=struct(**fields("current limit", UINT64)),
    blkio_stats=struct(
        **fields("io_service_bytes_recursive io_serviced_recursive io_queue_recursive", _BLOCKS),
        **fields("io_service_time_recursive io_wait_time_recursive io_merged_recursive", _BLOCKS),
        **fields("io_time_recursive sectors_recursive", _BLOCKS),
    ),
    num_procs=UINT32,
    **fields("cpu_stats precpu_stats", _CPU),
    memory_stats=struct(**fields("usage max_usage failcnt limit", UINT64), stats=mapped(UINT64)),
    networks=mapped(
        struct(
            **fields("rx_bytes rx_packets rx_errors rx_dropped", UINT64),
            **fields("tx_bytes tx_packets tx_errors tx_dropped", UINT64),
        )
    ),
)

# --- images ---------------------------------------------------------------------------------------

IMAGE_SUMMARY = struct(
    **fields("Id ParentId", TEXT),
    **fields("Containers Created SharedSize Size VirtualSize", INT),
    Labels=LABELS,
    **fields("RepoDigests RepoTags", STRINGS),
    Manifests=listed(struct(ID=TEXT, Descriptor=DESCRIPTOR, Available=BOOL)),
    Descriptor=DESCRIPTOR,
)
IMAGE = struct(
    **fields("Id Parent Comment Container DockerVersion Author Architecture Variant Os OsVersion", TEXT),
    **fields("RepoTags RepoDigests", STRINGS),
    Created=PRINTED_TIME,
    **fields("Config ContainerConfig", CONFIG),
    **fields("Size VirtualSize", INT),
    GraphDriver=DRIVER_DATA,
    RootFS=struct(Type=TEXT, Layers=STRINGS),
    Metadata=struct(LastTagTime=TIME),
    Descriptor=DESCRIPTOR,
    Manifests=listed(ANY),
    Identity=struct(),
)
HISTORY = listed(struct(**fields("Comment CreatedBy Id", TEXT), **fields("Created Size", INT), Tags=STRINGS))

# --- networks and volumes -------------------------------------------------------------------------

NETWORK = struct(
    **fields("Name Id Scope Driver", TEXT),
    Created=TIME,
    **fields("EnableIPv4 EnableIPv6 Internal Attachable Ingress ConfigOnly", BOOL),
    IPAM=struct(
        Driver=TEXT,
        Options=LABELS,
        Config=listed(struct(Subnet=PREFIX, IPRange=PREFIX, Gateway=ADDRESS, AuxiliaryAddresses=mapped(ADDRESS))),
    ),
    ConfigFrom=struct(Network=TEXT),
    **fields("Options Labels", LABELS),
    Peers=listed(struct(Name=TEXT, IP=ADDRESS)),
    Containers=mapped(
        struct(**fields("Name EndpointID", TEXT), MacAddress=MAC, **fields("IPv4Address IPv6Address", PREFIX))
    ),
    Services=mapped(
        struct(
            VIP=ADDRESS,
            Ports=STRINGS,
            LocalLBIndex=INT,
            Tasks=listed(struct(**fields("Name EndpointID", TEXT), EndpointIP=ADDRESS, Info=LABELS)),
        )
    ),
    Status=struct(
        IPAM=struct(
            Subnets=mapped(struct(**fields("IPsInUse DynamicIPsAvailable", UINT64)), key=PREFIX),
        )
    ),
)
VOLUME = struct(
    **fields("Name Driver Mountpoint Scope", TEXT),
    CreatedAt=PRINTED_TIME,
    **fields("Labels Options", LABELS),
    Status=mapped(ANY),
    UsageData=struct(**fields("Size RefCount", INT)),
)
VOLUMES = struct(Volumes=listed(VOLUME), Warnings=STRINGS)

# --- swarm ----------------------------------------------------------------------------------------

_INDEX = struct(Index=UINT64)
_META = {"ID": TEXT, "Version": _INDEX, **fields("CreatedAt UpdatedAt", TIME)}
_NAMED = {"Name": TEXT, "Labels": LABELS}
_DRIVER = struct(Name=TEXT, Options=LABELS)
_TLS = struct(TrustRoot=TEXT, **fields("CertIssuerSubject CertIssuerPublicKey", BYTES))
SWARM_SPEC = struct(
    **_NAMED,
    Orchestration=struct(TaskHistoryRetentionLimit=INT),
    Raft=struct(
        **fields("SnapshotInterval KeepOldSnapshots LogEntriesForSlowFollowers", UINT64),
        **fields("ElectionTick HeartbeatTick", INT),
    ),
    Dispatcher=struct(HeartbeatPeriod=INT),
    CAConfig=struct(
        NodeCertExpiry=INT,
        ExternalCAs=listed(struct(Protocol=TEXT, URL=TEXT, Options=LABELS, CACert=TEXT)),
        **fields("SigningCACert SigningCAKey", TEXT),
        ForceRotate=UINT64,
    ),
    TaskDefaults=struct(LogDriver=_DRIVER),
    EncryptionConfig=struct(AutoLockManagers=BOOL),
)
_CLUSTER = {
    **_META,
    "Spec": SWARM_SPEC,
    "TLSInfo": _TLS,
    "RootRotationInProgress": BOOL,
    "DefaultAddrPool": listed(PREFIX),
    **fields("SubnetSize DataPathPort", UINT32),
    "DataPathAddress": TEXT,
}
SWARM = struct(**_CLUSTER, JoinTokens=struct(Worker=TEXT, Manager=TEXT))
_GENERIC = listed(
    struct(
        NamedResourceSpec=struct(Kind=TEXT, Value=TEXT),
        DiscreteResourceSpec=struct(Kind=TEXT, Value=INT),
    )
)
_RESOURCES = struct(**fields("NanoCPUs MemoryBytes", INT), GenericResources=_GENERIC)
_PLATFORM = struct(Architecture=TEXT, OS=TEXT)
NODE = struct(
    **_META,
    Spec=struct(**_NAMED, Role=TEXT, Availability=TEXT),
    Description=struct(
        Hostname=TEXT,
        Platform=_PLATFORM,
        Resources=_RESOURCES,
        Engine=struct(EngineVersion=TEXT, Labels=LABELS, Plugins=listed(struct(Type=TEXT, Name=TEXT))),
        TLSInfo=_TLS,
        CSIInfo=listed(ANY),
    ),
    Status=struct(State=TEXT, Message=TEXT, Addr=TEXT),
    ManagerStatus=struct(Leader=BOOL, Reachability=TEXT, Addr=TEXT),
)
_FILE = struct(**fields("Name UID GID", TEXT), Mode=UINT32)
_ATTACHED = listed(struct(Target=TEXT, Aliases=STRINGS, DriverOpts=LABELS))
_PORTS = listed(struct(**fields("Name Protocol PublishMode", TEXT), **fields("TargetPort PublishedPort", UINT32)))
TASK_SPEC = struct(
    ContainerSpec=struct(
        **fields("Image Hostname Dir User StopSignal Isolation", TEXT),
        **fields("Command Args Env Groups Hosts CapabilityAdd CapabilityDrop", STRINGS),
        **fields("Labels Sysctls", LABELS),
        **fields("Init TTY OpenStdin ReadOnly", BOOL),
        Privileges=struct(
            CredentialSpec=struct(**fields("Config File Registry", TEXT)),
            SELinuxContext=struct(Disable=BOOL, **fields("User Role Type Level", TEXT)),
            Seccomp=struct(Mode=TEXT, Profile=BYTES),
            AppArmor=struct(Mode=TEXT),
            NoNewPrivileges=BOOL,
        ),
        Mounts=listed(MOUNT),
        **fields("StopGracePeriod OomScoreAdj", INT),
        Healthcheck=HEALTHCHECK,
        DNSConfig=struct(Nameservers=listed(ADDRESS), **fields("Search Options", STRINGS)),
        Secrets=listed(struct(File=_FILE, **fields("SecretID SecretName", TEXT))),
        Configs=listed(struct(File=_FILE, Runtime=struct(), **fields("ConfigID ConfigName", TEXT))),
        Ulimits=listed(struct(Name=TEXT, Hard=INT, Soft=INT)),
    ),
    PluginSpec=struct(name=TEXT, remote=TEXT, disabled=BOOL, env=STRINGS),
    NetworkAttachmentSpec=struct(ContainerID=TEXT),
    Resources=struct(
        Limits=struct(**fields("NanoCPUs MemoryBytes Pids", INT)),
        Reservations=_RESOURCES,
        **fields("SwapBytes MemorySwappiness", INT),
    ),
    RestartPolicy=struct(Condition=TEXT, **fields("Delay Window", INT), MaxAttempts=UINT64),
    Placement=struct(
        Constraints=STRINGS,
        Preferences=listed(struct(Spread=struct(SpreadDescriptor=TEXT))),
        MaxReplicas=UINT64,
        Platforms=listed(_PLATFORM),
    ),
    Networks=_ATTACHED,
    LogDriver=_DRIVER,
    ForceUpdate=UINT64,
    Runtime=TEXT,
)
_UPDATE = struct(
    Parallelism=UINT64,
    **fields("Delay Monitor", INT),
    **fields("FailureAction Order", TEXT),
    MaxFailureRatio=FLOAT,
)
_ENDPOINT_SPEC = struct(Mode=TEXT, Ports=_PORTS)
SERVICE_SPEC = struct(
    **_NAMED,
    TaskTemplate=TASK_SPEC,
    Mode=struct(
        Replicated=struct(Replicas=UINT64),
        Global=struct(),
        ReplicatedJob=struct(**fields("MaxConcurrent TotalCompletions", UINT64)),
        GlobalJob=struct(),
    ),
    **fields("UpdateConfig RollbackConfig", _UPDATE),
    Networks=_ATTACHED,
    EndpointSpec=_ENDPOINT_SPEC,
)
SERVICE = struct(
    **_META,
    **fields("Spec PreviousSpec", SERVICE_SPEC),
    Endpoint=struct(Spec=_ENDPOINT_SPEC, Ports=_PORTS, VirtualIPs=listed(struct(NetworkID=TEXT, Addr=PREFIX))),
    UpdateStatus=struct(**fields("State Message", TEXT), **fields("StartedAt CompletedAt", TIME)),
    ServiceStatus=struct(**fields("RunningTasks DesiredTasks CompletedTasks", UINT64)),
    JobStatus=struct(JobIteration=_INDEX, LastExecution=TIME),
)
SERVICE_CREATED = struct(ID=TEXT, Warnings=STRINGS)
TASK = struct(
    **_META,
    **_NAMED,
    Spec=TASK_SPEC,
    **fields("ServiceID NodeID DesiredState", TEXT),
    Slot=INT,
    Status=struct(
        Timestamp=TIME,
        **fields("State Message Err", TEXT),
        ContainerStatus=struct(ContainerID=TEXT, **fields("PID ExitCode", INT)),
        PortStatus=struct(Ports=_PORTS),
    ),
    NetworksAttachments=listed(struct(Network=struct(**_META), Addresses=listed(PREFIX))),
    GenericResources=_GENERIC,
    JobIteration=_INDEX,
    Volumes=listed(ANY),
)
SECRET = struct(**_META, Spec=struct(**_NAMED, Data=BYTES, **fields("Driver Templating", _DRIVER)))
CONFIG_OBJECT = struct(**_META, Spec=struct(**_NAMED, Data=BYTES, Templating=_DRIVER))

# --- the engine -----------------------------------------------------------------------------------

VERSION = struct(
    Platform=struct(Name=TEXT),
    **fields("Version ApiVersion MinAPIVersion Os Arch GitCommit GoVersion KernelVersion", TEXT),
    Components=listed(struct(Name=TEXT, Version=TEXT, Details=LABELS)),
    Experimental=BOOL,
    BuildTime=PRINTED_TIME,
)
_COMMIT = struct(ID=TEXT, Expected=TEXT)
INFO = struct(
    **fields("ID Driver SystemTime LoggingDriver CgroupDriver CgroupVersion KernelVersion Name", TEXT),
    **fields("OperatingSystem OSVersion OSType Architecture IndexServerAddress DockerRootDir", TEXT),
    **fields("HttpProxy HttpsProxy NoProxy ServerVersion DefaultRuntime InitBinary Isolation", TEXT),
    **fields("ProductLicense", TEXT),
    **fields("Containers ContainersRunning ContainersPaused ContainersStopped Images NFd", INT),
    **fields("NGoroutines NEventsListener NCPU MemTotal", INT),
    **fields("MemoryLimit SwapLimit KernelMemory KernelMemoryTCP CpuCfsPeriod CpuCfsQuota", BOOL),
    **fields("CPUShares CPUSet PidsLimit IPv4Forwarding BridgeNfIptables BridgeNfIp6tables", BOOL),
    **fields("Debug OomKillDisable ExperimentalBuild LiveRestoreEnabled", BOOL),
    **fields("DriverStatus SystemStatus", PAIRS),
    Plugins=struct(**fields("Volume Network Authorization Log", STRINGS)),
    **fields("Labels SecurityOptions CDISpecDirs Warnings", STRINGS),
    RegistryConfig=struct(
        InsecureRegistryCIDRs=listed(PREFIX),
        IndexConfigs=mapped(struct(Name=TEXT, Mirrors=STRINGS, Secure=BOOL, Official=BOOL)),
        Mirrors=STRINGS,
    ),
    GenericResources=listed(ANY),
    Runtimes=mapped(struct(path=TEXT, runtimeArgs=STRINGS, status=LABELS)),
    Swarm=struct(
        **fields("NodeID NodeAddr LocalNodeState Error", TEXT),
        ControlAvailable=BOOL,
        RemoteManagers=listed(struct(NodeID=TEXT, Addr=TEXT)),
        **fields("Nodes Managers", INT),
        Cluster=struct(**_CLUSTER),
        Warnings=STRINGS,
    ),
    **fields("ContainerdCommit RuncCommit InitCommit", _COMMIT),
    DefaultAddressPools=listed(struct(Base=PREFIX, Size=INT)),
    FirewallBackend=struct(Driver=TEXT, Info=PAIRS),
    DiscoveredDevices=listed(struct(Source=TEXT, ID=TEXT)),
    Containerd=struct(Address=TEXT, Namespaces=struct(Containers=TEXT, Plugins=TEXT)),
)
EVENT = struct(
    **fields("Type Action scope status id from", TEXT),
    Actor=struct(ID=TEXT, Attributes=LABELS),
    **fields("time timeNano", INT),
)
CACHE_RECORD = struct(
    **fields("ID Parent Type Description", TEXT),
    **{" Parents": STRINGS, "Parents": STRINGS},
    **fields("InUse Shared", BOOL),
    **fields("Size UsageCount", INT),
    **fields("CreatedAt LastUsedAt", TIME),
)


def _usage(items: Shape) -> Shape:
    return struct(**fields("ActiveCount TotalCount Reclaimable TotalSize", INT), Items=listed(items))


DISK_USAGE = struct(
    **fields("LayersSize BuilderSize", INT),
    Images=listed(IMAGE_SUMMARY),
    Containers=listed(SUMMARY),
    Volumes=listed(VOLUME),
    BuildCache=listed(CACHE_RECORD),
    ImageUsage=_usage(IMAGE_SUMMARY),
    ContainerUsage=_usage(SUMMARY),
    VolumeUsage=_usage(VOLUME),
    BuildCacheUsage=_usage(CACHE_RECORD),
)
PRUNED = struct(
    SpaceReclaimed=UINT64,
    **fields("ContainersDeleted NetworksDeleted VolumesDeleted CachesDeleted", STRINGS),
    ImagesDeleted=listed(struct(Untagged=TEXT, Deleted=TEXT)),
)
PLUGINS = listed(struct(Id=TEXT, Name=TEXT, Enabled=BOOL))
FAILURE = struct(message=TEXT)
