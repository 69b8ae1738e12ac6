"""Certificates for this node: asked for with a join token, or renewed.

Keys are made by a short-lived child (`engine.manager.keys`), because the daemon never loads the
library for it. A request under way keeps its key in node.key.new, so its repetition, also by the
next daemon, asks for the same node again.

Owns:    nothing: `state.Directory` has the files.
Threads: the event loop's.
Raises:  InvalidParameter for a token or root that managers or this side refuse; ServerError when
         no manager can be reached; what managers refuse with.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import engine
from engine.cluster import client
from engine.cluster.state import CERTIFICATE, KEY, Directory
from engine.errors import EngineError, Forbidden, InvalidParameter, ServerError, reason
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import FetchRoot, Join, Joined, Renew, Renewed
from engine.system.threads import uninterrupted

ANSWER_LIMIT = 20.0
"""Seconds that a manager may take to sign: it may wait for quorum."""
KEYS_LIMIT = 20.0
NECESSARY = "A valid join token is necessary to join this cluster"
_TOKEN = re.compile(r"SWMTKN-1-([0-9a-z]{50})-([0-9a-z]{25})", re.ASCII)

_log = logging.getLogger(__name__)


class Unreachable(ServerError):
    """No manager answers: trying again may help."""


async def keys(question: dict[str, str]) -> dict[str, Any]:
    """The answer of the child that handles private keys. Raises ServerError."""
    arguments = [sys.executable, "-P", "-m", "engine.manager.keys"]
    environment = {"PYTHONPATH": str(Path(engine.__file__ or "").parent.parent)}
    pipe = asyncio.subprocess.PIPE
    try:
        child = await asyncio.create_subprocess_exec(
            *arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=False
        )
    except OSError as error:
        raise ServerError(f"the program for keys cannot be started: {reason(error)}") from error
    try:
        async with asyncio.timeout(KEYS_LIMIT):
            out, words = await child.communicate(msgspec.json.encode(question))
    except BaseException:
        child.kill()
        await child.wait()
        raise
    try:
        answer: dict[str, Any] = msgspec.json.decode(out)
    except msgspec.MsgspecError:
        last = words.decode(errors="replace").strip().splitlines()[-1:] or ["no reason"]
        raise ServerError(f"the program for keys has failed: {last[0]}") from None
    if "error" in answer:
        raise ServerError(f"the program for keys has failed: {answer['error']}")
    return answer


async def request(directory: Directory) -> tuple[str, str]:
    """A private key and a certificate signing request for it. The key is kept until `install`."""
    kept = directory.kept_request()
    if kept is None:
        made = await keys({"verb": "new"})
        kept = made["key"], made["csr"]
        await uninterrupted(asyncio.to_thread(directory.keep_request, *kept))
    return kept


def check_token(token: str) -> str:
    """The digest of the root certificate in a token. Raises InvalidParameter."""
    found = _TOKEN.fullmatch(token)
    if found is None:
        raise InvalidParameter(f"JoinToken: {NECESSARY}")
    return found[1]


def digest(root: str) -> str:
    """SHA-256 of a root certificate's PEM, as it is in tokens."""
    number = int.from_bytes(hashlib.sha256(root.encode()).digest(), "big")
    digits = []
    for _ in range(50):
        number, digit = divmod(number, 36)
        digits.append("0123456789abcdefghijklmnopqrstuvwxyz"[digit])
    return "".join(reversed(digits))


async def fetch_root(address: str, token: str) -> str:
    """The root certificates of the swarm whose manager is at `address`, which the token pins.

    Raises InvalidParameter when it is another swarm's.
    """
    wanted = check_token(token)
    async with client.opened(await client.dial(address, client.context(""))) as connection:
        answer = await connection.ask(FetchRoot(), timeout=ANSWER_LIMIT)
    root: str = answer.body.decode(errors="replace")
    if digest(root) != wanted:
        raise InvalidParameter(f"remote CA does not match fingerprint: the token is not one of the swarm at {address}")
    return root


async def join(
    directory: Directory, remotes: Sequence[str], token: str, *, advertise: str, availability: str
) -> tuple[Joined, str, str]:
    """A certificate for a new node, from the first of `remotes` that answers; with its key and the
    address that answered.

    Raises Unreachable when none does.
    """
    key, csr = await request(directory)
    troubles = []
    for address in remotes:
        try:
            root = await fetch_root(address, token)
            async with client.opened(await client.dial(address, client.context(root))) as connection:
                message = Join(csr=csr, token=token, advertise=advertise, availability=availability)
                answer: Joined = await connection.ask(message, timeout=ANSWER_LIMIT)
                return answer, key, address
        except InvalidParameter:
            raise
        except (EngineError, OSError, TimeoutError) as error:
            troubles.append(f"{address}: {_words(error)}")
    raise Unreachable("no manager could be asked to join: " + "; ".join(troubles))


async def renew(
    directory: Directory, own: Connection | None, managers: Sequence[str], *, advertise: str
) -> tuple[Renewed, str]:
    """A new certificate in the role that the swarm wishes, from the first manager that answers;
    with its key.

    `own`: the connection to the own manager's process, which is asked first. `managers`: host:port
    of others. Raises Unreachable when none answers, Forbidden for a node that was removed, and what
    the last one refuses with.
    """
    key, csr = await request(directory)
    troubles = []
    refusal: EngineError | None = None
    if own is not None:
        try:
            return await own.ask(Renew(csr=csr, advertise=advertise), timeout=ANSWER_LIMIT), key
        except (EngineError, OSError, TimeoutError) as error:
            troubles.append(f"the own manager: {_words(error)}")
    expired = (certificate := directory.certificate()) is None or certificate.ends <= time.time()
    renewal = await _renewal(directory, csr, expired, advertise)
    for address in managers:
        try:
            async with client.opened(await _dial(address, directory, expired)) as connection:
                return await connection.ask(renewal, timeout=ANSWER_LIMIT), key
        except Forbidden:
            raise
        except EngineError as error:
            refusal = error
        except (OSError, TimeoutError) as error:
            troubles.append(f"{address}: {_words(error)}")
    if refusal is not None:
        raise refusal
    raise Unreachable("no manager could be asked to renew the certificate: " + ("; ".join(troubles) or "none is known"))


async def _dial(address: str, directory: Directory, expired: bool) -> Connection:
    if expired:  # TLS would refuse it
        return await client.dial(address, client.context(directory.roots()))
    tls = client.context(directory.roots(), directory.path / CERTIFICATE, directory.path / KEY)
    return await client.dial(address, tls)


async def _renewal(directory: Directory, csr: str, expired: bool, advertise: str) -> Renew:
    if not expired:
        return Renew(csr=csr, advertise=advertise)
    signed = await keys({"verb": "sign", "key": directory.key(), "data": csr})
    signature = base64.b64decode(signed["signature"])
    return Renew(csr=csr, certificate=directory.certificate_text(), signature=signature, advertise=advertise)


def _words(error: Exception) -> str:
    if isinstance(error, EngineError):
        return error.message
    if isinstance(error, TimeoutError) and not error.args:
        return "no answer"
    return reason(error) if isinstance(error, OSError) else str(error)
