"""What the operator chose: paths, listeners, runtime and limits. Frozen after start; read from arguments and a TOML file.

Not here: anything that changes while the daemon runs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

DEFAULT_SOCKET = "/run/engined.sock"
DEFAULT_ROOT = "/var/lib/engined"
DEFAULT_RUN = "/run/engined"
DEFAULT_BRIDGE = "engined0"
DEFAULT_CERTIFICATES = "/etc/docker/certs.d"

MAX_RUN_PATH = 60
"""Bytes of the run directory's path: a socket below it must fit into the 108 of unix(7)'s `sun_path`."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine on this host. Two of them with other `root`, `run` and `bridge` do not touch each other."""

    sockets: tuple[str, ...] = (DEFAULT_SOCKET,)
    group: str = "docker"
    """Group that may use the Unix sockets, when the host has it; else root alone."""
    tcp: tuple[str, ...] = ()
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    insecure: bool = False
    """Plain TCP, on loopback addresses alone."""
    root: Path = Path(DEFAULT_ROOT)
    run: Path = Path(DEFAULT_RUN)
    runtime: str = ""
    """`crun`, `runc` or a path; empty: the start-up probe chooses."""
    bridge: str = DEFAULT_BRIDGE
    bridge_subnet: str = ""
    """CIDR of the default bridge; empty: the first default pool that overlaps no route of the host."""
    log_level: str = "info"
    attach_stall: int = 300
    """Seconds after which an attached client that took nothing is disconnected (design §7)."""
    insecure_registries: tuple[str, ...] = ()
    """HOST, HOST:PORT or CIDR of registries that may be spoken to without TLS, or without a certificate that holds; loopback always may."""
    registry_mirrors: tuple[str, ...] = ()
    """URLs that are asked before Docker Hub."""
    registry_certificates: Path = Path(DEFAULT_CERTIFICATES)
    """HOST:PORT/*.crt, *.cert and *.key in it, as Docker reads them."""
    plugin_sockets: tuple[Path, ...] = (Path("/run/docker/plugins"),)
    """Directories with sockets of plugins (NAME.sock), as Docker looks for them; RUN/plugins comes after them."""
    plugin_specs: tuple[Path, ...] = (Path("/etc/docker/plugins"), Path("/usr/lib/docker/plugins"))
    """Directories with specifications of plugins (NAME.spec, NAME.json)."""
    plugin_timeout: int = 60
    """Seconds that a plugin may take to answer one call."""
    registry_timeout: int = 30
    """Seconds without a byte after which a registry's connection is given up."""
