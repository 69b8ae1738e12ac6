"""The check at a container's start that its log target can be reached, as far as Docker's drivers
check it: they connect to syslog over TCP and Unix sockets, to Fluentd and to GELF over TCP, resolve
the names of UDP targets, and ask Splunk and CloudWatch.

Not here: delivery, which the shipper does on connections of its own.

Owns:    nothing.
Threads: the event loop's.
Raises:  OSError, ssl.SSLError or TimeoutError, for which `reason` has the words.
"""

from __future__ import annotations

import asyncio
import importlib
import ssl

from engine.logs import dial
from engine.logs.deliveries import JOURNAL, Awslogs, Fluentd, Gelf, Journald, Remote, Splunk, Syslog, Tls

FAILURES = (OSError, ssl.SSLError, TimeoutError)


async def check(target: Remote) -> None:
    """Returns when the target has answered, or is not to be asked at a start."""
    match target:
        case Syslog(scheme="udp") | Gelf(scheme="udp"):
            (await dial.udp(target.host, target.port)).close()
        case Syslog(scheme="unixgram"):
            dial.datagram(target.path).close()
        case Syslog(scheme=""):
            dial.local_syslog().close()
        case Syslog(scheme="unix"):
            await _stream(target.path)
        case Syslog():
            await _tcp(target.host, target.port, target.tls)
        case Gelf():
            await _tcp(target.host, target.port)
        case Fluentd(async_=True):
            pass
        case Fluentd(scheme="unix"):
            await _stream(target.path)
        case Fluentd():
            await _tcp(target.host, target.port, Tls() if target.scheme == "tls" else None)
        case Journald():
            dial.datagram(JOURNAL).close()
        case Splunk(verify_connection=True):
            await _probe("collector", target)
        case Awslogs():
            await _probe("cloudwatch", target)


def reason(error: BaseException) -> str:
    """Why a target cannot be reached."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"tls: failed to verify certificate: {error.verify_message}"
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}"
    return str(error) or "timed out"


class _Caller(asyncio.Protocol):
    """Connects, and closes at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


async def _tcp(host: str, port: int, tls: Tls | None = None) -> None:
    (await dial.tcp(_Caller, host, port, tls)).transport.close()


async def _probe(name: str, target: Remote) -> None:
    """Ask by a module that is large, and loaded in a thread when the first target needs it."""
    module = await asyncio.to_thread(importlib.import_module, f"engine.logs.{name}")
    await module.probe(target)


async def _stream(path: str) -> None:
    (await dial.stream(_Caller, path)).transport.close()
