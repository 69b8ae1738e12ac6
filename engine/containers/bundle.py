"""A container's own directory: config.json for the runtime, and hosts, hostname and resolv.conf,
which are bound into the container.

Every function blocks on files and is called in threads. Not here: the content of config.json
(`spec.py`).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from engine.common.network_rules import PREDEFINED_NAMES
from engine.config import Config
from engine.containers import mount_points, program, spec
from engine.containers.body import HOST_GATEWAY, has_ipv6
from engine.containers.start import Placed, Start
from engine.containers.store import ContainerRecord
from engine.errors import InvalidParameter
from engine.networks.dns import resolver
from engine.networks.host import HAS_IPV6
from engine.runtime import cdi, users
from engine.system import files, user_namespaces
from engine.system.user_namespaces import IdMap
from engine.wire import oci
from engine.wire.containers import EndpointSettings, HostConfig

_RESOLV_CONF = Path("/etc/resolv.conf")
_RESOLVED = Path("/run/systemd/resolve/resolv.conf")
"""systemd-resolved's list of its upstream servers (systemd-resolved(8)), for containers, which
cannot reach its 127.0.0.53.
"""

FALLBACK_SERVERS = ("8.8.8.8", "8.8.4.4")
"""Docker's fallback servers, for a host whose own resolvers are all on loopback and therefore
unreachable for containers.
"""

_HOSTS = "127.0.0.1\tlocalhost\n"
_HOSTS_OF_SANDBOX = "127.0.0.1\tlocalhost {}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_HOSTS_WITH_IPV6 = f"""\
{_HOSTS}\
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
ff00::0\tip6-mcastprefix
ff02::1\tip6-allnodes
ff02::2\tip6-allrouters
"""


class Written(NamedTuple):
    """What a start has written."""

    user: oci.User
    """Of its process."""
    stubs: list[str]
    """Mount points that were made in the root, relative to it and without links."""


def write(record: ContainerRecord, start: Start, gateways: Sequence[str], named: cdi.Registry) -> Written:
    """Write all files of one start. `gateways`: as for `write_network_files`. `named`: the devices
    that have names on this host.

    Raises InvalidParameter or NotFound for requests of the record that this host cannot satisfy.
    """
    directory, bundle, rootfs, placed = start.directory, start.bundle, start.rootfs, start.placed
    directory.mkdir(mode=0o711, exist_ok=True)
    identity = users.lookup(rootfs, record.config.user, record.host.group_add or ())
    # Before the specification, whose binds of these files repeat the flags of their mount.
    write_network_files(record, directory, start.networks, start.config, gateways, sandbox=placed.sandbox)
    document = spec.build(record, start, identity, named.edits(record.host.device_requests or ()))
    _check_program(record, rootfs, start.sources, placed.here)
    with making_files(record.ids):
        stubs = make_mount_points(rootfs, document.mounts, placed)
    bundle.mkdir(mode=0o700, parents=True, exist_ok=True)
    (bundle / "config.json").write_bytes(oci.encode(document))
    if bundle != directory:  # for the next daemon (boot.end_strays), without what must not stay
        variables = [variable for variable in document.process.env if variable not in placed.environment]
        public = replace(document, process=replace(document.process, env=variables))
        (directory / "config.json").write_bytes(oci.encode(public))
    (directory / "runtime.log").unlink(missing_ok=True)
    return Written(document.process.user, stubs)


def making_files(ids: IdMap | None) -> contextlib.AbstractContextManager[None]:
    """For a thread that makes files in a root with these ids: they belong to its root."""
    return contextlib.nullcontext() if ids is None else user_namespaces.files_of(*ids.root)


def mark_begun(directory: Path) -> None:
    """From now on the start is seen to have begun (`was_begun`), however the daemon ends."""
    directory.mkdir(mode=0o711, exist_ok=True)
    (directory / "config.json").touch()


def was_begun(directory: Path) -> bool:
    """A start has written its files, or was about to."""
    return (directory / "config.json").exists()


def make_mount_points(rootfs: Path | str, mounts: Iterable[oci.Mount], extra: Placed | None = None) -> list[str]:
    """Make the missing mount points with Docker's modes; crun would use its own, 1755 and 0700.

    They are made in the root, or in the outer mount they lie in. If one cannot be made here (its
    source is read-only), the runtime reports why. Returns those made in the root. Raises
    InvalidParameter where a symbolic link of the image or a volume leads to /proc or /sys.
    """
    made: list[str] = []
    here = extra.here if extra is not None else {}
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
            in_root = rootfs if outer is None else here.get(outer.destination) or outer.source
            root = files.open_directory(in_root)
            try:
                if extra is not None and mount.destination in extra.mounts:
                    directory = mount.destination in extra.directories
                else:
                    directory = mount.type != "bind" or os.path.isdir(mount.source)
                path = mount.destination.removeprefix(place)
                noted = made if outer is None else None
                try:
                    mount_point = files.open_mount_point(root, path, directory=directory, links=False, made=noted)
                except OSError as error:
                    if error.errno != errno.ELOOP:
                        raise
                    _check_links(root, mount, nested=outer is not None)
                    mount_point = files.open_mount_point(root, path, directory=directory, made=noted)
                os.close(mount_point)
            finally:
                os.close(root)
    return made


def _check_links(root: int, mount: oci.Mount, *, nested: bool) -> None:
    """Check a mount point behind a symbolic link, which crun 1.8 follows: it must not lead to /proc
    or /sys.

    `nested`: the link lies in another mount. The target of an absolute link there depends on the
    whole root, so all of them are refused.
    """
    if mount.type in ("proc", "sysfs"):
        raise InvalidParameter(f'filesystem "{mount.type}" must be mounted on ordinary directory')
    if mount.destination == "/dev":  # runc makes links in it by its path, which would be the host's
        raise InvalidParameter("mount destination '/dev': it must be an ordinary directory")
    if nested:
        raise InvalidParameter(
            f"mount destination {mount.destination!r}: the path has a symbolic link in another mount"
        )
    mount_points.check_destination("/" + os.fsdecode(files.resolve_in_root(root, mount.destination)))


def _check_program(record: ContainerRecord, rootfs: str, sources: Mapping[str, str], extra: Mapping[str, str]) -> None:
    mounted = [(mount.destination, sources.get(mount.destination, mount.source)) for mount in record.mounts]
    mounted += extra.items()
    mounted += [(path, "") for path in ("/proc", "/dev", "/sys", *mount_points.temporary(record.host))]
    variables = spec.environment(record.config.env or (), "", tty=False, home="")
    search = next((entry.partition("=")[2] for entry in variables if entry.startswith("PATH=")), "")
    program.check(rootfs, record.path, search, record.config.working_dir or "/", mounted)


NETWORK_FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
"""Where a container has files of the engine, named alike in its directory."""


def network_files(directory: Path) -> dict[str, Path]:
    """Files for the destinations `NETWORK_FILES`; empty before the first start."""
    paths = {target: directory / os.path.basename(target) for target in NETWORK_FILES}
    return {target: path for target, path in paths.items() if path.exists()}


def give_to_root(directory: Path) -> None:
    """Its network files belong to the host's root again, after a run in a user namespace."""
    for path in network_files(directory).values():
        os.chown(path, 0, 0)


def write_network_files(
    record: ContainerRecord,
    directory: Path,
    networks: Mapping[str, EndpointSettings],
    config: Config,
    gateways: Sequence[str] = (),
    *,
    sandbox: bool = False,
) -> None:
    """hostname, hosts and resolv.conf as Docker writes them (resolv.conf(5), hosts(5)). What the
    container does not say about DNS, `config` may say. `sandbox`: hosts as BuildKit writes it.

    `gateways`: the addresses that `host-gateway` stands for. Raises InvalidParameter if there is
    none.
    """
    hostname = record.config.hostname or os.uname().nodename
    full_name = f"{hostname}.{record.config.domainname}" if record.config.domainname else hostname
    owner = record.ids.root if record.ids is not None else None
    on_users_network = not PREDEFINED_NAMES.issuperset(networks)
    _write(directory / "hostname", hostname + "\n", owner)
    host_network = record.host.network_mode == "host"
    loopback = HAS_IPV6 and has_ipv6(record.host, "lo")
    if sandbox:
        networks = {}
        hosts = _HOSTS_OF_SANDBOX.format(hostname)
    else:
        hosts = Path("/etc/hosts").read_text() if host_network else _HOSTS_WITH_IPV6 if loopback else _HOSTS
    if hosts and not hosts.endswith("\n"):
        hosts += "\n"
    for extra in record.host.extra_hosts or ():
        name, _, address = extra.partition(":")
        hosts += "".join(f"{each}\t{name}\n" for each in _addresses(extra, address, gateways))
    hosts += "".join(f"{line}\n" for line in record.link_hosts)
    first, dot, _ = full_name.partition(".")
    names = f"{full_name} {first}" if dot else full_name
    for endpoint in networks.values():
        for address in (endpoint.ip_address, endpoint.global_ipv6_address):
            if address:
                hosts += f"{address}\t{names}\n"
    _write(directory / "hosts", hosts, owner)
    _write(
        directory / "resolv.conf",
        resolv_conf(
            _host_lines(config.resolv_conf, loopback_reachable=host_network),
            servers=[resolver.ADDRESS] if on_users_network else dns_servers(record.host, config),
            search=record.host.dns_search or config.dns_search,
            options=record.host.dns_options or config.dns_opts,
            loopback_reachable=host_network,
            names_of_one_label=on_users_network,
        ),
        owner,
    )


def dns_servers(host: HostConfig, config: Config) -> Sequence[str]:
    """The servers of a container, or of all; empty for those of the host."""
    return host.dns or config.dns


def _addresses(extra: str, address: str, gateways: Sequence[str]) -> Sequence[str]:
    """The addresses of an entry of ExtraHosts."""
    if address != HOST_GATEWAY:
        return [address.removeprefix("[").removesuffix("]")]
    if not gateways:
        raise InvalidParameter(f"ExtraHosts: {extra}: unable to derive the IP value for {HOST_GATEWAY}")
    return gateways


def _host_lines(given: str, *, loopback_reachable: bool) -> list[str]:
    """Of the host's resolv.conf, or of the file `given`."""
    lines: list[str] = []
    for path in (Path(given),) if given else (_RESOLV_CONF, _RESOLVED):
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
    servers: Sequence[str],
    search: Sequence[str],
    options: Sequence[str],
    loopback_reachable: bool,
    names_of_one_label: bool = False,
) -> str:
    """The host's resolv.conf, with the container's own settings in place of the host's. `search` of
    "." means none.

    `names_of_one_label`: names without a dot are tried as they are before the search domains,
    unless `options` has ndots.
    """
    own: dict[str, list[str]] = {"nameserver": [], "search": [], "options": []}
    comments: list[str] = []
    for line in host_lines:
        if line.startswith(("#", ";")):
            comments.append(line.rstrip())
        keyword, *words = line.split()[:32] or [""]
        if keyword == "nameserver":
            own["nameserver"] += words[:1]
        elif keyword in ("search", "domain"):
            own["search"] = words
        elif keyword == "options":
            own["options"] += words
    reachable = [server for server in own["nameserver"] if loopback_reachable or not _is_loopback(server)]
    chosen_search = [domain for domain in search or own["search"] if domain != "."]
    # Docker copies the host's file, comments included, unless the container has DNS settings of its
    # own.
    lines = comments[:_MOST_COMMENTS] if not (servers or search or options) else []
    lines += [f"nameserver {server}" for server in servers or reachable or FALLBACK_SERVERS]
    lines += [f"search {' '.join(chosen_search)}"] if chosen_search else []
    chosen_options = options or own["options"]
    if names_of_one_label and not any(option.startswith("ndots:") for option in chosen_options):
        chosen_options = [*chosen_options, "ndots:0"]
    if chosen_options:
        lines.append(f"options {' '.join(chosen_options)}")
    return "\n".join(lines) + "\n"


_MOST_COMMENTS = 256


def _is_loopback(server: str) -> bool:
    try:
        return ipaddress.ip_address(server.partition("%")[0]).is_loopback
    except ValueError:
        return True  # not an address: useless to a container


def _write(path: Path, text: str, owner: tuple[int, int] | None) -> None:
    """Rewrite a file in place: a running container has this inode bind-mounted, and may read it at
    any time. `owner`: uid and gid of the container's root; None: they stay.

    The file is therefore never empty. A reader may see the end of a longer old text behind the new
    one.
    """
    data = text.encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(file, data[written:], written)
        os.ftruncate(file, len(data))
        if owner is not None:
            os.fchown(file, *owner)
    finally:
        os.close(file)
