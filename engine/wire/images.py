"""Images on the wire: the API's objects as their newest version documents them, and the documents
in archives and registries.

Structs name the fields and their defaults and have no behaviour. Rows of `api/versions/` describe
how older versions differ.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.wire.containers import Config, Empty, Healthcheck, Strings

# --- documents: OCI image specification, Docker image specification 1.2, Docker manifest schema 2 -


class RootFS(msgspec.Struct, frozen=True, kw_only=True):
    """`diff_ids`: digests of the uncompressed layers, lowest first."""

    type: str = "layers"
    diff_ids: tuple[str, ...] = ()


class History(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of the build; the document has the oldest first. `empty_layer`: it made no layer."""

    created: str = ""
    created_by: str = ""
    author: str = ""
    comment: str = ""
    empty_layer: bool = False


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The configuration document; an image's id is the digest of its bytes."""

    created: str = ""
    author: str = ""
    architecture: str = ""
    variant: str = ""
    os: str = ""
    os_version: str = msgspec.field(default="", name="os.version")
    config: Config | None = None
    rootfs: RootFS = RootFS()
    history: tuple[History, ...] = ()
    container: str = ""
    container_config: Config | None = None
    docker_version: str = ""
    comment: str = ""
    cache: Any = msgspec.field(default="", name="moby.buildkit.cache.v0")
    """The image's inline build cache: base64 (BuildKit)."""


class Platform(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    architecture: str = ""
    os: str = ""
    os_version: str = msgspec.field(default="", name="os.version")
    os_features: tuple[str, ...] = msgspec.field(default=(), name="os.features")
    variant: str = ""


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A blob by digest. `size` in bytes."""

    media_type: str = ""
    digest: str = ""
    size: int = 0
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    platform: Platform | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An image: its configuration and its layers, lowest first. With `manifests` instead it is an
    index.
    """

    schema_version: int = 0
    media_type: str = ""
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()
    manifests: tuple[Descriptor, ...] = ()
    annotations: dict[str, str] = msgspec.field(default_factory=dict)


class ArchiveItem(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """An image in `manifest.json` of a Docker archive: the names of its members, lowest layer
    first.
    """

    config: str
    repo_tags: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    parent: str = ""
    """Id of the parent image, if the archive contains it."""


class LegacyLayer(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that this engine reads from a layer's `json` in the legacy layout (Docker Engine
    API, "Image tarball format").
    """

    id: str = ""
    parent: str = ""
    created: str = ""
    author: str = ""
    comment: str = ""
    os: str = ""
    container_config: Config | None = None


# --- API ------------------------------------------------------------------------------------------


class ImageSummary(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """GET /images/json. `created` in Unix seconds. `shared_size` and `containers` are -1 where they
    were not computed.
    """

    id: str
    parent_id: str = ""
    repo_tags: list[str]
    repo_digests: list[str]
    created: int
    size: int
    shared_size: int = -1
    labels: dict[str, str]
    containers: int = -1


class GraphDriver(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    name: str
    data: dict[str, str]


class InspectRootFS(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    type: str
    layers: list[str]


class DefaultConfig(msgspec.Struct, frozen=True, kw_only=True, rename="pascal", omit_defaults=True):
    """`Config` of an image: the defaults for its containers."""

    user: str = ""
    exposed_ports: dict[str, Empty] = msgspec.field(default_factory=dict)
    env: list[str] | None = None
    entrypoint: Strings = None
    cmd: Strings = None
    healthcheck: Healthcheck | msgspec.UnsetType = msgspec.UNSET
    args_escaped: bool = False
    volumes: dict[str, Empty] | None = None
    working_dir: str = ""
    on_build: list[str] | None = None
    labels: dict[str, str] | None = None
    stop_signal: str | int = ""
    shell: list[str] | msgspec.UnsetType = msgspec.UNSET


class ImageMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """Facts about an image that are not part of it."""

    last_tag_time: str


class ImageInspect(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """GET /images/{name}/json.

    `engine_version` and `docker_version` are two names of one field.
    """

    id: str
    repo_tags: list[str]
    repo_digests: list[str]
    parent: str | msgspec.UnsetType = msgspec.UNSET
    comment: str | msgspec.UnsetType = msgspec.UNSET
    created: str | msgspec.UnsetType = msgspec.UNSET
    container: str | msgspec.UnsetType = msgspec.UNSET
    container_config: Config | msgspec.UnsetType = msgspec.UNSET
    """With `container`, for clients of versions that show them."""
    docker_version: str | msgspec.UnsetType = msgspec.UNSET
    engine_version: str | msgspec.UnsetType = msgspec.UNSET
    author: str | msgspec.UnsetType = msgspec.UNSET
    config: DefaultConfig
    architecture: str
    variant: str | msgspec.UnsetType = msgspec.UNSET
    os: str
    os_version: str | msgspec.UnsetType = msgspec.UNSET
    size: int
    graph_driver: GraphDriver
    root_fs: InspectRootFS = msgspec.field(name="RootFS")
    metadata: ImageMetadata


class HistoryItem(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """GET /images/{name}/history, newest first. `created` in Unix seconds; `id` is `<missing>`
    where the step's image is not here.
    """

    id: str
    created: int
    created_by: str
    tags: list[str] | None
    size: int
    comment: str


class Deletion(msgspec.Struct, frozen=True, kw_only=True, rename="pascal", omit_defaults=True):
    """One element of the reply to DELETE /images/{name}: a tag or an image that was removed."""

    untagged: str = ""
    deleted: str = ""


class ImagesPruned(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """POST /images/prune. `space_reclaimed` in bytes."""

    images_deleted: list[Deletion] | None
    space_reclaimed: int


class ProgressDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes done and to do."""

    current: int = 0
    total: int = 0


class PushResult(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The result of a push. `size`: of the manifest."""

    tag: str
    digest: str
    size: int


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """GET /images/search."""

    star_count: int = 0
    is_official: bool = False
    name: str = ""
    is_automated: bool = False
    description: str = ""


class DistributionDescriptor(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A manifest or an index in a registry."""

    media_type: str
    digest: str
    size: int


class DistributionInspect(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """GET /distribution/{name}/json."""

    descriptor: DistributionDescriptor
    platforms: list[Platform]


class Committed(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """POST /commit."""

    id: str


class LoggedIn(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """POST /auth."""

    status: str
    identity_token: str


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One object of a stream: a step of work, or a line of text in `stream`."""

    status: str = ""
    progress_detail: ProgressDetail | None = None
    progress: str = ""
    id: str = ""
    stream: str = ""
    aux: PushResult | None = None
