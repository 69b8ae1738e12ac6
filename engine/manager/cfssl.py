"""External CAs: sign requests of cfssl's HTTP API (`/api/v1/cfssl/sign`, `info`).

The manager shows its own certificate when the server asks for one. A server is trusted by the
swarm's roots, the CA's own certificate (CACert), and the host's. Every certificate that comes back
is checked: issued by the swarm's root, for the key and the names that were asked for.

Threads: requests run in threads of the pool, because http.client blocks.
Raises:  ServerError when no external CA has signed, with the reason of each; InvalidParameter for a
         URL that is none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from engine.errors import EngineError, InvalidParameter, ServerError, words
from engine.manager.certificates import (
    MANAGER_NAME,
    Root,
    Subject,
    certificates,
    issued_by,
    names,
    normal,
    request_key,
    subject_of,
)
from engine.swarm_session.states import Role
from engine.system.tls import verifying_context
from engine.wire.swarm import ExternalCA

TIMEOUT = 10.0
LONGEST = 1 << 20
"""Bytes of the longest answer."""

own_files: tuple[Path, Path] | None = None
"""Certificate and key of this manager, shown to servers that ask."""


async def sign(
    servers: Sequence[ExternalCA], root: Root, csr: str, subject: Subject, address: str, trusted: str
) -> str:
    """A certificate for the key of `csr`, PEM, from the first of `servers` that gives a fit one."""
    wanted = names(subject, address)
    document = {
        "certificate_request": csr,
        "hosts": [str(one.value) for one in wanted],
        "subject": {"CN": subject.node, "names": [{"O": subject.swarm, "OU": f"swarm-{subject.role.label}"}]},
    }
    return await _first(servers, document, trusted, lambda found: _check(found, root, csr, subject, wanted))


async def cross_sign(servers: Sequence[ExternalCA], signer: Root, root: Root, trusted: str) -> str:
    """The certificate of the new `root`, signed by the present one of an external CA, which needs a
    profile `CA` for it. cfssl takes the key out of the self-signed certificate.
    """
    document: dict[str, Any] = {"certificate_request": root.pem, "profile": "CA", "hosts": [], "subject": None}

    def check(found: x509.Certificate) -> None:
        if not issued_by(found, signer.certificate):
            raise ServerError("the certificate was not issued by the swarm's present root")
        if found.subject != root.certificate.subject or found.public_key() != root.certificate.public_key():
            raise ServerError("the certificate is not that of the new root")
        try:
            fit = found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        except (x509.ExtensionNotFound, ValueError):
            fit = False
        if not fit:
            raise ServerError("the certificate is not that of a CA")

    return await _first(servers, document, trusted, check)


async def root_of(server: ExternalCA) -> str:
    """The root that an external CA tells of itself, for a swarm that is founded without CACert."""
    url = server.url
    base = url[: -len("sign")] if url.endswith("/sign") else url.rstrip("/") + "/"
    try:
        async with asyncio.timeout(2 * TIMEOUT):
            answer = await asyncio.to_thread(_post, base + "info", {"label": server.options.get("label", "")}, "")
        return normal(certificates(str(answer.get("certificate", "")))[0])
    except (EngineError, OSError, ValueError, TimeoutError) as error:
        raise InvalidParameter(
            f"ExternalCAs: {url} does not tell its root: {_text(error)}. Give it as CACert"
        ) from error


async def _first(servers: Sequence[ExternalCA], document: dict[str, Any], trusted: str, check: Any) -> str:
    failures = []
    for server in servers:
        options = {name: value for name, value in server.options.items() if name in ("profile", "label")}
        try:
            async with asyncio.timeout(2 * TIMEOUT):
                answer = await asyncio.to_thread(_post, server.url, options | document, trusted + server.ca_cert)
            found = certificates(str(answer.get("certificate", "")))[0]
            check(found)
            return normal(found)
        except (EngineError, OSError, ValueError, TimeoutError) as error:
            failures.append(f"{server.url}: {_text(error)}")
    raise ServerError(f"no external CA has signed the certificate: {'; '.join(failures) or 'none is set'}")


def _post(url: str, document: dict[str, Any], trusted: str) -> dict[str, Any]:
    """The `result` of a cfssl answer."""
    import http.client  # a megabyte that few managers need

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidParameter(f"ExternalCAs.URL: {url}: not an http or https URL")
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = verifying_context()
        if trusted:
            context.load_verify_locations(cadata=trusted)
        if own_files is not None:
            context.load_cert_chain(*own_files)
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=TIMEOUT, context=context)
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT)
    try:
        path = parts.path or "/"
        target = f"{path}?{parts.query}" if parts.query else path
        connection.request("POST", target, json.dumps(document), {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = response.read(LONGEST + 1)
    except http.client.HTTPException as error:
        raise ServerError("the answer is not HTTP") from error
    finally:
        connection.close()
    if len(body) > LONGEST:
        raise ServerError(f"the answer is longer than {LONGEST} bytes")
    try:
        answer = json.loads(body)
    except ValueError:
        raise ServerError(f"status {response.status}, and no JSON") from None
    if not isinstance(answer, dict) or not answer.get("success") or not isinstance(answer.get("result"), dict):
        errors = answer.get("errors") if isinstance(answer, dict) else None
        raise ServerError(f"status {response.status}: {str(errors or 'refused')[:300]}")
    result: dict[str, Any] = answer["result"]
    return result


def _check(found: x509.Certificate, root: Root, csr: str, subject: Subject, wanted: Sequence[x509.GeneralName]) -> None:
    """Raises when the certificate is not what was asked for."""
    if not issued_by(found, root.certificate):
        raise ServerError("the certificate was not issued by the swarm's root")
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if found.public_key().public_bytes(*form) != request_key(csr).public_bytes(*form):
        raise ServerError("the certificate is not that of the requested key")
    if subject_of(found) != subject:
        raise ServerError("the certificate has another subject than requested")
    try:
        present = set(found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (x509.ExtensionNotFound, ValueError):
        present = set()
    if subject.role is not Role.MANAGER and x509.DNSName(MANAGER_NAME) in present:
        raise ServerError(f"the certificate of a worker has the name {MANAGER_NAME}")
    missing = [str(one.value) for one in wanted if one not in present]
    if missing:
        raise ServerError(f"the certificate lacks the name {missing[0]}")


def _text(error: Exception) -> str:
    return words(error)
