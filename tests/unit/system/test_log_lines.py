"""The engine's own log: text, and JSON as dockerd writes it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from engine.system import log_format, log_lines


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(log_lines.VARIABLE, "text")
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


def configured(level: str) -> None:
    """As in a process without pytest's handlers."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    log_format.configure(level)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    configured("warning")
    logging.getLogger("engine.x").warning("%s of\nlines", 2)
    logging.getLogger("engine.x").info("not this one")
    log_lines.say("short", prefix="monitor: ")
    first, second = capsys.readouterr().err.split("\nlines\n")
    assert first.endswith(" WARNING engine.x: 2 of") and second == "monitor: short\n"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    log_lines.choose("json")
    configured("info")
    log = logging.getLogger("engine.x")
    log.info('a "word" of\n%s', "two lines")
    try:
        raise OSError("\x00broken\udcff")
    except OSError as error:
        log.exception("it failed: %s", error)
    log.critical("the end")
    log_lines.say("short", prefix="monitor: ")
    lines = capsys.readouterr().err.splitlines()
    found = [json.loads(line) for line in lines]
    assert [(each["level"], each["msg"].partition("\x00")[0]) for each in found] == [
        ("info", 'a "word" of\ntwo lines'),
        ("error", "it failed: "),
        ("fatal", "the end"),
        ("warning", "short"),
    ]
    assert found[0]["module"] == "engine.x" and "Traceback" in found[1]["error"]
    assert all(len(each["time"]) == len("2026-11-28T13:14:44.304497334Z") for each in found)


def test_a_time() -> None:
    line = json.loads(log_lines.json_line("info", "x", 1_000_000_005, error="y"))
    assert line == {"level": "info", "msg": "x", "time": "1970-01-01T00:00:01.000000005Z", "error": "y"}
