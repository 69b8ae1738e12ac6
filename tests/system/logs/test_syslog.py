"""The log driver syslog with rsyslog and syslog-ng: every format over every transport, as they
parse it, and their certificates.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.logs.deliveries import Syslog, Tls
from tests.support.engine.harness import until
from tests.support.logs.shipping import Shipping
from tests.support.logs.targets.certificates import Authority
from tests.support.logs.targets.streams import Stream, StreamReceiver
from tests.support.logs.targets.syslog import Rsyslog, SyslogNg

FORMATS = ("unix", "rfc3164", "rfc5424", "rfc5424micro")
OLD, MODERN = FORMATS[:2], FORMATS[2:]
LINES = (
    b"plain",
    b"",  # not sent
    b"tab\there\rreturn",
    "Grüße 𝄞".encode(),
    b"no \xff\xfe text",
    b'%msg% $MSG {} \\ "',
    b"  spaces ",
    b"x" * 20_000,
)
TEXTS = [
    *("plain", "tab\there\rreturn", "Grüße 𝄞", "no \ufffd\ufffd text", '%msg% $MSG {} \\ "', "  spaces "),
    *("x" * 16_384, "x" * 3616),
]
"""As they arrive. A long line is not joined, as in Docker."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


@pytest.fixture(scope="module")
def authority(place: Path) -> Authority:
    return Authority(place / "ca")


@pytest.fixture(scope="module")
def rsyslog(place: Path, authority: Authority) -> Iterator[Rsyslog]:
    with Rsyslog(place / "r", authority) as made:
        yield made


@pytest.fixture(scope="module")
def old(place: Path, authority: Authority) -> Iterator[SyslogNg]:
    with SyslogNg(place / "o", authority) as made:
        yield made


@pytest.fixture(scope="module")
def modern(place: Path, authority: Authority) -> Iterator[SyslogNg]:
    with SyslogNg(place / "m", authority, modern=True) as made:
        yield made


def shipped(
    shipping: Shipping, server: Rsyslog | SyslogNg, scheme: str, formats: tuple[str, ...]
) -> dict[str, list[dict[str, str]]]:
    """The messages of a container with each format: lines on stdout, then one on stderr."""
    assert server.authority is not None
    tls = Tls(ca=server.authority.cert) if scheme == "tcp+tls" else None
    tags = {}
    for kind in formats:
        made = shipping.spool(server.target(scheme, format=kind, facility=16, tls=tls))
        made.write(b"".join(line + b"\n" for line in LINES))
        made.write(b"to stderr\n", 2)
        tags[kind] = made.document.tag
    shipping.start()

    def arrived() -> dict[str, list[dict[str, str]]] | None:
        messages = server.messages()
        raw = "rawmsg" if isinstance(server, Rsyslog) else "RAWMSG"
        found = {kind: [each for each in messages if tag in each[raw]] for kind, tag in tags.items()}
        return found if all(len(each) >= len(TEXTS) + 1 for each in found.values()) else None

    found: dict[str, list[dict[str, str]]] = until("all messages have arrived", arrived)
    return found


@pytest.mark.parametrize("scheme", ["udp", "tcp", "tcp+tls", "unixgram"])
def test_rsyslog(shipping: Shipping, rsyslog: Rsyslog, scheme: str) -> None:
    for kind, messages in shipped(shipping, rsyslog, scheme, FORMATS).items():
        new = kind in MODERN
        tag = messages[0]["app-name"]
        if scheme == "unixgram" and kind == "rfc3164":
            # no host name is expected on a local socket
            assert tag == "box"
            assert [each["msg"].partition(": ")[2] for each in messages] == [*TEXTS, "to stderr"]
            continue
        assert re.fullmatch("[0-9a-f]{12}", tag), messages[0]
        space = "" if new else " "  # a part of the text in RFC 3164
        assert [each["msg"] for each in messages] == [space + text for text in [*TEXTS, "to stderr"]]
        levels = ["6"] * len(TEXTS) + ["3"]
        assert [each["syslogseverity"] for each in messages] == levels
        assert [each["pri"] for each in messages] == [str(16 * 8 + int(level)) for level in levels]
        # a message without a host name has the sender's
        assert {each["hostname"] == "box" for each in messages} == {kind != "unix"}
        expected = {
            "syslogfacility": "16",
            "app-name": tag,
            "programname": tag,
            "procid": "77",
            "syslogtag": f"{tag}[77]" if new else f"{tag}[77]:",
            "msgid": tag if new else "-",
            "structured-data": "-",
            "protocol-version": "1" if new else "0",
            "inputname": {"udp": "imudp", "unixgram": "imuxsock"}.get(scheme, "imtcp"),
        }
        for each in messages:
            assert expected.items() <= each.items()
            stamp = time.strptime(each["timereported"], "%b %d %H:%M:%S")
            assert (stamp.tm_mon, stamp.tm_mday) == time.localtime()[1:3] or time.localtime().tm_hour == 0
            micro = re.search(r"\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d) box", each["rawmsg"])
            assert bool(micro) == (kind == "rfc5424micro")


@pytest.mark.parametrize("scheme", ["udp", "tcp", "tcp+tls", "unix", "unixgram"])
@pytest.mark.parametrize("formats", [OLD, MODERN], ids=["old", "modern"])
def test_syslog_ng(shipping: Shipping, old: SyslogNg, modern: SyslogNg, scheme: str, formats: tuple[str, ...]) -> None:
    server = old if formats == OLD else modern
    for kind, messages in shipped(shipping, server, scheme, formats).items():
        new = kind in MODERN
        local = scheme.startswith("unix")
        if local and kind == "rfc3164":
            # no host name is expected on a local socket
            assert {each["PROGRAM"] for each in messages} == {"box"}
            assert [each["MSG"].partition(": ")[2] for each in messages] == [*TEXTS, "to stderr"]
            continue
        tag = messages[0]["PROGRAM"]
        assert re.fullmatch("[0-9a-f]{12}", tag), messages[0]
        assert [each["MSG"] for each in messages] == [*TEXTS, "to stderr"]
        assert [each["LEVEL"] for each in messages] == ["info"] * len(TEXTS) + ["err"]
        assert {each["HOST"] == "box" for each in messages} == {kind != "unix"}
        expected = {"FACILITY": "local0", "PROGRAM": tag, "PID": "77", "MSGID": tag if new else ""}
        assert all(expected.items() <= each.items() for each in messages)


@pytest.mark.parametrize("kind", FORMATS)
def test_frames(shipping: Shipping, authority: Authority, kind: Any) -> None:
    """RFC 5424 over TLS has octet counts (RFC 5425 4.3), the rest lines."""
    with StreamReceiver(pair=authority.sign("frames")) as receiver:
        tls = Tls(ca=authority.cert)
        shipping.spool(Syslog("tcp+tls", "127.0.0.1", receiver.port, format=kind, tls=tls)).write(b"one\ntwo\n")
        shipping.start()
        counted = kind in MODERN
        until("both have arrived", lambda: len(receiver.frames() if counted else receiver.lines()) == 2)
        data = bytes(receiver.connections[0].data)
        assert data.startswith(b"<30>") != counted
        assert data.endswith(b"two" if counted else b"two\n")


class Greeting(StreamReceiver):
    """Speaks first, and no TLS."""

    def greet(self, stream: Stream) -> None:
        stream.peer.sendall(b"220 ready\r\n")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("expired", "certificate verify failed: certificate has expired"),
        ("other authority", "certificate verify failed: unable to get local issuer certificate"),
        (
            "other host",
            "certificate verify failed: IP address mismatch, certificate is not valid for '127.0.0.1'.",
        ),
        ("no TLS", "[SSL: WRONG_VERSION_NUMBER] wrong version number"),
        ("missing file", "No such file or directory"),
    ],
)
def test_certificates_that_are_refused(
    shipping: Shipping, place: Path, authority: Authority, fault: str, reason: str
) -> None:
    """Nothing is sent, and everything arrives when the certificate is right."""
    name = fault.replace(" ", "-")
    signing = Authority(place / "other", name) if fault == "other authority" else authority
    hosts = ("log.example",) if fault == "other host" else ()
    pair = signing.sign(name, *hosts, days=-1 if fault == "expired" else 1)
    trusted = place / f"{name}-trusted.pem"
    if fault != "missing file":
        trusted.write_text(Path(authority.cert).read_text())
    with Greeting() if fault == "no TLS" else StreamReceiver(pair=pair) as receiver:
        target = Syslog("tcp+tls", "127.0.0.1", receiver.port, tls=Tls(ca=str(trusted)))
        spool = shipping.spool(target)
        spool.write(b"secret\n")
        shipping.start()
        state = until("it is refused", lambda: (found := shipping.states()[spool.id])["attempts"] > 1 and found)
        assert state["error"].partition(" (_ssl")[0] == reason, state
        assert state["waiting"] == 1
        assert not any(b"secret" in stream.data for stream in receiver.connections)
    if fault == "missing file":
        trusted.write_text(Path(authority.cert).read_text())
    port = receiver.port
    with StreamReceiver(pair=authority.sign(f"{name}-right"), port=port) as receiver:
        until("it has arrived", lambda: len(receiver.lines()) == 1, 60)
        until("no error", lambda: not shipping.states()[spool.id]["error"])


def test_skip_verify(shipping: Shipping, place: Path) -> None:
    pair = Authority(place / "unknown").sign("expired", days=-1)
    with StreamReceiver(pair=pair) as receiver:
        shipping.spool(Syslog("tcp+tls", "127.0.0.1", receiver.port, tls=Tls(skip_verify=True))).write(b"line\n")
        shipping.start()
        until("it has arrived", lambda: len(receiver.lines()) == 1)
