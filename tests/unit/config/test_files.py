"""Configuration files that are none: each is one line that names the file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from engine import __main__ as program
from engine.commands import check
from engine.config import Config, FileError, parse, verdicts


@pytest.mark.parametrize("name", ["daemon.json", "engined.toml"])
@pytest.mark.parametrize("text", [b"", b"{}", b"\xef\xbb\xbf", b"\xef\xbb\xbf{}", b" \n", b"\n{\n}\n"])
def test_files_that_set_nothing(tmp_path: Path, name: str, text: bytes) -> None:
    (tmp_path / name).write_bytes(text)
    if name.endswith(".json") and not text.strip(b"\xef\xbb\xbf \n"):
        text = b""
    assert parse({}, str(tmp_path / name)) == Config()
    assert verdicts(str(tmp_path / name)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"mtu": 1,}', "line 1, column 1"),
        (b'{\n"debug": tru\n}', "line 2, column 10: "),
        (b'{"debug": true} x', "line 1, column 17: "),
        (b"[]", "must be a JSON object"),
        (b"1", "must be a JSON object"),
        (b'"debug"', "must be a JSON object"),
        (b'{"debug": true, "debug": false}', "debug is given twice"),
        (b'{"log-opts": {"a": "b", "a": "c"}}', "a is given twice"),
        (b'{"shutdown-timeout": NaN}', "NaN is not a number of JSON"),
        (b'{"shutdown-timeout": -Infinity}', "-Infinity is not a number of JSON"),
        (b'{"shutdown-timeout": ' + b"9" * 5000 + b"}", "99999999999999999999... is too large"),
        (b'{"debug": "\xff"}', "is not UTF-8 (byte 11)"),
        (b"\xff\xfe{\0}\0", "is not UTF-8 (byte 0)"),
        (b'{"labels": ' + b"[" * 100_000, "is nested too deeply"),
        (b'{"debug": true', "line 1, column "),
        (b"\0", "line 1, column 1: "),
        (b'{"a\nb": 1}', "line 1, column "),
        (b'{"a\\nb": 1}', ""),
    ],
)
def test_json_that_is_not_valid(tmp_path: Path, text: bytes, words: str) -> None:
    file = tmp_path / "daemon.json"
    file.write_bytes(text)
    for reads in (lambda: parse({}, str(file)), lambda: check_verdicts(file)):
        with pytest.raises(FileError) as caught:
            reads()
        said = str(caught.value)
        assert said.startswith(f"--config {file}: {words}") and len(said.splitlines()) == 1, said


def check_verdicts(file: Path) -> None:
    verdicts(str(file))
    parse({}, str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"socket = ", "Invalid value"),
        (b"a = 1\na = 2", "Cannot overwrite a value"),
        (b'group = "\xff"', "is not UTF-8 (byte 9)"),
        (b"label = " + b"[" * 100_000, "is nested too deeply"),
        (b"\0", "Invalid statement"),
    ],
)
def test_toml_that_is_not_valid(tmp_path: Path, text: bytes, words: str) -> None:
    file = tmp_path / "engined.toml"
    file.write_bytes(text)
    with pytest.raises(FileError) as caught:
        parse({}, str(file))
    said = str(caught.value)
    assert said.startswith(f"--config {file}: {words}") and len(said.splitlines()) == 1, said


def test_places_that_are_not_files(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "large.json").write_bytes(b" " * (1 << 20) + b"{}")
    for name, words in (
        ("", "is a directory"),
        ("none.json", "no such file"),
        ("loop", "too many levels"),
        ("fifo", "is not a regular file"),
        ("zero", "is not a regular file"),
        ("large.json", "is larger than 1 mib"),
        ("a\0b", ""),
    ):
        with pytest.raises(FileError) as caught:
            parse({}, f"{tmp_path}/{name}")
        assert words in str(caught.value).lower() and len(str(caught.value).splitlines()) == 1


def test_check_says_what_becomes_of_each_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "daemon.json"
    file.write_text('{"raw-logs": true, "labels": ["a=b"]}')
    assert check.configuration(str(file)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("raw-logs: has no meaning here (") and said[1:] == [
        "labels: in force",
        "configuration OK",
    ]
    file.write_text('{"log-driver": "gcplogs"}')
    assert check.configuration(str(file)) == 1
    assert program.main(["serve", "--config", str(file)]) == 1
    assert program.main(["serve", "--config", str(file), "--log-driver", "gcplogs"]) == 2
    assert capsys.readouterr().err.count("engined: Failed to set log opts: ") == 3


def test_files_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "daemon.json").write_text("null")
    assert parse({}, str(tmp_path / "daemon.json")) == parse({}, "/dev/null") == Config()


@pytest.mark.parametrize(
    "text",
    [
        '{"labels": ["a=\\ud800"]}',
        '{"group": "a\\ud800"}',
        '{"pidfile": "/run/x\\u0000y"}',
        '{"data-root": "/x\\u0000y"}',
        '{"tlscacert": "/x\\u0000y"}',
        '{"runtimes": {"x": {"path": "/a\\u0000"}}}',
    ],
)
def test_what_is_no_text(tmp_path: Path, text: str) -> None:
    file = tmp_path / "daemon.json"
    file.write_text(text)
    with pytest.raises(FileError, match=r"must not contain a NUL character|is not a character") as caught:
        parse({}, str(file))
    assert len(str(caught.value).splitlines()) == 1
    assert [each.kind for each in verdicts(str(file))] == ["refused"]


def test_sockets() -> None:
    for paths, words in (
        (("/a", "/b", "/a"), "--socket /a: is given twice"),
        (("relative",), "--socket 'relative': must be an absolute path of at most 107 bytes, or fd://"),
        (("/" + "x" * 107,), "must be an absolute path of at most 107 bytes"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            parse({"sockets": paths})


def test_each_key_is_judged_by_itself(tmp_path: Path) -> None:
    """What it must be beside others is said of the whole file."""
    file = tmp_path / "engined.toml"
    file.write_text('tcp = ["0.0.0.0:2375"]\ninsecure = true\n')
    assert [each.kind for each in verdicts(str(file))] == ["in force", "in force"]
    with pytest.raises(FileError, match=r"tcp 0\.0\.0\.0:2375: without TLS only loopback addresses are allowed"):
        parse({}, str(file))
