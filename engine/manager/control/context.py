"""What the verbs work on, and how they find an object and write a change."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec

from engine.errors import InvalidParameter, NotFound, ServerError, decoding_reason
from engine.manager.ca import Authority
from engine.manager.records import Kind
from engine.manager.store import Entry, Store
from engine.swarm_session.clock import Clock
from engine.swarm_session.frames import LONGEST
from engine.swarm_session.messages import Call

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)
S = TypeVar("S", bound=msgspec.Struct)

encode = msgspec.json.Encoder().encode

SLICE = 0.005
"""Seconds of work on a list after which others are served."""
LONGEST_BODY = LONGEST - (1 << 20)
"""Bytes of a list, so that the answer fits into one message."""
LONGEST_REQUEST = 4 << 20
"""Bytes of a request's body. A service's record has two specs, and etcd takes 10 MiB at once."""

CHOOSING = 2.0
"""Seconds that a request waits for others that choose something free."""

Guard = Callable[[str], Awaitable[str]]
"""Whether the etcd member of a node may be removed: "", or why not."""
Expel = Callable[[str], Awaitable[None]]
"""Removes the etcd member of a node, if it has one. Raises EngineError."""
Peers = Callable[[str], Iterable[str]]
"""The nodes with endpoints on a network."""


class Context(msgspec.Struct, frozen=True):
    """Of all verbs of one manager."""

    store: Store
    clock: Clock
    node: str
    """This manager's node."""
    authority: Authority
    guard: Guard
    expel: Expel
    peers: Peers
    old: bool = False
    """The cache may be old: etcd does not answer."""
    choosing: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    """Held while something free is chosen and written, so that requests at this manager do not all
    choose the same. Other managers' requests are told apart by comparisons.
    """
    encoded: dict[str, tuple[Entry[Any], Entry[Any] | None, bytes]] = msgspec.field(default_factory=dict)
    """Documents of services as lists have sent them, with the records that they were made of."""


@contextlib.asynccontextmanager
async def alone(context: Context) -> AsyncIterator[None]:
    """Hold `Context.choosing`, or go on without it when others take too long: without quorum, each
    of them fails by itself.
    """
    held = False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CHOOSING):
            await context.choosing.acquire()
            held = True
    try:
        yield
    finally:
        if held:
            context.choosing.release()


class Precondition(ServerError):
    """The state of the swarm forbids the change. 500 by the tables of the API."""


class OutOfSequence(Precondition):
    """An update names a version of its object that is not the current one. Clients retry on these
    words.
    """

    def __init__(self, kind: str, name: str, given: int, current: int) -> None:
        super().__init__(f"update out of sequence: {kind} {name} is at version {current}, not {given}")


def body(call: Call, of: type[S]) -> S:
    """The body of a request. Raises InvalidParameter."""
    if len(call.body) > LONGEST_REQUEST:
        raise InvalidParameter(f"the body has {len(call.body)} bytes, more than {LONGEST_REQUEST}")
    try:
        return msgspec.json.decode(call.body or b"{}", type=of)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidParameter(f"invalid body: {decoding_reason(error)}") from None


async def in_slices(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, between which others are served. Copy what the store may change meanwhile."""
    began = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began > SLICE:
            await asyncio.sleep(0)
            began = time.monotonic()


async def encode_all(documents: Iterable[msgspec.Struct | bytes | None]) -> bytes:
    """A JSON array. The documents, some of them encoded, are made in slices, between which others
    are served; None stands for one that was looked at and left out.
    """
    parts = []
    began = time.monotonic()
    for document in documents:
        if document is not None:
            parts.append(document if isinstance(document, bytes) else encode(document))
        if time.monotonic() - began > SLICE:
            await asyncio.sleep(0)
            began = time.monotonic()
    body = b"[" + b",".join(parts) + b"]"
    if len(body) > LONGEST_BODY:
        raise ServerError(f"the list has {len(body) >> 20} MiB, more than {LONGEST_BODY >> 20}: use filters")
    return body


def check_version(call: Call, kind: str, entry: Entry[R]) -> None:
    """Raises InvalidParameter when the request names no version, OutOfSequence when another one."""
    version = call.query.get("version")
    if not isinstance(version, int):
        raise InvalidParameter(f"invalid {kind} version '{version or ''}': the query parameter version is required")
    if version != entry.revision:
        raise OutOfSequence(kind, entry.key, version, entry.revision)


def find(store: Store, kind: Kind[R], what: str, text: str, named: Callable[[str], Iterable[str]]) -> Entry[R]:
    """The object with this id, else with this name (`named` returns the ids), else the only one
    whose id starts with it.

    Raises NotFound, ServerError when several match.
    """
    entry = store.get(kind, text) if text else None
    if entry is not None:
        return entry
    found = list(named(text)) if text else []
    if not found and text:
        found = [key for key in store.all(kind) if key.startswith(text)]
    if len(found) > 1:
        raise ServerError(f"{what} {text} is ambiguous ({len(found)} matches found)")
    entry = store.get(kind, found[0]) if found else None
    if entry is None:
        raise NotFound(f"{what} {text} not found")
    return entry
