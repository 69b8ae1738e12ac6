"""Details of a failure, in the form of BuildKit's errors: where in the Dockerfile it is, of which
the client prints the lines around, or what the frontend does not have.

Pure. Source: BuildKit's `solver/errdefs` (Source, Subrequest, FrontendCap, Vertex),
google.rpc.Status and google.protobuf.Any.
"""

from __future__ import annotations

import base64
from typing import Annotated

import msgspec

from engine.errors import ServerError, Unimplemented
from engine.rpc import grpc, protobuf

LARGEST = 32 << 10
"""Bytes of a Dockerfile for a trailer: encoded twice, it is smaller than 64 KiB. BuildKit's clients
take 16 MiB, others less.
"""

_MOST = 4
"""Places that are shown. Each has the whole file."""

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
    """Places in a Dockerfile, the first and last line of each from 1, and the file itself."""

    filename: str
    content: bytes
    places: tuple[tuple[int, int], ...]


class Named(msgspec.Struct, frozen=True):
    """A request or capability that the frontend does not have.

    `kind`: `Subrequest`, `FrontendCap`.
    """

    kind: str
    name: str


class Placed(grpc.Detailed, ServerError):
    """A failure with its places in the Dockerfile."""

    def __init__(self, message: str, detail: Lines) -> None:
        super().__init__(message)
        self.detail = detail

    def details(self, status: int, message: str) -> str:
        return encoded(status, message, self.detail)


class Unsupported(grpc.Detailed, Unimplemented):
    """A part of the frontend that this engine does not have. Clients do without it."""

    def __init__(self, message: str, detail: Named) -> None:
        super().__init__(message)
        self.detail = detail

    def details(self, status: int, message: str) -> str:
        return encoded(status, message, self.detail)


def encoded(code: int, message: str, detail: Lines | Named) -> str:
    """The value of the trailer `grpc-status-details-bin`; empty for a file that does not fit."""
    if isinstance(detail, Lines) and len(detail.content) * len(detail.places[:_MOST]) > LARGEST:
        return ""
    return base64.b64encode(status(code, message, detail)).decode().rstrip("=")


def status(code: int, message: str, detail: Lines | Named | None = None, vertex: str = "") -> bytes:
    """A google.rpc.Status with details. `vertex`: the digest of the one that has failed."""
    found = []
    if isinstance(detail, Named):
        found.append(_any(detail.kind, {"name": detail.name}))
    elif detail is not None and len(detail.content) <= LARGEST:
        info = {
            "filename": detail.filename,
            "data": base64.b64encode(detail.content).decode(),
            "language": "Dockerfile",
        }
        for first, last in detail.places[:_MOST]:
            ranges = [{"start": {"line": first}, "end": {"line": last}}]
            found.append(_any("Source", {"info": info, "ranges": ranges}))
    if vertex:
        found.append(_any("Vertex", {"digest": vertex}))
    return protobuf.encode(_Status(code=code, message=message, details=found))


def _any(kind: str, value: object) -> _Any:
    return _Any(type_url=f"{_ERRORS}{kind}+json", value=msgspec.json.encode(value))
