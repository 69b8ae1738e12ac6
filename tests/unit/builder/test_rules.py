"""What a build refuses of an instruction."""

from __future__ import annotations

import pytest

from engine.builder import rules
from engine.builder.dialect import BUILDKIT, CLASSIC
from engine.builder.options import Options
from engine.errors import InvalidParameter
from engine.images.instructions import records, words
from engine.wire.containers import HostConfig

OPTIONS = Options(dialect=BUILDKIT)
ROOT_MOUNT = 'invalid mount target "/"'
SHA256 = f"sha256:{'0' * 64}"


def instruction(text: str) -> records.Instruction:
    first, *below = text.splitlines(keepends=True)
    return records.read(words.with_heredocs(words.line(first.strip(), 1), words.Source(below)))


@pytest.mark.parametrize(
    ("text", "directory", "refused"),
    [
        ("RUN --mount=target=/ true", "", ROOT_MOUNT),
        ("RUN --mount=target=. true", "", ROOT_MOUNT),
        ("RUN --mount=target=../.. true", "/a/b", ROOT_MOUNT),
        ("RUN --mount=type=tmpfs,target=// true", "/a", ROOT_MOUNT),
        ("RUN --mount=type=cache,target=a/.. true", "/", ROOT_MOUNT),
        ("RUN --mount=type=secret,id=a,target=/ true", "", "invalid mount type SECRET for /"),
        ("RUN --mount=type=ssh,target=/ true", "", "invalid mount type SSH for /"),
        ("RUN --mount=type=secret,id=a true", "", ""),
        ("RUN --mount=type=ssh true", "", ""),
        ("RUN --mount=target=. true", "/a", ""),
        ("RUN --mount=target=../b true", "a", ""),
        ("ADD --checksum=x a /", "", "checksum requires HTTP(S) or Git sources"),
        ("ADD --checksum=x http://a.b/c http://a.b/d /", "", "checksum can't be specified for multiple sources"),
        ("ADD --checksum=x <<a /\na\n", "", "checksum can't be specified for multiple sources"),
        ("ADD --checksum=sha256:1 https://a.b/c.git /", "", ""),
        ("ADD --checksum=sha256:1 http://a.b/c /", "", "invalid checksum digest length"),
        (f"ADD --checksum={SHA256} http://a.b/c /", "", ""),
        ("ADD --checksum=sha256:1 git@a.b:c.git /", "", ""),
        ("COPY <<. /x\n.\n", "", "COPY <<.: this is not the name of a file"),
        ("COPY <<a /x\na\n", "", ""),
        ("COPY a /x", "", ""),
        ("ENV a=b", "", ""),
    ],
)
def test_what_it_cannot_mean(text: str, directory: str, refused: str) -> None:
    if not refused:
        rules.check(instruction(text), directory, OPTIONS)
        return
    with pytest.raises(InvalidParameter) as error:
        rules.check(instruction(text), directory, OPTIONS)
    assert error.value.message == refused


def test_what_it_may_not_do() -> None:
    hosts = instruction("RUN --network=host true")
    rules.permit(hosts, "", Options(dialect=BUILDKIT, grants_host_network=True))
    rules.permit(hosts, "", Options(dialect=CLASSIC, host=HostConfig(network_mode="host")))
    rules.permit(instruction("RUN --network=none true"), rules.ARCHITECTURE, OPTIONS)
    rules.permit(instruction("COPY a b"), "s390x", OPTIONS)
    rules.permit(instruction("RUN"), "", OPTIONS)
    rules.permit(instruction("RUN []"), "", Options(dialect=CLASSIC))
    for refused, architecture, reason in (
        (hosts, "", "RUN --network=host is not allowed"),
        (instruction("RUN --security=insecure true"), "", "RUN --security=insecure is not supported"),
        (instruction("RUN true"), "s390x", "this one is for s390x"),
        (instruction("RUN []"), "", "arguments are required"),
    ):
        with pytest.raises(InvalidParameter, match=reason):
            rules.permit(refused, architecture, OPTIONS)
