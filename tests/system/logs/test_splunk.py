"""The log driver splunk: the shipper's process and an HTTP Event Collector, with faults of both."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.logs import collector, reach
from engine.logs.deliveries import Splunk, Tls
from tests.support import PATIENCE
from tests.support.engine.harness import until
from tests.support.logs.receivers import TOKEN, Receiver, certificate
from tests.support.logs.shipping import Shipping, Spool

PATH = "/services/collector/event/1.0"


@pytest.fixture
def hec(base: Path) -> Iterator[Receiver]:
    made = Receiver(base, "collector").start()
    yield made
    made.close()


def target(hec: Receiver, token: str = TOKEN, **more: Any) -> Splunk:
    return Splunk(url=hec.url + PATH, token=token, **more)


def numbered(first: int, count: int) -> bytes:
    return b"".join(b"line %06d\n" % number for number in range(first, first + count))


def lines(hec: Receiver) -> dict[str, list[int]]:
    """The numbers of the lines that are stored, by container (its tag), in order."""
    found = defaultdict(list)
    for event in hec.stored():
        found[event["event"]["tag"]].append(int(event["event"]["line"].split()[1]))
    return found


def in_order(numbers: list[int], count: int) -> bool:
    """All numbers are there, and each one follows the one before it, if some are also there
    again.
    """
    expected = 0
    for number in numbers:
        if number == expected:
            expected += 1
        elif number > expected:
            return False
    return expected == count


def waiting(shipping: Shipping) -> int:
    return sum(state["waiting"] for state in shipping.states().values())


def error(shipping: Shipping, spool: Spool) -> str:
    return str(shipping.states().get(spool.id, {}).get("error", ""))


def test_events(shipping: Shipping, hec: Receiver) -> None:
    """Each format, from several containers with one token, which share a destination."""
    given = {"source": "s", "sourcetype": "t", "index": "i"}
    inline = shipping.spool(target(hec, **given), tag="web", attributes={"LABEL": "ü"})
    documents = shipping.spool(target(hec, format="json"), tag="web")
    raw = shipping.spool(target(hec, format="raw"), tag="web", attributes={"a": "b"})
    inline.write(b'say "hello"\n')
    inline.write(b"to stderr\n", 2)
    documents.write(b'{"level": "info", "n": 1}\n')
    documents.write(b"no document\n")
    raw.write(b"plain\n")
    raw.write(b"  \n")  # which a collector refuses
    shipping.start()
    until("all events are stored", lambda: len(hec.stored()) >= 5)
    until("all are acknowledged", shipping.delivered)
    stored = hec.stored()
    times = [event.pop("time") for event in stored]
    assert all(isinstance(time, str) and len(time.split(".")[1]) == 6 for time in times)
    extra = {"tag": "web", "attrs": {"LABEL": "ü"}}
    assert stored == [
        {"host": "box", **given, "event": {"line": 'say "hello"', "source": "stdout", **extra}},
        {"host": "box", **given, "event": {"line": "to stderr", "source": "stderr", **extra}},
        {"host": "box", "event": {"line": {"level": "info", "n": 1}, "source": "stdout", "tag": "web"}},
        {"host": "box", "event": {"line": "no document", "source": "stdout", "tag": "web"}},
        {"host": "box", "event": "web a=b plain"},
    ]


def test_a_body_is_bounded(shipping: Shipping, hec: Receiver) -> None:
    spools = [shipping.spool(target(hec)) for _ in range(3)]
    for spool in spools:
        spool.write(numbered(0, 4000))
    shipping.start()
    until("all lines are stored", lambda: len(hec.stored()) >= 12_000)
    until("all are acknowledged", shipping.delivered)
    assert all(in_order(found, 4000) for found in lines(hec).values())
    assert len(hec.stored()) == 12_000
    requests = hec.requests()
    assert all(request["events"] <= 5000 and request["size"] < 1_000_000 for request in requests)
    assert len(requests) <= 20


def test_large_events(shipping: Shipping, hec: Receiver) -> None:
    spool = shipping.spool(target(hec))
    for _ in range(100):
        spool.write(b"\x01" * 50_000 + b"\n")
    shipping.start()
    until("all lines are stored", lambda: sum(len(each["event"]["line"]) for each in hec.stored()) >= 5_000_000)
    assert all(request["size"] < 1_050_000 for request in hec.requests())


@pytest.mark.parametrize("level", [-1, 0, 1, 9])
def test_gzip(shipping: Shipping, hec: Receiver, level: int) -> None:
    spool = shipping.spool(target(hec, gzip=True, gzip_level=level))
    spool.write(numbered(0, 2000))
    shipping.start()
    until("all lines are stored", lambda: len(hec.stored()) >= 2000)
    assert all(in_order(found, 2000) for found in lines(hec).values())
    (first, *_) = hec.requests()
    assert first["headers"]["content-encoding"] == "gzip"
    assert int(first["headers"]["content-length"]) < 30_000


def test_the_token_is_no_part_of_messages(shipping: Shipping, hec: Receiver) -> None:
    """A wrong token is a state of the target. Nothing is lost, and it goes on when it is valid."""
    spool = shipping.spool(target(hec, token="00000000-secret"))
    spool.write(numbered(0, 100))
    shipping.start()
    until("the error is known", lambda: error(shipping, spool))
    assert error(shipping, spool) == "403 Forbidden: Invalid token (code 4)"
    assert waiting(shipping) == 100
    assert "secret" not in shipping.log.read_text()
    assert not hec.stored()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([503, {"text": "Server is busy", "code": 9}], "503 Service Unavailable: Server is busy (code 9)"),
        ([429, {}], "429 Too Many Requests: {}"),
        (
            [500, {"text": "Internal server error", "code": 8}],
            "500 Internal Server Error: Internal server error (code 8)",
        ),
        ([301, {}], "301 Moved Permanently: redirects are not followed"),
        ([400, {"text": "Data channel is missing", "code": 10}], "400 Bad Request: Data channel is missing (code 10)"),
    ],
)
def test_a_collector_that_is_not_well(shipping: Shipping, hec: Receiver, answer: list[Any], text: str) -> None:
    hec.faults(always=answer)
    spool = shipping.spool(target(hec))
    spool.write(numbered(0, 3000))
    shipping.start()
    until("the error is known", lambda: error(shipping, spool))
    assert error(shipping, spool) == text
    assert waiting(shipping) == 3000
    hec.faults()
    until("it goes on", shipping.delivered)
    assert in_order(lines(hec)[spool.document.tag], 3000)


@pytest.mark.nightly
def test_some_requests_fail(shipping: Shipping, hec: Receiver) -> None:
    """Others that are on the way meanwhile succeed: no line is missing."""
    busy = [503, {"text": "Server is busy", "code": 9}]
    hec.faults(answers=[busy] * 3, cuts=[10, 100_000])
    spools = [shipping.spool(target(hec)) for _ in range(4)]
    for spool in spools:
        spool.write(numbered(0, 5000))
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    found = lines(hec)
    assert len(found) == 4
    assert all(in_order(numbers, 5000) for numbers in found.values())


def test_a_slow_collector(shipping: Shipping, hec: Receiver) -> None:
    """No more than a few requests are on the way, with more events in each."""
    hec.faults(delay=0.3)
    spool = shipping.spool(target(hec))
    other = shipping.spool(target(hec))
    shipping.start()
    for number in range(200):
        spool.write(numbered(number, 1))
        other.write(numbered(number, 1))
    until("all are acknowledged", lambda: shipping.delivered() and len(hec.stored()) >= 400)
    assert all(in_order(numbers, 200) for numbers in lines(hec).values())
    assert len(hec.requests()) < 30


def test_a_refused_event(shipping: Shipping, hec: Receiver) -> None:
    """It is dropped and counted; the others arrive."""
    hec.faults(refuse="line 000500")
    spool = shipping.spool(target(hec))
    spool.write(numbered(0, 1500))
    shipping.start()
    until("all others are stored", shipping.delivered)
    numbers = lines(hec)[spool.document.tag]
    assert sorted(set(numbers)) == [number for number in range(1500) if number != 500]
    state = shipping.states()[spool.id]
    assert (state["dropped"], state["delivered"]) == (1, 1499)
    assert "1 lines refused, and dropped: 400 Bad Request: Invalid data format (code 6)" in shipping.log.read_text()


def test_a_refused_event_without_its_number(shipping: Shipping, hec: Receiver) -> None:
    hec.faults(refuse="00077", unnumbered=True)  # lines 77 and 770 to 779, which are 11
    spool = shipping.spool(target(hec))
    spool.write(numbered(0, 1000))
    shipping.start()
    until("all others are stored", shipping.delivered)
    assert lines(hec)[spool.document.tag] == [number for number in range(1000) if "00077" not in f"{number:06}"]
    assert shipping.states()[spool.id]["dropped"] == 11


def test_an_index_that_is_not_allowed(shipping: Shipping, hec: Receiver) -> None:
    """The events of that container are dropped, not those of others."""
    hec.faults(refuse='"index": "none"', code=7)
    wrong, right = shipping.spool(target(hec, index="none")), shipping.spool(target(hec, index="main"))
    for spool in (wrong, right):
        spool.write(numbered(0, 300))
    shipping.start()
    until("all others are stored", shipping.delivered)
    assert lines(hec) == {right.document.tag: list(range(300))}
    assert shipping.states()[wrong.id]["dropped"] == 300
    assert shipping.states()[right.id]["dropped"] == 0


def test_a_body_that_is_too_large(shipping: Shipping, hec: Receiver) -> None:
    hec.faults(most=20_000)
    spool = shipping.spool(target(hec))
    spool.write(numbered(0, 500) + b"x" * 40_000 + b"\n" + numbered(500, 500))
    shipping.start()
    until("all that fits is stored", shipping.delivered)
    small = [each["event"]["line"] for each in hec.stored() if each["event"]["line"].startswith("line")]
    assert [int(line.split()[1]) for line in small] == list(range(1000))
    assert shipping.states()[spool.id]["dropped"] == 0  # 16 KiB each


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("acknowledged", [False, True])
def test_the_shipper_is_killed(shipping: Shipping, hec: Receiver, acknowledged: bool) -> None:
    spools = [shipping.spool(target(hec, index_acknowledgment=acknowledged)) for _ in range(3)]
    shipping.start()
    for round_ in range(4):
        for spool in spools:
            spool.write(numbered(round_ * 2500, 2500))
        until("some lines are stored", lambda at=round_: len(hec.stored()) > at * 7500 + 1000)
        shipping.kill()
        shipping.start()
    until("all are acknowledged", shipping.delivered)
    found = lines(hec)
    assert all(in_order(found[spool.document.tag], 10_000) for spool in spools)


@pytest.mark.parametrize("acknowledged", [False, True])
def test_the_shipper_ends(shipping: Shipping, hec: Receiver, acknowledged: bool) -> None:
    """Requests on the way are settled first, so nothing is sent twice."""
    hec.faults(delay=0.2)
    spool = shipping.spool(target(hec, index_acknowledgment=acknowledged))
    shipping.start()
    spool.write(numbered(0, 5000))
    until("a request is on the way", lambda: len(hec.stored()) >= 1000)
    assert shipping.kill(signal.SIGTERM) == 0
    hec.faults()
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    assert lines(hec)[spool.document.tag] == list(range(5000))
    spool.end()
    until("the container is forgotten", lambda: spool.id not in shipping.states())


def test_the_collector_is_killed(shipping: Shipping, hec: Receiver) -> None:
    """With acknowledgements nothing is lost that it had in memory alone."""
    spools = [shipping.spool(target(hec, index_acknowledgment=True)) for _ in range(3)]
    shipping.start()
    for round_ in range(4):
        for spool in spools:
            spool.write(numbered(round_ * 2500, 2500))
        until("some lines are accepted", lambda at=round_: len(hec.requests()) > at * 2)
        hec.kill()
        hec.start()
    until("all are acknowledged", shipping.delivered, 60)
    found = lines(hec)
    assert all(in_order(found[spool.document.tag], 10_000) for spool in spools)
    channels = {request["headers"].get("x-splunk-request-channel") for request in hec.requests()}
    assert None not in channels and len(channels) > 1


@pytest.mark.nightly
def test_the_collector_stops_answering(shipping: Shipping, hec: Receiver) -> None:
    """Its kernel accepts what it does not read. Afterwards nothing is missing."""
    spool = shipping.spool(target(hec))
    shipping.start()
    spool.write(numbered(0, 100))
    until("lines are stored", lambda: len(hec.stored()) == 100)
    assert hec.process is not None
    hec.process.send_signal(signal.SIGSTOP)
    spool.write(numbered(100, 3000))
    until("lines wait", lambda: waiting(shipping) == 3000)
    hec.kill()
    until("the error is known", lambda: error(shipping, spool))
    hec.start()
    until("it goes on", shipping.delivered)
    assert in_order(lines(hec)[spool.document.tag], 3100)


def test_a_collector_without_acknowledgements(shipping: Shipping, hec: Receiver) -> None:
    hec.faults(acks="none")
    spool = shipping.spool(target(hec, index_acknowledgment=True))
    spool.write(numbered(0, 10))
    shipping.start()
    until("the error is known", lambda: error(shipping, spool))
    assert "gives no acknowledgements" in error(shipping, spool)
    assert waiting(shipping) == 10
    hec.faults()
    until("it goes on", shipping.delivered)


def test_an_idle_connection_that_the_collector_closes(shipping: Shipping, hec: Receiver) -> None:
    """It is no failure: the request is sent again on a new one."""
    spool = shipping.spool(target(hec))
    shipping.start()
    spool.write(numbered(0, 10))
    until("it is delivered", lambda: len(hec.stored()) == 10 and shipping.delivered())
    hec.kill()
    hec.start()
    spool.write(numbered(10, 10))
    until("it is delivered", lambda: len(hec.stored()) == 20 and shipping.delivered())
    assert in_order(lines(hec)[spool.document.tag], 20)
    assert "closed" not in shipping.log.read_text()


# --- TLS and the check at a start -----------------------------------------------------------------


@pytest.fixture
def secure(base: Path) -> Iterator[tuple[Receiver, Path]]:
    authority, own = certificate(base / "certificates")
    made = Receiver(base, "collector", certificate=own).start()
    yield made, authority
    made.close()


def test_tls(shipping: Shipping, secure: tuple[Receiver, Path]) -> None:
    hec, authority = secure
    good = shipping.spool(target(hec, tls=Tls(ca=str(authority))), tag="good")
    careless = shipping.spool(target(hec, tls=Tls(skip_verify=True)), tag="careless")
    strict = shipping.spool(target(hec, tls=Tls()), tag="strict")
    other = shipping.spool(target(hec, tls=Tls(ca=str(authority), server_name="other.example")), tag="other")
    for spool in (good, careless, strict, other):
        spool.write(numbered(0, 10))
    shipping.start()
    until("two are delivered", lambda: len(hec.stored()) == 20)
    until("the others have errors", lambda: error(shipping, strict) and error(shipping, other))
    assert lines(hec) == {"good": list(range(10)), "careless": list(range(10))}
    assert error(shipping, strict) == "certificate verify failed: unable to get local issuer certificate"
    assert error(shipping, other).startswith("certificate verify failed: Hostname mismatch")


def test_names_of_certificates(shipping: Shipping, base: Path) -> None:
    authority, own = certificate(base / "certificates", name="hec.example")
    hec = Receiver(base, "collector", certificate=own).start()
    try:
        spool = shipping.spool(target(hec, tls=Tls(ca=str(authority), server_name="hec.example")))
        spool.write(numbered(0, 10))
        shipping.start()
        until("it is delivered", lambda: len(hec.stored()) == 10)
    finally:
        hec.close()


def test_an_expired_certificate(shipping: Shipping, base: Path) -> None:
    authority, own = certificate(base / "certificates", expired=True)
    hec = Receiver(base, "collector", certificate=own).start()
    try:
        verified = target(hec, tls=Tls(ca=str(authority)))
        spool = shipping.spool(verified)
        spool.write(numbered(0, 10))
        shipping.start()
        until("the error is known", lambda: error(shipping, spool))
        assert error(shipping, spool) == "certificate verify failed: certificate has expired"
        with pytest.raises(
            OSError, match="failed to verify connection - certificate verify failed: certificate has expired"
        ):
            asyncio.run(collector.probe(verified))
    finally:
        hec.close()


def test_the_check_at_a_start(hec: Receiver, secure: tuple[Receiver, Path]) -> None:
    asyncio.run(collector.probe(target(hec)))
    assert [request["method"] for request in hec.requests()] == ["OPTIONS"]
    asyncio.run(reach.check(target(hec)))
    asyncio.run(reach.check(target(hec, verify_connection=False)))
    assert len(hec.requests()) == 2
    tls, authority = secure
    asyncio.run(collector.probe(target(tls, tls=Tls(ca=str(authority)))))
    hec.faults(always=[404, {"text": "not here"}])
    with pytest.raises(OSError) as refused:
        asyncio.run(collector.probe(target(hec)))
    assert refused.value.strerror == ('splunk: failed to verify connection - 404 Not Found - {"text": "not here"}')
    hec.kill()
    with pytest.raises(OSError) as refused:
        asyncio.run(collector.probe(target(hec)))
    assert refused.value.strerror == (
        f"splunk: failed to verify connection - dial 127.0.0.1:{hec.port}: Connection refused"
    )


def test_events_of_the_daemon(shipping: Shipping, hec: Receiver) -> None:
    """A target that goes and returns is reported once each."""
    hec.kill()
    spool = shipping.spool(target(hec))
    spool.write(numbered(0, 10))
    shipping.start()
    until("the error is known", lambda: error(shipping, spool))
    hec.start()
    until("it goes on", shipping.delivered)
    shipping.events.settimeout(10 * PATIENCE)
    found = [json.loads(shipping.events.recv(65536)) for _ in range(2)]
    assert [each["action"] for each in found] == ["unreachable", "reachable"]
    assert found[0]["error"] == f"dial 127.0.0.1:{hec.port}: Connection refused"
