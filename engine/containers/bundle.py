"""A container's own directory: what the runtime reads (config.json) and what is bound into it (hosts, hostname, resolv.conf).

All of it blocks on files and is called in threads. Not here: what config.json says (`spec.py`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.containers import spec
from engine.containers.joins import Joined
from engine.containers.store import ContainerRecord
from engine.networks import resolver
from engine.networks.network import PREDEFINED_NAMES
from engine.runtime import program, users
from engine.runtime.cgroups import Cgroups
from engine.runtime.oci import Runtime
from engine.system import files
from engine.wire import oci
from engine.wire.containers import EndpointSettings

_RESOLV_CONF = Path("/etc/resolv.conf")
_RESOLVED = Path("/run/systemd/resolve/resolv.conf")
"""Where systemd-resolved keeps the servers that it asks itself (systemd-resolved(8)): for those who can't reach its 127.0.0.53."""

FALLBACK_SERVERS = ("8.8.8.8", "8.8.4.4")
"""Docker's, for a host whose own resolvers are all on loopback and so out of a container's reach."""

_HOSTS = """\
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
ff00::0\tip6-mcastprefix
ff02::1\tip6-allnodes
ff02::2\tip6-allrouters
"""


def write(
    record: ContainerRecord,
    directory: Path,
    rootfs: str,
    runtime_rootfs: Path,
    network: str | None,
    networks: dict[str, EndpointSettings],
    sources: Mapping[str, str],
    runtime: Runtime,
    cgroups: Cgroups,
    joined: Joined,
) -> None:
    """Everything for one start. `rootfs`: the container's root as it is seen from here; `runtime_rootfs`: where the runtime finds it, and
    `sources` where it finds mounts, by destination, when it is not at their Source.

    Raises InvalidParameter or NotFound for what the record asks and this host can't give.
    """
    directory.mkdir(mode=0o711, exist_ok=True)
    identity = users.lookup(rootfs, record.config.user, record.host.group_add or ())
    place = spec.Place(
        rootfs=str(runtime_rootfs),
        directory=directory,
        identity=identity,
        network=network,
        runtime=runtime,
        cgroups=cgroups,
        pid_namespace=joined.pid,
        ipc_namespace=joined.ipc,
        shm=joined.shm,
        sources=sources,
        files=joined.files,
    )
    document = spec.build(record, place)
    _check_program(record, rootfs, sources)
    write_network_files(record, directory, networks)
    make_mount_points(rootfs, document.mounts)
    (directory / "config.json").write_bytes(oci.encode(document))
    (directory / "runtime.log").unlink(missing_ok=True)


def make_mount_points(rootfs: Path | str, mounts: Iterable[oci.Mount]) -> None:
    """Those that are missing, in the root or in what is mounted over it before, with Docker's modes: crun would give them its own, 1755 and 0700.

    What can't be made so (a link in the way, a source that is read-only) is left to the runtime, which says why it can't be.
    """
    above: dict[str, oci.Mount] = {}
    for mount in mounts:
        place = mount.destination
        while (place := place.rpartition("/")[0]) and place not in above:
            pass
        outer = above.get(place)
        above[mount.destination] = mount
        if outer is not None and (outer.type != "bind" or "ro" in outer.options):
            continue
        with contextlib.suppress(OSError):
            root = files.open_directory(rootfs if outer is None else outer.source)
            try:
                directory = mount.type != "bind" or os.path.isdir(mount.source)
                path = mount.destination.removeprefix(place)
                os.close(files.open_mount_point(root, path, directory=directory, links=outer is None))
            finally:
                os.close(root)


def _check_program(record: ContainerRecord, rootfs: str, sources: Mapping[str, str]) -> None:
    mounted = [(mount.destination, sources.get(mount.destination, mount.source)) for mount in record.mounts]
    mounted += [(path, "") for path in ("/proc", "/dev", "/sys", *(record.host.tmpfs or {}))]
    variables = spec.environment(record.config.env or (), "", tty=False, home="")
    search = next((entry.partition("=")[2] for entry in variables if entry.startswith("PATH=")), "")
    program.check(rootfs, record.path, search, record.config.working_dir or "/", mounted)


def network_files(directory: Path) -> dict[str, Path]:
    """Where in the container each of hosts, hostname and resolv.conf goes; none before the first start."""
    paths = {f"/etc/{name}": directory / name for name in ("hosts", "hostname", "resolv.conf")}
    return {target: path for target, path in paths.items() if path.exists()}


def write_network_files(record: ContainerRecord, directory: Path, networks: dict[str, EndpointSettings]) -> None:
    """hostname, hosts and resolv.conf as Docker writes them (clients.md; resolv.conf(5), hosts(5))."""
    hostname = record.config.hostname or os.uname().nodename
    full_name = f"{hostname}.{record.config.domainname}" if record.config.domainname else hostname
    _write(directory / "hostname", hostname + "\n")
    host_network = record.host.network_mode == "host"
    hosts = Path("/etc/hosts").read_text() if host_network else _HOSTS
    if hosts and not hosts.endswith("\n"):
        hosts += "\n"
    for extra in record.host.extra_hosts or ():
        name, _, address = extra.partition(":")
        hosts += f"{address}\t{name}\n"
    hosts += "".join(f"{line}\n" for line in record.link_hosts)
    first, dot, _ = full_name.partition(".")
    names = f"{full_name} {first}" if dot else full_name
    for endpoint in networks.values():
        for address in (endpoint.ip_address, endpoint.global_ipv6_address):
            if address:
                hosts += f"{address}\t{names}\n"
    _write(directory / "hosts", hosts)
    on_users_network = not PREDEFINED_NAMES.issuperset(networks)
    _write(
        directory / "resolv.conf",
        resolv_conf(
            _host_lines(loopback_reachable=host_network),
            servers=[resolver.ADDRESS] if on_users_network else record.host.dns,
            search=record.host.dns_search,
            options=record.host.dns_options,
            loopback_reachable=host_network,
            names_of_one_label=on_users_network,
        ),
    )


def _host_lines(*, loopback_reachable: bool) -> list[str]:
    lines: list[str] = []
    for path in (_RESOLV_CONF, _RESOLVED):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        servers = [line.split()[1:2] for line in lines if line.startswith("nameserver")]
        if loopback_reachable or servers != [["127.0.0.53"]]:
            break
    return lines


def resolv_conf(
    host_lines: Iterable[str],
    *,
    servers: list[str],
    search: list[str],
    options: list[str],
    loopback_reachable: bool,
    names_of_one_label: bool = False,
) -> str:
    """The host's resolv.conf with what the container was given in its place; `search` of "." means none.

    `names_of_one_label`: they are asked for as they are before any search domain is tried, unless the options say otherwise.
    """
    own: dict[str, list[str]] = {"nameserver": [], "search": [], "options": []}
    for line in host_lines:
        keyword, *words = line.split()[:32] or [""]
        if keyword == "nameserver":
            own["nameserver"] += words[:1]
        elif keyword in ("search", "domain"):
            own["search"] = words
        elif keyword == "options":
            own["options"] += words
    reachable = [server for server in own["nameserver"] if loopback_reachable or not _is_loopback(server)]
    chosen_search = [domain for domain in search or own["search"] if domain != "."]
    lines = [f"search {' '.join(chosen_search)}"] if chosen_search else []
    lines += [f"nameserver {server}" for server in servers or reachable or FALLBACK_SERVERS]
    chosen_options = options or own["options"]
    if names_of_one_label and not any(option.startswith("ndots:") for option in chosen_options):
        chosen_options = [*chosen_options, "ndots:0"]
    if chosen_options:
        lines.append(f"options {' '.join(chosen_options)}")
    return "\n".join(lines) + "\n"


def _is_loopback(server: str) -> bool:
    try:
        return ipaddress.ip_address(server.partition("%")[0]).is_loopback
    except ValueError:
        return True  # not an address: of no use to a container


def _write(path: Path, text: str) -> None:
    # Rewritten in place, not replaced: a running container has this very inode bound into it.
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
