"""Splunk's HTTP Event Collector (HEC): its requests and answers.

https://docs.splunk.com/Documentation/Splunk/latest/Data/HTTPEventCollector. Used by the shipper,
and by the daemon to check at a container's start that a collector answers (`probe`). Not here: the
events (`shipper/forms.py`, `shipper/senders/splunk.py`).

Owns:    the connections of a collector.
Threads: the event loop's; certificate files are read in others.
Raises:  OSError (with the reason in `strerror`), ssl.SSLError, TimeoutError.
"""

from __future__ import annotations

import asyncio
import errno
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from isal import isal_zlib

from engine.logs import dial, web
from engine.logs.deliveries import Splunk
from engine.logs.web import Answer

TOO_LARGE = 413

INCORRECT_INDEX = 7
EVENT_ERRORS = frozenset((5, 6, INCORRECT_INDEX, 12, 13, 15))
"""Codes of the answers that refuse an event rather than the request: no data, invalid data format,
incorrect index, event field is required, event field cannot be blank, error in handling indexed
fields."""

_GZIP = 31
"""Window bits of zlib: the largest window, in the format of gzip."""


class Code(msgspec.Struct, rename="kebab"):
    """The body of an answer. `invalid_event_number`: of the first event in the request that is
    refused, from 0."""

    text: str = ""
    code: int = 0
    invalid_event_number: int | None = None
    ack_id: int | None = msgspec.field(default=None, name="ackId")


class Collector:
    """Requests to one collector. They share a channel, which is new for each collector object."""

    def __init__(self, target: Splunk, *, limit: int) -> None:
        """`limit`: connections at a time."""
        self.target = target
        self._limit = limit
        self._client: web.Client | None = None
        self._channel = str(uuid.uuid4())
        self._headers = {"Authorization": f"Splunk {target.token}"}
        if target.index_acknowledgment:
            self._headers["X-Splunk-Request-Channel"] = self._channel
        self._event_headers = self._headers | {"Content-Type": "application/json"}
        if target.gzip:
            self._event_headers["Content-Encoding"] = "gzip"

    async def open(self) -> None:
        """Reads certificate files; connections are made as they are needed."""
        target = self.target
        context = None
        if target.tls is not None:
            context = await asyncio.get_running_loop().run_in_executor(None, dial.context, target.tls)
        self._client = web.Client(
            context,
            name=target.tls.server_name if target.tls is not None else "",
            limit=self._limit,
            # Acknowledgements are known to the indexer that took the events.
            sticky=target.index_acknowledgment,
        )

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def options(self) -> Answer:
        """Asks whether there is a collector. Needs no token."""
        return await self._request("OPTIONS", self.target.url, self._headers)

    async def post(self, events: bytes) -> Answer:
        """Send events, one after another."""
        target = self.target
        if target.gzip:
            events = isal_zlib.compress(events, gzip_level(target.gzip_level), _GZIP)
        return await self._request("POST", target.url, self._event_headers, events)

    async def acknowledged(self, ids: Sequence[int]) -> list[int]:
        """Which of these requests' events are indexed."""
        body = msgspec.json.encode({"acks": ids})
        url = f"{ack_url(self.target.url)}?channel={self._channel}"
        answer = await self._request("POST", url, self._headers | {"Content-Type": "application/json"}, body)
        if answer.status != 200:
            raise OSError(errno.EPROTO, reason(answer))
        try:
            found = msgspec.json.decode(answer.body, type=dict[str, dict[str, bool]])["acks"]
            return [int(name) for name, done in found.items() if done]
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            raise OSError(errno.EPROTO, "the answer to a query of acknowledgements has none") from error

    async def _request(self, method: str, url: str, headers: dict[str, str], body: bytes = b"") -> Answer:
        assert self._client is not None
        return await self._client.request(method, url, headers, body)


def gzip_level(level: int) -> int:
    """The level of isal for one of zlib, -1 to 9. isal has 0 to 3, of which 1 is its default; its 0
    compresses too."""
    return 1 if level < 0 else min(level, 3)


def ack_url(url: str) -> str:
    """The URL that answers for acknowledgements, beside that of events."""
    parts = urlsplit(url)
    before, found, _ = parts.path.partition("/services/collector")
    return parts._replace(path=f"{before if found else ''}/services/collector/ack", query="", fragment="").geturl()


def code(answer: Answer) -> Code:
    """The body of an answer; empty if it is none of a collector."""
    try:
        return msgspec.json.decode(answer.body, type=Code)
    except msgspec.MsgspecError:
        return Code()


def refuses_event(answer: Answer) -> bool:
    """True if the collector takes the request, but not an event in it."""
    if answer.status == TOO_LARGE:
        return True
    found = code(answer)
    return answer.status == 400 and (found.code in EVENT_ERRORS or found.invalid_event_number is not None)


def reason(answer: Answer) -> str:
    """Why a request is refused, for people."""
    if 300 <= answer.status < 400:
        return f"{answer.line}: redirects are not followed"
    found = code(answer)
    if found.text:
        return f"{answer.line}: {found.text} (code {found.code})"
    text = " ".join(answer.body[:400].decode(errors="replace").split())
    return f"{answer.line}: {text[:150]}" if text else answer.line


async def probe(target: Splunk) -> None:
    """Check, as Docker does at a container's start, that there is a collector. With the option
    `splunk-verify-connection=false` the caller skips it."""
    collector = Collector(target, limit=1)
    try:
        await collector.open()
        answer = await collector.options()
    except (OSError, TimeoutError) as error:
        raise OSError(errno.EIO, f"splunk: failed to verify connection - {_text(error)}") from error
    finally:
        await collector.close()
    if answer.status != 200:
        body = " ".join(answer.body[:400].decode(errors="replace").split())
        raise OSError(errno.EIO, f"splunk: failed to verify connection - {answer.line} - {body}")


def _text(error: Any) -> str:
    if message := getattr(error, "verify_message", ""):
        return f"certificate verify failed: {message}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
