"""The protobuf messages of the services that a client offers in its session, with the fields that
this engine uses. A field's number is in its annotation.

Sources: moby/buildkit session/*/*.proto, tonistiigi/fsutil types/*.proto.
Not here: the messages of BuildKit's own API (`control.py`), encoding (`rpc/protobuf.py`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class ReadContentRequest(msgspec.Struct):
    """containerd.services.content.v1"""

    digest: Annotated[str, 1] = ""


class ReadContentResponse(msgspec.Struct):
    offset: Annotated[int, 1] = 0
    data: Annotated[bytes, 2] = b""


STAT_CONTENT, WRITE_PIECE, COMMIT_CONTENT = range(3)
"""Actions of a WriteContentRequest."""


class WriteContentRequest(msgspec.Struct):
    """containerd.services.content.v1"""

    action: Annotated[int, 1] = STAT_CONTENT
    ref: Annotated[str, 2] = ""
    """Names the transfer."""
    total: Annotated[int, 3] = 0
    expected: Annotated[str, 4] = ""
    offset: Annotated[int, 5] = 0
    data: Annotated[bytes, 6] = b""


class ContentInfoResponse(msgspec.Struct):
    """containerd.services.content.v1; the fields do not matter."""


class GetSecretRequest(msgspec.Struct):
    """moby.buildkit.secrets.v1"""

    id: Annotated[str, 1] = ""


class GetSecretResponse(msgspec.Struct):
    data: Annotated[bytes, 1] = b""


class CheckAgentRequest(msgspec.Struct):
    """moby.sshforward.v1"""

    id: Annotated[str, 1] = ""


class CheckAgentResponse(msgspec.Struct):
    pass


class BytesMessage(msgspec.Struct):
    """A part of a byte stream."""

    data: Annotated[bytes, 1] = b""


class CredentialsRequest(msgspec.Struct):
    """moby.filesync.v1.Auth"""

    host: Annotated[str, 1] = ""


class CredentialsResponse(msgspec.Struct):
    username: Annotated[str, 1] = ""
    secret: Annotated[str, 2] = ""
    """A password, or an identity token when there is no user name."""

    def __repr__(self) -> str:
        return f"CredentialsResponse(username={self.username!r}, …)"


class Stat(msgspec.Struct):
    """fsutil.types: one file. `mode` is Go's os.FileMode."""

    path: Annotated[str, 1] = ""
    mode: Annotated[int, 2] = 0
    uid: Annotated[int, 3] = 0
    gid: Annotated[int, 4] = 0
    size: Annotated[int, 5] = 0
    modified: Annotated[int, 6] = 0
    """Nanoseconds since the epoch."""
    target: Annotated[str, 7] = ""
    """Target of a symbolic link; of a regular file, the path of which it is a hard link."""
    major: Annotated[int, 8] = 0
    minor: Annotated[int, 9] = 0
    xattrs: Annotated[dict[str, bytes], 10] = {}


STAT, REQUEST, DATA, FINISH, FAILURE = range(5)
"""Types of a Packet."""


class Packet(msgspec.Struct):
    """moby.filesync.v1.FileSync/DiffCopy"""

    type: Annotated[int, 1] = STAT
    stat: Annotated[Stat | None, 2] = None
    id: Annotated[int, 3] = 0
    data: Annotated[bytes, 4] = b""
