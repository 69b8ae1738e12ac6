"""Other Dockerfile parsers from PyPI, to compare ours with.

`dockerfile` is BuildKit's own parser, compiled from Go; it has wheels for x86-64 only. It runs in
its own process, because Go's runtime installs signal handlers. `dockerfile-parse` is pure Python
and knows lines, but not the words of an instruction.

    python -m tests.unit.builder.dockerfile.second    one JSON string a line, one JSON answer a line
"""

from __future__ import annotations

import io
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from dockerfile_parse import DockerfileParser

HAS_BUILDKIT = platform.machine() == "x86_64"


class Command(NamedTuple):
    """`sub`: the instruction of an ONBUILD. `heredocs`: names and contents."""

    keyword: str
    sub: str
    start: int
    flags: tuple[str, ...]
    json: bool
    value: tuple[str, ...]
    heredocs: tuple[tuple[str, str], ...]


class BuildKit:
    """The process with BuildKit's parser."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def parse(self, text: str) -> list[Command] | str:
        """The instructions, or the message of an error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(text) + "\n")
        self._process.stdin.flush()
        answer: Any = json.loads(self._process.stdout.readline())
        if isinstance(answer, str):
            return answer
        return [
            Command(keyword, sub, start, tuple(flags), is_json, tuple(value), tuple(map(tuple, heredocs)))
            for keyword, sub, start, flags, is_json, value, heredocs in answer
            if keyword  # a last line with nothing but an escape
        ]


@contextmanager
def buildkit() -> Iterator[BuildKit]:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    with process:
        yield BuildKit(process)


def lines(text: str) -> list[tuple[str, int, str]]:
    """Keyword, first line and text of each instruction, as dockerfile-parse has them."""
    found = DockerfileParser(fileobj=io.BytesIO(text.encode())).structure
    return [
        (one["instruction"], one["startline"] + 1, one["value"]) for one in found if one["instruction"] != "COMMENT"
    ]


def _serve() -> None:
    import dockerfile

    for request in sys.stdin:
        try:
            answer: Any = [
                (
                    (one.cmd or "").upper(),
                    (one.sub_cmd or "").upper(),
                    one.start_line,
                    one.flags,
                    one.json,
                    one.value,
                    [(body.name, body.content) for body in one.heredocs],
                )
                for one in dockerfile.parse_string(json.loads(request))
            ]
        except dockerfile.GoParseError as error:
            answer = str(error)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
