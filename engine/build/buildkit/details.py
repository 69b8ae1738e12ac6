"""Details of a failure, in the form of BuildKit's errors: where in the Dockerfile it is, of which
the client prints the lines around, or what the frontend does not have.

Pure. Source: BuildKit's `solver/errdefs` (Source, Subrequest, FrontendCap), google.rpc.Status and
google.protobuf.Any.
"""

from __future__ import annotations

import base64
from typing import Annotated

import msgspec

from engine.build.buildkit import protobuf

LARGEST = 32 << 10
"""Bytes of a Dockerfile for a trailer: encoded twice, it is smaller than 64 KiB. BuildKit's clients
take 16 MiB, others less.
"""

_ERRORS = "github.com/moby/buildkit/errdefs."


class _Any(msgspec.Struct):
    type_url: Annotated[str, 1] = ""
    value: Annotated[bytes, 2] = b""


class _Status(msgspec.Struct):
    """google.rpc.Status"""

    code: Annotated[int, 1] = 0
    message: Annotated[str, 2] = ""
    details: Annotated[list[_Any], 3] = []


class Lines(msgspec.Struct, frozen=True):
    """Lines of a Dockerfile, first and last from 1, and the file itself."""

    filename: str
    content: bytes
    first: int
    last: int


class Named(msgspec.Struct, frozen=True):
    """A request or capability that the frontend does not have.

    `kind`: `Subrequest`, `FrontendCap`.
    """

    kind: str
    name: str


def encoded(code: int, message: str, detail: Lines | Named) -> str:
    """The value of the trailer `grpc-status-details-bin`; empty for a file that does not fit."""
    if isinstance(detail, Named):
        found = _Any(type_url=f"{_ERRORS}{detail.kind}+json", value=msgspec.json.encode({"name": detail.name}))
    elif len(detail.content) > LARGEST:
        return ""
    else:
        info = {
            "filename": detail.filename,
            "data": base64.b64encode(detail.content).decode(),
            "language": "Dockerfile",
        }
        place = {"info": info, "ranges": [{"start": {"line": detail.first}, "end": {"line": detail.last}}]}
        found = _Any(type_url=f"{_ERRORS}Source+json", value=msgspec.json.encode(place))
    status = protobuf.encode(_Status(code=code, message=message, details=[found]))
    return base64.b64encode(status).decode().rstrip("=")
