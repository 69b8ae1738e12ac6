"""Amazon CloudWatch Logs: its requests, credentials and answers.

https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/. Used by the shipper, and by
the daemon to create a container's stream at its start (`probe`). botocore finds the credentials,
and refreshes them, and signs; requests are sent by `web.py`. Not here: batches of events
(`shipper/senders/awslogs.py`).

botocore is an optional package (the extra `awslogs`), 9 MB in memory, and is loaded by `open`.

Owns:    the connections of a client, and its credentials.
Threads: the event loop's. All of botocore that reads files or asks a server runs in others. A
         signature takes 0.1 ms, and 0.6 ms per megabyte.
Raises:  OSError (with the reason in `strerror`), ServiceError, ssl.SSLError, TimeoutError.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from engine.logs import dial, web
from engine.logs.deliveries import CREDENTIALS_HOST, Awslogs, Tls

ALREADY_EXISTS = "ResourceAlreadyExistsException"
NOT_FOUND = "ResourceNotFoundException"
INVALID_PARAMETER = "InvalidParameterException"
INVALID_TOKEN = "InvalidSequenceTokenException"
ALREADY_ACCEPTED = "DataAlreadyAcceptedException"

EXPIRED = frozenset(("ExpiredToken", "ExpiredTokenException", "RequestExpired"))
UNAUTHENTIC = EXPIRED | frozenset((
    "IncompleteSignature", "InvalidClientTokenId", "InvalidSignatureException", "MissingAuthenticationTokenException",
    "SignatureDoesNotMatch", "UnrecognizedClientException",
))  # fmt: skip
"""Errors of all requests with these credentials, not of a stream."""
THROTTLED = frozenset((
    "LimitExceededException", "OperationAbortedException", "RequestLimitExceeded", "Throttling",
    "ThrottlingException", "TooManyRequestsException",
))  # fmt: skip

_TARGET = "Logs_20140328"
_SUFFIXES = {
    "cn-": "amazonaws.com.cn",
    "us-iso-": "c2s.ic.gov",
    "us-isob-": "sc2s.sgov.gov",
    "us-isof-": "csp.hci.ic.gov",
    "eu-isoe-": "cloud.adc-e.uk",
    "eusc-": "amazonaws.eu",
}
"""Domains of partitions other than the commercial one, by the beginning of the region."""


class ServiceError(OSError):
    """The service has refused a request. `code`: the name of the error; empty if the answer has
    none, as those of other servers. `details`: the members of the answer."""

    def __init__(self, status: int, code: str, message: str, details: dict[str, Any]) -> None:
        super().__init__(errno.EPROTO, ": ".join(filter(None, (code, message))))
        self.status = status
        self.code = code
        self.details = details


class Identity(NamedTuple):
    """What signs requests. Both are botocore's."""

    credentials: Any
    region: str


class CloudWatchLogs:
    """Requests to the service of one region."""

    def __init__(self, target: Awslogs) -> None:
        self.target = target
        self._client: web.Client | None = None
        self._identity: Identity | None = None
        self._url = ""
        self._proxy: str | None = None
        self._refreshing = asyncio.Lock()
        self._headers = {"Content-Type": "application/x-amz-json-1.1"}
        if target.format:
            self._headers["x-amzn-logs-format"] = target.format

    async def open(self) -> None:
        """Find region and credentials; connections are made as they are needed."""
        loop = asyncio.get_running_loop()
        if self._identity is None:
            self._identity = await loop.run_in_executor(None, identity, self.target)
        self._url = endpoint(self.target, self._identity.region)
        self._proxy = await loop.run_in_executor(None, _proxy, self._url)
        context = None
        if self._url.startswith("https:"):
            tls = Tls(ca=os.environ.get("AWS_CA_BUNDLE", ""))
            context = await loop.run_in_executor(None, dial.context, tls)
        self._client = web.Client(context)

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def create(self, group: str, stream: str, *, with_group: bool) -> None:
        """Create a stream. It may exist. `with_group`: its group too, if it does not exist."""
        names = {"logGroupName": group, "logStreamName": stream}
        try:
            await self._create("stream", names)
        except ServiceError as error:
            if error.code != NOT_FOUND or not with_group:
                raise
            await self._create("group", {"logGroupName": group})
            await self._create("stream", names)

    async def _create(self, kind: str, names: dict[str, str]) -> None:
        try:
            await self.call(f"CreateLog{kind.title()}", msgspec.json.encode(names))
        except (OSError, TimeoutError) as error:
            if isinstance(error, ServiceError) and error.code == ALREADY_EXISTS:
                return
            error.strerror = f"failed to create Cloudwatch log {kind}: {error.strerror or error}"
            raise

    async def call(self, operation: str, body: bytes) -> dict[str, Any]:
        """The service's answer.

        With expired credentials the request is repeated once with others.
        """
        try:
            return await self._call(operation, body)
        except ServiceError as error:
            if error.code in UNAUTHENTIC:
                self._identity = None  # what `_signed` finds may be new
            if error.code not in EXPIRED:
                raise
        return await self._call(operation, body)

    async def _call(self, operation: str, body: bytes) -> dict[str, Any]:
        assert self._client is not None
        headers = await self._signed(self._headers | {"X-Amz-Target": f"{_TARGET}.{operation}"}, body)
        answer = await self._client.request("POST", self._url, headers, body, proxy=self._proxy)
        try:
            found = msgspec.json.decode(answer.body, type=dict[str, Any]) if answer.body else {}
        except msgspec.MsgspecError:
            found = {}
        if answer.status == 200:
            return found
        # "com.amazonaws.…#Name", or "Name:http://…" in the header
        kind = str(found.get("__type") or answer.headers.get("x-amzn-ErrorType") or "")
        kind = kind.rpartition("#")[2].partition(":")[0]
        message = str(found.get("message") or found.get("Message") or "")
        # Further lines of a wrong signature's message have the request's headers, among them the
        # security token.
        message = (message if kind else answer.line).partition("\n")[0][:300]
        raise ServiceError(answer.status, kind, message, found)

    async def _signed(self, headers: dict[str, str], body: bytes) -> dict[str, str]:
        loop = asyncio.get_running_loop()
        async with self._refreshing:
            if self._identity is None:
                self._identity = await loop.run_in_executor(None, identity, self.target)
            credentials, region = self._identity
            if _may_block(credentials):
                frozen = await loop.run_in_executor(None, _frozen, credentials)
            else:
                frozen = credentials.get_frozen_credentials()
        request = _module("botocore.awsrequest").AWSRequest("POST", self._url, headers=headers, data=body)
        _module("botocore.auth").SigV4Auth(frozen, "logs", region).add_auth(request)
        return dict(request.headers.items())


def endpoint(target: Awslogs, region: str) -> str:
    if target.endpoint:
        parts = urlsplit(target.endpoint)
        return parts._replace(path=parts.path or "/").geturl()
    suffix = next((domain for start, domain in _SUFFIXES.items() if region.startswith(start)), "amazonaws.com")
    return f"https://logs.{region}.{suffix}/"


def identity(target: Awslogs) -> Identity:
    """Region and credentials. Blocking: reads files, and may ask servers of the host's provider.

    The region is the target's, or that of the instance. Credentials are those of
    `awslogs-credentials-endpoint`, or the first of AWS's usual chain: environment, shared files,
    the endpoint of a container, the instance.
    """
    try:
        session = _module("botocore.session").get_session()
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        text = f"awslogs needs the Python package {name}: pip install engined[awslogs]"
        raise OSError(errno.ENOPKG, text) from error
    try:
        region = target.region or _module("botocore.utils").IMDSRegionProvider(session).provide()
        if not region:
            raise OSError(errno.ENOENT, "Cannot determine region for awslogs driver")
        credentials = _of_container(target) if target.credentials_endpoint else session.get_credentials()
    except OSError:
        raise
    except Exception as error:  # botocore's errors have no common base
        raise OSError(errno.EIO, f"no AWS credentials: {error}") from error
    if credentials is None:
        raise OSError(errno.ENOENT, "no AWS credentials: neither environment, files nor instance have any")
    return Identity(credentials, region)


def _of_container(target: Awslogs) -> Any:
    """Credentials from `awslogs-credentials-endpoint`. Its server is that of
    AWS_CONTAINER_CREDENTIALS_FULL_URI, if that is set."""
    server = CREDENTIALS_HOST
    if given := os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        parts = urlsplit(given)
        server = f"{parts.scheme}://{parts.netloc}"
    names = ("AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = server + target.credentials_endpoint
    return _module("botocore.credentials").ContainerProvider(environment).load()


def _may_block(credentials: Any) -> bool:
    """True if the credentials must, or should, be refreshed, which asks a server."""
    needed = getattr(credentials, "refresh_needed", None)
    return needed is not None and bool(needed())


def _frozen(credentials: Any) -> Any:
    try:
        return credentials.get_frozen_credentials()
    except Exception as error:  # botocore's errors have no common base
        raise OSError(errno.EIO, f"AWS credentials cannot be refreshed: {error}") from error


def _proxy(url: str) -> str | None:
    """The proxy for a URL by HTTP_PROXY, HTTPS_PROXY and NO_PROXY, as for other AWS clients."""
    found: dict[str, str] = _module("botocore.utils").get_environ_proxies(url)
    proxy = found.get(urlsplit(url).scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def _module(name: str) -> Any:
    """A module of botocore. It is loaded when it is needed, in the thread of `identity`."""
    return importlib.import_module(name)


async def probe(target: Awslogs) -> None:
    """Create the target's stream, and its group if the options allow, as Docker does at a
    container's start in blocking mode. Nothing is created with `awslogs-create-stream=false`, but
    region and credentials are looked for."""
    service = CloudWatchLogs(target)
    try:
        await service.open()
        if target.create_stream:
            await service.create(target.group, target.stream, with_group=target.create_group)
    finally:
        await service.close()
