"""The client's side of the distribution specification: manifests, blobs and tags of one repository, logins, searches.

- HTTPS with the host's certificates and those in `registry_certificates`/HOST:PORT, as Docker has them; plain HTTP, or a certificate that
  nobody vouches for, only for loopback and `insecure_registries`, and that holds for every redirection and token server too.
- Credentials go to the registry's own origin and to the token server it names, never along with a redirection to another origin.
- What is read into memory is bounded; blobs go to a descriptor, verified, and go on where a broken connection left them.
- An answer of 429 or 5xx, a broken connection and a stalled one are tried again with growing pauses; anything else is final.

Loaded when a registry is first needed: aiohttp takes 15 MB, and most engines on a dense host hardly ever pull.
Owns: the pool of connections. Not here: what becomes of what is fetched (pull.py, push.py). Raises: ServerError, NotFound, InvalidParameter.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import os
import random
import re
import ssl
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import aiohttp
import msgspec
from yarl import URL

from engine import __version__
from engine.config import Config
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.images.credentials import NOBODY, Challenge, Credentials, challenges, next_page
from engine.images.reference import DEFAULT_DOMAIN
from engine.system.threads import uninterrupted
from engine.wire.images import SearchResult

T = TypeVar("T")


class Outgoing(Protocol):
    """A blob to be stored; `digest` is right when `chunks` has ended."""

    @property
    def digest(self) -> str: ...
    def chunks(self) -> AsyncGenerator[bytes, None]: ...


S = TypeVar("S", bound=Outgoing)

HUB = "registry-1.docker.io"
"""Where `docker.io` is."""
HUB_INDEX = "index.docker.io"

MAX_MANIFEST = 4 << 20
"""Bytes of a manifest, as registries limit them too (distribution specification, "Pushing Manifests")."""
MAX_ANSWER = 1 << 20
"""Bytes of any other document: tokens, pages of tags, errors."""
MAX_TAGS = 10_000

DELAYS = (0.2, 0.8, 2.0)
"""Seconds before each new try; half as much at random."""
LONGEST_DELAY = 20.0
"""A registry that asks for more (Retry-After) is not waited for."""
_ATTEMPTS = 50
"""Tries of one blob, however far each gets."""
_PROGRESS = 64 << 10
"""Bytes that make a try a success, after which the next failure is the first again."""
_REDIRECTIONS = 8
_CHUNK = 1 << 20
_TOKEN_LIFE = 60
"""Seconds, when the token server does not say (distribution specification, "Token Response")."""

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
ACCEPT = ", ".join((DOCKER_MANIFEST, OCI_MANIFEST, DOCKER_LIST, OCI_INDEX, "*/*;q=0.1"))

_CONTENT_RANGE = re.compile(r"bytes\s+(\d+)-")


class Fetched(NamedTuple):
    """A manifest as it is in the registry."""

    raw: bytes
    media_type: str
    """Content-Type without its parameters."""
    digest: str


class Failure(ServerError):
    """What a registry, or the way to it, answered instead. `status` is 0 when there was no answer; `code` is of the distribution specification."""

    def __init__(self, message: str, status: int = 0, code: str = "", *, transient: bool = False, delay: float = 0):
        super().__init__(message)
        self.status = status
        self.code = code
        self.transient = transient
        self.delay = delay

    @property
    def refuses(self) -> bool:
        """It is not there, or not for us: registries do not tell the two apart."""
        return self.status in (401, 403, 404)


class _Page(msgspec.Struct):
    tags: list[str] | None = None


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""
    refresh_token: str = ""
    expires_in: float = _TOKEN_LIFE


class _Error(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Errors(msgspec.Struct):
    errors: list[_Error] = []


class _Search(msgspec.Struct):
    results: list[SearchResult] = []


class Registries:
    """All registries, by the operator's rules. One per engine, on one loop."""

    def __init__(self, config: Config) -> None:
        self.stall = float(config.registry_timeout)
        """Seconds without a byte after which a connection is given up."""
        self.delays = DELAYS
        self._insecure = config.insecure_registries
        self._mirrors = config.registry_mirrors
        self._certificates = config.registry_certificates
        self._verified: ssl.SSLContext | None = None
        self._unverified: ssl.SSLContext | None = None
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": f"engined/{__version__} (linux)", "Accept-Encoding": "identity"},
            read_bufsize=_CHUNK,
            max_field_size=32 << 10,
            max_line_size=32 << 10,
            trust_env=False,  # would also send what ~/.netrc has for a host
        )

    async def close(self) -> None:
        await self.session.close()

    def repository(
        self, domain: str, path: str, credentials: Credentials = NOBODY, actions: str = "pull"
    ) -> Repository:
        return Repository(self, domain, path, credentials, actions)

    def may_be_plain(self, url: URL) -> bool:
        """Whether plain HTTP, or a certificate that nobody vouches for, will do."""
        name, port = (url.host or "").lower(), url.port
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            address = None
        if name == "localhost" or (address is not None and address.is_loopback):
            return True
        for rule in self._insecure:
            if rule.lower() in (name, f"{name}:{port}", f"[{name}]:{port}"):
                return True
            if address is not None and "/" in rule:
                with contextlib.suppress(ValueError):
                    if address in ipaddress.ip_network(rule, strict=False):
                        return True
        return url.scheme == "http" and any(url.origin() == URL(mirror).origin() for mirror in self._mirrors)

    async def tls(self, url: URL) -> ssl.SSLContext:
        """What a server at `url` must prove. Raises ServerError for certificate files that cannot be used."""
        name = f"{url.host}:{url.port}" if url.explicit_port else str(url.host)
        directory = self._certificates / name
        own = await asyncio.to_thread(_own_context, directory)
        if own is not None:
            return own
        if self.may_be_plain(url):
            if self._unverified is None:
                self._unverified = await asyncio.to_thread(_unverified_context)
            return self._unverified
        if self._verified is None:
            self._verified = await asyncio.to_thread(ssl.create_default_context)
        return self._verified

    def origins(self, domain: str, *, mirrors: bool) -> list[tuple[URL, ...]]:
        """Where a domain's repositories may be, best first: each a choice of URLs of which the first that answers counts."""
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
            # Written out again rather than `with_scheme`, which would move the default port along.
            return [(secure, URL(f"http://{domain}"))]
        return [(secure,)]

    async def log_in(self, credentials: Credentials) -> str:
        """Prove the credentials to the registry they name. The identity token it gives instead, or "". Raises ServerError."""
        name = re.sub(r"^https?://", "", credentials.serveraddress).partition("/")[0]
        domain = DEFAULT_DOMAIN if name in ("", HUB_INDEX, HUB, DEFAULT_DOMAIN) else name
        origin = self.origins(domain, mirrors=False)[0]
        site = Site(self, origin, credentials, [])
        return await site.log_in()

    async def body(self, address: str) -> AsyncGenerator[bytes, None]:
        """What is at a URL that the client named; plain HTTP will do, and redirections are followed. Raises ServerError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(self.stall, 15.0), sock_read=self.stall)
        try:
            url = URL(address)
            async with self.session.get(url, timeout=timeout, max_redirects=_REDIRECTIONS, proxy=_proxy(url)) as answer:
                if answer.status != 200:
                    raise ServerError(f'Get "{url.with_query(None)}": {answer.status} {answer.reason or ""}'.rstrip())
                async for chunk in answer.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _unreachable(
                "GET", URL(address) if not isinstance(error, ValueError) else URL(), error, self.stall
            ) from error

    async def search(self, domain: str, term: str, limit: int, credentials: Credentials) -> list[SearchResult]:
        """By the index API that Docker Hub and few others offer. Raises ServerError that says so when it is not there."""
        origin = (URL(f"https://{HUB_INDEX}"),) if domain == DEFAULT_DOMAIN else self.origins(domain, mirrors=False)[0]
        failure: ServerError | None = None
        for base in origin:
            site = Site(self, (base,), NOBODY, [])
            headers = {"Authorization": credentials.basic} if credentials.username else {}
            try:
                async with site.answer("GET", base / "v1" / "search" % {"q": term, "n": str(limit)}, headers) as answer:
                    if answer.status == 200:
                        return decode(await _read(answer, MAX_ANSWER), _Search, "search results").results
                    failure = await _failure(answer)
                    if answer.status in (404, 405, 501):
                        raise ServerError(f"registry {domain} does not offer a search")
            except Failure as error:
                failure = error
        raise failure or ServerError(f"registry {domain} does not offer a search")


def _own_context(directory: Path) -> ssl.SSLContext | None:
    """Certificates that the operator gave for one registry: `*.crt` vouch for it, `X.cert` with `X.key` are shown to it."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return None
    vouching = [name for name in names if name.endswith(".crt")]
    shown = [name for name in names if name.endswith(".cert")]
    if not vouching and not shown:
        return None
    context = ssl.create_default_context()
    try:
        for name in vouching:
            context.load_verify_locations(directory / name)
        for name in shown:
            context.load_cert_chain(directory / name, directory / f"{name.removesuffix('.cert')}.key")
    except (OSError, ssl.SSLError) as error:
        raise ServerError(f"certificates in {directory}: {error}") from error
    return context


def _unverified_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Site:
    """One registry, and our standing with it."""

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

    # --- standing ---------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Find out how it is spoken to and what it asks for. Raises Failure."""
        async with self._connecting:
            if self._connected:
                return
            for base in self._origin:
                self.base = base
                try:
                    # Nobody waits for what does not answer at all: it is the address that is wrong, as a rule.
                    await persist(self._ping, self._registries.delays, unreachable=False)
                except Failure as error:
                    # No HTTPS there: the other way, if there is one.
                    if error.status or base is self._origin[-1]:
                        raise
                    continue
                self._connected = True
                return

    async def _ping(self) -> None:
        async with self.answer("GET", self.base / "v2/") as answer:
            if answer.status == 401:
                self._challenge = _choose(challenges(answer.headers.getall("WWW-Authenticate", [])))
            elif answer.status != 200:
                failure = await _failure(answer)
                if answer.status == 404:
                    raise Failure(f"{self.base}/v2/: not a registry of API version 2", 500)
                raise failure

    async def log_in(self) -> str:
        """See `Registries.log_in`."""
        await self.connect()
        if self._challenge is None:
            return ""
        refresh = ""
        if self._challenge.scheme == "bearer":
            refresh = await self._persist(lambda: self._new_token((), offline=True))
        async with self.exchange("GET", self.base / "v2/") as answer:
            if answer.status != 200:
                failure = await _failure(answer)
                raise Failure(f'Get "{self.base}/v2/": {failure.message}', failure.status, failure.code)
        return refresh

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
        """Ask the token server that the challenge names (distribution specification, "Token Authentication"); the refresh token, or ""."""
        assert self._challenge is not None
        realm = self._challenge.parameters.get("realm", "")
        try:
            url = URL(realm)
        except ValueError:
            url = URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise Failure(f"{self.base}: names no token server: {realm[:200]!r}")
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
                failure = await _failure(answer)
                if answer.status == 401 and not failure.code:
                    raise Failure("unauthorized: incorrect username or password", 401, "UNAUTHORIZED")
                raise failure
            found = decode(await _read(answer, MAX_ANSWER), _Token, f"token of {url.host}")
        token = found.token or found.access_token
        if not token or not token.isascii() or not token.isprintable():
            raise Failure(f"the token server {url.host} gave no token")
        # Renewed a little early: it has to hold until the request arrives.
        self._tokens[scopes] = (token, time.monotonic() + max(5.0, min(found.expires_in, 86400) * 0.9 - 5))
        return found.refresh_token

    # --- requests ---------------------------------------------------------------------------------------------------

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
        """An authorized request. A 401 has the standing renewed once, unless there is a body that cannot be sent again."""
        wanted = (*self.scopes, *scopes)
        await self.connect()
        for attempt in (1, 2):
            sent = dict(headers or {})
            authorization = await self._authorization(wanted)
            if authorization:
                sent["Authorization"] = authorization
            async with self.answer(method, url, sent, body=body, total=total) as answer:
                if answer.status == 401 and attempt == 1 and not isinstance(body, AsyncIterator):
                    offered = _choose(challenges(answer.headers.getall("WWW-Authenticate", [])))
                    if offered is not None and not (authorization and offered.scheme == "basic"):
                        self._challenge = offered
                        self._tokens.pop(wanted, None)
                        continue
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
        """The answer at the end of the redirections. Raises Failure when there is none; a status is the caller's to judge."""
        sent = dict(headers or {})
        stall = self._registries.stall
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=min(stall, 15.0), sock_read=stall)
        at = url
        try:
            for _ in range(_REDIRECTIONS):
                if at.scheme != "https" and not self._registries.may_be_plain(at):
                    raise Failure(f"{at.host} is spoken to by HTTPS alone: it is no insecure registry", 500)
                answer = await self._registries.session.request(
                    method,
                    at,
                    headers=sent,
                    data=body,
                    allow_redirects=False,
                    timeout=timeout,
                    ssl=await self._context(at),
                    proxy=_proxy(at),
                )
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
        """Where a Location header leads. Raises Failure."""
        try:
            target = URL(location, encoded=True)
            target = target if target.absolute else at.join(target)
            if target.scheme not in ("http", "https") or not target.host:
                raise ValueError(location)
        except ValueError:
            raise Failure(f"{at.host} redirects to an invalid address", 500) from None
        if (
            (target.scheme, at.scheme) == ("http", "https")
            and target.host == at.host
            and target.explicit_port in (None, at.port)
        ):
            # A registry behind a proxy that does not tell it about TLS.
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

    async def _persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await persist(attempt, self._registries.delays)


async def persist(attempt: Callable[[], Awaitable[T]], delays: tuple[float, ...], *, unreachable: bool = True) -> T:
    """Try again what fails for now; `unreachable`: also when there was no answer."""
    for delay in delays:
        try:
            return await attempt()
        except Failure as error:
            if not error.transient or error.delay > LONGEST_DELAY or not (error.status or unreachable):
                raise
            await asyncio.sleep(max(error.delay, delay * random.uniform(0.5, 1)))
    return await attempt()


def _choose(offered: list[Challenge]) -> Challenge | None:
    for scheme in ("bearer", "basic"):
        for challenge in offered:
            if challenge.scheme == scheme and (scheme == "basic" or challenge.parameters.get("realm")):
                return challenge
    return None


def _proxy(url: URL) -> str | None:
    """As http_proxy, https_proxy and no_proxy say; never for this host itself, as Go has it."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme)
    host = url.host or ""
    if not proxy or host == "localhost" or urllib.request.proxy_bypass(host):
        return None
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return None
    return proxy


def _unreachable(method: str, url: URL, error: BaseException, stall: float) -> Failure:
    """Without the query, which may be a signature."""
    where = f'{method.capitalize()} "{url.with_query(None)}"'
    if isinstance(error, TimeoutError):
        return Failure(f"{where}: no answer within {stall:g} s", transient=True)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Failure(f"{where}: lookup {url.host}: no such host")
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return Failure(f"{where}: x509: {error.certificate_error}")
    if isinstance(error, aiohttp.ClientSSLError):
        return Failure(f"{where}: TLS: {error.os_error}")
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return Failure(
            f"{where}: connect: {os.strerror(number).lower() if number else str(error.os_error) or 'closed'}"
        )
    # Disconnected, reset, cut short, or no HTTP: it may be well the next time.
    return Failure(f"{where}: {str(error) or type(error).__name__}", transient=True)


async def _read(answer: aiohttp.ClientResponse, limit: int) -> bytes:
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
        raise Failure(f"{answer.url.host} answers with more than {limit} bytes where a document is expected", 500)
    return b"".join(parts)


async def _failure(answer: aiohttp.ClientResponse) -> Failure:
    """What an answer that is no success means, in the words of Docker."""
    status = answer.status
    code = text = ""
    with contextlib.suppress(Failure, aiohttp.ClientError, OSError, msgspec.MsgspecError, ValueError, RecursionError):
        found = msgspec.json.decode(await _read(answer, MAX_ANSWER), type=_Errors).errors
        if found:
            code = found[0].code
            text = f"{code.lower().replace('_', ' ')}: {found[0].message or code.lower()}"[:500]
            if code in ("UNAUTHORIZED", "DENIED", "TOOMANYREQUESTS"):
                text = f"{code.lower()}: {found[0].message}"[:500]
    if not text:
        if status == 401:
            given = "Authorization" in answer.request_info.headers
            text = "unauthorized: authentication required" if given else "no basic auth credentials"
        elif status == 403:
            text = "denied: requested access to the resource is denied"
        elif status == 429:
            text = "toomanyrequests: the registry asks for fewer requests"
        else:
            text = f"received unexpected HTTP status: {status} {answer.reason or ''}".rstrip()
    delay = 0.0
    with contextlib.suppress(ValueError):
        delay = float(answer.headers.get("Retry-After", "0"))
    transient = status in (408, 425, 429) or (status >= 500 and status not in (501, 505))
    return Failure(text, status, code, transient=transient, delay=max(0.0, delay))


def decode(raw: bytes, of: type[T], what: str) -> T:
    """A JSON document of a registry. Raises ServerError that names it."""
    try:
        return msgspec.json.decode(raw, type=of, strict=False)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ServerError(f"{what}: invalid document: {error}") from None


class Repository:
    """One repository, seen with one client's credentials."""

    def __init__(self, registries: Registries, domain: str, path: str, credentials: Credentials, actions: str) -> None:
        self._registries = registries
        self.domain = domain
        self.path = path
        scopes = [f"repository:{path}:{actions}"]
        origins = registries.origins(domain, mirrors=actions == "pull")
        # A mirror is somebody else's: it gets no credentials of the registry that it mirrors.
        self._sites = [Site(registries, origin, NOBODY, scopes) for origin in origins[:-1]]
        self._sites.append(Site(registries, origins[-1], credentials, scopes))
        self._at = 0

    @property
    def host(self) -> str:
        """Where blobs come from, for what is counted by registry."""
        return str(self._site.base.host)

    @property
    def _site(self) -> Site:
        return self._sites[self._at]

    async def _url(self, site: Site, *parts: str) -> URL:
        await site.connect()  # finds out what the URL begins with
        # Slash by slash: none of the parts holds anything that needs escaping (reference.py).
        return URL(f"{str(site.base).rstrip('/')}/v2/{self.path}/{'/'.join(parts)}")

    async def _anywhere(self, attempt: Callable[[Site], Awaitable[T]]) -> T:
        """At the mirror that answered last, and those behind it. Raises Failure of the last."""
        while True:
            site = self._site
            try:
                return await persist(lambda site=site: attempt(site), self._registries.delays)  # type: ignore[misc]
            except ServerError:
                if site is self._sites[-1]:
                    raise
                if site is self._site:
                    self._at += 1

    # --- reading ----------------------------------------------------------------------------------------------------

    async def manifest(self, name: str) -> Fetched:
        """By tag or digest; of a digest, verified. Raises NotFound when it is not there or not for us, ServerError else."""
        try:
            return await self._anywhere(lambda site: self._manifest(site, name))
        except Failure as error:
            if not error.refuses:
                raise
            raise self._no_access(error, name) from None

    def _familiar(self) -> str:
        if self.domain != DEFAULT_DOMAIN:
            return f"{self.domain}/{self.path}"
        return self.path.removeprefix("library/")

    def _no_access(self, error: Failure, name: str) -> NotFound:
        familiar = self._familiar()
        if error.status == 404 and error.code != "NAME_UNKNOWN":
            separator = "@" if name.startswith("sha256:") else ":"
            return NotFound(f"manifest for {familiar}{separator}{name} not found: {error.message}")
        return NotFound(
            f"pull access denied for {familiar}, repository does not exist or may require 'docker login': {error.message}"
        )

    async def _manifest(self, site: Site, name: str) -> Fetched:
        total = self._registries.stall * 4  # a drip of bytes does not go on for ever
        async with site.exchange(
            "GET", await self._url(site, "manifests", name), {"Accept": ACCEPT}, total=total
        ) as answer:
            if answer.status != 200:
                raise await _failure(answer)
            media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if media_type.startswith("text/"):
                raise Failure(f"unsupported manifest media type and no default available: {media_type}", 500)
            raw = await _read(answer, MAX_MANIFEST)
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if name.startswith("sha256:") and digest != name:
            raise Failure(f"manifest verification failed for digest {name}", 500)
        return Fetched(raw, media_type, digest)

    async def tags(self) -> list[str]:
        """Every tag. Raises NotFound as `manifest` does."""
        try:
            return await self._anywhere(self._tags)
        except Failure as error:
            if not error.refuses:
                raise
            raise self._no_access(Failure(error.message, 403), "") from None

    async def _tags(self, site: Site) -> list[str]:
        found: dict[str, None] = {}
        url = (await self._url(site, "tags", "list")) % {"n": "1000"}
        seen: set[URL] = set()
        while url not in seen:
            seen.add(url)
            async with site.exchange("GET", url, total=self._registries.stall * 4) as answer:
                if answer.status != 200:
                    raise await _failure(answer)
                page = decode(await _read(answer, MAX_ANSWER), _Page, f"tags of {self._familiar()}")
                link = next_page(answer.headers.getall("Link", []))
            found.update(dict.fromkeys(page.tags or ()))
            if len(found) > MAX_TAGS or len(seen) > MAX_TAGS:
                raise ServerError(f"{self._familiar()} has more than {MAX_TAGS} tags")
            if not link:
                break
            url = site.target(url, link)
        return list(found)

    async def blob(self, digest: str, limit: int) -> bytes:
        """A small blob, verified. Raises ServerError."""
        return await self._anywhere(lambda site: self._blob(site, digest, limit))

    async def _blob(self, site: Site, digest: str, limit: int) -> bytes:
        async with site.exchange(
            "GET", await self._url(site, "blobs", digest), total=self._registries.stall * 4
        ) as answer:
            if answer.status != 200:
                raise await _failure(answer)
            raw = await _read(answer, limit)
        if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
            raise Failure(f"filesystem layer verification failed for digest {digest}", 500)
        return raw

    async def fetch(self, digest: str, size: int, target: int, report: Callable[[int], None]) -> None:
        """A blob of `size` bytes into an empty file, verified; `report` is told how many are there, in any thread. Raises ServerError.

        What a broken connection has brought is kept, and the rest asked for.
        """
        writing = _Writing(target, size, report)
        while True:
            site = self._site
            try:
                await self._fetch(site, digest, writing)
                break
            except ServerError:
                if site is self._sites[-1]:
                    raise
                if site is self._site:
                    self._at += 1
        found = f"sha256:{await writing.digest()}"
        if found != digest:
            raise ServerError(f"filesystem layer verification failed for digest {digest}")

    async def _fetch(self, site: Site, digest: str, writing: _Writing) -> None:
        delays = list(self._registries.delays)
        failures = 0
        for attempt in range(_ATTEMPTS):
            begun = writing.size
            try:
                await self._fetch_rest(site, digest, writing)
                return
            except Failure as error:
                failures = 1 if writing.size - begun >= _PROGRESS else failures + 1
                if (
                    not error.transient
                    or failures > len(delays)
                    or error.delay > LONGEST_DELAY
                    or attempt == _ATTEMPTS - 1
                ):
                    raise
                await asyncio.sleep(max(error.delay, delays[failures - 1] * random.uniform(0.5, 1)))

    async def _fetch_rest(self, site: Site, digest: str, writing: _Writing) -> None:
        url = await self._url(site, "blobs", digest)
        headers = {"Range": f"bytes={writing.size}-"} if writing.size else {}
        async with site.exchange("GET", url, headers) as answer:
            if answer.status == 206 and writing.size:
                begin = _CONTENT_RANGE.match(answer.headers.get("Content-Range", ""))
                if begin is None or int(begin[1]) != writing.size:
                    raise Failure(f"{url.host} gives another range of blob {digest} than was asked for", 500)
            elif answer.status == 200 or (answer.status == 416 and writing.size):
                await writing.restart()
                if answer.status == 416:
                    raise Failure(f"{url.host} does not continue blob {digest}", transient=True)
            else:
                raise await _failure(answer)
            try:
                # In the pieces that came: to join them would copy each once more, on the loop.
                async for chunk, _ in answer.content.iter_chunks():
                    await writing.take(chunk)
            except (aiohttp.ClientError, OSError):
                # aiohttp tells that the connection broke before it gives what came until then.
                answer.content.set_exception(None)  # type: ignore[arg-type]
                await writing.take(answer.content.read_nowait())
                raise
            finally:
                await writing.flush()
        if writing.size < writing.wanted:
            raise Failure(f"{url.host} closed the connection within blob {digest}", transient=True)

    # --- writing ----------------------------------------------------------------------------------------------------

    async def has_blob(self, digest: str) -> bool:
        """Raises Failure."""
        return await persist(lambda: self._has_blob(digest), self._registries.delays)

    async def _has_blob(self, digest: str) -> bool:
        site = self._site
        async with site.exchange(
            "HEAD", await self._url(site, "blobs", digest), total=self._registries.stall
        ) as answer:
            if answer.status == 200:
                return True
            if answer.status == 404:
                return False
            raise await _failure(answer)

    async def mount(self, digest: str, source: str) -> bool:
        """Have a blob that another repository of the registry has. False when the registry would rather have it uploaded."""
        site = self._site
        url = (await self._url(site, "blobs", "uploads/")) % {"mount": digest, "from": source}
        scopes = (f"repository:{source}:pull",)
        try:
            async with site.exchange("POST", url, scopes=scopes, total=self._registries.stall) as answer:
                if answer.status == 202 and "Location" in answer.headers:
                    await self._cancel_upload(site, site.target(url, answer.headers["Location"]))
                return answer.status == 201
        except Failure:
            return False  # an upload tells what is wrong, if something is

    async def _cancel_upload(self, site: Site, url: URL) -> None:
        with contextlib.suppress(Failure):
            async with site.exchange("DELETE", url, total=self._registries.stall):
                pass

    async def upload(self, source: Callable[[], S]) -> S:
        """Store a blob; what was sent. `source` is called anew for each try. Raises ServerError."""

        async def attempt() -> S:
            sent = source()
            async with contextlib.aclosing(sent.chunks()) as chunks:
                await self._upload(chunks, lambda: sent.digest)
            return sent

        return await persist(attempt, self._registries.delays)

    async def _upload(self, chunks: AsyncIterator[bytes], digest: Callable[[], str]) -> None:
        site = self._site
        stall = self._registries.stall
        url = await self._url(site, "blobs", "uploads/")
        async with site.exchange("POST", url, total=stall) as answer:
            if answer.status != 202 or "Location" not in answer.headers:
                raise await _failure(answer)
            url = site.target(url, answer.headers["Location"])
        done = False
        try:
            try:
                async with asyncio.timeout(stall) as limit:
                    body = _watched(chunks, limit, stall)
                    kind = {"Content-Type": "application/octet-stream"}
                    async with site.exchange("PATCH", url, kind, body=body) as answer:
                        if answer.status != 202:
                            raise await _failure(answer)
                        url = site.target(url, answer.headers.get("Location", str(url)))
            except TimeoutError:
                raise Failure(f'Patch "{url.with_query(None)}": stalled for {stall:g} s', transient=True) from None
            # Storing a large blob in its place may take the registry a while.
            async with site.exchange("PUT", url.update_query({"digest": digest()}), total=max(stall, 300)) as answer:
                if answer.status not in (201, 204):
                    raise await _failure(answer)
            done = True
        finally:
            if not done:
                await asyncio.shield(self._cancel_upload(site, url))

    async def put_manifest(self, name: str, raw: bytes, media_type: str) -> None:
        """Raises Failure."""
        await persist(lambda: self._put_manifest(name, raw, media_type), self._registries.delays)

    async def _put_manifest(self, name: str, raw: bytes, media_type: str) -> None:
        site = self._site
        url = await self._url(site, "manifests", name)
        total = self._registries.stall * 4
        async with site.exchange("PUT", url, {"Content-Type": media_type}, body=raw, total=total) as answer:
            if answer.status not in (200, 201, 202):
                raise await _failure(answer)


async def _watched(chunks: AsyncIterator[bytes], limit: asyncio.Timeout, stall: float) -> AsyncIterator[bytes]:
    """The chunks; each that is taken puts off the time limit."""
    loop = asyncio.get_running_loop()
    async for chunk in chunks:
        limit.reschedule(loop.time() + stall)
        yield chunk
    limit.reschedule(loop.time() + stall)


class _Writing:
    """A blob on its way to a file: written and hashed in a thread, one piece while the next is received."""

    def __init__(self, target: int, wanted: int, report: Callable[[int], None]) -> None:
        self._target = target
        self.wanted = wanted
        self.size = 0
        """Bytes that are in the file."""
        self._report = report
        self._hashed = hashlib.sha256()
        self._waiting: list[bytes] = []
        self._waiting_size = 0
        self._writing: asyncio.Future[None] | None = None

    async def take(self, chunk: bytes) -> None:
        """Raises Failure beyond the size that was told, ServerError when the disk does not take it."""
        self._waiting.append(chunk)
        self._waiting_size += len(chunk)
        if self.size + self._waiting_size > self.wanted:
            raise Failure(f"a blob is larger than the {self.wanted} bytes that its manifest says", 500)
        if self._waiting_size >= _CHUNK:
            await self._settle()
            self._begin()

    def _begin(self) -> None:
        pieces, size = self._waiting, self._waiting_size
        self._waiting, self._waiting_size = [], 0
        self.size += size
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, pieces, self.size))

    def _write(self, pieces: list[bytes], size: int) -> None:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[os.write(self._target, view) :]
        self._report(size)
        for piece in pieces:
            self._hashed.update(piece)

    async def _settle(self) -> None:
        writing, self._writing = self._writing, None
        if writing is None:
            return
        cancelled = False
        while not writing.done():
            try:
                await asyncio.wait([writing])
            except asyncio.CancelledError:  # the thread cannot be stopped, and the descriptor is the caller's
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        error = writing.exception()
        if isinstance(error, OSError):
            raise ServerError(f"writing a blob: {error.strerror}") from error
        writing.result()

    async def flush(self) -> None:
        """Have in the file what was taken."""
        await self._settle()
        if self._waiting and self.size + self._waiting_size <= self.wanted:
            self._begin()
            await self._settle()

    async def restart(self) -> None:
        """From the beginning."""
        await self._settle()
        self._report(0)
        await uninterrupted(asyncio.to_thread(os.ftruncate, self._target, 0))
        os.lseek(self._target, 0, os.SEEK_SET)
        self.size = 0
        self._hashed = hashlib.sha256()

    async def digest(self) -> str:
        await self.flush()
        return self._hashed.hexdigest()


__all__ = ["MAX_MANIFEST", "Failure", "Fetched", "Registries", "Repository", "decode", "persist"]
