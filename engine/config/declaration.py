"""Every option of the engine, once: its field in `Config`, its name, value, description and, where
dockerd has it, the key of dockerd's configuration file.

The command line, the TOML file, dockerd's JSON, `docs/engined.toml`, `docs/CONFIGURATION.md`, the
manual page and README's table are all made from this.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

DEFAULT_SOCKET = "/run/engined.sock"
DEFAULT_ROOT = "/var/lib/engined"
DEFAULT_RUN = "/run/engined"
DEFAULT_BRIDGE = "engined0"
DEFAULT_CERTIFICATES = "/etc/docker/certs.d"

INHERITED = "fd://"
"""Begins the name of sockets that the service manager has opened."""

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
FIREWALLS = ("auto", "own", "none")
FIREWALL_MARK = 0x10000000
"""Neither kube-proxy (0xc000) nor Tailscale (0xff0000) uses it."""
LOG_STARTS = ("strict", "lenient")

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path (unix(7): `sun_path` without its NUL)."""

MAX_RUN_PATH = 60
"""Most bytes of the run directory's path, because a socket path below it must fit into the 108
bytes of `sun_path`, unix(7).
"""


def _option(
    flag: str, value: str, text: str, default: str = "", *, docker: str = "", alias: str = "", reload: bool = False
) -> msgspec.Meta:
    """An option `flag VALUE`. `default` describes the default if the field's own is empty. `docker`
    is its key in dockerd's file, `alias` dockerd's flag if it has another one. `reload`: a new
    value is in force after a reload.
    """
    extra = {"flag": flag, "value": value, "default": default, "docker": docker, "alias": alias, "reload": reload}
    return msgspec.Meta(description=text, extra=extra)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one engine. Engines with different `sockets`, `root`, `run` and `bridge`
    do not affect each other.
    """

    sockets: Annotated[
        tuple[str, ...],
        _option(
            "--socket",
            "PATH",
            "Unix socket to listen on, mode 0660. fd:// for all that systemd has opened, fd://NAME for some.",
            docker="hosts",
        ),
    ] = (DEFAULT_SOCKET,)
    group: Annotated[
        str,
        _option(
            "--group", "NAME", "Group that may use the Unix sockets. If the host lacks it, only root.", docker="group"
        ),
    ] = "docker"
    tcp: Annotated[
        tuple[str, ...],
        _option(
            "--tcp",
            "HOST:PORT",
            "TCP address to listen on. Needs the three --tls options, or --insecure on a loopback address.",
            "none",
            docker="hosts",
        ),
    ] = ()
    tls_ca: Annotated[
        str,
        _option(
            "--tls-ca",
            "FILE",
            "CA that signs the clients' certificates.",
            "none",
            docker="tlscacert",
            alias="--tlscacert",
        ),
    ] = ""
    tls_cert: Annotated[
        str,
        _option("--tls-cert", "FILE", "Certificate chain of the server.", "none", docker="tlscert", alias="--tlscert"),
    ] = ""
    tls_key: Annotated[
        str, _option("--tls-key", "FILE", "Private key of the server.", "none", docker="tlskey", alias="--tlskey")
    ] = ""
    insecure: Annotated[bool, _option("--insecure", "", "Allow TCP without TLS, on loopback addresses only.")] = False
    experimental: Annotated[
        bool,
        _option("--experimental", "", "Tell clients that experimental features are enabled.", docker="experimental"),
    ] = False
    root: Annotated[
        Path,
        _option(
            "--root", "DIR", "Directory of images, containers and volumes.", docker="data-root", alias="--data-root"
        ),
    ] = Path(DEFAULT_ROOT)
    run: Annotated[
        Path,
        _option(
            "--run",
            "DIR",
            f"Directory of sockets and the monitor's journal, at most {MAX_RUN_PATH} bytes long. "
            "It must not survive a reboot: that is how the engine notices one.",
            docker="exec-root",
            alias="--exec-root",
        ),
    ] = Path(DEFAULT_RUN)
    runtime: Annotated[
        str,
        _option(
            "--runtime",
            "crun|runc|NAME|PATH",
            "OCI runtime. The log says at start which one is used and why.",
            "crun where it works, else runc",
            docker="default-runtime",
            alias="--default-runtime",
            reload=True,
        ),
    ] = ""
    runtimes: Annotated[
        tuple[str, ...],
        _option(
            "--add-runtime",
            "NAME=PATH [ARGUMENTS]",
            "Further OCI runtime, which containers choose by name. Arguments go before its command; --no-pivot goes "
            "after `run`.",
            "none",
            docker="runtimes",
            reload=True,
        ),
    ] = ()
    init: Annotated[
        bool,
        _option(
            "--init", "", "Run an init program in every container whose create does not say otherwise.", docker="init"
        ),
    ] = False
    init_path: Annotated[
        str,
        _option(
            "--init-path",
            "PATH",
            "Init program, linked statically.",
            "docker-init, tini-static or catatonit, whichever is installed",
            docker="init-path",
        ),
    ] = ""
    cdi_specs: Annotated[
        tuple[Path, ...],
        _option(
            "--cdi-spec-directory",
            "DIR",
            "Directory of CDI specifications (*.json, *.yaml) of devices. A later one has precedence.",
            docker="cdi-spec-dirs",
            alias="--cdi-spec-dir",
        ),
    ] = (Path("/etc/cdi"), Path("/var/run/cdi"))
    bridge: Annotated[
        str,
        _option(
            "--bridge", "NAME", "Bridge of the default network. none: there is no default network.", docker="bridge"
        ),
    ] = DEFAULT_BRIDGE
    bridge_subnet: Annotated[
        str,
        _option(
            "--bridge-subnet",
            "CIDR",
            "Subnet of the default network.",
            "the first subnet of the pools that is free",
            docker="bip",
            alias="--bip",
        ),
    ] = ""
    address_pools: Annotated[
        tuple[str, ...],
        _option(
            "--default-address-pool",
            "base=CIDR,size=BITS",
            "Pool that networks get their subnets from, which have a prefix of so many bits.",
            "172.17.0.0/16 to 172.31.0.0/16 and 192.168.0.0/16; /24 each, for the default network /16 or /20",
            docker="default-address-pools",
        ),
    ] = ()
    firewall: Annotated[
        str,
        _option(
            "--firewall",
            "|".join(FIREWALLS),
            "auto: also have iptables and firewalld of this host accept what the engine accepts, where they are in "
            "use. own: leave them alone. none: write no rules at all, as with Docker's iptables=false.",
            docker="iptables",
        ),
    ] = "auto"
    firewall_mark: Annotated[
        int,
        _option(
            "--firewall-mark",
            "NUMBER",
            "Bit of the packets' mark that says so. No other program of the host may use it.",
            hex(FIREWALL_MARK),
        ),
    ] = FIREWALL_MARK
    attach_stall: Annotated[
        int,
        _option("--attach-stall", "SECONDS", "Disconnect an attached client that has read nothing for so long."),
    ] = 300
    insecure_registries: Annotated[
        tuple[str, ...],
        _option(
            "--insecure-registry",
            "HOST[:PORT]|CIDR",
            "Registry that may be used without TLS or with an invalid certificate: a host, or all with an address in a "
            "network. Loopback always may.",
            "none",
            docker="insecure-registries",
            reload=True,
        ),
    ] = ()
    registry_mirrors: Annotated[
        tuple[str, ...],
        _option(
            "--registry-mirror",
            "URL",
            "Mirror to try before Docker Hub.",
            "none",
            docker="registry-mirrors",
            reload=True,
        ),
    ] = ()
    registry_certificates: Annotated[
        Path,
        _option(
            "--registry-certificates",
            "DIR",
            "Directory of HOST:PORT/*.crt, *.cert and *.key, as Docker reads them.",
        ),
    ] = Path(DEFAULT_CERTIFICATES)
    registry_timeout: Annotated[
        int,
        _option("--registry-timeout", "SECONDS", "Give up a registry that has sent nothing for so long."),
    ] = 30
    plugin_sockets: Annotated[
        tuple[Path, ...],
        _option(
            "--plugin-socket-directory",
            "DIR",
            "Directory of plugin sockets (NAME.sock). RUN/plugins is searched last.",
        ),
    ] = (Path("/run/docker/plugins"),)
    plugin_specs: Annotated[
        tuple[Path, ...],
        _option(
            "--plugin-spec-directory",
            "DIR",
            "Directory of plugin specifications (NAME.spec, NAME.json).",
        ),
    ] = (Path("/etc/docker/plugins"), Path("/usr/lib/docker/plugins"))
    plugin_timeout: Annotated[
        int,
        _option("--plugin-timeout", "SECONDS", "Give up a plugin call that takes longer."),
    ] = 60
    authorization_plugins: Annotated[
        tuple[str, ...],
        _option(
            "--authorization-plugin",
            "NAME",
            "Plugin that allows or denies every request to the API. They are asked in this order.",
            "none",
            docker="authorization-plugins",
            reload=True,
        ),
    ] = ()
    log_driver: Annotated[
        str,
        _option("--log-driver", "NAME", "Log driver of containers whose create names none.", docker="log-driver"),
    ] = "json-file"
    log_opts: Annotated[
        tuple[str, ...],
        _option(
            "--log-opt",
            "KEY=VALUE",
            "Option of containers' logs that have the driver of --log-driver.",
            "none",
            docker="log-opts",
        ),
    ] = ()
    log_start: Annotated[
        str,
        _option(
            "--log-start",
            "|".join(LOG_STARTS),
            "When the server of a container's log cannot be reached: strict fails the start where Docker does, "
            "lenient starts the container and keeps its lines until they can be delivered.",
        ),
    ] = "strict"
    labels: Annotated[
        tuple[str, ...],
        _option(
            "--label",
            "KEY=VALUE",
            "Label of this engine, which constraints of services can name.",
            "none",
            docker="labels",
            reload=True,
        ),
    ] = ()
    generic_resources: Annotated[
        tuple[str, ...],
        _option(
            "--node-generic-resource",
            "KIND=NUMBER|NAME",
            "Resource of this host that services can reserve: a number of equal items, or one item by its name.",
            "none",
            docker="node-generic-resources",
        ),
    ] = ()
    pidfile: Annotated[
        str,
        _option(
            "--pidfile", "FILE", "File that has the daemon's process number while it runs.", "none", docker="pidfile"
        ),
    ] = ""
    log_format: Annotated[
        str,
        _option("--log-format", "|".join(LOG_FORMATS), "Form of the lines that the engine logs.", docker="log-format"),
    ] = "text"
    metrics: Annotated[
        str,
        _option(
            "--metrics-addr",
            "HOST:PORT",
            "Address of metrics for Prometheus, at /metrics. On loopback only: nobody is asked who they are.",
            "none",
            docker="metrics-addr",
        ),
    ] = ""
    shutdown_timeout: Annotated[
        int,
        _option(
            "--shutdown-timeout",
            "SECONDS",
            "Time that `engined stop` gives containers to exit before it kills them.",
            docker="shutdown-timeout",
            reload=True,
        ),
    ] = 10
    exec_opts: Annotated[
        tuple[str, ...],
        _option(
            "--exec-opt",
            "KEY=VALUE",
            "native.cgroupdriver=cgroupfs or systemd: who makes the cgroups of containers.",
            "systemd if it is process 1 and the host has cgroup v2 alone, else cgroupfs",
            docker="exec-opts",
        ),
    ] = ()
    cgroup_parent: Annotated[
        str,
        _option(
            "--cgroup-parent",
            "PATH",
            "Parent of the cgroups of containers whose create names none. With systemd a slice: NAME.slice.",
            "engined; with systemd system.slice",
            docker="cgroup-parent",
        ),
    ] = ""
    cgroupns_mode: Annotated[
        str,
        _option(
            "--default-cgroupns-mode",
            "host|private",
            "Cgroup namespace of containers whose create names none.",
            "private with cgroup v2, else host",
            docker="default-cgroupns-mode",
        ),
    ] = ""
    ipc_mode: Annotated[
        str,
        _option(
            "--default-ipc-mode",
            "private|shareable",
            "IPC namespace of containers whose create names none.",
            docker="default-ipc-mode",
        ),
    ] = "private"
    shm_size: Annotated[
        str,
        _option(
            "--default-shm-size",
            "SIZE",
            "Size of /dev/shm in containers whose create names none: bytes, or with a unit such as 64m.",
            docker="default-shm-size",
        ),
    ] = "64m"
    ulimits: Annotated[
        tuple[str, ...],
        _option(
            "--default-ulimit",
            "NAME=SOFT[:HARD]",
            "Limit of the processes of containers whose create does not name it.",
            "none",
            docker="default-ulimits",
        ),
    ] = ()
    no_new_privileges: Annotated[
        bool,
        _option(
            "--no-new-privileges",
            "",
            "Containers get no new privileges by set-user-id programs, unless their create says otherwise.",
            docker="no-new-privileges",
        ),
    ] = False
    seccomp_profile: Annotated[
        str,
        _option(
            "--seccomp-profile",
            "builtin|unconfined|FILE",
            "Seccomp profile of containers whose create names none.",
            docker="seccomp-profile",
        ),
    ] = "builtin"
    userns_remap: Annotated[
        str,
        _option(
            "--userns-remap",
            "default|USER[:GROUP]",
            "User whose subordinate ids (/etc/subuid, /etc/subgid) containers run with; default: dockremap.",
            "none",
            docker="userns-remap",
        ),
    ] = ""
    dns: Annotated[
        tuple[str, ...],
        _option("--dns", "IP", "DNS server of containers whose create names none.", "those of the host", docker="dns"),
    ] = ()
    dns_opts: Annotated[
        tuple[str, ...],
        _option(
            "--dns-opt",
            "OPTION",
            "Option of resolv.conf of containers whose create names none.",
            "those of the host",
            docker="dns-opts",
        ),
    ] = ()
    dns_search: Annotated[
        tuple[str, ...],
        _option(
            "--dns-search",
            "DOMAIN",
            "Search domain of containers whose create names none.",
            "those of the host",
            docker="dns-search",
        ),
    ] = ()
    resolv_conf: Annotated[
        str,
        _option(
            "--resolv-conf",
            "FILE",
            "Configuration of DNS to take in place of the host's.",
            "/etc/resolv.conf",
            docker="resolv-conf",
        ),
    ] = ""
    host_gateways: Annotated[
        tuple[str, ...],
        _option(
            "--host-gateway-ip",
            "IP",
            "What host-gateway in --add-host stands for: an IPv4 address, an IPv6 address, or both.",
            "the default network's gateways",
            docker="host-gateway-ips",
        ),
    ] = ()
    ipv6: Annotated[bool, _option("--ipv6", "", "Give the default network IPv6.", docker="ipv6")] = False
    bridge_subnet6: Annotated[
        str, _option("--bip6", "CIDR", "IPv6 subnet of the default network.", "none", docker="bip6")
    ] = ""
    fixed_cidr: Annotated[
        str,
        _option(
            "--fixed-cidr",
            "CIDR",
            "Part of the default network's subnet that containers get addresses of.",
            "the whole subnet",
            docker="fixed-cidr",
        ),
    ] = ""
    fixed_cidr6: Annotated[
        str, _option("--fixed-cidr-v6", "CIDR", "The same for IPv6.", "the whole subnet", docker="fixed-cidr-v6")
    ] = ""
    gateway: Annotated[
        str,
        _option(
            "--default-gateway",
            "IP",
            "Gateway of containers in the default network.",
            "the bridge",
            docker="default-gateway",
        ),
    ] = ""
    gateway6: Annotated[
        str, _option("--default-gateway-v6", "IP", "The same for IPv6.", "the bridge", docker="default-gateway-v6")
    ] = ""
    mtu: Annotated[int, _option("--mtu", "BYTES", "MTU of the default network.", docker="mtu")] = 1500
    bridge_trunks: Annotated[
        bool,
        _option(
            "--bridge-trunks",
            "",
            "Let a network have more containers than its bridge has ports (1,023): those beyond the first 832 share "
            "ports.",
        ),
    ] = True
    icc: Annotated[
        bool, _option("--icc", "", "Let containers of the default network reach each other.", docker="icc")
    ] = True
    host_ip: Annotated[
        str,
        _option(
            "--ip",
            "IP",
            "Address of the host that ports of the default network are published at where their create names none.",
            "all",
            docker="ip",
        ),
    ] = ""
    ip_forward: Annotated[
        bool, _option("--ip-forward", "", "Switch on forwarding in the host's kernel.", docker="ip-forward")
    ] = True
    ip_masq: Annotated[
        bool,
        _option(
            "--ip-masq",
            "",
            "Hide the addresses of the default network's containers behind the host's.",
            docker="ip-masq",
        ),
    ] = True
    allow_direct_routing: Annotated[
        bool,
        _option(
            "--allow-direct-routing",
            "",
            "Let other hosts reach published ports at containers' own addresses.",
            docker="allow-direct-routing",
        ),
    ] = False
    bridge_accept_mark: Annotated[
        str,
        _option(
            "--bridge-accept-fwmark",
            "MARK[/MASK]",
            "Accept packets with this mark as if their port were published.",
            "none",
            docker="bridge-accept-fwmark",
        ),
    ] = ""
    network_opts: Annotated[
        tuple[str, ...],
        _option(
            "--default-network-opt",
            "DRIVER=KEY=VALUE",
            "Option of networks whose create does not name it.",
            "none",
            docker="default-network-opts",
        ),
    ] = ()
    max_downloads: Annotated[
        int,
        _option(
            "--max-concurrent-downloads",
            "NUMBER",
            "Layers that are downloaded at the same time, over all pulls. 0 for no limit.",
            docker="max-concurrent-downloads",
            reload=True,
        ),
    ] = 3
    max_uploads: Annotated[
        int,
        _option(
            "--max-concurrent-uploads",
            "NUMBER",
            "Layers that are uploaded at the same time, over all pushes. 0 for no limit.",
            docker="max-concurrent-uploads",
            reload=True,
        ),
    ] = 5
    download_attempts: Annotated[
        int,
        _option(
            "--max-download-attempts",
            "NUMBER",
            "Attempts to download a layer, with pauses of 5 s, 10 s and so on. The first one includes quick retries.",
            docker="max-download-attempts",
            reload=True,
        ),
    ] = 5
    http_proxy: Annotated[
        str,
        _option(
            "--http-proxy",
            "URL",
            "Proxy for http URLs of pulls, pushes and builds. Variables of RUN steps come from the client.",
            "the variable HTTP_PROXY",
            docker="http-proxy",
        ),
    ] = ""
    https_proxy: Annotated[
        str,
        _option(
            "--https-proxy",
            "URL",
            "Proxy for https URLs of pulls, pushes and builds.",
            "the variable HTTPS_PROXY",
            docker="https-proxy",
        ),
    ] = ""
    no_proxy: Annotated[
        str,
        _option(
            "--no-proxy",
            "HOST[,HOST]",
            "Hosts that are reached without proxy: HOST[:PORT] with its subdomains, .DOMAIN, IP, CIDR, or * for all. "
            "Loopback addresses always are.",
            "the variable NO_PROXY",
            docker="no-proxy",
        ),
    ] = ""
    features: Annotated[
        tuple[str, ...],
        _option(
            "--feature",
            "NAME=true|false",
            "Feature of dockerd. cdi=false and containerd-snapshotter=true are refused, the others change nothing.",
            "none",
            docker="features",
            reload=True,
        ),
    ] = ()
    build_gc: Annotated[
        bool,
        _option(
            "--build-cache-gc", "", "After each build, remove what the build cache may not keep.", docker="builder"
        ),
    ] = True
    build_reserved: Annotated[
        str,
        _option(
            "--build-cache-reserved",
            "SIZE",
            "Size of the build cache that is always kept.",
            "a tenth of the disk, if no limit is given",
            docker="builder",
        ),
    ] = ""
    build_max_used: Annotated[
        str,
        _option(
            "--build-cache-max-used",
            "SIZE",
            "Size of the build cache that it may not exceed.",
            "80 % of the disk, if no limit is given",
            docker="builder",
        ),
    ] = ""
    build_min_free: Annotated[
        str,
        _option(
            "--build-cache-min-free",
            "SIZE",
            "Free space of the disk that the build cache leaves.",
            "20 % of the disk, if no limit is given",
            docker="builder",
        ),
    ] = ""
    build_policies: Annotated[
        tuple[str, ...],
        _option(
            "--build-cache-policy",
            "KEY=VALUE[,KEY=VALUE]",
            "Instead of these limits: reserved, max-used, min-free, unused-for, all, and filters of "
            "`docker builder prune`. Policies are applied in this order.",
            "none",
            docker="builder",
        ),
    ] = ()
    build_history_entries: Annotated[
        int,
        _option(
            "--build-history-entries",
            "N",
            "Builds that `docker buildx history` keeps whatever their age.",
            docker="builder",
        ),
    ] = 50
    build_history_age: Annotated[
        str,
        _option(
            "--build-history-age",
            "DURATION",
            "Age up to which it keeps more builds than these.",
            docker="builder",
        ),
    ] = "48h"
    build_entitlements: Annotated[
        tuple[str, ...],
        _option(
            "--build-entitlement", "network.host|none", "What builds may be allowed by their client.", docker="builder"
        ),
    ] = ("network.host",)
    swarm_advertise: Annotated[
        str,
        _option(
            "--swarm-default-advertise-addr",
            "IP|INTERFACE",
            "Address to advertise where `docker swarm init` names none.",
            "found by the routes",
            docker="swarm-default-advertise-addr",
        ),
    ] = ""
    log_level: Annotated[
        str,
        _option(
            "--log-level",
            "|".join(LOG_LEVELS),
            "Least severe level that is logged, to standard error.",
            docker="log-level",
            reload=True,
        ),
    ] = "info"


class Option(NamedTuple):
    """One option of `engined serve`, which is one field of `Config`."""

    field: str
    flag: str
    value: str
    """Placeholder of its value; empty for a switch."""
    text: str
    default: Any
    shown_default: str
    repeatable: bool
    docker: str
    """Its key in dockerd's file; empty where dockerd has none."""
    alias: str
    """Dockerd's flag, if it has another one."""
    reload: bool
    """It is in force after a reload."""

    @property
    def name(self) -> str:
        """Its name in the TOML file."""
        return self.flag.removeprefix("--").replace("-", "_")


def options() -> tuple[Option, ...]:
    """All options, in the order of the manual."""
    return _OPTIONS


def _options() -> Iterator[Option]:
    hints = typing.get_type_hints(Config, include_extras=True)
    for field in msgspec.structs.fields(Config):
        kind, meta = typing.get_args(hints[field.name])
        default = field.default
        repeatable = typing.get_origin(kind) is tuple
        shown = ", ".join(map(str, default)) if repeatable else str(default)
        yield Option(
            field.name,
            meta.extra["flag"],
            meta.extra["value"],
            meta.description,
            default,
            meta.extra["default"] or ("" if kind is bool else shown),
            repeatable,
            meta.extra["docker"],
            meta.extra["alias"],
            meta.extra["reload"],
        )


_OPTIONS = tuple(_options())
