"""How many managers answer, for the messages of what fails without quorum.

The records of their presence cannot expire then, so each manager's etcd is asked directly: it
answers when it completes a TLS handshake. While the own etcd does not list the members, because it
does not run or has no leader, the listeners of the managers that the store knows are asked instead.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from engine.manager.certificates import MANAGER_NAME
from engine.manager.kv import Etcd, EtcdError, Member
from engine.manager.tls import PORT, Credentials
from engine.swarm_session.clock import Clock
from engine.system.tasks import shield

HANDSHAKE = 1.0
KEPT = 2.0
"""Seconds for which an answer about other managers is kept."""


class Quorum:
    """The members of etcd, as this manager reaches them."""

    def __init__(self, etcd: Etcd, clock: Clock, credentials: Credentials, others: Callable[[], Sequence[str]]) -> None:
        """`others()` returns host:port of the other managers' listeners; "" for one that is not
        known.
        """
        self._etcd, self._clock, self._credentials = etcd, clock, credentials
        self._others = others
        self._counted: tuple[float, tuple[int, int]] | None = None
        self._counting: asyncio.Task[tuple[int, int]] | None = None

    async def reachable(self) -> tuple[int, int]:
        """How many voting managers answer, this one included, and how many there are."""
        now = self._clock.monotonic()
        if self._counted is not None and now - self._counted[0] < KEPT:
            return self._counted[1]
        if self._counting is None or self._counting.done():
            self._counting = asyncio.ensure_future(self._count())
        counted = await shield(self._counting)
        self._counted = self._clock.monotonic(), counted
        return counted

    async def _count(self) -> tuple[int, int]:
        members, own = await asyncio.gather(self._members(), self._own())
        here = int(own != 0)
        voters = [member for member in members if not member.learner]
        try:
            if voters:
                context = self._context()
                places = [_place(member.peer_url) for member in voters if member.id != own]
            else:
                context = self._credentials.client()
                places = [_place(f"//{address}") for address in self._others()]
        except OSError:
            return here, max(1, len(voters))
        answers = await asyncio.gather(*(_answers(place, context) for place in places))
        return here + sum(answers), len(voters) or 1 + len(places)

    async def _members(self) -> list[Member]:
        with contextlib.suppress(EtcdError):
            return await self._etcd.members()
        return []

    async def _own(self) -> int:
        """Of this manager's member; 0 when it does not answer."""
        with contextlib.suppress(EtcdError):
            return (await self._etcd.status()).member
        return 0

    def _context(self) -> ssl.SSLContext:
        """Of etcd's peers: without the ALPN name of managers, which etcd would refuse."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(str(self._credentials.roots_file))
        context.load_cert_chain(str(self._credentials.certificate_file), str(self._credentials.key_file))
        return context


def _place(url: str) -> tuple[str, int]:
    """Host and port; "" for none."""
    try:
        found = urlsplit(url)
        return found.hostname or "", found.port or PORT
    except ValueError:
        return "", 0


async def _answers(place: tuple[str, int], context: ssl.SSLContext) -> bool:
    host, port = place
    if not host:
        return False
    try:
        async with asyncio.timeout(HANDSHAKE):
            _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=MANAGER_NAME)
    except (OSError, TimeoutError):  # ssl.SSLError is an OSError
        return False
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(HANDSHAKE):
            await writer.wait_closed()
    return True
