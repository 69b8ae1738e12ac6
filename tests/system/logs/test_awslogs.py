"""The log driver awslogs: the shipper's process with moto's CloudWatch Logs, and with a stub for
what moto does not check: limits, clocks, signatures, credentials and failures."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from engine.logs import cloudwatch, reach
from engine.logs.deliveries import Awslogs
from tests.support.engine.harness import free_ports, until
from tests.support.logs.receivers import HOST, SECRET, Receiver
from tests.support.logs.shipping import Shipping, Spool

REGION = "eu-west-1"
KEY = "AKIATEST"
DAY = 86_400_000


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials of these tests, and none of the host."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET.format(KEY))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def stub(base: Path) -> Iterator[Receiver]:
    made = Receiver(base, "cloudwatch").start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from moto.server import main; main(sys.argv[1:])",
            "-H",
            HOST,
            "-p",
            str(port),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def listens() -> bool:
        assert process.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex((HOST, port)) == 0

    until("moto listens", listens, 60)
    yield f"http://{HOST}:{port}"
    process.kill()
    process.wait()


def target(endpoint: str, stream: str = "stream", group: str = "group", **more: Any) -> Awslogs:
    more = {"region": REGION, "create_group": True, "flush_interval": 1} | more
    return Awslogs(group=group, stream=stream, endpoint=endpoint, **more)


def numbered(first: int, count: int) -> bytes:
    return b"".join(b"line %06d\n" % number for number in range(first, first + count))


def messages(stub: Receiver) -> dict[str, list[str]]:
    found = defaultdict(list)
    for event in stub.stored():
        found[event["stream"]].append(event["message"])
    return found


def numbers(found: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in found]


def in_order(found: list[str], count: int) -> bool:
    """All numbers are there, and each one follows the one before it, if some are also there
    again.
    """
    expected = 0
    for number in numbers(found):
        if number == expected:
            expected += 1
        elif number > expected:
            return False
    return expected == count


def error(shipping: Shipping, spool: Spool) -> str:
    return str(shipping.states().get(spool.id, {}).get("error", ""))


def waiting(shipping: Shipping, spool: Spool) -> int:
    return int(shipping.states()[spool.id]["waiting"])


# --- moto -----------------------------------------------------------------------------------------


def test_moto(shipping: Shipping, moto: str) -> None:
    """Group and streams are created, and have the lines with their times."""
    spools = [shipping.spool(target(moto, f"stream-{number}", group="moto")) for number in range(3)]
    begin = time.time_ns() // 1_000_000
    for spool in spools:
        spool.write(numbered(0, 5000) + 'ü "quoted" \\ \t\n'.encode())
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    session = botocore.session.get_session()
    client = session.create_client("logs", region_name=REGION, endpoint_url=moto)
    for number in range(3):
        events = stored_in_moto(client, "moto", f"stream-{number}")
        texts = [event["message"] for event in events]
        assert texts == [f"line {each:06}" for each in range(5000)] + ['ü "quoted" \\ \t']
        assert all(begin <= event["timestamp"] <= begin + 60_000 for event in events)


def stored_in_moto(client: Any, group: str, stream: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    token: dict[str, str] = {}
    while True:
        answer = client.get_log_events(logGroupName=group, logStreamName=stream, startFromHead=True, **token)
        if not answer["events"]:
            return found
        found += answer["events"]
        token = {"nextToken": answer["nextForwardToken"]}


@pytest.mark.nightly
def test_moto_keeps_what_exists(shipping: Shipping, moto: str) -> None:
    asyncio.run(cloudwatch.probe(target(moto, "known", group="known")))
    asyncio.run(cloudwatch.probe(target(moto, "known", group="known")))
    spool = shipping.spool(target(moto, "known", group="known", create_group=False, create_stream=False))
    spool.write(numbered(0, 10))
    shipping.start()
    until("all are acknowledged", shipping.delivered)


# --- batches --------------------------------------------------------------------------------------


def test_full_batches(shipping: Shipping, stub: Receiver) -> None:
    """They do not wait for the interval, and are within the limits, which the stub checks."""
    spool = shipping.spool(target(stub.url, flush_interval=3600))
    line = b"x" * 83 + b" %07d\n"
    for first in range(0, 40_000, 1000):
        spool.write(b"".join(line % number for number in range(first, first + 1000)))
    shipping.start()
    until("batches are stored", lambda: len(stub.stored()) > 20_000, 90)
    found = [int(text.split()[1]) for text in messages(stub)["stream"]]
    assert found == list(range(len(found)))
    spool.end()
    until("the rest is stored when the container has ended", shipping.delivered)
    assert len(stub.stored()) == 40_000
    puts = [request for request in stub.requests() if request["events"]]
    assert len(puts) <= 10


@pytest.mark.nightly
def test_an_interval(shipping: Shipping, stub: Receiver) -> None:
    """Lines of an interval are one batch."""
    spool = shipping.spool(target(stub.url, flush_interval=1))
    shipping.start()
    begin, count = time.monotonic(), 0

    def three_batches() -> bool:
        nonlocal count
        spool.write(numbered(count, 1))
        count += 1
        return len([request for request in stub.requests() if request["events"]]) == 3

    until("three batches are sent", three_batches)
    assert time.monotonic() - begin > 2
    until("all are acknowledged", shipping.delivered)
    assert numbers(messages(stub)["stream"]) == list(range(count))


def test_short_lines(shipping: Shipping, stub: Receiver) -> None:
    """The number of events is limited too; lines without text are none."""
    spool = shipping.spool(target(stub.url))
    spool.write(b"".join(b"%d\n\n" % number for number in range(25_000)))
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    assert messages(stub)["stream"] == [str(number) for number in range(25_000)]
    assert len([request for request in stub.requests() if request["events"]]) <= 5


def test_long_lines(shipping: Shipping, stub: Receiver) -> None:
    """Parts of 16 KiB are joined, up to the limit of an event."""
    lines = [b"short", b"a" * 20_000, b"b" * 200_000, "é".encode() * 300_000, b"c" * (16 << 10), b"end"]
    spool = shipping.spool(target(stub.url))
    for line in lines:
        spool.write(line + b"\n")
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    found = messages(stub)["stream"]
    assert found[:3] == [line.decode() for line in lines[:3]]
    assert found[-2:] == [line.decode() for line in lines[-2:]]
    assert "".join(found[3:-2]) == lines[3].decode()
    assert [len(text.encode()) > 200_000 for text in found[3:-3]] == [True, True]


def test_a_line_that_is_not_finished(shipping: Shipping, stub: Receiver) -> None:
    """It waits for the rest, for an interval at most, while the other stream does not."""
    spool = shipping.spool(target(stub.url, flush_interval=1))
    spool.write(b"a" * (16 << 10))
    spool.write(b"b" * (16 << 10), 2)
    spool.write(b"b\n", 2)
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    assert sorted(messages(stub)["stream"]) == ["a" * (16 << 10), "b" * ((16 << 10) + 1)]


def test_text_that_json_escapes(shipping: Shipping, stub: Receiver) -> None:
    text = "\x01\x1b[0m <&> \u2028 \U0001f600 \ufffd" * 100
    spool = shipping.spool(target(stub.url))
    for _ in range(3000):
        spool.write(text.encode() + b"\n")
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    assert messages(stub)["stream"] == [text] * 3000


@pytest.mark.nightly
def test_clocks_that_jump(shipping: Shipping, stub: Receiver) -> None:
    """Batches are in the order of time, and span a day at most. Too old and too new events are
    refused, and count as dropped."""
    now = time.time_ns() // 1_000_000
    offsets = [0, -10, 5, -3 * DAY, -20 * DAY, -1 * DAY, 1 * DAY, 0, -15 * DAY, 60_000]
    spool = shipping.spool(target(stub.url))
    written(spool, [(now + offset, f"line {number:06}") for number, offset in enumerate(offsets)])
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    kept = {number for number, offset in enumerate(offsets) if -14 * DAY < offset < 7_200_000}
    assert set(numbers(messages(stub)["stream"])) == kept
    state = shipping.states()[spool.id]
    assert (state["delivered"], state["dropped"]) == (len(kept), len(offsets) - len(kept))
    assert "3 lines refused, and dropped: too old or too new" in shipping.log.read_text()


def written(spool: Spool, lines: list[tuple[int, str]]) -> None:
    """Replace the spool with lines of these times in milliseconds."""
    spool.end()
    entries = []
    for at, text in lines:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at // 1000))
        entries.append(f'{{"log":"{text}\\n","stream":"stdout","time":"{second}.{at % 1000:03}000000Z"}}\n')
    spool.path.write_text("".join(entries))


def test_an_event_that_is_not_valid(shipping: Shipping, stub: Receiver) -> None:
    """It is dropped and counted; the others arrive."""
    stub.faults(refuse="line 000333")
    spool = shipping.spool(target(stub.url))
    spool.write(numbered(0, 1000))
    shipping.start()
    until("all others are stored", shipping.delivered)
    assert numbers(messages(stub)["stream"]) == [number for number in range(1000) if number != 333]
    assert shipping.states()[spool.id]["dropped"] == 1


def test_the_format_is_a_header(shipping: Shipping, stub: Receiver) -> None:
    plain, formatted = (shipping.spool(target(stub.url, each or "plain", format=each)) for each in ("", "json/emf"))
    for spool in (plain, formatted):
        spool.write(b"{}\n")
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    headers = {request["headers"].get("x-amzn-logs-format") for request in stub.requests() if request["events"]}
    assert headers == {None, "json/emf"}


# --- lines that belong together -------------------------------------------------------------------


def test_multiline(shipping: Shipping, stub: Receiver) -> None:
    spool = shipping.spool(target(stub.url, multiline=r"^\d{4}-\d\d-\d\d"))
    traces = [f"2026-01-01 error {number}\n  at ü\n  at line {number}\n" for number in range(3000)]
    for trace in traces:
        spool.write(trace.encode())
    shipping.start()
    until("all but the last one are stored", lambda: len(stub.stored()) >= 2999)
    until("the last one is stored when it is old", shipping.delivered)
    assert messages(stub)["stream"] == traces


@pytest.mark.nightly
def test_multiline_across_intervals(shipping: Shipping, stub: Receiver) -> None:
    """An event that goes on is not cut by a batch, and is sent once."""
    spool = shipping.spool(target(stub.url, multiline="^>", flush_interval=2))
    shipping.start()
    spool.write(b"> one\nmore\n")
    until("it is read", lambda: waiting(shipping, spool) == 2)
    spool.write(b"still\n> two\n")
    until("the first one is stored", stub.stored)
    until("all are acknowledged", shipping.delivered)
    assert messages(stub)["stream"] == ["> one\nmore\nstill\n", "> two\n"]


@pytest.mark.nightly
def test_multiline_of_a_container_that_ends(shipping: Shipping, stub: Receiver) -> None:
    """What may continue is sent at once: nothing comes any more."""
    spool = shipping.spool(target(stub.url, multiline="^>", flush_interval=3600))
    spool.write(b"> one\nmore\n> two\n")
    spool.end()
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    assert messages(stub)["stream"] == ["> one\nmore\n", "> two\n"]
    until("the container is forgotten", lambda: spool.id not in shipping.states())


def test_the_shipper_ends(shipping: Shipping, stub: Receiver) -> None:
    """Requests on the way are settled first, so nothing is sent twice."""
    stub.faults(delay=0.2)
    spool = shipping.spool(target(stub.url))
    shipping.start()
    spool.write(numbered(0, 20_000))
    spool.end()
    until("a request is on the way", stub.requests)
    assert shipping.kill(signal.SIGTERM) == 0
    stub.faults()
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    assert numbers(messages(stub)["stream"]) == list(range(20_000))


def test_multiline_that_never_matches(shipping: Shipping, stub: Receiver) -> None:
    spool = shipping.spool(target(stub.url, multiline="^>"))
    spool.write(numbered(0, 100_000))
    spool.end()
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    found = messages(stub)["stream"]
    assert "".join(found).encode() == numbered(0, 100_000)
    assert len(found) == 5


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (400, "ThrottlingException", "ThrottlingException: Rate exceeded"),
        (500, "ServiceUnavailableException", "ServiceUnavailableException: Rate exceeded"),
        (503, "", "503 Service Unavailable"),
        (400, "UnrecognizedClientException", "UnrecognizedClientException: Rate exceeded"),
        (400, "AccessDeniedException", "AccessDeniedException: Rate exceeded"),
    ],
)
def test_a_service_that_is_not_well(shipping: Shipping, stub: Receiver, status: int, kind: str, text: str) -> None:
    stub.faults(always=[status, {"__type": kind, "message": "Rate exceeded"} if kind else {}])
    spool = shipping.spool(target(stub.url))
    spool.write(numbered(0, 1000))
    shipping.start()
    until("the error is known", lambda: error(shipping, spool))
    assert error(shipping, spool) == text
    assert waiting(shipping, spool) == 1000
    stub.faults()
    until("it goes on", shipping.delivered)
    assert numbers(messages(stub)["stream"]) == list(range(1000))


def test_a_stream_does_not_hold_up_others(shipping: Shipping, stub: Receiver) -> None:
    stub.faults(forbidden="secret")
    wrong = shipping.spool(target(stub.url, "a", group="secret"))
    missing = shipping.spool(target(stub.url, "b", group="none", create_group=False))
    right = shipping.spool(target(stub.url, "c"))
    shipping.start()
    for first in range(0, 3000, 1000):
        for spool in (wrong, missing, right):
            spool.write(numbered(first, 1000))
        until("one is stored", lambda at=first: len(stub.stored()) == at + 1000)
    assert error(shipping, wrong) == "AccessDeniedException: User is not authorized to perform: logs:PutLogEvents"
    assert error(shipping, missing) == (
        "failed to create Cloudwatch log stream: ResourceNotFoundException: The specified log group does not exist."
    )
    assert error(shipping, right) == ""
    assert waiting(shipping, wrong) == waiting(shipping, missing) == 3000
    asyncio.run(cloudwatch.probe(target(stub.url, "other", group="none")))
    stub.faults()
    until("all go on", shipping.delivered)
    assert all(in_order(found, 3000) for found in messages(stub).values())


def test_sequence_tokens(shipping: Shipping, stub: Receiver) -> None:
    """Other implementations require them. Here a token was used by another client meanwhile."""
    stub.faults(tokens=True)
    spool = shipping.spool(target(stub.url))
    shipping.start()
    for first in range(3):
        spool.write(numbered(first * 10, 10))
        until("it is delivered", shipping.delivered)
        shipping.kill()  # it forgets the token
        shipping.start()
    assert in_order(messages(stub)["stream"], 30)
    assert shipping.states()[spool.id]["dropped"] == 0


def test_data_that_was_accepted_before(shipping: Shipping, stub: Receiver) -> None:
    accepted = {"__type": "DataAlreadyAcceptedException", "message": "again", "expectedSequenceToken": "5"}
    stub.faults(answers=[[400, accepted]])
    spool = shipping.spool(target(stub.url))
    spool.write(numbered(0, 10))
    shipping.start()
    until("it is delivered", shipping.delivered)
    assert not stub.stored()


@pytest.mark.nightly
def test_cut_connections(shipping: Shipping, stub: Receiver) -> None:
    stub.faults(cuts=[100, 200_000, 0])
    spools = [shipping.spool(target(stub.url, f"{number}")) for number in range(3)]
    for spool in spools:
        spool.write(numbered(0, 20_000))
    shipping.start()
    until("all are acknowledged", shipping.delivered)
    found = messages(stub)
    assert all(in_order(found[f"{number}"], 20_000) for number in range(3))


@pytest.mark.nightly
def test_kills(shipping: Shipping, stub: Receiver) -> None:
    """Of the shipper and of the service."""
    spools = [shipping.spool(target(stub.url, f"{number}")) for number in range(3)]
    shipping.start()
    for round_ in range(4):
        for spool in spools:
            spool.write(numbered(round_ * 5000, 5000))
        until("something is stored", lambda at=round_: len(stub.stored()) > at * 15_000)
        if round_ % 2:
            stub.kill()
            stub.start()
        else:
            shipping.kill()
            shipping.start()
    until("all are acknowledged", shipping.delivered)
    found = messages(stub)
    assert all(in_order(found[f"{number}"], 20_000) for number in range(3))


# --- credentials ----------------------------------------------------------------------------------


def test_credentials_that_expire(shipping: Shipping, stub: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an endpoint are asked for again, also when the service says so before their time."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{stub.url}/elsewhere")
    stub.faults(key="AKIAONE")
    spool = shipping.spool(target(stub.url, credentials_endpoint="/credentials"))
    shipping.start()
    spool.write(numbered(0, 10))
    until("it is delivered", lambda: len(stub.stored()) == 10 and shipping.delivered())
    stub.faults(key="AKIATWO", expired=["AKIAONE"])
    spool.write(numbered(10, 10))
    until("it is delivered", lambda: len(stub.stored()) == 20 and shipping.delivered())
    keys = [
        request["headers"]["authorization"].split("=")[1].split("/")[0]
        for request in stub.requests()
        if request["events"]
    ]
    assert keys[-2:] == ["AKIAONE", "AKIATWO"]
    tokens = {request["headers"]["x-amz-security-token"] for request in stub.requests() if request["events"]}
    assert tokens == {"token of AKIAONE", "token of AKIATWO"}
    assert "Expired" not in shipping.log.read_text()


def test_credentials_that_stay_expired(shipping: Shipping, stub: Receiver) -> None:
    stub.faults(expired=[KEY])
    spool = shipping.spool(target(stub.url))
    spool.write(numbered(0, 10))
    shipping.start()
    until("the error is known", lambda: error(shipping, spool))
    assert error(shipping, spool) == ("ExpiredTokenException: The security token included in the request is expired")
    stub.faults()
    until("it goes on", shipping.delivered)


def test_region_and_credentials_of_the_instance(
    shipping: Shipping, stub: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", stub.url)
    spool = shipping.spool(target(stub.url, region=""))
    spool.write(numbered(0, 10))
    shipping.start()
    until("it is delivered", shipping.delivered)
    (signed,) = [request["headers"]["authorization"] for request in stub.requests() if request["events"] == 10][-1:]
    assert "/eu-west-1/logs/aws4_request" in signed


def test_credentials_of_files(
    shipping: Shipping, stub: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[default]\naws_access_key_id = AKIAFILE\naws_secret_access_key = {SECRET.format('AKIAFILE')}\n"
    )
    spool = shipping.spool(target(stub.url))
    spool.write(numbered(0, 10))
    shipping.start()
    until("it is delivered", shipping.delivered)


def test_no_credentials(shipping: Shipping, stub: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    spool = shipping.spool(target(stub.url))
    spool.write(numbered(0, 10))
    shipping.start()
    until("the error is known", lambda: error(shipping, spool))
    assert error(shipping, spool) == "no AWS credentials: neither environment, files nor instance have any"


# --- the check at a start -------------------------------------------------------------------------


def test_the_check_at_a_start(stub: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(cloudwatch.probe(target(stub.url)))
    asyncio.run(cloudwatch.probe(target(stub.url)))
    failures = {
        target(stub.url, group="none", create_group=False): "failed to create Cloudwatch log stream: "
        "ResourceNotFoundException: The specified log group does not exist.",
        target(stub.url, "a:b"): "failed to create Cloudwatch log stream: "
        "InvalidParameterException: Value at 'logStreamName' failed to satisfy constraint",
        target("http://127.0.0.1:1"): "failed to create Cloudwatch log stream: dial 127.0.0.1:1: Connection refused",
        target(stub.url, region=""): "Cannot determine region for awslogs driver",
    }
    for each, text in failures.items():
        with pytest.raises(OSError) as refused:
            asyncio.run(reach.check(each))
        assert reach.reason(refused.value) == text
    before = len(stub.requests())
    asyncio.run(cloudwatch.probe(target(stub.url, create_stream=False)))
    assert len(stub.requests()) == before


def test_a_host_without_botocore(base: Path) -> None:
    """Nothing else needs it, and a start says what is missing."""
    code = (
        "import asyncio, sys; sys.modules['botocore'] = None\n"
        "from engine.logs import cloudwatch\n"
        "from engine.logs.deliveries import Awslogs\n"
        "import engine.shipper.senders.awslogs\n"
        "try: asyncio.run(cloudwatch.probe(Awslogs(region='r', group='g', stream='s')))\n"
        "except OSError as error: print(error.strerror)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "awslogs needs the Python package botocore: pip install engined[awslogs]\n"


def test_a_notice_of_lost_lines(shipping: Shipping, stub: Receiver) -> None:
    """In non-blocking mode it is an event by itself, also among those of several lines."""
    stub.faults(always=[503, {}])
    spool = shipping.spool(target(stub.url, multiline="^>"), blocking=False, quota=200_000)
    shipping.start()
    spool.write(b"> one\nmore\n")
    until("the error is known", lambda: error(shipping, spool))
    for _ in range(100):
        spool.write(b"> lines\nmore\n" * 100)
    until("lines are dropped", lambda: shipping.states()[spool.id]["dropped"])
    stub.faults()
    until("it goes on", shipping.delivered)
    found = messages(stub)["stream"]
    notices = [text for text in found if "lines of this container were lost" in text]
    assert notices
    assert set(found) - set(notices) <= {"> one\nmore\n", "> lines\nmore\n", "more\n"}
