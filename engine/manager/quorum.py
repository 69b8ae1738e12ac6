"""How many managers answer, for the messages of what fails without quorum.

The records of their presence cannot expire then, so each manager's etcd is asked directly: it
answers when it completes a TLS handshake.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from urllib.parse import urlsplit

from engine.manager.certificates import MANAGER_NAME
from engine.manager.clock import Clock
from engine.manager.kv import Etcd, EtcdError, Member
from engine.manager.tls import Credentials

HANDSHAKE = 1.0
KEPT = 2.0
"""Seconds for which an answer about other managers is kept."""


class Quorum:
    """The members of etcd, as this manager reaches them."""

    def __init__(self, etcd: Etcd, clock: Clock, credentials: Credentials) -> None:
        self._etcd, self._clock, self._credentials = etcd, clock, credentials
        self._counted: tuple[float, tuple[int, int]] | None = None
        self._counting: asyncio.Task[tuple[int, int]] | None = None

    async def reachable(self) -> tuple[int, int]:
        """How many voting managers answer, this one included, and how many there are."""
        now = self._clock.monotonic()
        if self._counted is not None and now - self._counted[0] < KEPT:
            return self._counted[1]
        if self._counting is None or self._counting.done():
            self._counting = asyncio.ensure_future(self._count())
        counted = await asyncio.shield(self._counting)
        self._counted = self._clock.monotonic(), counted
        return counted

    async def _count(self) -> tuple[int, int]:
        members, own = await self._known()
        voters = [member for member in members if not member.learner]
        try:
            context = self._context()
        except OSError:
            return 1, max(1, len(voters))
        answers = await asyncio.gather(*(_answers(member, context) for member in voters if member.id != own))
        return 1 + sum(answers), max(1, len(voters))

    async def _known(self) -> tuple[list[Member], int]:
        """The members, and this one's id, as far as the own etcd answers."""
        members: list[Member] = []
        with contextlib.suppress(EtcdError):
            members = await self._etcd.members()
            return members, (await self._etcd.status()).member
        return members, 0

    def _context(self) -> ssl.SSLContext:
        """Of etcd's peers: without the ALPN name of managers, which etcd would refuse."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(str(self._credentials.roots_file))
        context.load_cert_chain(str(self._credentials.certificate_file), str(self._credentials.key_file))
        return context


async def _answers(member: Member, context: ssl.SSLContext) -> bool:
    url = urlsplit(member.peer_url)
    try:
        async with asyncio.timeout(HANDSHAKE):
            _, writer = await asyncio.open_connection(url.hostname, url.port, ssl=context, server_hostname=MANAGER_NAME)
    except (OSError, ValueError, TimeoutError):  # ssl.SSLError is an OSError
        return False
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(HANDSHAKE):
            await writer.wait_closed()
    return True
