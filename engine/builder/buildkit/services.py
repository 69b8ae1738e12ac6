"""One client's session: its services as calls of the daemon.

Owns:    the connection; listening sockets and tasks of forwarded SSH agents.
Threads: the event loop's, and a thread to make or remove a forwarded agent's directory.
Raises:  NotFound for an unknown secret or agent, Unimplemented for a service that the client does
         not offer, Unavailable when the client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING

from engine.builder.buildkit import filesync
from engine.builder.buildkit.messages import (
    COMMIT_CONTENT,
    WRITE_PIECE,
    BytesMessage,
    CheckAgentRequest,
    CheckAgentResponse,
    ContentInfoResponse,
    CredentialsRequest,
    CredentialsResponse,
    GetSecretRequest,
    GetSecretResponse,
    ReadContentRequest,
    ReadContentResponse,
    WriteContentRequest,
)
from engine.errors import Conflict, EngineError, InvalidParameter, NotFound, ServerError, Unimplemented, reason
from engine.images.credentials import NOBODY, Credentials
from engine.rpc import grpc, protobuf
from engine.system.tasks import spawn
from engine.system.threads import uninterrupted

if TYPE_CHECKING:
    from engine.builder.buildkit.session import Offer

_log = logging.getLogger(__name__)

SECRET_LIMIT = 500 << 10
"""Bytes of a secret; BuildKit's limit too."""
READ_SIZE = 32 << 10

GET_SECRET = "/moby.buildkit.secrets.v1.Secrets/GetSecret"
CHECK_AGENT = "/moby.sshforward.v1.SSH/CheckAgent"
FORWARD_AGENT = "/moby.sshforward.v1.SSH/ForwardAgent"
CREDENTIALS = "/moby.filesync.v1.Auth/Credentials"
DIFF_COPY = "/moby.filesync.v1.FileSync/DiffCopy"

FILE_SEND = "/moby.filesync.v1.FileSend/DiffCopy"
UPLOAD = "/moby.upload.v1.Upload/Pull"
READ_CONTENT = "/containerd.services.content.v1.Content/Read"
WRITE_CONTENT = "/containerd.services.content.v1.Content/Write"
CONTENT_INFO = "/containerd.services.content.v1.Content/Info"
PIECE = 1 << 20
"""Bytes of a blob in one message."""

DEFAULT_AGENT = "default"


class Session:
    """One session."""

    def __init__(self, offer: Offer) -> None:
        self.id = offer.id
        self.shared_key = offer.shared_key
        self.peer = offer.peer
        self._methods = frozenset(method.lower() for method in offer.methods)
        self._connection: grpc.Connection | None = None

    @property
    def open(self) -> bool:
        return self._connection is not None and self._connection.open

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def closed(self) -> None:
        if self._connection is not None:
            await self._connection.closed()

    def attach(self, connection: grpc.Connection) -> None:
        self._connection = connection

    def offers(self, method: str) -> bool:
        """True if the client serves the gRPC method with this path."""
        return method.lower() in self._methods

    def _served(self, method: str, what: str) -> grpc.Connection:
        if not self.offers(method):
            raise Unimplemented(f"the client's session {self.id} offers no {what}")
        assert self._connection is not None
        return self._connection

    # --- secrets ----------------------------------------------------------------------------------

    async def secret(self, secret_id: str) -> bytes:
        """The content of a secret. Raises NotFound."""
        connection = self._served(GET_SECRET, "secrets")
        try:
            answer = await connection.ask(GET_SECRET, GetSecretRequest(id=secret_id), GetSecretResponse)
        except NotFound:
            raise NotFound(f"secret {secret_id}: not found") from None
        if len(answer.data) > SECRET_LIMIT:
            raise InvalidParameter(f"secret {secret_id}: longer than {SECRET_LIMIT} bytes")
        return answer.data

    # --- registry credentials ---------------------------------------------------------------------

    async def auth(self, host: str) -> Credentials:
        """The client's credentials for a registry; NOBODY when it has none or offers none."""
        if not self.offers(CREDENTIALS):
            return NOBODY
        connection = self._served(CREDENTIALS, "credentials")
        answer = await connection.ask(CREDENTIALS, CredentialsRequest(host=host), CredentialsResponse)
        if not answer.secret:
            return NOBODY
        if not answer.username:
            return Credentials(identitytoken=answer.secret)
        return Credentials(username=answer.username, password=answer.secret)

    # --- SSH agents -------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def ssh(
        self, agent_id: str, directory: str, *, uid: int = 0, gid: int = 0, mode: int = 0o600
    ) -> AsyncIterator[str]:
        """Forward an SSH agent of the client: the path of a Unix socket in a new private directory
        below `directory`, which is removed at the end.

        Raises NotFound when the client has no such agent.
        """
        agent_id = agent_id or DEFAULT_AGENT
        connection = self._served(CHECK_AGENT, "SSH agent")
        try:
            await connection.ask(CHECK_AGENT, CheckAgentRequest(id=agent_id), CheckAgentResponse)
        except EngineError as error:
            raise NotFound(f"SSH agent {agent_id}: {error.message}") from error
        listening = asyncio.ensure_future(asyncio.to_thread(_listen, directory, uid, gid, mode))
        try:
            private, listener = await uninterrupted(listening)
        except OSError as error:
            raise ServerError(f"SSH agent {agent_id}: {reason(error)}") from error
        except asyncio.CancelledError:
            if listening.exception() is None:
                await uninterrupted(_unlisten(*listening.result()))
            raise
        relays: set[asyncio.Task[None]] = set()

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = spawn(_relay(connection, agent_id, reader, writer), f"relaying SSH agent {agent_id}")
            relays.add(task)
            task.add_done_callback(relays.discard)

        try:
            # From Python 3.13 on, start_unix_server looks for the path that the socket was bound
            # to, which is of a descriptor that means something else by now.
            server = await asyncio.start_server(accepted, sock=listener)
            try:
                yield os.path.join(private, _SOCKET)
            finally:
                server.close()
                for task in relays:
                    task.cancel()
                await asyncio.gather(*relays, return_exceptions=True)
        finally:
            await uninterrupted(_unlisten(private, listener))

    # --- files ------------------------------------------------------------------------------------

    async def sync(
        self,
        name: str,
        receiver: filesync.Receiver,
        *,
        exclude: tuple[str, ...] = (),
        follow: tuple[str, ...] = (),
        received: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Copy the client's directory `name` (`context`, `dockerfile`).

        The client leaves out what `exclude` matches, and what none of the paths `follow` names, if
        there are any; links in `follow` are followed. `received`: is called with the size of each
        packet. Raises Unimplemented, and ServerError with the client's reason.
        """
        connection = self._served(DIFF_COPY, "files")
        metadata = [("dir-name", name)]
        metadata += [("exclude-patterns", pattern) for pattern in exclude]
        metadata += [("followpaths", path) for path in follow]
        stream = connection.call(DIFF_COPY, filesync.encoded(metadata))
        await filesync.copy(stream, name, receiver, received)

    def file_send(self, metadata: list[tuple[str, str]]) -> grpc.Stream:
        """A call by which the client receives files of a build. Raises Unimplemented."""
        return self._served(FILE_SEND, "place for files of a build").call(FILE_SEND, metadata)

    async def blob(self, store: str, digest: str) -> AsyncGenerator[bytes, None]:
        """A blob of one of the client's stores: `oci:` with the name of an image layout, `local:`
        with the directory of a cache. Raises Unimplemented, and ServerError with
        the client's reason.
        """
        connection = self._served(READ_CONTENT, "image layouts")
        stream = connection.call(READ_CONTENT, [("buildkit-attachable-store-id", store)])
        try:
            await stream.send(protobuf.encode(ReadContentRequest(digest=digest)), last=True)
            while (message := await stream.receive()) is not None:
                yield protobuf.decode(message, ReadContentResponse).data
        finally:
            stream.cancel()

    async def small_blob(self, store: str, digest: str, limit: int) -> bytes:
        """As `blob`, whole and verified. Raises InvalidParameter for other content, or for more
        than `limit` bytes.
        """
        content = bytearray()
        async with contextlib.aclosing(self.blob(store, digest)) as chunks:
            async for chunk in chunks:
                content += chunk
                if len(content) > limit:
                    raise InvalidParameter(f"{digest}: more than {limit} bytes")
        if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
            raise InvalidParameter(f"content of {digest} does not match its digest")
        return bytes(content)

    async def has_blob(self, store: str, digest: str) -> bool:
        """True if one of the client's stores has a blob. Raises Unimplemented and ServerError."""
        connection = self._served(CONTENT_INFO, "caches")
        about = [("buildkit-attachable-store-id", store)]
        try:
            await connection.ask(CONTENT_INFO, ReadContentRequest(digest=digest), ContentInfoResponse, about)
        except NotFound:
            return False
        return True

    async def write_blob(self, store: str, chunks: AsyncIterator[bytes], digest: Callable[[], str]) -> None:
        """Write a blob into one of the client's stores. `digest` is known after the last chunk.

        Raises Unimplemented, and ServerError with the client's reason.
        """
        connection = self._served(WRITE_CONTENT, "caches")
        stream = connection.call(WRITE_CONTENT, [("buildkit-attachable-store-id", store)])
        ref, offset = secrets.token_hex(16), 0

        async def step(message: WriteContentRequest, *, last: bool = False) -> None:
            await stream.send(protobuf.encode(message), last=last)
            if await stream.receive() is None:
                raise ServerError("the client ended the export of the cache too early")

        try:
            async for chunk in chunks:
                for begin in range(0, len(chunk), PIECE):
                    data = chunk[begin : begin + PIECE]
                    await step(WriteContentRequest(WRITE_PIECE, ref, offset=offset, data=data))
                    offset += len(data)
            with contextlib.suppress(Conflict):  # it has the blob already
                await step(WriteContentRequest(COMMIT_CONTENT, ref, offset, digest(), offset), last=True)
        finally:
            stream.cancel()

    async def upload(self, path: str, host: str) -> AsyncGenerator[bytes, None]:
        """The archive that the client uploads under this path. Raises Unimplemented."""
        connection = self._served(UPLOAD, "uploads")
        stream = connection.call(UPLOAD, [("urlpath", path), ("urlhost", host)])
        try:
            await stream.end()
            while (message := await stream.receive()) is not None:
                yield protobuf.decode(message, BytesMessage).data
        finally:
            stream.cancel()


async def open_session(
    offer: Offer, descriptor: int, head: bytes, early: bytes, on_lost: Callable[[], object]
) -> Session:
    """Begin a session on a hijacked connection. Raises OSError when the client has left."""
    session = Session(offer)
    connection = await grpc.join(descriptor, head, early, None, on_lost)
    session.attach(connection)
    return session


_SOCKET = "agent"


def _listen(directory: str, uid: int, gid: int, mode: int) -> tuple[str, socket.socket]:
    """A private directory, and the socket that listens in it. Blocking."""
    private = tempfile.mkdtemp(prefix="ssh-", dir=directory)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        descriptor = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{descriptor}/{_SOCKET}")  # the whole path may be too long
            os.chmod(_SOCKET, mode, dir_fd=descriptor)
            os.chown(_SOCKET, uid, gid, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        listener.listen(64)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        shutil.rmtree(private, True)
        raise
    return private, listener


async def _unlisten(private: str, listener: socket.socket) -> None:
    """Undo `_listen`."""
    listener.close()
    await asyncio.to_thread(shutil.rmtree, private, True)


async def _relay(
    connection: grpc.Connection, agent_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Carry one program's conversation with the agent, until either side ends it."""
    outward: asyncio.Task[None] | None = None
    stream: grpc.Stream | None = None
    try:
        stream = connection.call(FORWARD_AGENT, [("buildkit.ssh.id", agent_id)])
        outward = asyncio.create_task(_send_all(stream, reader))
        while (message := await stream.receive()) is not None:
            writer.write(protobuf.decode(message, BytesMessage).data)
            await writer.drain()
    except EngineError as error:
        _log.info("SSH agent %s: %s", agent_id, error.message)
    except OSError as error:
        _log.debug("SSH agent %s: %s", agent_id, error)
    finally:
        if outward is not None:
            outward.cancel()
            await asyncio.gather(outward, return_exceptions=True)
        if stream is not None:
            stream.cancel()
        writer.close()


async def _send_all(stream: grpc.Stream, reader: asyncio.StreamReader) -> None:
    while data := await reader.read(READ_SIZE):
        await stream.send(protobuf.encode(BytesMessage(data=data)))
    await stream.end()


__all__ = ["CHECK_AGENT", "CREDENTIALS", "DIFF_COPY", "FORWARD_AGENT", "GET_SECRET", "Session", "open_session"]
