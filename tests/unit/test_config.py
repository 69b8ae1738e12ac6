"""Arguments and the TOML file: what becomes of them, and that each refusal names the option."""

from pathlib import Path

import pytest

from engine import __main__ as program
from engine.config import Config


def config(*argv: str) -> Config:
    return program._config(program._parser().parse_args(["serve", *argv]))


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
    ],
)
def test_a_broken_rule_is_refused_by_name(argv: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(*argv)


@pytest.mark.parametrize("text", ["bridge = 5", "unknown = 1", "not toml", 'tcp = ["x"]'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "engined.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"engined\.toml"):
        config("--config", str(file))
