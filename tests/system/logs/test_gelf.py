"""The log driver gelf with receivers of datagrams and streams."""

from __future__ import annotations

import random
import string
import time
from typing import Any

import pytest

from engine.logs.deliveries import Gelf
from tests.support.engine.harness import until
from tests.support.logs import numbered
from tests.support.logs.shipping import Shipping, Spool
from tests.support.logs.targets.gelf import GelfTcp, GelfUdp

TEXTS = (
    *("plain", 'quotes " and \\', "tab\there\rreturn", "Grüße 𝄞 \u2028", "<html>&", "\x00\x01\x1b[31m", "  spaces "),
    "{}",
)


def expected(spool: Spool, text: str, level: int = 6) -> dict[str, Any]:
    return {
        "version": "1.1",
        "host": "box",
        "short_message": text,
        "level": level,
        "_container_id": spool.id,
        "_container_name": "web",
        "_image_id": "sha256:0",
        "_image_name": "busybox",
        "_command": "sh -c 'x'",
        "_tag": spool.document.tag,
        "_created": "2023-11-14T22:13:20.5Z",
        "_label": "v",
        "_under": "u",
    }


def write_all(shipping: Shipping, target: Gelf) -> Spool:
    attributes = {"label": "v", "_under": "u"}
    spool = shipping.spool(target, command="sh -c 'x'", created=1_700_000_000_500_000_000, attributes=attributes)
    # an empty line is not sent
    spool.write("".join(f"{text}\n" for text in TEXTS).encode() + b"\n")
    spool.write(b"to stderr \xff\n", 2)
    return spool


def check(messages: list[dict[str, Any]], spool: Spool) -> None:
    stamps = [each.pop("timestamp") for each in messages]
    assert all(isinstance(stamp, float | int) and abs(time.time() - stamp) < 600 for stamp in stamps)
    assert stamps == sorted(stamps) and all(round(stamp, 3) == stamp for stamp in stamps)
    assert messages == [expected(spool, text) for text in TEXTS] + [expected(spool, "to stderr \ufffd", 3)]


@pytest.mark.parametrize("compression", ["gzip", "zlib", "none"])
def test_udp(shipping: Shipping, compression: Any) -> None:
    with GelfUdp() as receiver:
        spool = write_all(shipping, Gelf("udp", "127.0.0.1", receiver.port, compression=compression))
        shipping.start()
        until("all have arrived", lambda: len(receiver.messages()) == len(TEXTS) + 1)
        first = {"gzip": b"\x1f\x8b", "zlib": b"\x78", "none": b"{"}[compression]
        assert all(each.startswith(first) for each in receiver.datagrams)
        check(receiver.messages(), spool)
        until("it is delivered", lambda: shipping.states()[spool.id]["waiting"] == 0)


def test_tcp(shipping: Shipping) -> None:
    with GelfTcp() as receiver:
        spool = write_all(shipping, Gelf("tcp", "127.0.0.1", receiver.port))
        shipping.start()
        until("all have arrived", lambda: len(receiver.messages()) == len(TEXTS) + 1)
        check(receiver.messages(), spool)


@pytest.mark.parametrize("compression", ["gzip", "none"])
def test_chunks(shipping: Shipping, compression: Any) -> None:
    """Text that hardly shrinks, of parts of 16 KiB."""
    text = "".join(random.Random(1).choices(string.ascii_letters + string.digits, k=40_000))
    with GelfUdp() as receiver:
        target = Gelf("udp", "127.0.0.1", receiver.port, compression=compression)
        spools = [shipping.spool(target), shipping.spool(target)]
        for spool in spools:
            spool.write(text.encode() + b"\n")
        shipping.start()
        until("all have arrived", lambda: len(receiver.messages()) == 6)
        chunked = [each for each in receiver.datagrams if each.startswith(b"\x1e\x0f")]
        assert len(chunked) > 10 and all(len(each) <= 1420 for each in receiver.datagrams)
        receiver.datagrams.reverse()
        for spool in spools:
            parts = [each["short_message"] for each in receiver.messages() if each["_container_id"] == spool.id]
            assert "".join(reversed(parts)) == text


def test_udp_target_that_is_away(shipping: Shipping) -> None:
    """ICMP reports it, and nothing is lost on this host."""
    receiver = GelfUdp()
    receiver.away()
    spool = shipping.spool(Gelf("udp", "127.0.0.1", receiver.port))
    spool.write(numbered.lines("a", 0, 3000))
    shipping.start()
    state = until("it is away", lambda: (all := shipping.states())[spool.id]["error"] and all[spool.id])
    assert (state["error"], state["waiting"]) == ("Connection refused", 3000)
    receiver.start()
    with receiver:
        texts = lambda: [each["short_message"].encode() + b"\n" for each in receiver.messages()]  # noqa: E731
        until("all have arrived", lambda: numbered.complete(texts(), {"a": 3000}))
        numbered.assert_right(texts(), {"a": 3000})
        until("it is delivered", lambda: not shipping.states()[spool.id]["waiting"])


def test_many_containers_over_one_connection(shipping: Shipping) -> None:
    with GelfTcp() as receiver:
        spools = [shipping.spool(Gelf("tcp", "127.0.0.1", receiver.port)) for _ in range(50)]
        for index, spool in enumerate(spools):
            spool.write(numbered.lines(f"c{index}", 0, 200))
        shipping.start()
        wanted = {f"c{index}": 200 for index in range(50)}
        texts = lambda: [each["short_message"].encode() + b"\n" for each in receiver.messages()]  # noqa: E731
        until("all have arrived", lambda: numbered.complete(texts(), wanted))
        found = numbered.assert_right(texts(), wanted)
        assert not any(each.duplicates for each in found.values())
        assert len(receiver.connections) == 1
