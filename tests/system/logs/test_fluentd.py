"""The log driver fluentd with the server of another project, and with a receiver that answers
badly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.logs.deliveries import Fluentd
from tests.support.engine.harness import until
from tests.support.logs import numbered
from tests.support.logs.shipping import Shipping
from tests.support.logs.targets.certificates import Authority
from tests.support.logs.targets.fluentd import FluentServer
from tests.support.logs.targets.forward import ForwardReceiver

TEXTS = ("plain", "", 'quotes " and \\', "tab\there\rreturn", "Grüße 𝄞", "\x00\x01\x1b[31m", "  spaces ", "x" * 300)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluentServer]:
    with FluentServer(tmp_path_factory.mktemp("f") / "f") as made:
        yield made


def entries(server: FluentServer, tag: str, count: int) -> list[dict[str, Any]]:
    """Those with a tag, when there are so many."""

    def arrived() -> list[dict[str, Any]] | None:
        found = [each for each in server.entries() if each["tag"] == tag]
        return found if len(found) >= count else None

    found: list[dict[str, Any]] = until(f"{count} entries", arrived)
    assert len(found) == count
    return found


@pytest.mark.parametrize("sub_second", [True, False])
@pytest.mark.parametrize("request_ack", [True, False])
def test_records(shipping: Shipping, server: FluentServer, sub_second: bool, request_ack: bool) -> None:
    target = Fluentd(port=server.port, sub_second=sub_second, request_ack=request_ack)
    spool = shipping.spool(target, tag=f"docker.{sub_second}.{request_ack}", attributes={"label": "v"})
    spool.write("".join(f"{text}\n" for text in TEXTS).encode())
    spool.write(b"to stderr \xff\n", 2)
    shipping.start()
    found = entries(server, spool.document.tag, len(TEXTS) + 1)
    for each, text in zip(found, [*TEXTS, "to stderr \ufffd"], strict=True):
        assert each["record"] == {
            "container_id": spool.id,
            "container_name": "/web",
            "source": "stderr" if text.startswith("to stderr") else "stdout",
            "label": "v",
            "log": text,
        }
        seconds = each["time"][0] if sub_second else each["time"]
        assert abs(time.time() - seconds) < 600
        assert not sub_second or 0 < each["time"][1] < 1_000_000_000
    if request_ack:
        until("it is delivered", lambda: not shipping.states()[spool.id]["waiting"])


def test_parts_of_a_long_line(shipping: Shipping, server: FluentServer) -> None:
    spool = shipping.spool(Fluentd(port=server.port, request_ack=True), attributes={f"l{n}": "v" for n in range(11)})
    spool.write(b"x" * 40_000 + b"\n")
    spool.write(b"short\n", 2)
    shipping.start()
    found = [each["record"] for each in entries(server, spool.document.tag, 4)]
    parts, short = found[:3], found[3]
    assert "".join(each["log"] for each in parts) == "x" * 40_000
    assert [each["partial_ordinal"] for each in parts] == ["1", "2", "3"]
    assert [each["partial_last"] for each in parts] == ["false", "false", "true"]
    assert {each["partial_message"] for each in parts} == {"true"}
    assert len({each["partial_id"] for each in parts}) == 1
    assert set(parts[0]) - set(short) == {"partial_message", "partial_id", "partial_ordinal", "partial_last"}


def test_unix_socket(shipping: Shipping, base: Path) -> None:
    with FluentServer(base / "f", path=str(base / "f.sock")) as server:
        spool = shipping.spool(Fluentd("unix", path=server.path, request_ack=True))
        spool.write(b"one\n")
        shipping.start()
        assert entries(server, spool.document.tag, 1)[0]["record"]["log"] == "one"


def test_tls_with_an_unknown_authority(shipping: Shipping, base: Path) -> None:
    """The driver has no option for certificates, so those of the host count."""
    with FluentServer(base / "f", pair=Authority(base / "ca").sign("fluentd")) as server:
        spool = shipping.spool(Fluentd("tls", port=server.port))
        spool.write(b"one\n")
        shipping.start()
        state = until("it is refused", lambda: (all := shipping.states())[spool.id]["error"] and all[spool.id])
        assert state["error"] == "certificate verify failed: unable to get local issuer certificate"
        assert server.entries() == []


def texts(receiver: ForwardReceiver) -> list[bytes]:
    return [each.record["log"].encode() + b"\n" for each in list(receiver.events)]


@pytest.mark.parametrize("answer", ["never", "garbage", "half", "other"])
def test_answers_that_acknowledge_nothing(shipping: Shipping, answer: Any) -> None:
    """The lines are sent again, and delivered when the right answer comes."""
    with ForwardReceiver(answer=answer) as receiver:
        target = Fluentd(port=receiver.port, request_ack=True, read_timeout=0.3, retry_wait=0.1)
        spool = shipping.spool(target)
        spool.write(numbered.lines("a", 0, 100))
        shipping.start()
        until("they are sent again", lambda: len(receiver.events) >= 200)
        state = shipping.states()[spool.id]
        assert state["waiting"] == 100 and state["delivered"] == 0
        reason = (
            "the answer to a chunk is no map" if answer == "garbage" else "no acknowledgement of a chunk within 0.3 s"
        )
        until("the reason is known", lambda: shipping.states()[spool.id]["error"] == reason)
        receiver.answer = "at once"
        until("they are delivered", lambda: shipping.states()[spool.id]["waiting"] == 0)
        assert not shipping.states()[spool.id]["error"]
        numbered.assert_right(texts(receiver), {"a": 100})
        chunks = [options["chunk"] for options in receiver.options]
        assert len(set(chunks)) == len(chunks)


def test_late_answers(shipping: Shipping) -> None:
    """They are waited for, and nothing is sent twice."""
    with ForwardReceiver(answer="late", delay=0.2) as receiver:
        spool = shipping.spool(Fluentd(port=receiver.port, request_ack=True))
        for number in range(10):
            spool.write(numbered.lines("a", 100 * number, 100))
        shipping.start()
        until("they have arrived", lambda: len(receiver.events) >= 1000)
        until("they are delivered", lambda: shipping.states()[spool.id]["waiting"] == 0)
        (found,) = numbered.assert_right(texts(receiver), {"a": 1000}).values()
        assert found.duplicates == 0 and len(receiver.connections) == 1


def test_a_server_that_ends_between_store_and_answer(shipping: Shipping) -> None:
    """The chunk is sent again: duplicates instead of loss."""
    with ForwardReceiver(answer="never") as receiver:
        spool = shipping.spool(Fluentd(port=receiver.port, request_ack=True, retry_wait=0.1))
        spool.write(numbered.lines("a", 0, 10))
        shipping.start()
        until("they have arrived", lambda: len(receiver.events) == 10)
        receiver.away()
        receiver.answer = "at once"
        receiver.start()
        until("they are delivered", lambda: shipping.states()[spool.id]["waiting"] == 0)
        (found,) = numbered.assert_right(texts(receiver), {"a": 10}).values()
        assert found.duplicates == 10


def test_a_backlog_with_acknowledgements(shipping: Shipping) -> None:
    """More than may be without acknowledgement at a time, of several containers."""
    with ForwardReceiver() as receiver:
        target = Fluentd(port=receiver.port, request_ack=True)
        wanted = {}
        for index in range(4):
            shipping.spool(target).write(numbered.lines(f"c{index}", 0, 6000, 92))
            wanted[f"c{index}"] = 6000
        shipping.start()
        until("they have arrived", lambda: len(receiver.events) >= 24_000)
        until("they are delivered", lambda: not any(each["waiting"] for each in shipping.states().values()))
        found = numbered.assert_right(texts(receiver), wanted)
        assert not any(each.duplicates for each in found.values())
