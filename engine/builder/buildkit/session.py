"""Sessions of clients (BuildKit): services that a client offers to its builds over a connection of
its own: secrets, its SSH agent, its registry credentials, its files.

`POST /session` turns the connection into HTTP/2, on which the daemon is the client. A build names
the session by its id.

This module is loaded with the daemon; gRPC and h2 when the first client opens a session.

Owns:    the connections of all sessions; directories of forwarded SSH agents while they are in use.
Threads: the event loop's. Not here: the services themselves (`services.py`), gRPC (`rpc/grpc.py`).
Raises:  the kinds of `engine/errors.py`, with the id of secret or agent and never a secret.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import InvalidParameter, NotFound

if TYPE_CHECKING:
    from engine.builder.buildkit.services import Session

_log = logging.getLogger(__name__)

APPEAR_SECONDS = 5.0
"""Seconds for which a build waits for its session: clients open both at the same time."""
_ID = re.compile(r"[^\x00-\x20\x7f]{1,256}\Z")


class Offer(NamedTuple):
    """The head of a request for a session."""

    id: str
    methods: frozenset[str]
    """Paths of the gRPC methods that the client serves."""
    shared_key: str = ""
    """Names the directory that the client builds from; "" when it gives none."""
    peer: str = ""
    """The client's process or host (`http/peers.py`)."""


class Sessions:
    """The sessions of one engine."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._opening: set[str] = set()
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._services: Any = None
        """`engine.builder.buildkit.services`, once it is loaded."""

    @property
    def count(self) -> int:
        return len(self._sessions)

    async def load(self) -> None:
        """Load the modules that `open` needs: h2 and others."""
        if self._services is None:
            self._services = await asyncio.to_thread(importlib.import_module, "engine.builder.buildkit.services")

    def offered(self, session_id: str, shared_key: str, methods: Iterable[str], peer: str = "") -> Offer:
        """Check the head of a request. Raises InvalidParameter."""
        if not _ID.match(session_id):
            raise InvalidParameter("X-Docker-Expose-Session-Uuid must be given, with 1 to 256 printable characters")
        if session_id in self._sessions or session_id in self._opening:
            raise InvalidParameter(f"session {session_id} is in use already")
        return Offer(session_id, frozenset(methods), shared_key, peer)

    async def open(self, offer: Offer, descriptor: int, head: bytes, early: bytes) -> None:
        """Serve a session on a hijacked connection until it ends; `load` was called before.

        `descriptor` is owned from now on; `head` is the answer to send; `early` bytes came with the
        request. Raises OSError when the client has left.
        """
        self._opening.add(offer.id)
        try:
            session = await self._services.open_session(
                offer, descriptor, head, early, lambda: self._sessions.pop(offer.id, None)
            )
            if session.open:
                self._sessions[offer.id] = session
        finally:
            self._opening.discard(offer.id)
        for waiter in self._waiting.pop(offer.id, set()):
            if not waiter.done():
                waiter.set_result(None)

    async def find(self, session_id: str) -> Session:
        """The session with this id, as soon as its client has opened it.

        Raises NotFound when that takes longer than APPEAR_SECONDS.
        """
        session = self._sessions.get(session_id)
        if session is None:
            waiter = asyncio.get_running_loop().create_future()
            waiters = self._waiting.setdefault(session_id, set())
            waiters.add(waiter)
            try:
                await asyncio.wait((waiter,), timeout=APPEAR_SECONDS)
            finally:
                waiters.discard(waiter)
                if not waiters and self._waiting.get(session_id) is waiters:
                    del self._waiting[session_id]
            session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(f"no active session {session_id}")
        return session

    async def close(self) -> None:
        """End every session."""
        sessions = list(self._sessions.values())
        for session in sessions:
            session.close()
        for session in sessions:
            await session.closed()
