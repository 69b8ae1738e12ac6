"""Requests to the swarm's manager, as the handlers of its objects make them: parameters and bodies
on the way there, and JSON on the way back.

The manager's process validates, and answers with the newest version's document. So its answer is
passed on as it is, unless the client's version differs.

Not here: the connection (`engine/cluster`), the verbs (`engine/manager/control`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import encode
from engine.common import booleans
from engine.common.turns import Turn
from engine.errors import InvalidParameter
from engine.http.messages import Query, Reply, Request

T = TypeVar("T")

_UINT64 = 1 << 64

Amend = Callable[[dict[str, Any]], None]
"""Changes the JSON object of a body in place. Field names are spelled as the struct spells them."""


async def ask(
    engine: Engine,
    request: Request,
    verb: str,
    of: type | None = None,
    *,
    query: dict[str, Any] | None = None,
    body: Any = None,
    many: bool = False,
) -> Reply:
    """One verb about the object that the path names, if any. `of`: the struct of the answer, or of
    its elements with `many`; None when the answer has no body.
    """
    name = request.parameters.get("id", "")
    sent = b"" if body is None else msgspec.json.encode(body)
    done = await engine.cluster.call(verb, name, query, sent)
    headers = warned(done.warning)
    if of is None:
        return Reply(request.status, headers=headers)
    shown = done.body
    if not request.version.shape(of).newest:
        shown = await _shaped_list(request, shown, of) if many else encode(_decoder(of)(shown), request, of)
    return Reply(request.status, shown + b"\n", headers=headers)


async def _shaped_list(request: Request, body: bytes, of: type) -> bytes:
    """A list of the newest version's documents in the shape of the request's version, made in
    parts, between which other requests are served: a swarm may have 100,000 tasks.
    """
    decode, elements = _decoder(of), _elements(body)
    parts = []
    turn = Turn()
    for begin in range(0, len(elements), _AT_ONCE):
        await turn.over()
        parts.append(encode([decode(each) for each in elements[begin : begin + _AT_ONCE]], request, of)[1:-1])
    return b"[%b]" % b",".join(parts)


_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_AT_ONCE = 20
"""Objects that are decoded and encoded at a time: less than a millisecond's work."""


@functools.cache
def _decoder(of: type) -> Callable[[Any], Any]:
    return msgspec.json.Decoder(of).decode


def warned(reason: str) -> tuple[tuple[str, str], ...]:
    """The header that marks an answer as possibly old (RFC 7234, 5.5.1)."""
    if not reason:
        return ()
    text = reason.encode("ascii", "replace").decode().replace("\\", "").replace('"', "'")
    return (("Warning", f'110 engined "{" ".join(text.split())}"'),)


# --- parameters -----------------------------------------------------------------------------------


def version(query: Query, of: str) -> int:
    """The version of the object that an update changes. Raises InvalidParameter, in Docker's words,
    when it is missing or is not a number.
    """
    text = query.get("version", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < _UINT64):
        raise InvalidParameter(f"invalid {of} version '{text[:100]}': an unsigned integer is required")
    return int(text)


def flag(query: Query, *names: str) -> bool:
    """A boolean as Go's ParseBool reads it, under the first of these names that is given."""
    for name in names:
        text = query.get(name, "")
        if text:
            if text not in booleans.WORDS:
                raise InvalidParameter(f"invalid value for {name}: {text[:100]}")
            return booleans.WORDS[text]
    return False


async def body(request: Request, of: type[T], amend: Amend | None = None) -> T:
    """The body as a struct of the newest version, read as Go reads it. `amend` sees it before the
    changes for the request's version do.
    """
    content = await request.body.read(parameters.BODY_LIMIT)
    if not content.strip():
        raise InvalidParameter("request body is empty: a JSON object is expected")
    parameters.check_json(request)
    older = request.version.upgrade(of)

    def upgrade(shape: dict[str, Any]) -> None:
        if amend is not None:
            amend(shape)
        if older is not None:
            older(shape)

    return parameters.decode_json(content, of, upgrade, exact=request.authorization is not None)


def renamed(shape: Any, old: str, new: str) -> None:
    """Another spelling of a field of an object. The usual one counts when both are given."""
    if isinstance(shape, dict) and old in shape:
        value = shape.pop(old)
        if value is not None:
            shape.setdefault(new, value)


def standard_base64(shape: dict[str, Any]) -> None:
    """Data of a secret or config, which the documentation has in the URL-safe alphabet, and clients
    send in the usual one.
    """
    data = shape.get("Data")
    if isinstance(data, str):
        text = "".join(data.split()).replace("-", "+").replace("_", "/")
        shape["Data"] = text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4)
