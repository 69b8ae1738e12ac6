"""The files that are bound into a container."""

import os
import re
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import config
from engine.containers import body, bundle
from engine.containers.store import ContainerRecord
from engine.errors import InvalidParameter
from engine.wire import oci
from engine.wire.containers import Config, CreateBody, EndpointSettings, HostConfig

ENGINE = config.Config()


def record(config: Config, host: HostConfig | None = None) -> ContainerRecord:
    return ContainerRecord(
        id="ab" * 32,
        name="n",
        created=1,
        image_id="sha256:x",
        parent="",
        path="sh",
        args=(),
        config=config,
        host=host or HostConfig(),
    )


HOST = [
    "# comment",
    "nameserver 127.0.0.53",
    "nameserver 10.0.0.2",
    "nameserver fe80::1%eth0",
    "search a.example b.example",
    "options edns0",
]


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        (
            {},
            [
                "# comment",
                "nameserver 10.0.0.2",
                "nameserver fe80::1%eth0",
                "search a.example b.example",
                "options edns0",
            ],
        ),
        ({"servers": ["1.1.1.1"]}, ["nameserver 1.1.1.1", "search a.example b.example", "options edns0"]),
        ({"search": ["."]}, ["nameserver 10.0.0.2", "nameserver fe80::1%eth0", "options edns0"]),
        (
            {"search": ["x.y"], "options": ["ndots:2"]},
            ["nameserver 10.0.0.2", "nameserver fe80::1%eth0", "search x.y", "options ndots:2"],
        ),
        (
            {"loopback_reachable": True},
            [
                "# comment",
                "nameserver 127.0.0.53",
                "nameserver 10.0.0.2",
                "nameserver fe80::1%eth0",
                "search a.example b.example",
                "options edns0",
            ],
        ),
        (
            {"servers": ["127.0.0.11"], "names_of_one_label": True},
            ["nameserver 127.0.0.11", "search a.example b.example", "options edns0 ndots:0"],
        ),
        (
            {"servers": ["127.0.0.11"], "names_of_one_label": True, "options": ["ndots:1"]},
            ["nameserver 127.0.0.11", "search a.example b.example", "options ndots:1"],
        ),
    ],
)
def test_resolv_conf(given: dict[str, object], lines: list[str]) -> None:
    arguments = {"servers": [], "search": [], "options": [], "loopback_reachable": False} | given
    assert bundle.resolv_conf(HOST, **arguments).splitlines() == lines  # type: ignore[arg-type]


def test_resolv_conf_falls_back_when_every_resolver_is_on_loopback() -> None:
    text = bundle.resolv_conf(
        ["nameserver ::1", "nameserver 127.0.0.1"], servers=[], search=[], options=[], loopback_reachable=False
    )
    assert text == "nameserver 8.8.8.8\nnameserver 8.8.4.4\n"


def test_hosts_and_hostname(tmp_path: Path) -> None:
    host = HostConfig(extra_hosts=["db:10.1.1.1", "v6:::1"])
    networks = {"bridge": EndpointSettings(ip_address="172.17.0.9")}
    bundle.write_network_files(record(Config(hostname="web", domainname="example"), host), tmp_path, networks, ENGINE)
    assert (tmp_path / "hostname").read_text() == "web\n"
    hosts = (tmp_path / "hosts").read_text().splitlines()
    assert hosts[0] == "127.0.0.1\tlocalhost"
    assert hosts[-3:] == ["10.1.1.1\tdb", "::1\tv6", "172.17.0.9\tweb.example web"]


@pytest.mark.parametrize("mode", ["default", "none", "host"])
def test_hosts_of_a_sandbox(tmp_path: Path, mode: str) -> None:
    """Its name is one of the loopback, whatever its network is."""
    host = HostConfig(network_mode=mode, extra_hosts=["db:10.1.1.1"])
    networks = {"bridge": EndpointSettings(ip_address="172.17.0.9")}
    bundle.write_network_files(record(Config(hostname="box"), host), tmp_path, networks, ENGINE, sandbox=True)
    assert (tmp_path / "hosts").read_text() == (
        "127.0.0.1\tlocalhost box\n::1\tlocalhost ip6-localhost ip6-loopback\n10.1.1.1\tdb\n"
    )


@pytest.mark.parametrize(
    ("sysctls", "ipv6"),
    [
        ({}, True),
        ({"net.ipv6.conf.all.disable_ipv6": "0", "net.ipv6.conf": "1"}, True),
        ({"net.ipv6.conf.all.disable_ipv6": "1"}, False),
        ({"net/ipv6/conf/lo/disable_ipv6": "1"}, False),
    ],
)
def test_hosts_names_the_addresses_of_the_loopback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sysctls: dict[str, str], ipv6: bool
) -> None:
    monkeypatch.setattr(bundle, "HAS_IPV6", True)
    bundle.write_network_files(record(Config(), HostConfig(sysctls=sysctls)), tmp_path, {}, ENGINE)
    assert ("::1\tlocalhost" in (tmp_path / "hosts").read_text()) == ipv6
    monkeypatch.setattr(bundle, "HAS_IPV6", False)
    bundle.write_network_files(record(Config(), HostConfig(sysctls=sysctls)), tmp_path, {}, ENGINE)
    assert (tmp_path / "hosts").read_text() == "127.0.0.1\tlocalhost\n"


@pytest.mark.parametrize(
    ("hostname", "domainname", "names"),
    [("web", "", "web"), ("a.b.c", "", "a.b.c a"), ("a.b", "c", "a.b.c a"), ("web", "b.c", "web.b.c web")],
)
def test_a_full_name_and_its_first_part(tmp_path: Path, hostname: str, domainname: str, names: str) -> None:
    networks = {"bridge": EndpointSettings(ip_address="172.17.0.9")}
    bundle.write_network_files(record(Config(hostname=hostname, domainname=domainname)), tmp_path, networks, ENGINE)
    assert (tmp_path / "hosts").read_text().splitlines()[-1] == f"172.17.0.9\t{names}"


def test_extra_hosts(tmp_path: Path) -> None:
    """host-gateway is each address of the host; addresses of IPv6 may have brackets."""
    own = record(Config(hostname="web"), HostConfig(extra_hosts=["host:host-gateway", "v6:[fd00::1]"]))
    bundle.write_network_files(own, tmp_path, {}, ENGINE, ["172.17.0.1", "fd00::9"])
    assert (tmp_path / "hosts").read_text().splitlines()[-3:] == ["172.17.0.1\thost", "fd00::9\thost", "fd00::1\tv6"]
    with pytest.raises(InvalidParameter, match="host:host-gateway: unable to derive the IP value for host-gateway"):
        bundle.write_network_files(own, tmp_path, {}, ENGINE, [])


_TEXT = st.one_of(
    st.sampled_from(["x", "eth0", "a_b", "a b", "a\nb", "\r", "\x85", "\u2028"]),
    st.text(st.characters(codec="utf-8"), max_size=12),
)


@given(_TEXT, _TEXT, _TEXT, _TEXT, _TEXT)
def test_what_a_client_sends_adds_no_lines(hostname: str, domain: str, name: str, zone: str, word: str) -> None:
    """Whatever is accepted."""
    shape = {
        "Hostname": f"h{hostname}",
        "Domainname": f"d{domain}",
        "HostConfig": {
            "ExtraHosts": [f"n{name}:fe80::1%{zone}"],
            "Dns": [f"fe80::1%{zone}", "1.1.1.1"],
            "DnsSearch": [f"s{word}"],
            "DnsOptions": [f"o{word}"],
        },
    }
    try:
        config, host = body.checked(msgspec.convert(shape, CreateBody))
    except InvalidParameter:
        return
    with tempfile.TemporaryDirectory() as directory:
        networks = {"bridge": EndpointSettings(ip_address="10.0.0.2")}
        bundle.write_network_files(record(config, host), Path(directory), networks, ENGINE)
        written = {each.name: each.read_bytes() for each in Path(directory).iterdir()}
    assert {name: len(re.split(rb"[\n\r\0]", text)) - 1 for name, text in written.items()} == {
        "hostname": 1,
        "hosts": 8,
        "resolv.conf": 4,
    }
    assert [line.split()[0] for line in written["resolv.conf"].splitlines()] == [
        *(b"nameserver", b"nameserver", b"search", b"options"),
    ]


def test_files_are_rewritten_in_place(tmp_path: Path) -> None:
    bundle.write_network_files(record(Config(hostname="web")), tmp_path, {}, ENGINE)
    before = (tmp_path / "hosts").stat().st_ino
    bundle.write_network_files(
        record(Config(hostname="web")), tmp_path, {"bridge": EndpointSettings(ip_address="10.0.0.1")}, ENGINE
    )
    assert (tmp_path / "hosts").stat().st_ino == before
    assert (tmp_path / "hosts").read_text().endswith("10.0.0.1\tweb\n")


def test_resolv_conf_on_a_users_network(tmp_path: Path) -> None:
    networks = {"net": EndpointSettings(ip_address="10.0.0.2", global_ipv6_address="fd00::2")}
    host = HostConfig(dns=["1.1.1.1"], dns_search=["x"], dns_options=["timeout:1"])
    bundle.write_network_files(record(Config(hostname="web"), host), tmp_path, networks, ENGINE)
    assert (tmp_path / "resolv.conf").read_text() == "nameserver 127.0.0.11\nsearch x\noptions timeout:1 ndots:0\n"
    assert (tmp_path / "hosts").read_text().endswith("10.0.0.2\tweb\nfd00::2\tweb\n")


def test_dns_of_the_engine(tmp_path: Path) -> None:
    """For containers that say nothing of their own, on all networks."""
    (tmp_path / "host").write_text("nameserver 192.0.2.1\nsearch host.example\n")
    engine = config.Config(dns=("192.0.2.2",), dns_search=("engine.example",), dns_opts=("ndots:3",))

    def written(host: HostConfig, engine: config.Config, network: str = "bridge") -> list[str]:
        networks = {network: EndpointSettings()}
        bundle.write_network_files(record(Config(hostname="web"), host), tmp_path, networks, engine)
        return (tmp_path / "resolv.conf").read_text().splitlines()

    assert written(HostConfig(), engine) == ["nameserver 192.0.2.2", "search engine.example", "options ndots:3"]
    own = HostConfig(dns=["192.0.2.3"], dns_search=["own.example"], dns_options=["ndots:1"])
    assert written(own, engine) == ["nameserver 192.0.2.3", "search own.example", "options ndots:1"]
    named = ["nameserver 127.0.0.11", "search engine.example", "options ndots:3"]
    assert written(HostConfig(), engine, "net") == named
    assert bundle.dns_servers(HostConfig(), engine) == ("192.0.2.2",)
    file = config.Config(resolv_conf=str(tmp_path / "host"))
    assert written(HostConfig(), file) == ["nameserver 192.0.2.1", "search host.example"]


def test_mount_points_reached_through_links(tmp_path: Path) -> None:
    """crun follows links of the image. A link must not lead to a mount over /proc."""
    root, volume = tmp_path / "root", tmp_path / "volume"
    for path in (root / "proc", root / "run", root / "etc", volume / "d"):
        path.mkdir(parents=True)
    (root / "var").symlink_to("run")
    (root / "evil").symlink_to("/x/../proc/self")
    (root / "etc/hosts").symlink_to("../proc/self/attr/current")
    (volume / "evil").symlink_to("/proc")

    def mount(destination: str, kind: str = "bind", source: str = str(volume)) -> oci.Mount:
        return oci.Mount(destination=destination, type=kind, source=source, options=())

    bundle.make_mount_points(root, [mount("/var/x"), mount("/a"), mount("/a/d/e")])
    assert (root / "run/x").is_dir() and (volume / "d/e").is_dir()
    for mounts in ([mount("/evil")], [mount("/evil/attr")], [mount("/etc/hosts")], [mount("/a"), mount("/a/evil/sys")]):
        with pytest.raises(InvalidParameter, match="mount destination"):
            bundle.make_mount_points(root, mounts)
    (root / "dev").symlink_to(tmp_path)
    with pytest.raises(InvalidParameter, match="mount destination '/dev'"):
        bundle.make_mount_points(root, [mount("/dev", "tmpfs", "tmpfs")])
    (root / "sys").symlink_to("/run")
    with pytest.raises(InvalidParameter, match='filesystem "sysfs" must be mounted on ordinary directory'):
        bundle.make_mount_points(root, [mount("/sys", "sysfs", "sysfs")])


@pytest.mark.parametrize(
    ("own", "behind", "reachable", "expected"),
    [
        ("nameserver 127.0.0.53", "nameserver 10.0.0.1", False, "nameserver 10.0.0.1"),
        ("nameserver 127.0.0.53", "nameserver 10.0.0.1", True, "nameserver 127.0.0.53"),
        ("nameserver 127.0.0.53", None, False, "nameserver 127.0.0.53"),
        ("nameserver 127.0.0.1", "nameserver 10.0.0.1", False, "nameserver 127.0.0.1"),
        (None, None, False, None),
    ],
)
def test_the_servers_behind_systemds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, behind: str | None, reachable: bool, expected: str
) -> None:
    for name, text in (("_RESOLV_CONF", own), ("_RESOLVED", behind)):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(bundle, name, path)
    assert bundle._host_lines("", loopback_reachable=reachable) == ([expected] if expected else [])


def test_network_files_are_never_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running container reads the same inode, for example while a linked container starts."""
    hosts = tmp_path / "hosts"
    bundle.write_network_files(record(Config(hostname="a-longer-name")), tmp_path, {}, ENGINE)
    inode = hosts.stat().st_ino
    sizes: list[int] = []
    pwrite, ftruncate = os.pwrite, os.ftruncate

    def seen(size: int) -> None:
        if os.fstat(descriptor).st_ino == inode:
            sizes.append(size)

    def watched_pwrite(file: int, data: bytes, offset: int) -> int:
        nonlocal descriptor
        descriptor = file
        seen(os.fstat(file).st_size)
        return pwrite(file, data, offset)

    def watched_ftruncate(file: int, size: int) -> None:
        seen(os.fstat(file).st_size)
        ftruncate(file, size)

    descriptor = -1
    monkeypatch.setattr(os, "pwrite", watched_pwrite)
    monkeypatch.setattr(os, "ftruncate", watched_ftruncate)
    networks = {"bridge": EndpointSettings(ip_address="172.17.0.2")}
    for written in (networks, {}):
        bundle.write_network_files(record(Config(hostname="web")), tmp_path, written, ENGINE)
    assert len(sizes) == 4 and min(sizes) > 0
    assert hosts.stat().st_ino == inode and "172.17.0.2" not in hosts.read_text()
