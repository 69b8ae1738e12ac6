"""What the monitor answers to an order that it cannot carry out, and when it looks for orphans."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine.monitor import messages
from engine.monitor.monitor import Monitor


def answers(data: bytes, descriptors: list[int]) -> list[messages.Failed]:
    sent: list[messages.Failed] = []
    connection: Any = SimpleNamespace(codec=messages.CURRENT, send=sent.append)
    monitor: Any = object.__new__(Monitor)
    monitor.obey(connection, data, descriptors)
    return sent


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), None),
        (KeyError("k"), None),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(2, "No such file or directory", "/a"), "/a: No such file or directory"),
    ],
)
def test_the_failure_of_an_order(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str | None) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setitem(Monitor._orders, messages.Forget, fail)
    reading, writing = os.pipe()
    assert answers(messages.encode(messages.Forget(9, "k")), [reading, writing]) == [
        messages.Failed(9, reason or str(error))
    ]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


def test_what_is_not_an_order(capfd: pytest.CaptureFixture[str]) -> None:
    [refusal] = answers(b"\xc1", [])
    assert (refusal.seq, refusal.reason.startswith("not an order: ")) == (0, True)
    [refusal] = answers(messages.encode(messages.Forget(9, "k")).replace(b"forget", b"forgot"), [])
    assert (refusal.seq, refusal.reason.startswith("not an order: ")) == (9, True)
    assert capfd.readouterr().err.count("monitor: not an order: ") == 2


def test_one_look_for_all_children_that_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel walks all children for it: 95 us with 3,000 of them."""
    looks: list[str] = []
    due: list[Callable[[], None]] = []
    monkeypatch.setattr(Monitor, "_reap", lambda _: looks.append("all children"))
    monitor: Any = object.__new__(Monitor)
    monitor.loop = SimpleNamespace(call_later=lambda _, call: due.append(call))
    monitor._reaping = False
    monitor._child_pipe = os.pipe()
    for _ in range(2):
        for _ in range(50):
            os.write(monitor._child_pipe[1], bytes([signal.SIGCHLD]))
            monitor._child_changed(1)
        assert len(due) == 1 and not looks
        due.pop()()
        assert looks.pop() and not looks
    for descriptor in monitor._child_pipe:
        os.close(descriptor)
