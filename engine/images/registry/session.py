"""The client of registries: transport, TLS, logins and tokens, redirects, retries; searches.

- HTTPS with the host's certificates and those in `registry_certificates`/HOST:PORT, as Docker has
  them. Plain HTTP and unverified certificates only for loopback and `insecure_registries`. That
  holds for every redirect and token server too.
- Credentials go to the registry's own origin and to the token server it names, never along with a
  redirect to another origin.
- Documents read into memory are bounded.
- After a status of 429 or 5xx, a broken connection or a stalled one, the request is tried again,
  with growing pauses. The same holds when a registry that has answered before cannot be reached.
  Any other error is final.

Owns:   the pool of connections.
Not here: requests to a repository (repository.py), writing blobs to files (download.py).
Raises: ServerError, NotFound, InvalidParameter.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import os
import random
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec
from yarl import URL

from engine import __version__
from engine.common import proxies
from engine.config import Config
from engine.errors import (
    EngineError,
    Forbidden,
    InvalidParameter,
    NotFound,
    ServerError,
    Unauthorized,
    decoding_reason,
    reason,
    words,
)
from engine.images.credentials import NOBODY, Challenge, Credentials, challenges
from engine.images.reference import DEFAULT_DOMAIN
from engine.system.tls import verifying_context
from engine.wire.images import SearchResult

T = TypeVar("T")


HUB = "registry-1.docker.io"
"""The host of `docker.io`."""
HUB_INDEX = "index.docker.io"

MAX_ANSWER = 1 << 20
"""Bytes of other documents: tokens, pages of tags, errors."""

DELAYS = (0.2, 0.8, 2.0)
"""Seconds before each retry."""
PATIENCE = (5.0, 10.0, 15.0, 20.0, 25.0)
"""Seconds before the further retries of an upload: dockerd's."""
PAUSE = 5.0
"""A download is tried again after this many seconds, then after twice as many, and so on."""
LONGEST_DELAY = 20.0
"""Seconds that a registry may request by Retry-After, over all retries of an operation. Uploads and
downloads accept as many as they wait at most otherwise.
"""
_SPREAD = 1.2
"""The waits of several layers are longer by different parts of a fifth."""
_REDIRECTIONS = 8
_NO_SUCH_HOST = "NO_SUCH_HOST"
"""Code of a Failure whose host name does not exist."""
_UNTRUSTED = "UNTRUSTED"
"""Code of a Failure whose host has a certificate that is refused."""
_BAD_REDIRECTION = "it redirects to an invalid address"
_SHOWN = 500
"""Characters of a reply that an error quotes."""
REFUSALS: dict[int, type[EngineError]] = {400: InvalidParameter, 401: Unauthorized, 403: Forbidden, 404: NotFound}
"""Statuses of another server that are passed on; the error of any other one is the engine's."""
_MESSAGES = {
    "DENIED": "requested access to the resource is denied",
    "TOOMANYREQUESTS": "too many requests",
    "UNAUTHORIZED": "authentication required",
}
"""By code, when a reply has no message."""
_CHUNK = 1 << 20
_TOKEN_LIFE = 60
"""Default lifetime of a token in seconds (distribution specification, "Token Response")."""


class Failure(ServerError):
    """An error of a registry, or of the connection to it. `status` is 0 without an answer; `code`
    is one of the distribution specification.
    """

    def __init__(self, message: str, status: int = 0, code: str = "", *, transient: bool = False, delay: float = 0):
        super().__init__(message)
        self.status = status
        self.code = code
        self.transient = transient
        self.delay = delay

    @property
    def refuses(self) -> bool:
        """True if the object is missing or not allowed; registries do not distinguish the two."""
        return self.status in (401, 403, 404)


Retrying = Callable[[float], None]
"""Called with the seconds before the next try."""


Address = ipaddress.IPv4Address | ipaddress.IPv6Address

Sleep = Callable[[float], Awaitable[None]]


def not_reported(seconds: float) -> None:
    """A `Retrying` that reports nothing."""


class Document(NamedTuple):
    """An answer to a request that is none of a registry."""

    status: int
    reason: str
    headers: Mapping[str, str]
    """Names in any case."""
    length: int | None
    """Bytes of the body, if the server states it."""
    body: AsyncIterator[bytes]


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""
    refresh_token: str = ""
    expires_in: float = _TOKEN_LIFE


class _Search(msgspec.Struct):
    results: list[SearchResult] = []


class Registries:
    """All registries, by the operator's rules. One per engine, on one loop."""

    def __init__(self, config: Config) -> None:
        self.stall = float(config.registry_timeout)
        """Seconds without a byte after which a connection is given up."""
        self.delays = DELAYS
        self.patience = PATIENCE
        """Of uploads."""
        self.pause = PAUSE
        self.sleep: Sleep = asyncio.sleep
        """Waits before a retry."""
        self._certificates = config.registry_certificates
        self._verified: ssl.SSLContext | None = None
        self._unverified: ssl.SSLContext | None = None
        self._session: aiohttp.ClientSession | None = None
        self._addresses: dict[str, tuple[Address, ...]] = {}
        """By name, as of the last operation with this registry."""
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take the values that a reload may change. Operations under way keep some of the old
        ones. The host's certificates are read again.
        """
        self._insecure = config.insecure_registries
        self._mirrors = config.registry_mirrors
        self.attempts = config.download_attempts
        self._verified = self._unverified = None

    def waits(self, *, patient: bool) -> tuple[float, ...]:
        """Seconds before each retry of a download. Only a `patient` one makes all attempts: others
        have a further place to ask.
        """
        further = range(1, self.attempts) if patient else ()
        return (*self.delays, *(self.pause * number for number in further))

    @property
    def session(self) -> aiohttp.ClientSession:
        """The pool of connections, made when it is first used or after a `rest`."""
        if self._session is None:
            self._session = self._new_session()
        return self._session

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": f"engined/{__version__} (linux)", "Accept-Encoding": "identity"},
            read_bufsize=_CHUNK,
            max_field_size=32 << 10,
            max_line_size=32 << 10,
            trust_env=False,  # would also send credentials from ~/.netrc
        )

    async def rest(self) -> None:
        """Close connections and drop the host's certificates, which take more than a megabyte. The
        next request opens new ones.
        """
        session, self._session = self._session, None
        self._verified = self._unverified = None
        if session is not None:
            await session.close()

    async def look_up(self, domain: str) -> None:
        """Learn the addresses of a registry, if it may be insecure by one of them."""
        if not any("/" in rule for rule in self._insecure) or domain == DEFAULT_DOMAIN:
            return
        with contextlib.suppress(ValueError, OSError):
            name = (URL(f"https://{domain}").host or "").lower()
            found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
            self._addresses[name] = tuple(ipaddress.ip_address(entry[4][0]) for entry in found)

    def _is_insecure(self, url: URL) -> bool:
        """The operator has listed the registry."""
        name, port = (url.host or "").lower(), url.port
        try:
            addresses: tuple[Address, ...] = (ipaddress.ip_address(name),)
        except ValueError:
            addresses = self._addresses.get(name, ())
        for rule in self._insecure:
            if rule.lower() in (name, f"{name}:{port}", f"[{name}]:{port}"):
                return True
            if "/" in rule:
                with contextlib.suppress(ValueError):
                    network = ipaddress.ip_network(rule, strict=False)
                    if any(address in network for address in addresses):
                        return True
        return False

    def may_be_plain(self, url: URL) -> bool:
        """True if plain HTTP, or an unverified certificate, is allowed."""
        name = (url.host or "").lower()
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(name).is_loopback:
                return True
        if name == "localhost" or self._is_insecure(url):
            return True
        return url.scheme == "http" and any(url.origin() == URL(mirror).origin() for mirror in self._mirrors)

    async def tls(self, url: URL) -> ssl.SSLContext:
        """The TLS context for a server. Raises ServerError for certificate files that cannot be
        used.
        """
        name = f"{url.host}:{url.port}" if url.explicit_port else str(url.host)
        directory = self._certificates / name
        own = await asyncio.to_thread(_own_context, directory)
        if own is not None:
            if self._is_insecure(url):
                own.check_hostname, own.verify_mode = False, ssl.CERT_NONE
            return own
        if self.may_be_plain(url):
            if self._unverified is None:
                self._unverified = await asyncio.to_thread(_unverified_context)
            return self._unverified
        if self._verified is None:
            self._verified = await asyncio.to_thread(verifying_context)
        return self._verified

    def origins(self, domain: str, *, mirrors: bool) -> list[tuple[URL, ...]]:
        """Base URLs of a domain's repositories, best first.

        Each is a choice of URLs of which the first that answers is used.
        """
        found: list[tuple[URL, ...]] = []
        if domain == DEFAULT_DOMAIN:
            if mirrors:
                found += [(URL(mirror),) for mirror in self._mirrors]
            return [*found, (URL(f"https://{HUB}"),)]
        try:
            secure = URL(f"https://{domain}")
            if not secure.host:
                raise ValueError("no host")
        except ValueError as error:
            raise InvalidParameter(f"invalid registry {domain}: {error}") from None
        if self.may_be_plain(secure):
            # Built by hand rather than with `with_scheme`, which would keep the default port.
            return [(secure, URL(f"http://{domain}"))]
        return [(secure,)]

    async def log_in(self, credentials: Credentials) -> str:
        """Log in to the registry that the credentials name.

        Returns the identity token that it issues, or "". Raises ServerError.
        """
        name = re.sub(r"^https?://", "", credentials.serveraddress).partition("/")[0]
        domain = DEFAULT_DOMAIN if name in ("", HUB_INDEX, HUB, DEFAULT_DOMAIN) else name
        await self.look_up(domain)
        origin = self.origins(domain, mirrors=False)[0]
        site = Site(self, origin, credentials, [])
        return await site.log_in()

    @contextlib.asynccontextmanager
    async def document(self, address: str) -> AsyncIterator[Document]:
        """The answer at a URL that the client named, after all redirects. Plain HTTP is allowed.

        Raises ServerError when there is none, also while the body is read, and InvalidParameter for
        a host name that cannot exist.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(self.stall, 15.0), sock_read=self.stall)
        url = _url_of_client(address)
        try:
            answer = await self._followed(url, timeout)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, aiohttp.InvalidURL) and not isinstance(error, aiohttp.RedirectClientError):
                raise InvalidParameter(_bad_host(address)) from error
            raise _unreachable("GET", url, error, self.stall) from error

        async def body() -> AsyncGenerator[bytes, None]:
            try:
                async for chunk in answer.content.iter_any():
                    yield chunk
            except (aiohttp.ClientError, OSError) as error:
                raise _unreachable("GET", url, error, self.stall) from error

        async with answer, contextlib.aclosing(body()) as chunks:
            yield Document(answer.status, answer.reason or "", answer.headers, answer.content_length, chunks)

    async def _followed(self, url: URL, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        """The answer after all redirects, each of which may need another proxy."""
        at = url
        headers = _login_of(url)
        for _ in range(_REDIRECTIONS):
            answer = await self.session.get(
                at.with_user(None), headers=headers, timeout=timeout, allow_redirects=False, **_proxy(at)
            )
            location = answer.headers.get("Location", "")
            if answer.status not in (301, 302, 303, 307, 308) or not location:
                return answer
            answer.release()
            target = URL(location)
            if not target.scheme:
                target = at.with_user(None).join(target)
            if target.scheme not in ("http", "https") or not target.host:
                raise aiohttp.NonHttpUrlRedirectClientError(target)
            headers = _login_of(target) or (headers if target.origin() == at.origin() else {})
            at = target
        raise Failure(f'Get "{shown(url)}": more than {_REDIRECTIONS} redirections')

    @contextlib.asynccontextmanager
    async def body(self, address: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The body at a URL that the client named; see `document`. What the server refuses raises
        `REFUSALS`; a host that does not exist raises NotFound, as in Docker.
        """
        try:
            async with self.document(address) as answer:
                if answer.status != 200:
                    kind = REFUSALS.get(answer.status, ServerError)
                    raise kind(f'Get "{shown(URL(address))}": {answer.status} {answer.reason}'.rstrip())
                yield answer.body
        except Failure as error:
            if error.code == _NO_SUCH_HOST:
                raise NotFound(error.message) from error
            raise

    async def search(self, domain: str, term: str, limit: int, credentials: Credentials) -> list[SearchResult]:
        """Search with the index API, which only Docker Hub and a few other registries offer.

        Raises ServerError when the registry does not offer it.
        """
        await self.look_up(domain)
        origin = (URL(f"https://{HUB_INDEX}"),) if domain == DEFAULT_DOMAIN else self.origins(domain, mirrors=False)[0]
        failure: ServerError | None = None
        for base in origin:
            site = Site(self, (base,), NOBODY, [])
            headers = {"Authorization": credentials.basic} if credentials.username else {}
            try:
                async with site.answer("GET", base / "v1" / "search" % {"q": term, "n": str(limit)}, headers) as answer:
                    if answer.status == 200:
                        return decode(await read(answer, MAX_ANSWER), _Search, "search results").results
                    failure = await failure_of(answer)
                    if answer.status in (404, 405, 501):
                        raise ServerError(f"registry {domain} does not offer a search")
            except Failure as error:
                failure = error
        raise failure or ServerError(f"registry {domain} does not offer a search")


def _own_context(directory: Path) -> ssl.SSLContext | None:
    """The operator's certificates for one registry: `*.crt` are trusted, `X.cert` with `X.key`
    identify the client.
    """
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return None
    vouching = [name for name in names if name.endswith(".crt")]
    shown = [name for name in names if name.endswith(".cert")]
    keys = [name for name in names if name.endswith(".key")]
    for name in shown:
        key = f"{name.removesuffix('.cert')}.key"
        if key not in keys:
            more = "CA certificates must use the extension .crt"
            raise ServerError(f"certificates in {directory}: missing key {key} for client certificate {name}. {more}")
    for name in keys:
        certificate = f"{name.removesuffix('.key')}.cert"
        if certificate not in shown:
            raise ServerError(f"certificates in {directory}: missing client certificate {certificate} for key {name}")
    if not vouching and not shown:
        return None
    context = verifying_context()
    try:
        for name in vouching:
            context.load_verify_locations(directory / name)
        for name in shown:
            context.load_cert_chain(directory / name, directory / f"{name.removesuffix('.cert')}.key")
    except OSError as error:  # ssl.SSLError is one
        raise ServerError(f"certificates in {directory}: {words(error)}") from error
    return context


def _unverified_context() -> ssl.SSLContext:
    context = verifying_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Site:
    """One registry, with the login and tokens of one client."""

    def __init__(
        self, registries: Registries, origin: tuple[URL, ...], credentials: Credentials, scopes: list[str]
    ) -> None:
        self._registries = registries
        self._origin = origin
        self.base = origin[0]
        self._credentials = credentials
        self.scopes = scopes
        self._challenge: Challenge | None = None
        self._tokens: dict[tuple[str, ...], tuple[str, float]] = {}
        self._tls: dict[URL, ssl.SSLContext] = {}
        self._connected = False
        self._connecting = asyncio.Lock()

    # --- connection and login ---------------------------------------------------------------------

    async def connect(self) -> None:
        """Find the scheme and the authentication method of the registry. Raises Failure."""
        async with self._connecting:
            if self._connected:
                return
            for base in self._origin:
                self.base = base
                try:
                    await self.persist(self._ping)
                except Failure as error:
                    # No HTTPS there: try the other scheme, if allowed.
                    if error.status or error.code == _UNTRUSTED or base is self._origin[-1]:
                        raise
                    continue
                self._connected = True
                return

    async def _ping(self) -> None:
        try:
            async with self.answer("GET", self.base / "v2/") as answer:
                if answer.status == 401:
                    self._challenge = _choose(challenges(answer.headers.getall("WWW-Authenticate", [])))
                elif answer.status != 200:
                    failure = await failure_of(answer)
                    if answer.status == 404:
                        raise Failure(f"{self.base}/v2/: not a registry of API version 2", 500)
                    raise failure
        except Failure as error:
            # No retry without an answer, neither here nor by the caller: usually the address is
            # wrong.
            error.transient = error.transient and error.status != 0
            raise

    async def log_in(self) -> str:
        """See `Registries.log_in`."""
        await self.connect()
        if self._challenge is None:
            return ""
        refresh = ""
        if self._challenge.scheme == "bearer":
            try:
                refresh = await self.persist(lambda: self._new_token((), offline=True))
            except Failure as failure:
                raise self._refused(failure) from None
        async with self.exchange("GET", self.base / "v2/") as answer:
            if answer.status != 200:
                raise self._refused(await failure_of(answer))
        return refresh

    def _refused(self, failure: Failure) -> Failure:
        """Docker's words for a failed login, which scripts match."""
        basic = self._challenge is not None and self._challenge.scheme == "basic"
        if failure.status == 401 and (basic or not failure.code):
            text = f"login attempt to {self.base}/v2/ failed with status: 401 Unauthorized"
        else:
            text = f'Get "{self.base}/v2/": {failure.message}'
        return Failure(text, failure.status, failure.code)

    async def _authorization(self, scopes: tuple[str, ...]) -> str:
        """The Authorization header, or ""."""
        if self._challenge is None:
            return ""
        if self._challenge.scheme == "basic":
            return self._credentials.basic if self._credentials.username else ""
        if self._credentials.registrytoken:
            return f"Bearer {self._credentials.registrytoken}"
        token, until = self._tokens.get(scopes, ("", 0.0))
        if time.monotonic() >= until:
            await self._new_token(scopes)
            token, _ = self._tokens[scopes]
        return f"Bearer {token}"

    async def _new_token(self, scopes: tuple[str, ...], *, offline: bool = False) -> str:
        """Ask the token server that the challenge names (distribution specification, "Token
        Authentication"); the refresh token, or "".
        """
        assert self._challenge is not None
        realm = self._challenge.parameters.get("realm", "")
        try:
            url = URL(realm)
        except ValueError:
            url = URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise Failure(f"{self.base}: the registry names an invalid token server: {realm[:200]!r}")
        identity = self._credentials.identitytoken or (
            self._credentials.password if self._credentials.username == "<token>" else ""
        )
        service = self._challenge.parameters.get("service", "")
        headers: dict[str, str] = {}
        if identity:
            form = {
                "grant_type": "refresh_token",
                "refresh_token": identity,
                "client_id": "engined",
                "service": service,
            }
            if scopes:
                form["scope"] = " ".join(scopes)
            asked = self.answer("POST", url, body=aiohttp.FormData(form))
        else:
            query = [*url.query.items(), ("service", service), *(("scope", scope) for scope in scopes)]
            if self._credentials.username:
                headers["Authorization"] = self._credentials.basic
                query.append(("account", self._credentials.username))
            if offline:
                query += [("offline_token", "true"), ("client_id", "engined")]
            asked = self.answer("GET", url.with_query([pair for pair in query if pair[1]]), headers)
        async with asked as answer:
            if answer.status != 200:
                failure = await failure_of(answer)
                if answer.status == 401 and not failure.code:
                    raise Failure("unauthorized: authentication required", 401)
                raise failure
            issued = decode(await read(answer, MAX_ANSWER), _Token, f"token of {url.host}")
        token = issued.token or issued.access_token
        if not token or not token.isascii() or not token.isprintable():
            raise Failure("authorization server did not include a token in the response")
        # Renewed a little early, so that it is still valid when the request arrives.
        self._tokens[scopes] = (token, time.monotonic() + max(5.0, min(issued.expires_in, 86400) * 0.9 - 5))
        return issued.refresh_token

    # --- requests ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def exchange(
        self,
        method: str,
        url: URL,
        headers: dict[str, str] | None = None,
        *,
        body: Any = None,
        scopes: tuple[str, ...] = (),
        total: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An authorized request.

        A 401 renews the authorization once. A body that cannot be sent again fails with a transient
        error then.
        """
        needed = (*self.scopes, *scopes)
        await self.connect()
        for attempt in (1, 2):
            sent = dict(headers or {})
            authorization = await self._authorization(needed)
            if authorization:
                sent["Authorization"] = authorization
            async with self.answer(method, url, sent, body=body, total=total) as answer:
                if answer.status == 401 and attempt == 1:
                    offered = _choose(challenges(answer.headers.getall("WWW-Authenticate", [])))
                    if offered is not None and not (authorization and offered.scheme == "basic"):
                        self._challenge = offered
                        self._tokens.pop(needed, None)
                        if not isinstance(body, AsyncIterator):
                            continue
                        failure = await failure_of(answer)
                        failure.transient = failure.status == 401
                        raise failure
                yield answer
                return

    @contextlib.asynccontextmanager
    async def answer(
        self,
        method: str,
        url: URL,
        headers: dict[str, str] | None = None,
        *,
        body: Any = None,
        total: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response after all redirects.

        Raises Failure when there is none; the caller checks the status.
        """
        sent = dict(headers or {})
        stall = self._registries.stall
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=min(stall, 15.0), sock_read=stall)
        at = url
        try:
            for _ in range(_REDIRECTIONS):
                if at.scheme != "https" and not self._registries.may_be_plain(at):
                    raise Failure(f"{at.host}: plain HTTP is allowed only for loopback and insecure registries", 500)
                context = await self._context(at)
                try:
                    answer = await self._registries.session.request(
                        method,
                        at,
                        headers=sent,
                        data=body,
                        allow_redirects=False,
                        timeout=timeout,
                        ssl=context,
                        **_proxy(at),
                    )
                except UnicodeError:
                    raise Failure(f"{shown(at)}: no such host: its name is not valid", 500) from None
                async with answer:
                    location = answer.headers.get("Location", "")
                    if answer.status not in (301, 302, 303, 307, 308) or not location or method not in ("GET", "HEAD"):
                        yield answer
                        return
                    target = self.target(at, location)
                if target.origin() != at.origin():
                    sent.pop("Authorization", None)
                at = target
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError and SSLError are OSErrors
            raise _unreachable(method, at, error, stall) from error
        raise Failure(f"{url.host}: more than {_REDIRECTIONS} redirections", 500)

    def target(self, at: URL, location: str) -> URL:
        """The target of a Location header. Raises Failure."""
        try:
            target = URL(location, encoded=True)
            target = target if target.absolute else at.join(target)
            if target.scheme not in ("http", "https") or not target.host:
                raise ValueError(location)
        except ValueError:
            raise Failure(f"{at.host}: {_BAD_REDIRECTION}", 500) from None
        if (
            (target.scheme, at.scheme) == ("http", "https")
            and target.host == at.host
            and target.explicit_port in (None, at.port)
        ):
            # The registry is behind a TLS proxy that does not announce itself.
            return (
                target.with_scheme("https")
                if target.explicit_port is None
                else target.with_scheme("https").with_port(at.port)
            )
        return target

    async def _context(self, url: URL) -> ssl.SSLContext | bool:
        if url.scheme != "https":
            return True
        origin = url.origin()
        if origin not in self._tls:
            self._tls[origin] = await self._registries.tls(url)
        return self._tls[origin]

    def patience(self, *, patient: bool) -> Patience:
        """For one operation. `patient`: an upload."""
        registries = self._registries
        return Patience(registries.delays + (registries.patience if patient else ()), registries.sleep)

    def download_patience(self, *, patient: bool) -> Patience:
        """For one download. Its first attempt includes the quick retries."""
        return Patience(self._registries.waits(patient=patient), self._registries.sleep)

    async def url(self, path: str, *parts: str) -> URL:
        """A URL in the repository `path`. Raises Failure."""
        await self.connect()  # finds the scheme
        # Joined as text: none of the parts contains anything that needs escaping (reference.py).
        return URL(f"{str(self.base).rstrip('/')}/v2/{path}/{'/'.join(parts)}")

    async def persist(
        self, attempt: Callable[[], Awaitable[T]], retrying: Retrying = not_reported, *, patient: bool = False
    ) -> T:
        """Retry transient failures."""
        patience = self.patience(patient=patient)
        while True:
            try:
                return await attempt()
            except Failure as error:
                await patience.wait(error, retrying)


class Patience:
    """The waits of one operation before its retries."""

    def __init__(self, delays: tuple[float, ...], sleep: Sleep) -> None:
        self._delays = iter(delays)
        self._longest = max(LONGEST_DELAY, sum(delays))
        self._sleep = sleep

    async def wait(self, error: Failure, retrying: Retrying) -> None:
        """Wait before the next try, a little longer than its delay, or as long as the registry
        requests. Raises `error` when there is no next try.
        """
        delay = next(self._delays, None)
        if not error.transient or delay is None or error.delay > self._longest:
            raise error
        seconds = max(error.delay, delay * random.uniform(1, _SPREAD))
        self._longest -= error.delay
        retrying(seconds)
        await self._sleep(seconds)


def _choose(offered: list[Challenge]) -> Challenge | None:
    for scheme in ("bearer", "basic"):
        for challenge in offered:
            if challenge.scheme == scheme and (scheme == "basic" or challenge.parameters.get("realm")):
                return challenge
    return None


def _login_of(url: URL) -> dict[str, str]:
    """The header for the user and password in a URL."""
    return {"Authorization": _basic_login(url.user or "", url.password or "")} if url.user or url.password else {}


def _basic_login(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def _proxy(url: URL) -> dict[str, Any]:
    """The arguments of a request that say which proxy a URL needs. Raises Failure."""
    try:
        proxy = proxies.proxy_of(url.scheme, url.raw_host or "", url.port)
    except ValueError as error:
        raise Failure(f"the proxy for {url.scheme} {error}") from error
    if proxy is None:
        return {}
    if not proxy.user:
        return {"proxy": proxy.url}
    user, _, password = proxy.user.partition(":")
    login = aiohttp.BasicAuth(urllib.parse.unquote(user), urllib.parse.unquote(password), "utf-8")
    return {"proxy": proxy.url, "proxy_auth": login}


def _unreachable(method: str, url: URL, error: BaseException, stall: float) -> Failure:
    """The Failure for a request without an answer, or without all of it."""
    where = f'{method.capitalize()} "{shown(url)}"'
    if isinstance(error, TimeoutError):
        return Failure(f"{where}: no answer within {stall:g} s", transient=True)
    if isinstance(error, aiohttp.ClientConnectorError):
        code = ""
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            code = _UNTRUSTED
        elif isinstance(error.os_error, socket.gaierror) and error.os_error.errno != socket.EAI_AGAIN:
            code = _NO_SUCH_HOST
        text = f"{where}: {_unconnected(error)}"
        return Failure(text, code=code, transient=not isinstance(error, aiohttp.ClientSSLError))
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return Failure(f"{where}: the proxy answers with status {error.status}")
    if isinstance(error, aiohttp.NonHttpUrlClientError | ValueError):
        return Failure(f"{where}: {_BAD_REDIRECTION}")
    # Disconnected, reset, cut short, or not HTTP: a retry may succeed.
    return Failure(f"{where}: {_broken(error)}", transient=True)


def _unconnected(error: aiohttp.ClientConnectorError) -> str:
    """The host is that of the last redirection."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        refused = error.certificate_error
        why = refused.verify_message if isinstance(refused, ssl.SSLCertVerificationError) else words(refused)
        return f"tls: failed to verify certificate: x509: {why}"
    why = reason(error.os_error)
    if isinstance(error, aiohttp.ClientSSLError):
        # Docker's words for a registry without TLS, which users look for.
        return "http: server gave HTTP response to HTTPS client" if why == "wrong version number" else f"tls: {why}"
    if isinstance(error.os_error, socket.gaierror):
        return f"dial tcp: lookup {error.host}: {why if error.os_error.errno == socket.EAI_AGAIN else 'no such host'}"
    proxy = "proxyconnect tcp: " if isinstance(error, aiohttp.ClientProxyConnectionError) else ""
    return f"{proxy}dial tcp {error.host}:{error.port}: connect: {why}"


def _broken(error: BaseException) -> str:
    """Why an answer came not at all, or not whole."""
    cause = error.__cause__
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return f"the answer is cut short: {reason(cause) if isinstance(cause, OSError) else 'unexpected EOF'}"
    if isinstance(error, OSError):
        return reason(error)
    return "the answer is not valid HTTP"


def shown(url: URL) -> str:
    """The URL as messages name it: without credentials, also those in a query, such as a
    signature.
    """
    return str(url.with_user(None).with_query(None).with_fragment(None))


def _url_of_client(address: str) -> URL:
    """Raises InvalidParameter for a host name that cannot exist."""
    try:
        url = URL(address)
        (url.raw_host or "").encode("idna")  # as the resolver does
    except ValueError as error:
        raise InvalidParameter(_bad_host(address)) from error
    return url


def _bad_host(address: str) -> str:
    return f"invalid URL: its host is not a valid name or address: {address}"[:300]


async def read(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body. Raises Failure when it has more than `limit` bytes."""
    parts: list[bytes] = []
    size = answer.content_length or 0
    if size <= limit:
        size = 0
        async for part in answer.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > limit:
                break
    if size > limit:
        raise Failure(f"{answer.url.host} sent a document of more than {limit} bytes", 500)
    return b"".join(parts)


async def failure_of(answer: aiohttp.ClientResponse) -> Failure:
    """The error for a status other than success, in Docker's words (distribution specification,
    "Error Codes").
    """
    status = answer.status
    try:
        body = await read(answer, MAX_ANSWER)
    except (Failure, aiohttp.ClientError, OSError):
        body = b""
    code, text = _error(body)
    if status == 401 and _insufficient_scope(answer):
        # The credentials are good, but not for this repository, which may not even exist (RFC 6750,
        # section 3.1).
        status, code, text = 403, "DENIED", "denied: requested access to the resource is denied"
    if status == 401:
        # Docker CLIs and scripts know both texts: the first when a login was refused, the second
        # when there was none.
        if "Authorization" not in answer.request_info.headers and (_basic(answer) or not (text or body)):
            text = "no basic auth credentials"
        text = text or "unauthorized: authentication required"
    elif not text and status == 403 and not body:
        text = "denied: requested access to the resource is denied"
    elif not text and status == 429:
        text = "toomanyrequests: the registry asks for fewer requests"
    elif not text and 400 <= status < 500 and body:
        shown = json.dumps(body[:_SHOWN].decode(errors="replace"))
        text = f"error parsing HTTP {status} response body: no error details found: {shown}"
    elif not text:
        text = f"received unexpected HTTP status: {status} {answer.reason or ''}".rstrip()
    delay = 0.0
    with contextlib.suppress(ValueError):
        delay = float(answer.headers.get("Retry-After", "0"))
    transient = status in (408, 425, 429) or (status >= 500 and status not in (501, 505))
    return Failure(text, status, code, transient=transient, delay=max(0.0, delay))


def _basic(answer: aiohttp.ClientResponse) -> bool:
    """True if a registry wants a name and a password."""
    found = _choose(challenges(answer.headers.getall("WWW-Authenticate", [])))
    return found is not None and found.scheme == "basic"


def _insufficient_scope(answer: aiohttp.ClientResponse) -> bool:
    return any(
        each.scheme == "bearer" and each.parameters.get("error") == "insufficient_scope"
        for each in challenges(answer.headers.getall("WWW-Authenticate", []))
    )


def _error(body: bytes) -> tuple[str, str]:
    """Code and text of the first error in a body, both empty if there is none.

    Keys are case-insensitive, as in Go.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "", ""
    errors = _folded(document).get("errors")
    if not isinstance(errors, list) or not errors:
        return "", ""
    first = _folded(errors[0])
    code, message = first.get("code"), first.get("message")
    if not isinstance(code, str) or not code:
        code = "UNKNOWN"
    if not isinstance(message, str) or not message:
        message = _MESSAGES.get(code, "unknown error")
    known = code.lower() if code in _MESSAGES else code.lower().replace("_", " ")
    return code, f"{known}: {message}"[:_SHOWN]


def _folded(document: object) -> dict[str, object]:
    return {str(key).lower(): value for key, value in document.items()} if isinstance(document, dict) else {}


def decode(raw: bytes, of: type[T], what: str) -> T:
    """A JSON document of a registry. Raises ServerError that names it."""
    try:
        return msgspec.json.decode(raw, type=of, strict=False)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ServerError(f"{what}: invalid document: {decoding_reason(error)}") from None


__all__ = [
    "MAX_ANSWER",
    "REFUSALS",
    "Failure",
    "Patience",
    "Registries",
    "Retrying",
    "Site",
    "decode",
    "failure_of",
    "not_reported",
    "read",
    "shown",
]
