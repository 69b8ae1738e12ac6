"""What dockerd says of Dockerfiles that it does not build: `docker build --check`, `--call=outline`
and `--call=targets`. The answers are recorded in tests/data/build/checks.json.

    python -m tests.support.builds.checks            # compare dockerd with what is recorded
    python -m tests.support.builds.checks --record   # record again

Needs `make bench-peers`, and docker's clients of Debian forky.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.builder.state import DEFAULT_PATH
from tests.support import PATIENCE, ROOT
from tests.support.builds.building import TAR
from tests.support.engine import client
from tests.support.images.archives import busybox, docker_archive

RECORDED = ROOT / "tests/data/build/checks.json"
CLIENT = ROOT / ".venv/clients/forky"
IMAGES = ("alpine:latest", "busybox:latest", "busybox:stable")
"""Names of an image that an engine must have. Its only variable is PATH."""


class Case(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One Dockerfile. `ignored`: the text of .dockerignore. `own_words`: the error is the same, the
    engines say it in other words.
    """

    call: str = "check"
    text: str
    arguments: list[str] = []
    target: str = ""
    ignored: str = ""
    own_words: bool = False
    answer: dict[str, Any] = {}


def cases() -> list[Case]:
    """All recorded ones."""
    return msgspec.json.decode(RECORDED.read_bytes(), type=list[Case])


def comparable(answer: dict[str, Any], *, own_words: bool) -> dict[str, Any]:
    """An answer without what differs from run to run: what is of one line has no order."""
    found = {name: value for name, value in answer.items() if name != "sources"}
    for name in ("warnings", "args", "secrets", "ssh"):
        if found.get(name):
            found[name] = sorted(found[name], key=_place)
    if own_words and "buildError" in found:
        found["buildError"] = {"location": found["buildError"]["location"]}
    return found


def _place(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["location"]["ranges"][0]["start"]["line"], json.dumps(entry, sort_keys=True)


def ask(socket: str, case: Case) -> tuple[dict[str, Any], int]:
    """The answer of an engine to buildx, and the exit status of buildx."""
    with tempfile.TemporaryDirectory() as directory:
        config, context = Path(directory, "config"), Path(directory, "context")
        config.mkdir()
        context.mkdir()
        (config / "cli-plugins").symlink_to(CLIENT / "cli-plugins")
        (context / "Dockerfile").write_text(case.text)
        if case.ignored:
            (context / ".dockerignore").write_text(case.ignored)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")}
        done = subprocess.run(
            [
                *(CLIENT / "bin/docker", "buildx", "build", "--progress=quiet", f"--call={case.call},format=json"),
                *(word for argument in case.arguments for word in ("--build-arg", argument)),
                *(("--target", case.target) if case.target else ()),
                context,
            ],
            env=kept | {"DOCKER_HOST": f"unix://{socket}", "DOCKER_CONFIG": str(config)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60 * PATIENCE,
            check=False,
        )
    text = done.stdout.decode().strip()
    assert text, (case.text, done.stderr)
    answer, _ = json.JSONDecoder().raw_decode(text)
    return answer, done.returncode


def differences(socket: str) -> Iterator[str]:
    """The cases that an engine answers otherwise than recorded. It has IMAGES."""
    for case in cases():
        found, status = ask(socket, case)
        expected = comparable(case.answer, own_words=case.own_words)
        if comparable(found, own_words=case.own_words) != expected:
            yield f"{case.call} of {case.text!r}: {found}"
        if status != (case.call == "check" and bool(expected["warnings"] or "buildError" in expected)):
            yield f"{case.call} of {case.text!r}: exit status {status}"


def prepare(socket: str) -> None:
    """Give an engine IMAGES."""
    archive = docker_archive(busybox(*IMAGES, config={"Env": [DEFAULT_PATH]}))
    answer = client.request(socket, "POST", "/v1.24/images/load?quiet=1", archive, TAR)
    assert answer.status == 200, answer


def main() -> int:
    from bench.engines import Dockerd  # bench imports tests

    parser = argparse.ArgumentParser(prog="tests.support.builds.checks", description=__doc__)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    engine = Dockerd()
    try:
        engine.start()
        prepare(engine.socket)
        if not arguments.record:
            found = list(differences(engine.socket))
            print(*found, sep="\n")
            return 1 if found else 0
        recorded = cases()
        for case in recorded:
            answer, _ = ask(engine.socket, case)
            case.answer = comparable(answer, own_words=False)
        RECORDED.write_bytes(msgspec.json.format(msgspec.json.encode(recorded), indent=1) + b"\n")
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
