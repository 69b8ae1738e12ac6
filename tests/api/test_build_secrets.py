"""Builds with a session: secrets, the client's SSH agent and its credentials in RUN and FROM, and
that a secret is left nowhere.
"""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import PATIENCE
from tests.support.builds import sessions
from tests.support.builds.building import build, context, post, read
from tests.support.engine.harness import TempEngine

pytestmark = pytest.mark.own

SECRET = f"secret-{secrets.token_hex(16)}".encode()


@pytest.fixture
def session(builder: TempEngine) -> Iterator[str]:
    """The id of a session that has a secret."""
    with sessions.session(builder.socket, sessions.of_secrets({"token": SECRET})) as (identifier, _):
        yield identifier


@pytest.mark.parametrize(
    ("mount", "script"),
    [
        ("id=token", "sha256sum /run/secrets/token; stat -c 'mode %a:%u:%g' /run/secrets/token"),
        ("id=token,target=/a/b", "sha256sum /a/b; stat -c 'mode %a:%u:%g' /a/b"),
        ("id=token,env=T", "printf %s $T | sha256sum; echo mode 400:0:0"),
    ],
)
def test_a_secret(mount: str, script: str, session: str, builder: TempEngine) -> None:
    dockerfile = f"FROM busybox\nRUN --mount=type=secret,{mount} {script}\nRUN ls -R /run /a || true\n"
    built = build(builder, dockerfile, session=session, nocache=1)
    assert built.error is None, built.objects
    (line,) = (line for line in built.lines if line.endswith(("/token", "/b", "  -")) and len(line.split()[0]) == 64)
    expected = subprocess.run(["sha256sum"], input=SECRET, capture_output=True, check=True).stdout.split()[0].decode()
    assert line.split()[0] == expected
    assert "mode 400:0:0" in built.lines
    assert "token" not in built.lines[built.lines.index("mode 400:0:0") + 3 :], "a later step does not have it"


def test_a_secret_s_owner_and_mode(session: str, builder: TempEngine) -> None:
    mount = "type=secret,id=token,uid=7,gid=8,mode=0440"
    dockerfile = f"FROM busybox\nRUN --mount={mount} stat -c '%a %u %g' /run/secrets/token\n"
    assert "440 7 8" in build(builder, dockerfile, session=session).lines


@pytest.mark.parametrize("required", [True, False])
def test_a_missing_secret(required: bool, session: str, builder: TempEngine) -> None:
    mount = f"type=secret,id=nothing,required={str(required).lower()}"
    built = build(builder, f"FROM busybox\nRUN --mount={mount} ls /run/secrets || echo none\n", session=session)
    if required:
        assert built.error is not None and "nothing: not found" in built.error["error"]
    else:
        assert any(line.endswith("none") for line in built.lines)


def test_a_secret_is_left_nowhere(session: str, builder: TempEngine) -> None:
    """Not in layers, records, logs, history or events, nor in the container of a failed step."""
    dockerfile = (
        "FROM busybox\n"
        "RUN --mount=type=secret,id=token --mount=type=secret,id=token,env=T --mount=type=cache,target=/c "
        "cat /run/secrets/token | wc -c; echo ${#T}\n"
        "RUN --mount=type=secret,id=token exit 1\n"
    )
    built = build(builder, dockerfile, session=session, nocache=1, rm=0)
    assert built.code == 1 and built.lines.count(str(len(SECRET))) == 2
    assert builder.containers(), "the failed step's container is there"
    assert SECRET.decode() not in str(built.objects)
    for identifier in builder.containers():
        assert SECRET.decode() not in str(builder.inspect(identifier))
    assert SECRET not in builder.request("GET", f"/v1.24/events?since=1&until={time.time():.9f}").body
    found = subprocess.run(
        ["grep", "-r", "-l", "-a", "-F", SECRET.decode(), str(builder.root), str(builder.run), str(builder.log_path)],
        capture_output=True,
        check=False,
        text=True,
    )
    assert found.stdout == ""


def test_a_secret_is_no_part_of_the_key(session: str, builder: TempEngine) -> None:
    """Docker's rule: a changed secret does not run the step again."""
    dockerfile = "FROM busybox\nRUN --mount=type=secret,id=token cat /proc/sys/kernel/random/uuid\n"
    first = build(builder, dockerfile, session=session)
    with sessions.session(builder.socket, sessions.of_secrets({"token": b"another"})) as (other, _):
        second = build(builder, dockerfile, session=other)
    assert second.id == first.id and "Using cache" in second.text


def test_an_unknown_session(builder: TempEngine) -> None:
    dockerfile = "FROM busybox\nRUN --mount=type=secret,id=token true\n"
    answer = post(builder, context(dockerfile), session="no-such-session", timeout=60 * PATIENCE)
    message = str((read(answer).error or {}).get("error")) if answer.status == 200 else answer.message
    assert "no-such-session" in message


def test_an_agent(builder: TempEngine, tmp_path: Path) -> None:
    """RUN has a socket that leads to the client's agent."""
    with sessions.session(builder.socket, sessions.of_agent(str(tmp_path / "agent"))) as (identifier, _):
        dockerfile = (
            "FROM busybox\nRUN --mount=type=ssh test -S $SSH_AUTH_SOCK && echo agent $SSH_AUTH_SOCK\n"
            "RUN echo later [$SSH_AUTH_SOCK]\n"
        )
        built = build(builder, dockerfile, session=identifier, nocache=1)
    assert "agent /run/buildkit/ssh_agent.0" in built.lines
    assert "later []" in built.lines
