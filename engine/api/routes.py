"""The routes, in the order of the API's documentation. To add one, add its row.

A row has the method, path, handler, success status (default 200), `mode`, `body`, what it `needs`
of a daemon that starts, and the versions that serve it: from `since` on, and before `until`. A
route whose status changed has one row for each status. `{name}` is one segment of the path,
`{name:path}` any number of them (image names with slashes).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Awaitable, Callable
from typing import Protocol

from engine.api import (
    archive,
    containers,
    events,
    exec,
    images,
    late,
    networks,
    plugins,
    session,
    swarm_mode,
    system,
    volumes,
)
from engine.api.engine import Engine
from engine.api.versions import MINIMUM, release
from engine.http.head import HTTP2
from engine.http.messages import AnyReply, Request

Handler = Callable[[Engine, Request], AnyReply | Awaitable[AnyReply]]


class Mode(enum.Enum):
    """What a route does to its connection."""

    PLAIN = enum.auto()
    """The handler runs to its end even if the client disconnects, so no change is left half
    done.
    """
    STREAM = enum.auto()
    """The reply may last long (streams, wait). It is cancelled when the client disconnects."""
    HIJACK = enum.auto()
    """Bytes after the request are a stream, not another request."""


class Phase(enum.IntEnum):
    """What a request needs of a daemon that starts (`starting.py`)."""

    LISTENING = enum.auto()
    """What records and host say: the monitor may not have been asked yet."""
    KNOWN = enum.auto()
    """The state of every container as it is. Nothing is changed by the request."""
    RESTORED = enum.auto()
    """Everything: leftovers of a crash are removed, so that nothing new is taken for one."""


class Body(enum.Enum):
    """What the handler reads of the request's body. Authorization plugins are shown that
    (`authorization.py`). `tests/unit/api/test_routes.py` compares it with the handlers.
    """

    NONE = enum.auto()
    """Nothing."""
    JSON = enum.auto()
    """One JSON document of at most `parameters.BODY_LIMIT` bytes, whatever the Content-Type."""
    CREDENTIALS = enum.auto()
    """The same, which is shown to no one."""
    UPLOAD = enum.auto()
    """An archive of any size."""


PLAIN, STREAM, HIJACK = Mode.PLAIN, Mode.STREAM, Mode.HIJACK
LISTENING, KNOWN, RESTORED = Phase.LISTENING, Phase.KNOWN, Phase.RESTORED
NONE, JSON, CREDENTIALS, UPLOAD = Body.NONE, Body.JSON, Body.CREDENTIALS, Body.UPLOAD


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """One row."""

    method: str
    path: str
    handler: Handler
    status: int
    mode: Mode
    body: Body
    needs: Phase
    since: tuple[int, int]
    until: tuple[int, int]


class _Row(Protocol):
    def __call__(
        self,
        path: str,
        handler: Handler,
        status: int = 200,
        *,
        mode: Mode = PLAIN,
        body: Body = NONE,
        needs: Phase = RESTORED,
        since: str = MINIMUM,
        until: str = "",
    ) -> Route: ...


def _constructor(method: str) -> _Row:
    def row(
        path: str,
        handler: Handler,
        status: int = 200,
        *,
        mode: Mode = PLAIN,
        body: Body = NONE,
        needs: Phase = RESTORED,
        since: str = MINIMUM,
        until: str = "",
    ) -> Route:
        end = release(until) if until else (1 << 30, 0)
        return Route(
            method=method,
            path=path,
            handler=handler,
            status=status,
            mode=mode,
            body=body,
            needs=needs,
            since=release(since),
            until=end,
        )

    return row


GET, HEAD, POST, PUT, DELETE, PRI = map(_constructor, ("GET", "HEAD", "POST", "PUT", "DELETE", HTTP2))


ROUTES: tuple[Route, ...] = (
    # Containers
    GET("/containers/json", containers.list_all, needs=KNOWN),
    POST("/containers/create", containers.create, 201, body=JSON),
    GET("/containers/{id}/json", containers.inspect, needs=KNOWN),
    GET("/containers/{id}/{alias}/json", containers.inspect_link, needs=KNOWN),
    GET("/containers/{id}/top", containers.top),
    GET("/containers/{id}/logs", containers.read_logs, mode=STREAM),
    GET("/containers/{id}/changes", archive.changes),
    GET("/containers/{id}/export", archive.export, mode=STREAM),
    GET("/containers/{id}/stats", containers.stats, mode=STREAM),
    POST("/containers/{id}/resize", containers.resize),
    POST("/containers/{id}/start", containers.start, 204, body=JSON),
    POST("/containers/{id}/stop", containers.stop, 204),
    POST("/containers/{id}/restart", containers.restart, 204),
    POST("/containers/{id}/kill", containers.kill, 204),
    POST("/containers/{id}/update", containers.update, body=JSON, since="1.22"),
    POST("/containers/{id}/rename", containers.rename, 204),
    POST("/containers/{id}/pause", containers.pause, 204),
    POST("/containers/{id}/unpause", containers.unpause, 204),
    POST("/containers/{id}/attach", containers.attach, mode=HIJACK),
    GET("/containers/{id}/attach/ws", containers.attach_websocket, mode=HIJACK),
    POST("/containers/{id}/wait", containers.wait, mode=STREAM),
    POST("/containers/prune", containers.prune, since="1.25"),
    GET("/containers/{id}/checkpoints", containers.checkpoints, since="1.25"),
    POST("/containers/{id}/checkpoints", containers.checkpoints, since="1.25"),
    DELETE("/containers/{id}/checkpoints/{checkpoint}", containers.checkpoints, since="1.25"),
    DELETE("/containers/", containers.remove_unnamed, 204),
    DELETE("/containers/{id}", containers.remove, 204),
    DELETE("/containers/{id}/{alias}", containers.remove_link, 204),
    POST("/containers/{id}/copy", archive.copy, mode=STREAM, body=JSON, until="1.24"),
    HEAD("/containers/{id}/archive", archive.inspect, since="1.20"),
    GET("/containers/{id}/archive", archive.get, since="1.20", mode=STREAM),
    PUT("/containers/{id}/archive", archive.put, body=UPLOAD, since="1.20"),
    # Exec
    POST("/containers/{id}/exec", exec.create, 201, body=JSON),
    POST("/exec/{id}/start", exec.start, mode=HIJACK, body=JSON),
    POST("/exec/{id}/resize", exec.resize, 201, until="1.25"),
    POST("/exec/{id}/resize", exec.resize, since="1.25"),
    GET("/exec/{id}/json", exec.inspect),
    # Images
    GET("/images/json", images.list_all),
    POST("/build", late.handler("build", "build"), mode=STREAM, body=UPLOAD),
    POST("/build/prune", late.handler("build", "prune")),
    POST("/build/cancel", late.handler("build", "cancel")),
    POST("/session", session.open_session, mode=HIJACK),
    POST("/grpc", session.serve_buildkit, mode=HIJACK),
    PRI("/", session.serve_buildkit, mode=HIJACK),
    POST("/images/create", images.create, mode=STREAM, body=UPLOAD),
    POST("/images/prune", images.prune, since="1.25"),
    GET("/images/{name:path}/json", images.inspect),
    GET("/images/{name:path}/history", images.history),
    GET("/images/{name:path}/attestations", images.attestations, since="1.55"),
    POST("/images/{name:path}/push", images.push, mode=STREAM),
    POST("/images/{name:path}/tag", images.tag, 201),
    DELETE("/images/{name:path}", images.delete),
    POST("/images/load", images.load, mode=STREAM, body=UPLOAD),
    GET("/images/get", images.save_many, mode=STREAM),
    GET("/images/{name:path}/get", images.save_one, mode=STREAM),
    # Volumes
    GET("/volumes", volumes.list_all),
    POST("/volumes/create", volumes.create, 201, body=JSON),
    POST("/volumes/prune", volumes.prune, since="1.25"),
    PUT("/volumes/{name:path}", volumes.update, since="1.42"),
    GET("/volumes/{name:path}", volumes.inspect),
    DELETE("/volumes/{name:path}", volumes.remove, 204),
    # Networks
    GET("/networks", networks.list_all),
    GET("/networks/", networks.list_all),
    GET("/networks/{id}", networks.inspect),
    POST("/networks/create", networks.create, 201, body=JSON),
    POST("/networks/prune", networks.prune, since="1.25"),
    POST("/networks/{id}/connect", networks.connect, body=JSON),
    POST("/networks/{id}/disconnect", networks.disconnect, body=JSON),
    DELETE("/networks/{id}", networks.remove, 204),
    # Plugins
    GET("/plugins", plugins.list_all, since="1.24"),
    GET("/plugins/privileges", plugins.privileges, since="1.25", mode=STREAM),
    POST("/plugins/pull", plugins.install, since="1.24", until="1.25", mode=STREAM),
    POST("/plugins/pull", plugins.pull, mode=STREAM, body=JSON, since="1.25"),
    POST("/plugins/create", plugins.create, 204, mode=STREAM, body=UPLOAD, since="1.25"),
    GET("/plugins/{name:path}", plugins.inspect, since="1.24", until="1.25"),
    GET("/plugins/{name:path}/json", plugins.inspect, since="1.25"),
    DELETE("/plugins/{name:path}", plugins.remove_silently, since="1.24", until="1.25"),
    DELETE("/plugins/{name:path}", plugins.remove, since="1.25"),
    POST("/plugins/{name:path}/enable", plugins.enable, since="1.24"),
    POST("/plugins/{name:path}/disable", plugins.disable, since="1.24"),
    POST("/plugins/{name:path}/push", plugins.push, since="1.25", mode=STREAM),
    POST("/plugins/{name:path}/set", plugins.set_values, 204, body=JSON, since="1.25"),
    POST("/plugins/{name:path}/upgrade", plugins.upgrade, mode=STREAM, body=JSON, since="1.26"),
    # Swarm
    GET("/swarm", swarm_mode.handler("swarm", "inspect"), since="1.24"),
    POST("/swarm/init", swarm_mode.handler("swarm", "init"), body=JSON, since="1.24"),
    POST("/swarm/join", swarm_mode.handler("swarm", "join"), body=JSON, since="1.24"),
    POST("/swarm/update", swarm_mode.handler("swarm", "update"), body=JSON, since="1.24"),
    POST("/swarm/leave", swarm_mode.handler("swarm", "leave"), since="1.24"),
    GET("/swarm/unlockkey", swarm_mode.handler("swarm", "unlock_key"), since="1.24"),
    POST("/swarm/unlock", swarm_mode.handler("swarm", "unlock"), body=JSON, since="1.24"),
    GET("/nodes", swarm_mode.handler("nodes", "list_all"), since="1.24"),
    GET("/nodes/{id}", swarm_mode.handler("nodes", "inspect"), since="1.24"),
    DELETE("/nodes/{id}", swarm_mode.handler("nodes", "remove"), since="1.24"),
    POST("/nodes/{id}/update", swarm_mode.handler("nodes", "update"), body=JSON, since="1.24"),
    GET("/services", swarm_mode.handler("services", "list_all"), since="1.24"),
    POST("/services/create", swarm_mode.handler("services", "create"), 201, body=JSON, since="1.24"),
    GET("/services/{id}", swarm_mode.handler("services", "inspect"), since="1.24"),
    DELETE("/services/{id}", swarm_mode.handler("services", "remove"), since="1.24"),
    POST("/services/{id}/update", swarm_mode.handler("services", "update"), body=JSON, since="1.24"),
    GET("/services/{id}/logs", swarm_mode.handler("services", "read_logs"), since="1.25", mode=STREAM),
    GET("/tasks", swarm_mode.handler("tasks", "list_all"), since="1.24"),
    GET("/tasks/{id}", swarm_mode.handler("tasks", "inspect"), since="1.24"),
    GET("/tasks/{id}/logs", swarm_mode.handler("tasks", "read_logs"), since="1.29", mode=STREAM),
    GET("/secrets", swarm_mode.handler("secrets", "list_all"), since="1.25"),
    POST("/secrets/create", swarm_mode.handler("secrets", "create"), 201, body=JSON, since="1.25"),
    GET("/secrets/{id}", swarm_mode.handler("secrets", "inspect"), since="1.25"),
    DELETE("/secrets/{id}", swarm_mode.handler("secrets", "remove"), 204, since="1.25"),
    POST("/secrets/{id}/update", swarm_mode.handler("secrets", "update"), body=JSON, since="1.25"),
    GET("/configs", swarm_mode.handler("configs", "list_all"), since="1.30"),
    POST("/configs/create", swarm_mode.handler("configs", "create"), 201, body=JSON, since="1.30"),
    GET("/configs/{id}", swarm_mode.handler("configs", "inspect"), since="1.30"),
    DELETE("/configs/{id}", swarm_mode.handler("configs", "remove"), 204, since="1.30"),
    POST("/configs/{id}/update", swarm_mode.handler("configs", "update"), body=JSON, since="1.30"),
    # System
    POST("/commit", images.commit, 201, body=JSON),
    POST("/auth", images.log_in, mode=STREAM, body=CREDENTIALS),
    GET("/distribution/{name:path}/json", images.inspect_remote, since="1.30", mode=STREAM),
    GET("/images/search", images.search, mode=STREAM),
    GET("/_ping", system.ping, needs=LISTENING),
    HEAD("/_ping", system.ping, needs=LISTENING),
    GET("/info", system.info, needs=LISTENING),
    GET("/version", system.version, needs=LISTENING),
    GET("/system/df", system.disk_usage, since="1.25", mode=STREAM),
    GET("/events", events.list_all, mode=STREAM, needs=LISTENING),
)
