"""Command line and TOML file: the Config they give, and refusals that name the option."""

import re
from pathlib import Path
from typing import Any

import pytest

from engine import __main__ as program
from engine.config import Config, decode, encode, options, parse


def config(*argv: str) -> Config:
    arguments = program._parser().parse_args(["serve", *argv])
    return parse({option.field: getattr(arguments, option.field) for option in options()}, arguments.config)


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
        (["--run", "/" + "r" * 60], "--run"),
        (["--registry-mirror", "ftp://x"], "--registry-mirror"),
        (["--init-path", "tini"], "--init-path tini: must be an absolute path"),
        (["--add-runtime", "kata"], "--add-runtime 'kata': must be NAME=PATH"),
        (["--add-runtime", "kata=bin/kata"], "--add-runtime 'kata=bin/kata': must be NAME=PATH, with an absolute path"),
        (["--add-runtime", "a b=/bin/x"], "--add-runtime 'a b=/bin/x'"),
        (["--add-runtime", "a=/x", "--add-runtime", "a=/y"], "a name is given twice: a, a"),
        (["--insecure-registry", "a b"], "--insecure-registry 'a b': must be HOST"),
        (["--insecure-registry", "10.0.0.0/33"], "--insecure-registry '10.0.0.0/33'"),
        (["--insecure-registry", "http://x"], "--insecure-registry 'http://x'"),
        (["--log-opt", "tag"], "--log-opt 'tag': must be KEY=VALUE"),
        (["--log-opt", "=x"], "--log-opt '': must be KEY=VALUE"),
        (["--log-opt", "tag=a", "--log-opt", "tag=b"], "--log-opt tag: has another value already"),
        (["--log-start", "maybe"], "--log-start 'maybe': must be one of strict, lenient"),
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
        ('tcp = ["x"]', "--tcp x: must be HOST:PORT"),
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
    assert [option.field for option in found] == list(Config.__struct_fields__)
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
