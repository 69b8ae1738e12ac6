"""Requests to log targets that speak HTTP.

A client keeps its connections open. A request that fails because the server has closed an idle
connection is sent again on a new one. Redirects are not followed: they would take tokens and
signatures to another server. Proxies of the environment are the caller's to pass on.

Importing it loads aiohttp: 10 MB, 0.1 s. Not here: what the answers mean (`collector.py`,
`cloudwatch.py`).

Owns:    the connections of a client.
Threads: the event loop's; names are resolved in others.
Raises:  OSError (with the reason in `strerror`), ssl.SSLError, TimeoutError.
"""

from __future__ import annotations

import errno
import io
import os
import ssl
from collections.abc import Mapping
from types import SimpleNamespace
from typing import NamedTuple

import aiohttp
from yarl import URL

from engine import __version__

PATIENCE = 30.0
"""Seconds that a request may take, as in Docker."""
CONNECT = 10.0
"""Seconds of these to connect."""
ANSWER_MAX = 1 << 20
"""Bytes of the longest answer."""


class Answer(NamedTuple):
    """`headers`: names in any case."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def line(self) -> str:
        """Status and reason, for messages."""
        return f"{self.status} {self.reason}".rstrip()


class Client:
    """Requests to one server."""

    def __init__(self, tls: ssl.SSLContext | None = None, *, name: str = "", limit: int = 0, sticky: bool = False):
        """`tls`: for https; the system's certificates without it. `name`: expected in the server's
        certificate instead of its host's. `limit`: connections at a time, 0 for any number.
        `sticky`: send cookies back, by which a load balancer recognises a client."""
        self._name = name or None
        traced = aiohttp.TraceConfig()
        traced.on_connection_reuseconn.append(_reused)
        self._session = aiohttp.ClientSession(
            # Names are resolved for each connection, so that a change of addresses is noticed.
            connector=aiohttp.TCPConnector(ssl=tls if tls is not None else True, limit=limit, use_dns_cache=False),
            auto_decompress=False,
            cookie_jar=aiohttp.CookieJar(unsafe=True) if sticky else aiohttp.DummyCookieJar(),
            headers={"User-Agent": f"engined/{__version__} (linux)", "Accept-Encoding": "identity"},
            skip_auto_headers=("Content-Type",),
            trace_configs=[traced],
            trust_env=False,  # would also send credentials from ~/.netrc
        )

    async def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        patience: float = PATIENCE,
        proxy: str | None = None,
    ) -> Answer:
        """`patience`: seconds until the whole answer must be here."""
        while True:
            connection = SimpleNamespace(reused=False)
            try:
                return await self._request(method, url, headers or {}, body, patience, proxy, connection)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # There can be no more such failures than idle connections.
                if not connection.reused or isinstance(error, aiohttp.ClientConnectorError):
                    raise _failure(error, url) from error
            except aiohttp.ConnectionTimeoutError as error:
                raise TimeoutError(f"no connection within {min(CONNECT, patience):g} s") from error
            except TimeoutError as error:
                raise TimeoutError(f"no answer within {patience:g} s") from error
            except aiohttp.ClientError as error:
                raise _failure(error, url) from error

    async def _request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        patience: float,
        proxy: str | None,
        connection: SimpleNamespace,
    ) -> Answer:
        async with self._session.request(
            method,
            URL(url, encoded=True),
            headers=headers,
            data=io.BytesIO(body) if len(body) > 1 << 20 else body or None,
            allow_redirects=False,
            server_hostname=self._name,
            timeout=aiohttp.ClientTimeout(total=patience, sock_connect=CONNECT),
            proxy=proxy,
            trace_request_ctx=connection,
        ) as answer:
            connection.reused = False  # what fails from here on is not the connection's age
            data = await answer.content.read(ANSWER_MAX)
            while len(data) < ANSWER_MAX and (more := await answer.content.read(ANSWER_MAX - len(data))):
                data += more
            if not answer.content.at_eof():
                raise OSError(errno.EPROTO, f"the answer has more than {ANSWER_MAX} bytes")
            return Answer(answer.status, answer.reason or "", answer.headers, data)

    async def close(self) -> None:
        await self._session.close()


async def _reused(_session: aiohttp.ClientSession, context: SimpleNamespace, _: object) -> None:
    context.trace_request_ctx.reused = True


def _failure(error: aiohttp.ClientError, url: str) -> OSError:
    """The failure as an error of the operating system or of TLS."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        if isinstance(cause, ssl.SSLError):
            return cause
        return OSError(errno.EPROTO, str(cause))
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return OSError(error.errno, f"lookup {error.host}: {error.os_error.strerror or error.os_error}")
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, ssl.SSLError):
            return cause
        number = cause.errno if cause.errno is not None and cause.errno > 0 else 0
        return OSError(cause.errno, f"dial {error.host}:{error.port}: {os.strerror(number) if number else cause}")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return ConnectionResetError(errno.ECONNRESET, "connection closed by the target")
    if isinstance(error, OSError) and error.strerror:
        return OSError(error.errno, error.strerror)
    if isinstance(error, aiohttp.InvalidURL):
        return OSError(errno.EINVAL, f"not a URL: {url}")
    return OSError(errno.EPROTO, str(error) or type(error).__name__)
