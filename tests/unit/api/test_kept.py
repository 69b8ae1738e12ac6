"""Kept replies: one entry for all versions with the same shape of an object, none for an object
that has changed or was removed.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec

from engine.api import networks
from engine.api.kept import LISTS, Entry, KeptReplies
from engine.api.versions import VERSIONS
from engine.http.messages import Reply
from engine.wire.containers import ContainerInspect
from engine.wire.networks import NetworkInspect
from tests.unit.api.parts import engine, request
from tests.unit.api.versions.rows import NETWORK_INSPECT


def test_entries_by_shape_and_object() -> None:
    kept = KeptReplies()
    older, newest = (VERSIONS[name].shape(ContainerInspect) for name in ("1.18", "1.24"))
    kept.of(older)["a"] = Entry(1, b"old")
    kept.of(newest)["a"] = Entry(1, b"new")
    kept.of(newest)["b"] = Entry(7, b"other")
    assert kept.of(older)["a"].body == b"old"
    kept.forget("a")
    assert kept.of(older) == {} and list(kept.of(newest)) == ["b"]
    kept.forget("a")


def test_an_object_is_encoded_again_when_its_generation_grows() -> None:
    shown = 0

    def show(found: Any) -> NetworkInspect:
        nonlocal shown
        shown += 1
        return msgspec.structs.replace(NETWORK_INSPECT, id=found.record.id)

    network: Any = SimpleNamespace(record=SimpleNamespace(id="1", scope="local"), generation=0)
    fake: Any = SimpleNamespace(get=lambda name: network, inspected=show)
    parts = dataclasses.replace(engine(), networks=fake)

    def inspect(version: str) -> bytes:
        asked = request("/networks/1", version=version)
        asked.parameters = {"id": "1"}
        reply = networks.inspect(parts, asked)
        assert isinstance(reply, Reply)
        return reply.body

    for version in ("1.24", "1.23", "1.24"):
        assert b"Internal" in inspect(version)
    assert shown == 1, "1.23 shows networks as 1.24 does"
    for version in ("1.22", "1.18"):
        assert b"Internal" not in inspect(version)
    assert shown == 2
    network.generation += 1
    inspect("1.24")
    inspect("1.18")
    assert shown == 4


def test_lists() -> None:
    kept = KeptReplies().lists
    assert kept.find(b"/a", 1, 0) is None
    kept.keep(b"/a", 1, b"[1]", until=10)
    kept.keep(b"/b", 0, b"[0]", until=10)
    assert (kept.find(b"/a", 1, 9), kept.find(b"/a", 1, 10), kept.find(b"/b", 1, 9)) == (b"[1]", None, None)
    kept.keep(b"/large", 1, bytes(LISTS), until=10)
    assert kept.find(b"/large", 1, 9) is None
    for _ in range(3):  # replaced, not added
        kept.keep(b"/half", 1, bytes(LISTS // 2), until=10)
    assert len(kept.find(b"/half", 1, 9) or b"") == LISTS // 2
    assert kept.find(b"/a", 2, 9) is None
    for number in range(LISTS // 256):
        kept.keep(str(number).encode(), 2, b"[]\n", until=10)
    assert kept.find(b"0", 2, 9) == b"[]\n"
    assert kept.find(str(LISTS // 256 - 1).encode(), 2, 9) is None, "short lists fill it, too"
