"""Answers of two checkouts of the engine to the same requests, byte by byte: what a rebuilding that
changes no behaviour must keep.

    python -m tests.support.engine.recorded CHECKOUT [--write DIRECTORY]

CHECKOUT is another checkout with its `.venv` and compiled extensions, for example a git worktree of
an older commit. Each version of VERSIONS has some 100 requests; ids, times, addresses and what the
host says of itself stand in a transcript as names in the order in which they appear.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import re
import socket
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.builds.building import TAR, context
from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until

VERSIONS = ("1.18", "1.24", "1.35", "1.44", "1.55")

_SENT_ALWAYS = ("date", "content-length")
"""Headers whose value is not compared: a length follows from names of other lengths."""
_NUMBERS = re.compile(
    rb'("(?:Pid|pid|PID|StartedAt|MemTotal|NFd|NGoroutines|Goroutines|timeNano|time|Created|CreatedAt|Size|SizeRw'
    rb'|VirtualSize|SizeRootFs|LayersSize|SpaceReclaimed|mtime)":)-?\d+'
)
_STAMP = re.compile(
    rb"(?:Less than a second|\d+ seconds?) ago"
    rb"|(?!0001)\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z| ?[+-]\d\d:?\d\d(?: UTC)?)?"
)
_NAMED = {
    "directory": re.compile(rb"(?<=/layers/)\d+"),
    "pid": re.compile(rb"(?<=/proc/)\d+|(?<=\"Processes\":\[\[\")\d+"),
    "engine": re.compile(rb"\b(?:[A-Z0-9]{4}:){11}[A-Z0-9]{4}\b"),
    "made name": re.compile(rb"\b[a-z]+_[a-z]+\d?(?=\"\])"),
    "id": re.compile(rb"[0-9a-f]{64}"),
    "mac": re.compile(rb"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b"),
    "address": re.compile(rb"\b(?!0\.0\.0\.0|127\.0\.0\.1|255\.)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b"),
    "token": re.compile(rb"\b[0-9a-f]{12}\b"),
}


class Transcript:
    """Requests of one version to one engine, and their answers."""

    def __init__(self, engine: TempEngine, version: str) -> None:
        self._engine = engine
        self._version = version
        self._names: dict[bytes, bytes] = {}
        self.lines: list[str] = []

    def ask(
        self, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None, values: bool = True
    ) -> client.Answer:
        """Without `values`, the names of the fields are compared alone."""
        answer = self._engine.request(method, f"/v{self._version}{target}", body, headers)
        head = [f"{name}: {'…' if name in _SENT_ALWAYS else value}" for name, value in answer.headers.items()]
        text = self._plain("\n".join([str(answer.status), *head, ""]).encode() + answer.body)
        if not values:
            text = "\n".join(sorted({*re.findall(r'"[a-z_]+":', text)} - {'"major":', '"minor":', '"op":'}))
        # a line for each field: a difference is then one of a field
        self._note(f"{method} {target}", text.replace(',"', ',\n"'))
        return answer

    def upgraded(self, target: str, sent: bytes, body: Any = None) -> None:
        """A request that takes the connection over, with what the client sends on it."""
        data = json.dumps(body).encode() if body is not None else b""
        head = (
            f"POST /v{self._version}{target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        connection = client.connect(self._engine.socket)
        connection.sendall(head.encode() + data + sent)
        connection.shutdown(socket.SHUT_WR)
        self._note(f"POST {target} (upgraded)", self._plain(client.read_to_end(connection)))

    def until_logged(self, container: str, word: bytes) -> None:
        """Wait until the container has written this."""
        logs = f"/v{self._version}{container}/logs?stdout=1&stderr=1"
        until(f"{word!r} in {logs}", lambda: word in self._engine.request("GET", logs).body)

    def _note(self, request: str, answer: str) -> None:
        self.lines += [f">>> {self._version} {self._plain(request.encode())}", *answer.splitlines()]

    def _plain(self, data: bytes) -> str:
        data = data.replace(str(self._engine.base).encode(), b"<base>").replace(
            self._engine.bridge.encode(), b"<bridge>"
        )
        data = _NUMBERS.sub(rb"\1#", _STAMP.sub(b"<time>", data))
        for kind, pattern in _NAMED.items():
            data = pattern.sub(lambda found, kind=kind: self._name(kind, found[0]), data)
        return data.decode(errors="backslashreplace")

    def _name(self, kind: str, value: bytes) -> bytes:
        if value not in self._names:
            number = len(self._names)
            self._names[value] = f"<{kind} {number}>".encode()
            if kind == "id":
                self._names[value[:12]] = f"<short {number}>".encode()
        return self._names[value]


def record(engine: TempEngine, version: str) -> list[str]:
    """Send all requests of a version. The engine has busybox, and afterwards what it had before."""
    transcript = Transcript(engine, version)
    ask = transcript.ask
    at = tuple(map(int, version.split(".")))
    for target in ("/_ping", "/version", "/networks", "/volumes", "/images/json", "/containers/json?all=1"):
        ask("GET", target)
    ask("GET", "/info")
    ask("GET", "/images/busybox/json")
    ask("GET", "/images/busybox/history")
    ask("GET", "/images/search?term=")
    for target in ("/containers/none/json", "/images/none/json", "/exec/none/json", "/volumes/none", "/networks/none"):
        ask("GET", target)
    ask("GET", "/nothing")
    ask("PUT", "/containers/json")
    ask("GET", "/containers/json?filters=nonsense")
    ask("GET", '/containers/json?filters={"nonsense":["x"]}')
    for body in (b"{", {"Cmd": 7}, {"Image": "none"}, {}, {"Image": "busybox", "HostConfig": {"Memory": 1}}):
        ask("POST", "/containers/create", body)
    ask("POST", "/containers/create?name=-bad-", {"Image": "busybox"})
    _volumes_and_networks(transcript)
    _containers(transcript)
    _images(transcript)
    if at >= (1, 24):
        for target in ("/swarm", "/nodes", "/services", "/tasks", "/secrets", "/configs"):
            ask("GET", target)
        ask("POST", "/services/create", {"Name": "x"})
    if at >= (1, 25):
        ask("GET", "/plugins")
        ask("GET", "/system/df")
        for kind in ("containers", "images", "networks", "volumes"):
            ask("POST", f"/{kind}/prune")
    ask("POST", "/auth", {"username": "x"})
    return transcript.lines


def _volumes_and_networks(transcript: Transcript) -> None:
    ask = transcript.ask
    ask("POST", "/volumes/create", {"Name": "recorded", "Labels": {"a": "b"}})
    ask("POST", "/volumes/create", {"Name": "recorded", "Driver": "none"})
    ask("GET", "/volumes/recorded")
    ask("GET", '/volumes?filters={"name":["recorded"]}')
    made = ask("POST", "/networks/create", {"Name": "recorded", "IPAM": {"Config": [{"Subnet": "10.213.0.0/24"}]}})
    ask("POST", "/networks/create", {"Name": "recorded", "Driver": "none"})
    if made.status == 201:
        ask("GET", f"/networks/{made.json()['Id']}")
    ask("GET", '/networks?filters={"name":["recorded"]}')


def _containers(transcript: Transcript) -> None:
    ask = transcript.ask
    command = ["sh", "-c", "mkfifo /end; echo out; echo err >&2; read line </end; exit 3"]
    made = ask(
        "POST",
        "/containers/create?name=recorded",
        {
            "Image": "busybox",
            "Cmd": command,
            "Env": ["A=b"],
            "Labels": {"one": "two"},
            "ExposedPorts": {"80/tcp": {}},
            "HostConfig": {
                "Binds": ["recorded:/data"],
                "Memory": 64 << 20,
                "CpuShares": 512,
                "NetworkMode": "recorded",
            },
        },
    )
    ask("POST", "/containers/create?name=recorded", {"Image": "busybox"})
    here = f"/containers/{made.json()['Id'][:12]}"
    ask("GET", f"{here}/json")
    ask("GET", f"{here}/stats?stream=0", values=False)
    ask("POST", f"{here}/kill")
    ask("POST", f"{here}/start")
    ask("POST", f"{here}/start")
    transcript.until_logged(here, b"err")
    ask("GET", "/containers/json?size=1")
    ask("GET", f"{here}/json")
    ask("GET", f"{here}/top?ps_args=-o%20pid,comm")
    ask("GET", f"{here}/stats?stream=0", values=False)
    ask("GET", f"{here}/changes")
    ask("POST", f"{here}/update", {"CpuShares": 256})
    ask("POST", f"{here}/update", {"Memory": 1})
    ask("POST", f"{here}/resize?h=24&w=80")
    ask("POST", f"{here}/rename?name=again")
    ask("POST", f"{here}/pause")
    ask("POST", f"{here}/pause")
    ask("POST", f"{here}/unpause")
    ask("DELETE", here)
    _archives(transcript, here)
    made = ask("POST", f"{here}/exec", {"Cmd": ["cat"], "AttachStdin": True, "AttachStdout": True})
    ask("GET", f"/exec/{made.json()['Id']}/json")
    transcript.upgraded(f"/exec/{made.json()['Id']}/start", b"through\n", {})
    ask("POST", f"{here}/exec", {"Cmd": []})
    made = ask("POST", f"{here}/exec", {"Cmd": ["sh", "-c", "echo >/end"], "AttachStdout": True})
    ask("POST", f"/exec/{made.json()['Id']}/start", {})
    ask("POST", f"{here}/wait")
    ask("GET", f"/exec/{made.json()['Id']}/json")
    ask("GET", f"{here}/logs?stdout=1")
    ask("GET", f"{here}/logs?stderr=1&timestamps=1")
    ask("GET", f"{here}/logs")
    transcript.upgraded(f"{here}/attach?logs=1&stdout=1", b"")
    ask("GET", f"{here}/json")
    ask("GET", "/containers/json?all=1")
    ask("POST", f"/commit?container={made_of(here)}&repo=recorded&tag=made&comment=why", {"Cmd": ["true"]})
    ask("DELETE", f"{here}?v=1")
    ask("DELETE", here)
    ask("DELETE", "/volumes/recorded")
    ask("DELETE", "/networks/recorded")
    ask("DELETE", "/networks/bridge")


def made_of(target: str) -> str:
    """The id in a container's path."""
    return target.rpartition("/")[2]


def _archives(transcript: Transcript, here: str) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        file = tarfile.TarInfo("note")
        file.size = 4
        archive.addfile(file, io.BytesIO(b"text"))
    transcript.ask("PUT", f"{here}/archive?path=/data", data.getvalue(), TAR)
    transcript.ask("GET", f"{here}/archive?path=/data/note")
    transcript.ask("HEAD", f"{here}/archive?path=/none")
    transcript.ask("GET", f"{here}/archive?path=/none")
    transcript.ask("PUT", f"{here}/archive?path=/none", data.getvalue(), TAR)


def _images(transcript: Transcript) -> None:
    ask = transcript.ask
    files = context("FROM busybox\nENV x=y\nRUN echo made > /made\nLABEL a=b\n")
    ask("POST", "/build?t=recorded:built&q=0", files, TAR)
    ask("POST", "/build?t=recorded:built", context("FROM busybox\nRUN exit 4\n"), TAR)
    ask("POST", "/build", context("NONSENSE\n"), TAR)
    ask("GET", "/images/recorded:built/json")
    ask("GET", "/images/recorded:built/history")
    ask("GET", "/images/json")
    ask("POST", "/images/recorded:built/tag?repo=other&tag=x")
    ask("POST", "/images/recorded:built/tag?repo=BAD")
    ask("GET", "/images/none/get")
    ask("POST", "/images/load", b"no archive", TAR)
    ask("POST", "/images/create?fromImage=127.0.0.1:1/none")
    for name in ("other:x", "recorded:built", "recorded:made", "none"):
        ask("DELETE", f"/images/{name}")


def transcript(checkout: Path | None) -> dict[str, list[str]]:
    """The transcripts of a checkout (None: this one) by version."""
    engine = TempEngine() if checkout is None else TempEngine(checkout=checkout)
    with engine:
        engine.load_busybox()
        return {version: record(engine, version) for version in VERSIONS}


def differences(one: Mapping[str, list[str]], other: Mapping[str, list[str]]) -> Iterator[str]:
    """Lines of a diff between two checkouts' transcripts."""
    for version, lines in one.items():
        yield from difflib.unified_diff(lines, other[version], f"other {version}", f"this {version}", n=2, lineterm="")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.support.engine.recorded", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--write", type=Path, metavar="DIRECTORY", help="keep this checkout's transcripts there")
    arguments = parser.parse_args()
    this = transcript(None)
    if arguments.write:
        for version, lines in this.items():
            (arguments.write / version).write_text("\n".join(lines))
    found = list(differences(transcript(arguments.checkout), this))
    print(*found, sep="\n")
    print(f"{sum(line.startswith('>>> ') for lines in this.values() for line in lines)} requests", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
