"""Builds by raw HTTP for the outside-in tests: a context, the request, and what its stream says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from tests.support.engine.client import Answer
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Node, tar

TAR = {"Content-Type": "application/x-tar"}

_ID = re.compile(r"Successfully built ([0-9a-f]{12})\n")


def cgroup_parent(engine: TempEngine) -> str:
    """A parent of cgroups that the engine's driver accepts: a path, or a slice of systemd."""
    driver = engine.request("GET", "/v1.24/info").json()["CgroupDriver"]
    return "system.slice" if driver == "systemd" else "/builds-of-test"


def context(dockerfile: str | bytes | None, files: Mapping[str, bytes | Node] | None = None) -> bytes:
    """A context as an archive; `dockerfile` None means that it has none."""
    nodes = []
    if dockerfile is not None:
        nodes.append(Node("Dockerfile", dockerfile.encode() if isinstance(dockerfile, str) else dockerfile))
    for name, content in (files or {}).items():
        nodes.append(content if isinstance(content, Node) else Node(name, content))
    return tar(nodes)


@dataclass(frozen=True)
class Built:
    """The stream of a build."""

    objects: list[dict[str, Any]]

    @property
    def text(self) -> str:
        """All its `stream` texts."""
        return "".join(each.get("stream", "") for each in self.objects)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def error(self) -> dict[str, Any] | None:
        """The last object, if it is an error."""
        last = self.objects[-1] if self.objects else {}
        assert all("error" not in each for each in self.objects[:-1]), self.objects
        return last if "error" in last else None

    @property
    def id(self) -> str:
        """The first 12 digits of the image. Raises AssertionError if there is none."""
        found = _ID.search(self.text)
        assert found is not None and self.error is None, self.objects
        return found[1]

    @property
    def code(self) -> int | None:
        assert self.error is not None, self.objects
        code: int | None = self.error["errorDetail"].get("code")
        return code


def query(parameters: Mapping[str, Any]) -> str:
    """A query string; dicts and lists of dicts as JSON, other lists as repeated parameters."""
    pairs: list[tuple[str, str]] = []
    for name, value in parameters.items():
        if isinstance(value, dict) or (isinstance(value, list) and (not value or name in ("ulimits", "cachefrom"))):
            pairs.append((name, json.dumps(value)))
        elif isinstance(value, list):
            pairs.extend((name, str(each)) for each in value)
        else:
            pairs.append((name, str(int(value)) if isinstance(value, bool) else str(value)))
    return urlencode(pairs)


def post(
    engine: TempEngine,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    *,
    api: str = "v1.24",
    timeout: float = 60,
    **parameters: Any,
) -> Answer:
    target = f"/{api}/build?{query(parameters)}"
    return engine.request("POST", target, body, {**TAR, **(headers or {})}, timeout)


def read(answer: Answer) -> Built:
    """The objects of a stream that began."""
    assert answer.status == 200, answer
    assert answer.headers["content-type"] == "application/json", answer
    assert answer.body.endswith(b"\r\n"), answer
    return Built([json.loads(line) for line in answer.body.split(b"\r\n")[:-1]])


def build(
    engine: TempEngine,
    dockerfile: str | bytes | None,
    files: Mapping[str, bytes | Node] | None = None,
    /,
    *,
    headers: Mapping[str, str] | None = None,
    timeout: float = 60,
    **parameters: Any,
) -> Built:
    """Builds at API 1.24. The stream may end with an error; a refused request is an assertion."""
    return read(post(engine, context(dockerfile, files), headers, timeout=timeout, **parameters))


def printed(engine: TempEngine, script: str, **parameters: Any) -> list[str]:
    """The lines that `script` prints in a RUN of an image of busybox, without the cache."""
    parameters = {"nocache": 1, "networkmode": "none"} | parameters
    built = build(engine, f"FROM busybox\nRUN {script}\n", **parameters)
    assert built.error is None, built.objects
    lines = built.lines
    start = next(at for at, line in enumerate(lines) if line.startswith(" ---> Running in "))
    return [
        line
        for line in lines[start + 1 : -1]
        if not re.match(r" ---> [0-9a-f]{12}$|Removing intermediate container |Successfully ", line)
    ]


def refused(answer: Answer, status: int = 400) -> str:
    """The message of a request that was refused before the stream began."""
    assert answer.status == status, answer
    return answer.message


def image(engine: TempEngine, name: str) -> Any:
    answer = engine.request("GET", f"/v1.24/images/{name}/json")
    assert answer.status == 200, answer
    return answer.json()


def exists(engine: TempEngine, name: str) -> bool:
    return engine.request("GET", f"/v1.24/images/{name}/json").status == 200
