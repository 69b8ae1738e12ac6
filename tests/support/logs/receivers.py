"""Receivers of log messages over HTTP, each in a process of its own, which tests kill at will:
Splunk's HTTP Event Collector, and Amazon CloudWatch Logs with the limits that moto does not check.

A receiver appends what it has stored to a file, so that a test sees what survived. It misbehaves as
`faults` says, which a test may change at any time.

`python -m tests.support.logs.receivers collector|cloudwatch --port PORT --directory DIR
[--certificate PEM]`
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import ipaddress
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support import PATIENCE, ROOT
from tests.support.engine.harness import free_ports, until

HOST = "127.0.0.1"
TOKEN = "11111111-2222-3333-4444-555555555555"
INDEXED_AFTER = 0.05
"""Seconds that events of a collector with acknowledgements are in memory alone."""
SECRET = "secret of {}"
"""Secret key of an access key."""


class Receiver:
    """A receiver's process, as a test uses it."""

    def __init__(self, base: Path, kind: str, *, certificate: Path | None = None) -> None:
        self.kind = kind
        (self.port,) = free_ports(1)
        self.directory = base / f"{kind}-{self.port}"
        self.directory.mkdir()
        self.certificate = certificate
        self.process: subprocess.Popen[bytes] | None = None
        self.faults()

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://{HOST}:{self.port}"

    def start(self) -> Receiver:
        command = [sys.executable, "-m", "tests.support.logs.receivers", self.kind, "--port", str(self.port)]
        command += ["--directory", str(self.directory)]
        command += ["--certificate", str(self.certificate)] if self.certificate else []
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        until("the receiver listens", self._listens)
        return self

    def _listens(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.directory / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(30 * PATIENCE)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()

    def faults(self, **faults: Any) -> None:
        """What it does wrong from now on, instead of what it did before."""
        fresh = self.directory / "faults.new"
        fresh.write_text(json.dumps(faults))
        fresh.rename(self.directory / "faults")

    def stored(self) -> list[Any]:
        """The events that it has stored, in order."""
        return self._lines("stored")

    def requests(self) -> list[Any]:
        """What it was asked: method, path, headers in lower case, bytes of the body, events."""
        return self._lines("requests")

    def _lines(self, name: str) -> list[Any]:
        path = self.directory / name
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]  # the last one may be incomplete
        return [json.loads(line) for line in lines if line]


# --- the receivers' processes ---------------------------------------------------------------------


class Server:
    """The common part of the receivers' processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stored = os.open(directory / "stored", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._requests = os.open(directory / "requests", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._faults: dict[str, Any] = {}
        self._faults_of = 0

    @property
    def faults(self) -> dict[str, Any]:
        """Faults that happen a number of times are removed from the lists in it."""
        path = self.directory / "faults"
        if (changed := path.stat().st_ino) != self._faults_of:
            self._faults, self._faults_of = json.loads(path.read_text()), changed
        return self._faults

    def store(self, events: list[Any]) -> None:
        os.write(self._stored, "".join(json.dumps(event) + "\n" for event in events).encode())

    async def received(self, request: web.Request) -> bytes:
        """The body, unless the connection is to be cut before."""
        faults = self.faults
        if cuts := faults.get("cuts"):
            await request.content.read(cuts.pop(0))
            assert request.transport is not None
            request.transport.abort()
        body = await request.read()
        await asyncio.sleep(faults.get("delay", 0))
        if faults.get("silent"):
            await asyncio.Event().wait()
        return body

    def note(self, request: web.Request, body: bytes, events: int) -> None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        line = {"method": request.method, "path": request.path_qs, "headers": headers, "size": len(body)}
        os.write(self._requests, (json.dumps(line | {"events": events}) + "\n").encode())

    def planned(self) -> web.Response | None:
        """An answer that the faults name: of `answers` once each, `always` until it is changed."""
        faults = self.faults
        if answers := faults.get("answers"):
            status, document = answers.pop(0)
        elif "always" in faults:
            status, document = faults["always"]
        else:
            return None
        return web.json_response(document, status=status)


class Collector(Server):
    """An HTTP Event Collector.

    Faults: `refuse`, a text of events that are refused with `code` (6), and without their number if
    `unnumbered`; `most`, bytes of the largest body; `acks`: "held", "none".
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._indexed: dict[str, dict[int, bool]] = {}
        self._indexing: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.options("/services/collector/event/1.0", self.options),
            web.post("/services/collector/event/1.0", self.events),
            web.post("/services/collector/ack", self.acks),
        ]

    async def options(self, request: web.Request) -> web.Response:
        self.note(request, b"", 0)
        return self.planned() or web.json_response({"text": "OK"})

    async def events(self, request: web.Request) -> web.Response:
        body = await self.received(request)
        events = list(documents(body.decode()))
        self.note(request, body, len(events))
        if (planned := self.planned()) is not None:
            return planned
        if request.headers.get("Authorization") != f"Splunk {TOKEN}":
            return web.json_response({"text": "Invalid token", "code": 4}, status=403)
        faults = self.faults
        if len(body) > faults.get("most", 1 << 30):
            return web.Response(status=413, text="<html>too large</html>")
        for number, event in enumerate(events):
            if (text := faults.get("refuse")) and text in json.dumps(event):
                answer = {"text": "Invalid data format", "code": faults.get("code", 6)}
                if not faults.get("unnumbered"):
                    answer["invalid-event-number"] = number
                return web.json_response(answer, status=400)
        channel = request.headers.get("X-Splunk-Request-Channel")
        if channel is None or faults.get("acks") == "none":
            self.store(events)
            return web.json_response({"text": "Success", "code": 0})
        known = self._indexed.setdefault(channel, {})
        number = len(known)
        known[number] = False
        task = asyncio.create_task(self._index(events, known, number))
        self._indexing.add(task)
        task.add_done_callback(self._indexing.discard)
        return web.json_response({"text": "Success", "code": 0, "ackId": number})

    async def _index(self, events: list[Any], known: dict[int, bool], number: int) -> None:
        await asyncio.sleep(INDEXED_AFTER)
        self.store(events)
        known[number] = True

    async def acks(self, request: web.Request) -> web.Response:
        body = await self.received(request)
        self.note(request, body, 0)
        known = self._indexed.get(request.query["channel"], {})
        held = self.faults.get("acks") == "held"
        # a real one forgets what it has confirmed
        found = {str(number): not held and known.get(number, False) for number in json.loads(body)["acks"]}
        return web.json_response({"acks": found})


def documents(text: str) -> Iterator[Any]:
    """JSON documents, one after another."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        found, at = decoder.raw_decode(text, at)
        yield found


class CloudWatch(Server):
    """CloudWatch Logs, with its limits, and the servers of credentials.

    Faults: `expired`, access keys; `tokens`: sequence tokens are required; `refuse`, a text of
    events that are not valid; `forbidden`, a group; `now`, the clock in milliseconds. The
    credentials at /credentials are those of the faults: `key`, and `expires` in seconds.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._groups: dict[str, dict[str, int]] = {}
        """Streams and their sequence numbers, by group."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/", self.call),
            web.get("/credentials", self.credentials),
            web.put("/latest/api/token", self.instance_token),
            web.get("/latest/meta-data/placement/availability-zone/", self.zone),
            web.get("/latest/meta-data/iam/security-credentials/", self.role),
            web.get("/latest/meta-data/iam/security-credentials/role", self.credentials),
        ]

    async def credentials(self, request: web.Request) -> web.Response:
        self.note(request, b"", 0)
        key = self.faults.get("key", "AKIA")
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.faults.get("expires", 7200))
        return web.json_response({
            "Code": "Success", "AccessKeyId": key, "SecretAccessKey": SECRET.format(key), "Token": f"token of {key}",
            "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ"), "LastUpdated": "2026-01-01T00:00:00Z",
            "Type": "AWS-HMAC",
        })  # fmt: skip

    async def instance_token(self, request: web.Request) -> web.Response:
        return web.Response(text="instance")

    async def zone(self, request: web.Request) -> web.Response:
        return web.Response(text="eu-west-1b")

    async def role(self, request: web.Request) -> web.Response:
        return web.Response(text="role")

    async def call(self, request: web.Request) -> web.Response:
        body = await self.received(request)
        operation = request.headers["X-Amz-Target"].removeprefix("Logs_20140328.")
        document = json.loads(body)
        self.note(request, body, len(document.get("logEvents", ())))
        if (planned := self.planned()) is not None:
            return planned
        key = signer(request, body)
        if key is None:
            return refusal("InvalidSignatureException", "The request signature we calculated does not match")
        if key in self.faults.get("expired", ()):
            return refusal("ExpiredTokenException", "The security token included in the request is expired")
        if document["logGroupName"] == self.faults.get("forbidden"):
            return refusal("AccessDeniedException", f"User is not authorized to perform: logs:{operation}")
        return getattr(self, operation)(document)  # type: ignore[no-any-return]

    def CreateLogGroup(self, document: dict[str, Any]) -> web.Response:
        if document["logGroupName"] in self._groups:
            return refusal("ResourceAlreadyExistsException", "The specified log group already exists")
        self._groups[document["logGroupName"]] = {}
        return web.json_response({})

    def CreateLogStream(self, document: dict[str, Any]) -> web.Response:
        if not re.fullmatch(r"[^:*]{1,512}", document["logStreamName"]):
            return refusal("InvalidParameterException", "Value at 'logStreamName' failed to satisfy constraint")
        streams = self._groups.get(document["logGroupName"])
        if streams is None:
            return refusal("ResourceNotFoundException", "The specified log group does not exist.")
        if document["logStreamName"] in streams:
            return refusal("ResourceAlreadyExistsException", "The specified log stream already exists")
        streams[document["logStreamName"]] = 0
        return web.json_response({})

    def PutLogEvents(self, document: dict[str, Any]) -> web.Response:
        group, stream, events = document["logGroupName"], document["logStreamName"], document["logEvents"]
        streams = self._groups.get(group)
        if streams is None or stream not in streams:
            what = "group" if streams is None else "stream"
            return refusal("ResourceNotFoundException", f"The specified log {what} does not exist.")
        times = [event["timestamp"] for event in events]
        sizes = [len(event["message"].encode()) for event in events]
        if wrong := not_valid(times, sizes):
            return refusal("InvalidParameterException", wrong)
        if (text := self.faults.get("refuse")) and any(text in event["message"] for event in events):
            return refusal("InvalidParameterException", f"Log event has {text}")
        if self.faults.get("tokens"):
            expected = str(streams[stream])
            if streams[stream] and document.get("sequenceToken") != expected:
                text = f"The given sequenceToken is invalid. The next expected sequenceToken is: {expected}"
                return refusal("InvalidSequenceTokenException", text, expectedSequenceToken=expected)
            streams[stream] += 1
        now = self.faults.get("now", time.time() * 1000)
        old = sum(at < now - 14 * 86_400_000 for at in times)
        new = sum(at > now + 2 * 3_600_000 for at in times)
        self.store([{"group": group, "stream": stream, **event} for event in events[old : len(events) - new]])
        answer: dict[str, Any] = {"nextSequenceToken": str(streams[stream])} if self.faults.get("tokens") else {}
        if old or new:
            answer["rejectedLogEventsInfo"] = {
                **({"tooOldLogEventEndIndex": old} if old else {}),
                **({"tooNewLogEventStartIndex": len(events) - new} if new else {}),
            }
        return web.json_response(answer)


def not_valid(times: list[int], sizes: list[int]) -> str:
    """Why a batch is refused; empty if it is not."""
    if not 1 <= len(times) <= 10_000:
        return "1 to 10000 log events"
    if times != sorted(times):
        return "Log events in a single PutLogEvents request must be in chronological order."
    if times[-1] - times[0] > 86_400_000:
        return "The batch of log events in a single PutLogEvents request cannot span more than 24 hours."
    if not all(1 <= size <= 262_118 for size in sizes):
        return "Log event too large"
    if sum(sizes) + 26 * len(sizes) > 1_048_576:
        return "Upload too large"
    return ""


def signer(request: web.Request, body: bytes) -> str | None:
    """The access key that has signed a request; None if the signature is wrong."""
    given = request.headers.get("Authorization", "")
    match = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=(\w+)/\d+/([\w-]+)/logs/aws4_request, SignedHeaders=(\S+), .*", given
    )
    if match is None:
        return None
    key, region, names = match[1], match[2], match[3].split(";")
    headers = {name: request.headers[name] for name in names}
    made = AWSRequest("POST", f"http://{request.host}/", headers=headers, data=body)
    made.context["timestamp"] = request.headers["X-Amz-Date"]
    by = SigV4Auth(Credentials(key, SECRET.format(key), request.headers.get("X-Amz-Security-Token")), "logs", region)
    signature = by.signature(by.string_to_sign(made, by.canonical_request(made)), made)
    return key if given.endswith(f"Signature={signature}") else None


def refusal(kind: str, message: str, **more: str) -> web.Response:
    document = {"__type": f"com.amazonaws.logs#{kind}", "message": message} | more
    return web.json_response(document, status=400, content_type="application/x-amz-json-1.1")


# --- certificates ---------------------------------------------------------------------------------


def certificate(directory: Path, *, name: str = HOST, expired: bool = False) -> tuple[Path, Path]:
    """An authority, and a server's certificate of it with its key, both PEM. `name`: the server's,
    an address or a host's name."""
    directory.mkdir(exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    begin, end = now - datetime.timedelta(days=30), now + datetime.timedelta(days=-1 if expired else 30)
    signing, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority")])
    root = (
        x509.CertificateBuilder()
        .subject_name(authority)
        .issuer_name(authority)
        .public_key(signing.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(signing.public_key()), critical=False)
        .add_extension(x509.KeyUsage(False, False, False, False, False, True, True, False, False), critical=True)
        .sign(signing, hashes.SHA256())
    )
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        alternative = x509.DNSName(name)
    leaf = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA256())
    )
    key = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    authority_file, server_file = directory / "authority.pem", directory / "server.pem"
    authority_file.write_bytes(root.public_bytes(serialization.Encoding.PEM))
    server_file.write_bytes(leaf.public_bytes(serialization.Encoding.PEM) + key)
    return authority_file, server_file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("collector", "cloudwatch"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--certificate", type=Path)
    given = parser.parse_args()
    server = Collector(given.directory) if given.kind == "collector" else CloudWatch(given.directory)
    tls = None
    if given.certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(given.certificate)
    app = web.Application(client_max_size=1 << 30)
    app.add_routes(server.routes())
    web.run_app(app, host=HOST, port=given.port, ssl_context=tls, print=None, access_log=None)


if __name__ == "__main__":
    main()
