"""Detach keys as clients write them (Docker Engine API, ContainerAttach, `detachKeys`); an attach
that coincides with the end of the process."""

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine._fast.logwriter import LogWriter
from engine.containers.streams import DEFAULT_DETACH_KEYS, Wanted, attach, parse_detach_keys
from engine.errors import InvalidParameter
from engine.monitor.handles import Attached, Client
from tests.support import PATIENCE


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (None, b"\x10\x11"),
        ("", b""),
        ("a", b"a"),
        ("a,b,C", b"abC"),
        ("ctrl-p,ctrl-q", b"\x10\x11"),
        ("ctrl-a", b"\x01"),
        ("ctrl-z", b"\x1a"),
        ("ctrl-@", b"\x00"),
        ("ctrl-[", b"\x1b"),
        ("ctrl-^", b"\x1e"),
        ("ctrl-_", b"\x1f"),
        ("ctrl-]", b"\x1d"),
        ("ctrl-\\", b"\x1c"),
        ("ctrl-,", b","),
        ("ctrl-,,a", b",a"),
        ("a,ctrl-p,b", b"a\x10b"),
    ],
)
def test_sequences(text: str | None, keys: bytes) -> None:
    assert parse_detach_keys(text) == keys


@pytest.mark.parametrize(
    "text",
    ["ab", "ctrl-", "ctrl-1", "ctrl-pq", "a,", "ctrl-p,", "control-p", "a,,b", "é", "ctrl-é", "ctrl-p;q", "ctrl-A,a"],
)
def test_what_breaks_the_format_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        parse_detach_keys(text)
    assert text in raised.value.message


@given(st.text("actrl-pq,@^[_", max_size=20))
def test_any_text_gives_keys_or_a_refusal(text: str) -> None:
    try:
        keys = parse_detach_keys(text)
    except InvalidParameter:
        return
    assert len(keys) <= len(text) and (keys or not text)


def test_the_default_is_what_the_documentation_says() -> None:
    assert parse_detach_keys("ctrl-p,ctrl-q") == DEFAULT_DETACH_KEYS


class EndedAlready:
    """A monitor whose process has ended, which the daemon does not know yet. A real monitor reports
    too fast for this test.
    """

    async def attach(self, _key: str, client: Client, *, hold: bool = False) -> Attached:
        os.write(client.descriptor, client.head)
        return Attached(client=1, log_inode=0, log_offset=0, running=False)

    async def release(self, _key: str, _client: int) -> None:
        """The client has already left."""


@pytest.mark.parametrize(("logs", "received"), [(False, b"head"), (True, b"headlast words\n")])
def test_an_attach_that_comes_after_the_end_gets_the_end(tmp_path: Path, logs: bool, received: bytes) -> None:
    log = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(log))
    writer.write(1, b"last words\n")
    writer.close()
    container: Any = SimpleNamespace(
        id="c",
        record=SimpleNamespace(config=SimpleNamespace(tty=True, open_stdin=False)),
        running=True,
        log_path=log,
        check_attach=lambda: None,
        log_reading=lambda: None,
        publish=lambda _action: None,
        parts=SimpleNamespace(monitor=EndedAlready()),
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wanted = Wanted(logs=logs, stream=True, stdout=True)
        asyncio.run(attach(container, theirs.fileno(), wanted, head=b"head", early=b""))
        ours.settimeout(20 * PATIENCE)
        found = b""
        while data := ours.recv(4096):
            found += data
    assert found == received
