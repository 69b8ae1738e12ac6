"""Command line and TOML file: the Config they give, and refusals that name the option."""

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from engine import __main__ as program
from engine import daemon
from engine.config import Config, decode, encode, options, parse


def config(*argv: str) -> Config:
    return program._source(program._parser().parse_args(["serve", *argv])).load().config


def test_defaults() -> None:
    assert config() == Config()


def test_arguments_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "engined.toml"
    file.write_text('socket = ["/a", "/b"]\nbridge = "br7"\nattach_stall = 5\nroot = "/data"\n')
    found = config("--config", str(file), "--bridge", "br8")
    assert found.sockets == ("/a", "/b") and found.bridge == "br8" and found.attach_stall == 5
    assert found.root == Path("/data")


def test_relative_directories_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert config("--root", "here").root == tmp_path / "here"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tcp", "nonsense", "--insecure"], "--tcp nonsense"),
        (["--tcp", "127.0.0.1:99999", "--insecure"], "127.0.0.1:99999"),
        (["--tcp", ":80", "--insecure"], "HOST:PORT"),
        (["--tcp", "127.0.0.1:0"], "--tls-ca"),
        (["--tcp", "0.0.0.0:80", "--insecure"], "loopback"),
        (
            [
                "--tcp",
                "127.0.0.1:0",
                "--tls-ca",
                "/dev/null/none",
                "--tls-cert",
                "/dev/null/none",
                "--tls-key",
                "/dev/null/none",
            ],
            "--tls-ca /dev/null/none",
        ),
        (["--tcp", "127.0.0.1:0", "--insecure", "--tls-cert", "/dev/null/none"], "--tls-ca"),
        (["--attach-stall", "-1"], "--attach-stall -1"),
        (["--bridge", "a-name-that-is-too-long"], "--bridge"),
        (["--default-address-pool", "base=10.0.0.0/8"], "--default-address-pool base=10.0.0.0/8: must be base="),
        (["--run", "/" + "r" * 60], "--run"),
        (["--registry-mirror", "ftp://x"], "--registry-mirror"),
        (["--init-path", "tini"], "--init-path tini: must be an absolute path"),
        (["--add-runtime", "kata"], "--add-runtime 'kata': must be NAME=PATH"),
        (["--add-runtime", "kata=/k 'a"], '--add-runtime "kata=/k \'a": No closing quotation'),
        (
            ["--add-runtime", "kata=bin/kata"],
            "--add-runtime 'kata=bin/kata': must be NAME=PATH .*, with an absolute path",
        ),
        (["--add-runtime", "a b=/bin/x"], "--add-runtime 'a b=/bin/x'"),
        (["--add-runtime", "a=/x", "--add-runtime", "a=/y"], "--add-runtime a: is given twice"),
        (["--insecure-registry", "a b"], "--insecure-registry 'a b': must be HOST"),
        (["--insecure-registry", "10.0.0.0/33"], "--insecure-registry '10.0.0.0/33'"),
        (["--insecure-registry", "http://x"], "--insecure-registry 'http://x'"),
        (["--log-opt", "tag"], "--log-opt 'tag': must be KEY=VALUE"),
        (["--log-opt", "=x"], "--log-opt '': must be KEY=VALUE"),
        (["--log-opt", "tag=a", "--log-opt", "tag=b"], "--log-opt tag: has another value already"),
        (["--log-start", "maybe"], "--log-start 'maybe': must be one of strict, lenient"),
        (["--dns", "one"], "--dns 'one': must be an IP address"),
        (["--dns", "fe80::1%eth0"], "--dns 'fe80::1%eth0': must be an IP address without a zone"),
        (["--dns-search", "a b"], "--dns-search 'a b': must be a domain name"),
        (["--dns-opt", "a b"], "--dns-opt 'a b': must be one word"),
        (["--resolv-conf", "x"], "--resolv-conf x: must be an absolute path"),
        (
            ["--host-gateway-ip", "192.0.2.1", "--host-gateway-ip", "192.0.2.2"],
            "--host-gateway-ip 192.0.2.2: only one IPv4",
        ),
        (["--bip", "10.0.0.0/31"], "--bridge-subnet 10.0.0.0/31: has no room for containers"),
        (["--bip6", "10.0.0.1/24"], "--bip6 10.0.0.1/24: is not an IPv6 subnet"),
        (["--fixed-cidr", "x"], "--fixed-cidr 'x': must be an IPv4 subnet such as"),
        (["--bip", "10.0.0.1/24", "--fixed-cidr", "10.0.1.0/25"], "--fixed-cidr 10.0.1.0/25: must be a part of"),
        (
            ["--bip", "10.0.0.1/24", "--default-gateway", "10.0.1.1"],
            "--default-gateway 10.0.1.1: must be an address of",
        ),
        (["--default-gateway", "fd00::1"], "--default-gateway 'fd00::1': must be an IPv4 address"),
        (
            ["--ipv6", "--bip6", "fd00::1/64", "--fixed-cidr-v6", "fd01::/80"],
            "--fixed-cidr-v6 fd01::/80: must be a part of",
        ),
        (["--mtu", "67"], "--mtu 67: must be from 68 to 65535"),
        (["--mtu", "-1"], "--mtu -1: must be from 68 to 65535"),
        (["--mtu", "1000", "--ipv6"], "--mtu 1000: is less than 1280"),
        (["--ip", "localhost"], "--ip 'localhost': must be an IP address"),
        (["--ip", "fd00::1"], "--ip fd00::1: must be an IPv4 address"),
        (["--icc=false", "--firewall", "none"], "--icc false: needs rules"),
        (["--bridge-accept-fwmark", "0x4/0x3"], "--bridge-accept-fwmark '0x4/0x3': must be MARK or MARK/MASK"),
        (["--default-network-opt", "bridge=x"], "--default-network-opt 'bridge=x': must be DRIVER=KEY=VALUE"),
        (
            ["--default-network-opt", "bridge=com.docker.network.driver.mtu=x"],
            "--default-network-opt bridge=com.docker.network.driver.mtu=x: mtu 'x' is not a number",
        ),
    ],
)
def test_a_broken_rule_is_refused_by_name(argv: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(*argv)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bridge = 5", "bridge: expected string, got integer"),
        ("root = 5", "root: expected string, got integer"),
        ('socket = "/a"', "socket: expected array, got string"),
        ("unknown = 1", "unknown option unknown"),
        ("not toml", "Expected '='"),
        ('tcp = ["x"]', "tcp x: must be HOST:PORT"),
    ],
)
def test_a_broken_file_is_named_with_its_option(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "engined.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"--config {file}: {words}")):
        config("--config", str(file))


def test_registries_that_may_be_insecure() -> None:
    rules = ("r.example", "r.example:5000", "10.0.0.0/8", "10.1.2.3:80", "fd00::1", "[fd00::1]:80", "fd00::/8")
    given = [word for rule in rules for word in ("--insecure-registry", rule)]
    assert config(*given).insecure_registries == rules


def test_options_of_logs() -> None:
    found = config("--log-driver", "syslog", "--log-opt", "tag=a=b", "--log-opt", "env=", "--log-start", "lenient")
    assert (found.log_driver, found.log_opts, found.log_start) == ("syslog", ("tag=a=b", "env="), "lenient")
    assert config("--log-opt", "tag=a", "--log-opt", "tag=a").log_opts == ("tag=a", "tag=a")
    assert (Config().log_driver, Config().log_opts, Config().log_start) == ("json-file", (), "strict")
    with pytest.raises(ValueError) as caught:
        config("--log-opt", "splunk-token=secret", "--log-opt", "splunk-token=hidden")
    assert "secret" not in str(caught.value) and "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("driver", "option", "words"),
    [
        ("syslog", "syslog-address=corrupted:42", "syslog-address should be in form proto://address, got corrupted:42"),
        ("fluentd", "fluentd-address=corrupted:c", "invalid fluentd-address corrupted:c: "),
        ("gcplogs", "x=y", "logger: no log driver named 'gcplogs' is registered"),
    ],
)
def test_the_daemon_does_not_start_with_a_log_driver_that_is_none(
    capsys: pytest.CaptureFixture[str], driver: str, option: str, words: str
) -> None:
    """Before the user and the sockets are checked."""
    assert program.main(["serve", f"--log-driver={driver}", "--log-opt", option]) == 2
    assert capsys.readouterr().err.startswith(f"engined: Failed to set log opts: {words}")


def test_a_number_of_containers_is_at_least_1(capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("-1", "0", "x", "1.5"):
        with pytest.raises(SystemExit, match="2"):
            program.main(["check", f"--containers={number}"])
        assert f"--containers: {number!r} is not a number of at least 1" in capsys.readouterr().err


def test_every_field_is_an_option_with_a_description() -> None:
    found = list(options())
    assert {option.field for option in found} <= set(Config.__struct_fields__)
    assert len({option.flag for option in found}) == len(found)
    for option in found:
        assert option.text.endswith("."), option
        assert option.value == "" if isinstance(option.default, bool) else option.value, option


def test_an_unknown_log_level_is_refused_from_the_command_line_too() -> None:
    with pytest.raises(ValueError, match="--log-level 'loud'"):
        config("--log-level", "loud")


def test_stop_reads_what_serve_wrote() -> None:
    chosen = config("--root", "/data", "--plugin-socket-directory", "/p", "--tcp", "127.0.0.1:1", "--insecure")
    assert decode(encode(chosen)) == chosen


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--config /nonexistent\.toml: no such file"):
        config("--config", "/nonexistent.toml")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"labels": ("zone",)}, "--label 'zone': must be KEY=VALUE"),
        ({"labels": ("=a",)}, "must be KEY=VALUE"),
        ({"labels": ("a b=c",)}, "must be KEY=VALUE"),
        ({"labels": ("a=b", "a=c")}, "a has another value already"),
        ({"generic_resources": ("SSD",)}, "must be KIND=NUMBER or KIND=NAME"),
        ({"generic_resources": ("SSD=",)}, "must be KIND=NUMBER or KIND=NAME"),
        ({"generic_resources": ("=3",)}, "must be KIND=NUMBER or KIND=NAME"),
        ({"generic_resources": ("SSD=3 4",)}, "must be KIND=NUMBER or KIND=NAME"),
        ({"generic_resources": ("SSD=3", "SSD=4")}, "given twice"),
        ({"generic_resources": ("SSD=3", "SSD=a")}, "given twice"),
        ({"generic_resources": ("SSD=a", "SSD=3")}, "given twice"),
        ({"generic_resources": ("SSD=a", "SSD=a")}, "given twice"),
        ({"generic_resources": ("SSD=9223372036854775808",)}, "too large"),
    ],
)
def test_labels_and_resources_of_a_node(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(chosen)


def test_labels_and_resources_that_are_valid() -> None:
    made = parse({"labels": ("a=b", "a=b", "c=", "d=e=f"), "generic_resources": ("SSD=3", "GPU=a", "GPU=b")})
    assert made.labels == ("a=b", "a=b", "c=", "d=e=f") and len(made.generic_resources) == 3


def test_flags_of_dockerd() -> None:
    """As in a unit that was written for it."""
    found = config("-H", "fd://", "-H", "tcp://127.0.0.1:2375", "-D", "--data-root=/data", "--bip", "172.30.0.1/24")
    assert (found.sockets, found.tcp, found.insecure) == (("fd://",), ("127.0.0.1:2375",), True)
    assert (found.log_level, found.root, found.bridge_subnet) == ("debug", Path("/data"), "172.30.0.1/24")
    assert config("--init=false").init is False and config("--init").init is True
    assert config("--iptables=false").firewall == "none"
    with pytest.raises(ValueError, match="without TLS only loopback addresses"):
        config("-H", "tcp://0.0.0.0:2375")


def test_the_exit_status_says_where_the_mistake_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "daemon.json"
    file.write_text('{"log-driver": "gcplogs"}')
    assert program.main(["serve", "--config", str(file)]) == 1
    file.write_text('{"log-level": "loud"}')
    assert program.main(["serve", "--config", str(file)]) == 1
    file.write_text("{}")
    assert program.main(["serve", "--config", str(file), "--log-level", "loud"]) == 2
    assert program.main(["serve", "--config", str(file), "--log-driver", "gcplogs"]) == 2
    assert all(line.startswith("engined: ") for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max-concurrent-downloads", 7, {"max_downloads": 7}),
        ("max-concurrent-uploads", 0, {}),  # not set, as in dockerd
        ("max-download-attempts", 2, {"download_attempts": 2}),
        ("proxies", {"http-proxy": "http://a:1", "no-proxy": "*"}, {"http_proxy": "http://a:1", "no_proxy": "*"}),
        ("http-proxy", "http://me:secret@a:1", {"http_proxy": "http://me:secret@a:1"}),
        (
            "features",
            {"buildkit": False, "cdi": True, "new": True},
            {"features": ("buildkit=false", "cdi=true", "new=true")},
        ),
        ("features", {"containerd-snapshotter": False}, {"features": ("containerd-snapshotter=false",)}),
        (
            "insecure-registries",
            ["http://a:1", "https://b", "10.0.0.0/8"],
            {"insecure_registries": ("a:1", "b", "10.0.0.0/8")},
        ),
        ("registry-mirrors", ["HTTPS://a/path/"], {"registry_mirrors": ("HTTPS://a/path/",)}),
    ],
)
def test_dockers_keys_of_images(tmp_path: Path, key: str, value: Any, expected: dict[str, Any]) -> None:
    assert in_json(tmp_path, key, value) == Config(**expected)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("max-concurrent-downloads", -1, "max-concurrent-downloads -1: must be at least 0"),
        ("max-concurrent-uploads", "3", "max-concurrent-uploads: expected integer, got string"),
        ("max-download-attempts", -1, "max-download-attempts -1: must be at least 1"),
        ("proxies", {"all-proxy": "x"}, "proxies all-proxy: is not known"),
        ("proxies", {"http-proxy": 5}, "proxies http-proxy: expected a string"),
        (
            "proxies",
            {"https-proxy": "socks5://me:secret@a"},
            "proxies 'socks5://xxxxx:xxxxx@a': must be an http or https",
        ),
        ("features", {"cdi": False}, "features cdi=false: is not supported: devices by CDI are always offered"),
        (
            "features",
            {"containerd-snapshotter": True},
            "features containerd-snapshotter=true: is not supported: the engine",
        ),
        ("features", {"buildkit": "yes"}, "features buildkit: expected true or false"),
        ("registry-mirrors", ["https://me:secret@a"], "registry-mirrors 'https://xxxxx:xxxxx@a': must not have user"),
        ("registry-mirrors", ["a.example"], "registry-mirrors 'a.example': must be an http or https URL"),
        ("insecure-registries", ["a b"], "insecure-registries 'a b': must be HOST"),
    ],
)
def test_refused_values_of_dockers_keys_of_images(tmp_path: Path, key: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        in_json(tmp_path, key, value)
    assert "secret" not in str(caught.value)


def in_json(tmp_path: Path, key: str, value: Any) -> Config:
    file = tmp_path / "daemon.json"
    file.write_text(json.dumps({key: value}))
    return config("--config", str(file))


@pytest.mark.parametrize(("arguments", "seconds"), [([], 7), (["--time", "3"], 3)])
def test_stop_gives_containers_the_time_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], seconds: int
) -> None:
    (tmp_path / "config.json").write_bytes(encode(Config(shutdown_timeout=7)))
    (tmp_path / "engined.pid").write_text("77")
    asked: list[tuple[int, int]] = []

    def ask(pid: int, run: Path, time: int) -> int:
        asked.append((pid, time))
        (run / "engined.pid").unlink()
        return 0

    monkeypatch.setattr(program, "_ask_to_stop", ask)
    with open(tmp_path / "engined.pid") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        assert program.main(["stop", "--run", str(tmp_path), *arguments]) == 0
    assert asked == [(77, seconds)]


def test_stop_without_a_configuration_that_can_be_read_gives_the_usual_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}x")
    assert program._shutdown_timeout(tmp_path) == program._shutdown_timeout(tmp_path / "none") == 10


def test_the_pid_file(tmp_path: Path) -> None:
    file = tmp_path / "made" / "pid"
    chosen = Config(run=tmp_path, pidfile=str(file))
    for before in (None, "", "x", str(os.getpid()), "99999999"):  # the last one is above any pid
        if before is not None:
            file.write_text(before)
        with daemon._pidfile(chosen, write=True):
            assert file.read_text() == str(os.getpid())
        assert not file.exists()
    file.write_text("1")
    with (
        pytest.raises(OSError, match="process 1, which it names, is still running"),
        daemon._pidfile(chosen, write=True),
    ):
        pass
    assert file.read_text() == "1"
    with daemon._pidfile(chosen, write=False):  # `engined stop` in place of a daemon that has died
        assert file.read_text() == "1"
    assert not file.exists()


def test_the_pid_file_may_be_the_engines_own(tmp_path: Path) -> None:
    (tmp_path / "engined.pid").write_text("1")
    with daemon._pidfile(Config(run=tmp_path, pidfile=f"{tmp_path}/engined.pid"), write=True):
        pass
    assert (tmp_path / "engined.pid").read_text() == "1"


@pytest.mark.parametrize("address", ["127.0.0.1:9323", "localhost:0", "[::1]:9323"])
def test_metrics_on_loopback(tmp_path: Path, address: str) -> None:
    assert in_json(tmp_path, "metrics-addr", address).metrics == address


@pytest.mark.parametrize("address", ["0.0.0.0:9323", "127.0.0.1", "localhost:http", "192.0.2.1:1", "[::]:1"])
def test_metrics_elsewhere_are_refused(tmp_path: Path, address: str) -> None:
    words = re.escape(f"metrics-addr {address}: must be ")
    with pytest.raises(ValueError, match=words):
        in_json(tmp_path, "metrics-addr", address)


def test_a_command_line_that_was_written_for_dockerd() -> None:
    """Debian's unit, and flags of keys without meaning."""
    found = config(
        *("-H", "fd://", "--containerd=/run/containerd/containerd.sock", "--live-restore", "--userland-proxy=false"),
        *("-s", "overlay2", "--userland-proxy-path=/usr/sbin/docker-proxy", "--network-control-plane-mtu=1500"),
    )
    assert found == Config(sockets=("fd://",))
    for flag, words in (
        ("--storage-driver=btrfs", "storage-driver btrfs"),
        ("--selinux-enabled", "selinux-enabled true"),
        ("--storage-opt=dm.fs=xfs", "storage-opts"),
    ):
        with pytest.raises(ValueError, match=words):
            config(flag)


def test_the_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["serve"], ["reload"], ["stop"], ["check"], ["swarm"], ["install-service"], ["uninstall"]):
        with pytest.raises(SystemExit, match="0"):
            program.main([*command, "--help"])
    assert "80 % of the disk" in capsys.readouterr().out


def test_a_usage_that_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["serve", "--mtu", "x"])
    assert capsys.readouterr().err == "engined serve: argument --mtu: 'x' is not a number (see engined serve --help)\n"
