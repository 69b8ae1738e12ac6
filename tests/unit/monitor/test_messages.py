"""Messages survive their encoding, in this protocol and in the previous one, and no packet harms
its reader."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.logs.targets import JsonFile
from engine.monitor import messages, previous
from engine.monitor.messages import Size
from tests.unit.monitor import protocol3

ORDERS = [
    messages.Hello(1, attach_stall=5),
    messages.Run(2, "k", ("crun", "run"), "/", True, True, True, Size(1, 2), JsonFile("/x", 3, 4, b"{}")),
    messages.Run(
        *(2, "k", ("crun", "exec"), "/"),
        document=True,
        attach=messages.Attach(0, "", True, True, True, False),
        namespace=True,
    ),
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
    messages.Adopt(10, "k", 11, "ioe", False, JsonFile("/x")),
    messages.Adopt(10, "k", 11, "ioe", False, None),
    messages.Reaped(11, "k", 137),
    messages.Relay(15, b"\x7f\0\0\1"),
    messages.Shutdown(12),
]
NEW_ORDERS = [
    messages.Hold(16, "name"),
    messages.Serve(19, "name", b"\x7f\0\0\1", 80),
    messages.Ship(17, "/root"),
    messages.Compressed(18, "k", 1 << 40, "/x.1.packing"),
]
"""Those that monitors of the previous protocol refuse."""
REPORTS = [
    messages.Done(1, pid=2, client=3, log_inode=4, log_offset=5),
    messages.Failed(2, "reason", 1),
    messages.State("k", 5, True, "t", True, JsonFile("/x"), 0, 0),
    messages.Kept(),
    messages.Exited("k", 255, 1 << 62),
    messages.InputEnded("k"),
    messages.Detached("k", 4, True),
    messages.Superseded(),
]
NEW_REPORTS = [messages.Held("name"), messages.Rotated("k"), messages.Dropped("k", 1 << 40), messages.Unlogged()]
"""Those that a daemon gets only if it asks for them."""
CODECS = [messages.CURRENT, previous.CODEC]


def named(each: object) -> str:
    return str(each.protocol) if isinstance(each, messages.Codec) else type(each).__name__


@pytest.mark.parametrize("codec", CODECS, ids=named)
@pytest.mark.parametrize("order", [*ORDERS, *NEW_ORDERS], ids=named)
def test_orders(order: messages.Order, codec: messages.Codec) -> None:
    if isinstance(order, messages.Hello):
        order = msgspec.structs.replace(order, protocol=codec.protocol)
    assert codec.decode_order(codec.encode(order)) == order


@pytest.mark.parametrize("codec", CODECS, ids=named)
@pytest.mark.parametrize("report", [*REPORTS, *NEW_REPORTS], ids=named)
def test_reports(report: messages.Report, codec: messages.Codec) -> None:
    assert codec.decode_report(codec.encode(report)) == report


def test_every_message_is_tested() -> None:
    assert {type(each) for each in [*ORDERS, *NEW_ORDERS]} == set(messages.Order.__args__)
    assert {type(each) for each in [*REPORTS, *NEW_REPORTS]} == set(messages.Report.__args__)


@pytest.mark.parametrize(("order", "golden"), list(zip(ORDERS, protocol3.ORDERS, strict=True)), ids=named)
def test_orders_of_the_previous_protocol(order: messages.Order, golden: str) -> None:
    """They are encoded byte for byte as by that version, and decoded."""
    if isinstance(order, messages.Hello):
        order = msgspec.structs.replace(order, protocol=3)
    assert previous.encode(order) == bytes.fromhex(golden)
    assert previous.decode_order(bytes.fromhex(golden)) == order


def test_a_process_in_a_user_namespace_needs_a_monitor_of_this_version() -> None:
    run = messages.Run(1, "k", ("crun",), "/", owner=(100_000, 200_000))
    assert messages.decode_order(messages.encode(run)) == run
    with pytest.raises(ValueError, match="a monitor of protocol 3 cannot run processes in user namespaces"):
        previous.encode(run)


@pytest.mark.parametrize(("report", "golden"), list(zip(REPORTS, protocol3.REPORTS, strict=True)), ids=named)
def test_reports_of_the_previous_protocol(report: messages.Report, golden: str) -> None:
    assert previous.encode(report) == bytes.fromhex(golden)
    assert previous.decode_report(bytes.fromhex(golden)) == report


def test_a_hello_is_understood_before_the_protocol_is_known() -> None:
    hello = messages.Hello(1, previous.PREVIOUS, 5)
    assert messages.decode_order(previous.encode(hello)) == hello == previous.decode_order(messages.encode(hello))


NESTED = b"\x82\xa4type\xa5hello\xa1x" + b"\x91" * 3000 + b"\xc0"


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x81", messages.encode({"type": "nothing"}), b"\xc1" * 100, NESTED])
@pytest.mark.parametrize("codec", CODECS, ids=named)
def test_what_is_no_message(data: bytes, codec: messages.Codec) -> None:
    with pytest.raises(messages.NOT_A_MESSAGE):
        codec.decode_order(data)
    assert messages.number(data) == 0


def test_a_packet_that_is_no_order_can_be_answered() -> None:
    assert messages.number(messages.encode({"type": "of a later version", "seq": 7})) == 7


def mutated(pick: Any, data: bytes) -> bytes:
    """`data` with some bytes changed, dropped or doubled."""
    changed = bytearray(data)
    for place, kind, byte in pick:
        at = place % (len(changed) or 1)
        if kind == 0 and changed:
            changed[at] = byte
        elif kind == 1:
            del changed[at : at + 1 + byte % 7]
        else:
            changed[at:at] = changed[at : at + 1 + byte % 7]
    return bytes(changed)


MUTATIONS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2), st.integers(0, 255)), min_size=1, max_size=6)


@settings(max_examples=400)
@given(st.sampled_from(ORDERS + REPORTS), st.sampled_from(CODECS), MUTATIONS)
@example(ORDERS[1], previous.CODEC, [(0, 0, 0xC0)])
def test_mutated_packets(message: object, codec: messages.Codec, mutations: list[tuple[int, int, int]]) -> None:
    """A mutated packet is decoded as a message, or raises one of NOT_A_MESSAGE, and nothing
    else."""
    data = mutated(mutations, codec.encode(message))
    for decode in (codec.decode_order, codec.decode_report):
        with contextlib.suppress(*messages.NOT_A_MESSAGE):
            decode(data)
    assert messages.number(data) >= 0


@given(st.sampled_from(ORDERS + REPORTS), st.sampled_from(CODECS))
def test_cut_packets(message: object, codec: messages.Codec) -> None:
    data = codec.encode(message)
    for end in range(len(data)):
        for decode in (codec.decode_order, codec.decode_report):
            with pytest.raises(messages.NOT_A_MESSAGE):
                decode(data[:end])
