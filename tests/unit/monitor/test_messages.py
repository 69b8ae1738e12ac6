"""Every message survives its encoding, and a packet's limit holds for the largest that is sent."""

from __future__ import annotations

import msgspec
import pytest

from engine.monitor import messages
from engine.monitor.messages import LogFile, Size

ORDERS = [
    messages.Hello(1, attach_stall=5),
    messages.Run(2, "k", ("crun", "run"), "/", True, True, True, Size(1, 2), LogFile("/x", 3, 4, b"{}")),
    messages.Run(2, "k", ("crun", "exec"), "/", document=True, attach=messages.Attach(0, "", True, True, True, False)),
    messages.Attach(3, "k", True, True, False, True, b"head", b"\x00\xff", b"\x10\x11", True),
    messages.Release(4, "k", 5),
    messages.Resize(5, "k", Size(24, 80)),
    messages.Watch(6, "k", 1 << 40, 1 << 50),
    messages.Unwatch(7, 6),
    messages.Follow(7, "k", 1 << 40, 1 << 60),
    messages.Unfollow(7, "k", 5),
    messages.Drop(8, "k"),
    messages.Forget(9, "k"),
    messages.Keep(14),
    messages.Adopt(10, "k", 11, "ioe", False, None),
    messages.Reaped(11, "k", 137),
    messages.Relay(15, b"\x7f\0\0\1"),
    messages.Shutdown(12),
]
REPORTS = [
    messages.Done(1, pid=2, client=3, log_inode=4, log_offset=5),
    messages.Failed(2, "reason", 1),
    messages.State("k", 5, True, "t", True, LogFile("/x"), 0, 0),
    messages.Kept(),
    messages.Exited("k", 255, 1 << 62),
    messages.InputEnded("k"),
    messages.Detached("k", 4, True),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda each: type(each).__name__)
def test_orders(order: messages.Order) -> None:
    assert messages.decode_order(messages.encode(order)) == order


@pytest.mark.parametrize("report", REPORTS, ids=lambda each: type(each).__name__)
def test_reports(report: messages.Report) -> None:
    assert messages.decode_report(messages.encode(report)) == report


def test_every_message_is_tested() -> None:
    assert {type(each) for each in ORDERS} == set(messages.Order.__args__)
    assert {type(each) for each in REPORTS} == set(messages.Report.__args__)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x81", messages.encode({"type": "nothing"}), b"\xc1" * 100])
def test_what_is_no_message(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        messages.decode_order(data)
