"""The operator's configuration: paths, listeners, runtime and limits. Frozen after start.

Each field of `Config` carries its option's name, value and description. The command line, the TOML
file, `docs/engined.toml`, the manual page and README's table are all made from them.

Not here: anything that changes while the daemon runs.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from engine.errors import decoding_reason, reason

DEFAULT_SOCKET = "/run/engined.sock"
DEFAULT_ROOT = "/var/lib/engined"
DEFAULT_RUN = "/run/engined"
DEFAULT_BRIDGE = "engined0"
DEFAULT_CERTIFICATES = "/etc/docker/certs.d"

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_STARTS = ("strict", "lenient")

MAX_RUN_PATH = 60
"""Most bytes of the run directory's path, because a socket path below it must fit into the 108
bytes of `sun_path`, unix(7).
"""


def _option(flag: str, value: str, text: str, default: str = "") -> msgspec.Meta:
    """An option `flag VALUE`. `default` describes the default if the field's own is empty."""
    return msgspec.Meta(description=text, extra={"flag": flag, "value": value, "default": default})


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one engine. Engines with different `sockets`, `root`, `run` and `bridge`
    do not affect each other.
    """

    sockets: Annotated[
        tuple[str, ...],
        _option("--socket", "PATH", "Unix socket to listen on, mode 0660."),
    ] = (DEFAULT_SOCKET,)
    group: Annotated[
        str,
        _option("--group", "NAME", "Group that may use the Unix sockets. If the host lacks it, only root."),
    ] = "docker"
    tcp: Annotated[
        tuple[str, ...],
        _option(
            "--tcp",
            "HOST:PORT",
            "TCP address to listen on. Needs the three --tls options, or --insecure on a loopback address.",
            "none",
        ),
    ] = ()
    tls_ca: Annotated[str, _option("--tls-ca", "FILE", "CA that signs the clients' certificates.", "none")] = ""
    tls_cert: Annotated[str, _option("--tls-cert", "FILE", "Certificate chain of the server.", "none")] = ""
    tls_key: Annotated[str, _option("--tls-key", "FILE", "Private key of the server.", "none")] = ""
    insecure: Annotated[bool, _option("--insecure", "", "Allow TCP without TLS, on loopback addresses only.")] = False
    experimental: Annotated[
        bool, _option("--experimental", "", "Tell clients that experimental features are enabled.")
    ] = False
    root: Annotated[Path, _option("--root", "DIR", "Directory of images, containers and volumes.")] = Path(DEFAULT_ROOT)
    run: Annotated[
        Path,
        _option(
            "--run",
            "DIR",
            f"Directory of sockets and the monitor's journal, at most {MAX_RUN_PATH} bytes long. "
            "It must not survive a reboot: that is how the engine notices one.",
        ),
    ] = Path(DEFAULT_RUN)
    runtime: Annotated[
        str,
        _option(
            "--runtime",
            "crun|runc|NAME|PATH",
            "OCI runtime. The log says at start which one is used and why.",
            "crun where it works, else runc",
        ),
    ] = ""
    runtimes: Annotated[
        tuple[str, ...],
        _option("--add-runtime", "NAME=PATH", "Further OCI runtime, which containers choose by name.", "none"),
    ] = ()
    init: Annotated[
        bool,
        _option("--init", "", "Run an init program in every container whose create does not say otherwise."),
    ] = False
    init_path: Annotated[
        str,
        _option(
            "--init-path",
            "PATH",
            "Init program, linked statically.",
            "docker-init, tini-static or catatonit, whichever is installed",
        ),
    ] = ""
    cdi_specs: Annotated[
        tuple[Path, ...],
        _option(
            "--cdi-spec-directory",
            "DIR",
            "Directory of CDI specifications (*.json, *.yaml) of devices. A later one has precedence.",
        ),
    ] = (Path("/etc/cdi"), Path("/var/run/cdi"))
    bridge: Annotated[str, _option("--bridge", "NAME", "Bridge of the default network.")] = DEFAULT_BRIDGE
    bridge_subnet: Annotated[
        str,
        _option(
            "--bridge-subnet",
            "CIDR",
            "Subnet of the default network.",
            "the first default pool that overlaps no route of the host",
        ),
    ] = ""
    attach_stall: Annotated[
        int,
        _option("--attach-stall", "SECONDS", "Disconnect an attached client that has read nothing for so long."),
    ] = 300
    insecure_registries: Annotated[
        tuple[str, ...],
        _option(
            "--insecure-registry",
            "HOST[:PORT]|CIDR",
            "Registry that may be used without TLS or with an invalid certificate. Loopback always may.",
            "none",
        ),
    ] = ()
    registry_mirrors: Annotated[
        tuple[str, ...],
        _option("--registry-mirror", "URL", "Mirror to try before Docker Hub.", "none"),
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
        ),
    ] = ()
    log_driver: Annotated[
        str,
        _option("--log-driver", "NAME", "Log driver of containers whose create names none."),
    ] = "json-file"
    log_opts: Annotated[
        tuple[str, ...],
        _option("--log-opt", "KEY=VALUE", "Option of containers' logs that have the driver of --log-driver.", "none"),
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
        _option("--label", "KEY=VALUE", "Label of this engine, which constraints of services can name.", "none"),
    ] = ()
    generic_resources: Annotated[
        tuple[str, ...],
        _option(
            "--node-generic-resource",
            "KIND=NUMBER|NAME",
            "Resource of this host that services can reserve: a number of equal items, or one item by its name.",
            "none",
        ),
    ] = ()
    log_level: Annotated[
        str,
        _option("--log-level", "|".join(LOG_LEVELS), "Least severe level that is logged, to standard error."),
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

    @property
    def name(self) -> str:
        """Its name in the TOML file."""
        return self.flag.removeprefix("--").replace("-", "_")


def options() -> Iterator[Option]:
    """All options, in the order of the manual."""
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
        )


def parse(chosen: dict[str, Any], file: str | None = None) -> Config:
    """The configuration. The command line overrides the TOML file, which overrides the defaults.

    Raises ValueError that names the invalid option (and the file), or the file that cannot be read.
    """
    values: dict[str, Any] = {}
    if file:
        by_name = {option.name: option.field for option in options()}
        try:
            for name, value in tomllib.loads(Path(file).read_text()).items():
                values[by_name.get(name, name)] = value
            _convert(values)
        except msgspec.ValidationError as error:
            raise ValueError(f"--config {file}: {_by_option(decoding_reason(error))}") from error
        except OSError as error:
            raise ValueError(f"--config {file}: {reason(error)}") from error
        except ValueError as error:
            raise ValueError(f"--config {file}: {error}") from error
    return _convert(values | {name: value for name, value in chosen.items() if value is not None})


def _by_option(text: str) -> str:
    """A message of `decoding_reason` with the option's name instead of the field's."""
    for option in options():
        text = re.sub(rf"^{option.field}\b", option.name, text)
    return text.replace("object contains unknown field", "unknown option")


def decode(document: bytes) -> Config:
    """A configuration that `encode` wrote. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(document, type=Config, dec_hook=_from_text)


def encode(config: Config) -> bytes:
    """The configuration as JSON, for `engined stop` when no daemon is alive."""
    return msgspec.json.encode(config, enc_hook=str)


def _from_text(kind: type[Any], value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f"Expected `str`, got `{type(value).__name__}`")  # as msgspec says it
    return kind(value)


def _is_registry(rule: str) -> bool:
    """True if `rule` is HOST, HOST:PORT or a network in CIDR notation."""
    try:
        ipaddress.ip_network(rule, strict=False)  # an address is a network of one
    except ValueError:
        return re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+)(:[0-9]{1,5})?", rule) is not None
    return True


def _is_loopback(host: str) -> bool:
    """True if the server would accept plain TCP on `host`. Checked here too, so that the daemon
    refuses before it makes anything on the host.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _runtime(entry: str) -> tuple[str, str]:
    """Name and path of `NAME=PATH`."""
    name, equals, path = entry.partition("=")
    if not (equals and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) and path.startswith("/")):
        raise ValueError(f"--add-runtime {entry!r}: must be NAME=PATH, with an absolute path")
    return name, path


def _check_log_options(entries: tuple[str, ...]) -> None:
    """Raises ValueError for an entry without a name, and for two values of one option. Names and
    values are checked by the driver (`logs/drivers`). No message quotes a value: it may be a
    secret."""
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not (name and equals):
            raise ValueError(f"--log-opt {name!r}: must be KEY=VALUE")
        if found.setdefault(name, value) != value:
            raise ValueError(f"--log-opt {name}: has another value already")


def _check_labels(labels: tuple[str, ...]) -> None:
    """Raises ValueError for a label without a key or a value, and for two values of one key."""
    found: dict[str, str] = {}
    for label in labels:
        key, equals, value = label.partition("=")
        if not (key and equals) or any(each.isspace() for each in key):
            raise ValueError(f"--label {label!r}: must be KEY=VALUE")
        if found.setdefault(key, value) != value:
            raise ValueError(f"--label {label!r}: {key} has another value already")


def _check_resources(entries: tuple[str, ...]) -> None:
    """Raises ValueError for an entry of another form, and for a kind with numbers and names."""
    kinds: dict[str, bool] = {}
    names: set[str] = set()
    for entry in entries:
        kind, _, value = entry.partition("=")
        if not re.fullmatch(r"[^\s=,]+", kind) or not re.fullmatch(r"[^\s=,]+", value):
            raise ValueError(f"--node-generic-resource {entry!r}: must be KIND=NUMBER or KIND=NAME")
        number = value.isascii() and value.isdigit()
        if number and int(value[:20]) >= 1 << 63:
            raise ValueError(f"--node-generic-resource {entry!r}: the number is too large")
        if entry in names or (kind in kinds and (number or kinds[kind])):
            raise ValueError(f"--node-generic-resource {entry!r}: {kind} is given twice, or has numbers and names")
        kinds[kind] = number
        names.add(entry)


def _convert(values: dict[str, Any]) -> Config:
    config = msgspec.convert(values, Config, dec_hook=_from_text)
    config = msgspec.structs.replace(config, root=config.root.resolve(), run=config.run.resolve())
    if len(os.fsencode(config.run)) > MAX_RUN_PATH:
        raise ValueError(
            f"--run {config.run}: must have at most {MAX_RUN_PATH} bytes, or the paths of sockets in it are too long"
        )
    if not 0 < len(config.bridge.encode()) <= 15:
        raise ValueError(f"--bridge {config.bridge!r}: must have 1 to 15 bytes, as every interface name")
    if config.init_path and not os.path.isabs(config.init_path):
        raise ValueError(f"--init-path {config.init_path}: must be an absolute path")
    names = [name for name, _ in map(_runtime, config.runtimes)]
    if len(set(names)) < len(names):
        raise ValueError(f"--add-runtime: a name is given twice: {', '.join(names)}")
    for address in config.tcp:
        host, _, port = address.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"--tcp {address}: must be HOST:PORT, with a port of 0 to 65535")
        if config.insecure and not (config.tls_ca or config.tls_cert or config.tls_key) and not _is_loopback(host):
            raise ValueError(f"--tcp {address}: without TLS only loopback addresses are allowed")
    files = {"--tls-ca": config.tls_ca, "--tls-cert": config.tls_cert, "--tls-key": config.tls_key}
    if config.tcp and not (config.insecure and not any(files.values())):
        for option, path in files.items():
            if not path:
                raise ValueError(f"--tcp needs {option} (or --insecure, on loopback)")
            if not os.access(path, os.R_OK):
                raise ValueError(f"{option} {path}: not readable")
    for mirror in config.registry_mirrors:
        if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", mirror):
            raise ValueError(f"--registry-mirror {mirror!r}: must be an http or https URL")
    for rule in config.insecure_registries:
        if not _is_registry(rule):
            raise ValueError(f"--insecure-registry {rule!r}: must be HOST, HOST:PORT or a network such as 10.0.0.0/8")
    if config.log_level not in LOG_LEVELS:
        raise ValueError(f"--log-level {config.log_level!r}: must be one of {', '.join(LOG_LEVELS)}")
    if config.log_start not in LOG_STARTS:
        raise ValueError(f"--log-start {config.log_start!r}: must be one of {', '.join(LOG_STARTS)}")
    _check_log_options(config.log_opts)
    _check_labels(config.labels)
    _check_resources(config.generic_resources)
    for option, seconds in (
        ("--attach-stall", config.attach_stall),
        ("--registry-timeout", config.registry_timeout),
        ("--plugin-timeout", config.plugin_timeout),
    ):
        if seconds < 1:
            raise ValueError(f"{option} {seconds}: must be at least 1 second")
    return config
