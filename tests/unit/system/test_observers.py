"""Observers: all are called, in order, even if one of them fails."""

from __future__ import annotations

import logging

import pytest

from engine.system.observers import Observers


def test_a_failed_observer_is_logged_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    happened: Observers[[str]] = Observers("something happened")

    def fail(_: str) -> None:
        raise KeyError("no")

    happened("before anyone listens")
    happened.subscribe(fail)
    happened.subscribe(seen.append)
    happened.subscribe(lambda what: seen.append(what.upper()))
    happened("it")
    assert seen == ["it", "IT"]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "something happened" in record.message
