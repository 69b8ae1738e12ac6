"""The parameters of a build and of a prune of the build cache: their meaning and their rules.

Pure. Not here: query strings and headers (`api/build.py`), what a parameter does.
Raises: InvalidParameter that names the parameter, in Docker's words where clients match them;
        Unimplemented for what only BuildKit's own protocol has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from engine.builder.dialect import CLASSIC, Dialect
from engine.containers import body
from engine.errors import InvalidParameter, Unimplemented, decoding_reason
from engine.images import platforms, reference
from engine.images.credentials import Credentials
from engine.images.reference import Reference
from engine.wire.containers import Config, HostConfig, LogConfig, Ulimit
from engine.wire.images import Platform

if TYPE_CHECKING:
    from engine.builder.imported import Imports
    from engine.builder.prune import Entry
    from engine.builder.state import Made, State
    from engine.images.record import ImageRecord

T = TypeVar("T")

_LOG = LogConfig(type="json-file")
"""The client has the output of a build, so that the daemon's default driver is not used."""
DEFAULT_HOST = body.checked_host(HostConfig(log_config=_LOG))

SANDBOX = "buildkitsandbox"
"""The host name of RUN in BuildKit."""

PRUNE_FILTERS = frozenset(
    ("description", "id", "inuse", "label", "label!", "parent", "private", "shared", "type", "until", "unused-for")
)
LONGEST, CONDITIONS = 4096, 16
"""Characters of all filters of a request about the build cache, and conditions in them. A prune
checks them for each of thousands of entries in the event loop.
"""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one build, valid.

    Build arguments and credentials may be secrets: an object of this class is never logged.
    """

    dialect: Dialect = CLASSIC
    dockerfile: str = ""
    """Path in the context as it was given; empty for the default names."""
    content: bytes | None = None
    """The Dockerfile itself, instead of one in the context."""
    tags: tuple[Reference, ...] = ()
    """Canonical, each with a tag, without duplicates."""
    remote: str = ""
    """URL of the context, instead of the body."""
    no_cache: bool = False
    no_cache_stages: frozenset[str] = frozenset()
    """Names, in lower case, of stages for which `no_cache` holds, and for those that begin with
    them.
    """
    pull: bool = False
    """Ask the registry for every base."""
    remove: bool = True
    """Remove containers of successful steps."""
    force_remove: bool = False
    """Remove containers of failed steps too."""
    host: HostConfig = DEFAULT_HOST
    """For RUN's containers alone: limits, ulimits, cgroup parent, size of /dev/shm, network mode
    and extra hosts, checked as in a create.
    """
    grants_host_network: bool = False
    """RUN may ask for the host's network although the build's is another one."""
    arguments: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    """Build arguments. None: as if it were not given, so its default applies."""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    cache_from: tuple[str, ...] = ()
    """Images whose layers may serve as cache."""
    target: str = ""
    """Name or number of the stage to build; empty for the last one."""
    cache_namespace: str = ""
    """Builds share a `RUN --mount=type=cache` with those of the same one only."""
    hostname: str = ""
    """Of RUN's containers; empty for each one's own."""
    platform: Platform | None = None
    """The target platform, if one was given."""
    session: str = ""
    """Id of the client's session, for secrets and SSH agents."""
    build_id: str = ""
    """The client's own id of the build, for POST /build/cancel."""
    contexts: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Images, by name or id, that stand for names in FROM and `from`, and for stages of these
    names; `scratch` is the empty root. By `context_key`.
    """
    credentials: Mapping[str, Credentials] = msgspec.field(default_factory=dict)
    """By registry domain, as in `Reference.domain`."""
    based_on: Callable[[str, ImageRecord], None] | None = None
    """Gets each image that the Dockerfile names, with that name, when it is known."""
    imports: Imports | None = None
    """Caches from elsewhere."""
    result: Callable[[State], None] | None = None
    """Gets what the build results in, while the build still uses it."""
    export: Callable[[Sequence[Made]], Awaitable[None]] | None = None
    """Exports the steps of the build when it has succeeded."""
    inline_cache: bool = False
    """The image names the steps that it was made of, as a cache for other engines."""
    numbered_steps: bool = True
    """`Step N/M : …` instead of `Step N : …`."""
    unused_arguments_fail: bool = False
    """A build argument that no ARG consumed is an error after the last step, not a warning."""


class PruneOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which records of the build cache a prune removes. Sizes in bytes; 0 when not given."""

    all: bool = False
    """Records of images that are tagged too, not only of dangling ones."""
    filters: Mapping[str, Sequence[str]] = msgspec.field(default_factory=dict)
    """Names of `PRUNE_FILTERS` without the two times."""
    condition: Callable[[Entry], bool] | None = None
    """What holds for the records beside `filters`."""
    unused_since_ns: int = 0
    """Only records whose last use was before this time, in nanoseconds since the epoch. 0: any."""
    reserved_space: int = 0
    """Bytes of cache that are kept."""
    max_used_space: int = 0
    """Remove records until the cache has at most this size."""
    min_free_space: int = 0
    """Remove records until the disk has this much free space."""


def check_filters(characters: int, conditions: int = 0) -> None:
    """Raises InvalidParameter for more of them than the entries of the build cache are compared
    with.
    """
    if characters > LONGEST:
        raise InvalidParameter(f"the filters have more than {LONGEST} characters")
    if conditions > CONDITIONS:
        raise InvalidParameter(f"the filters have more than {CONDITIONS} conditions")


def context_key(name: str) -> str:
    """The form in which names of images and of named contexts are compared."""
    try:
        parsed = reference.parse(name.lower())
    except InvalidParameter:
        return name.lower()
    return parsed.canonical if parsed.digest else parsed.tagged().canonical


def tags(names: Iterable[str]) -> tuple[Reference, ...]:
    """The values of `t`, each with its tag, without duplicates. Empty values are skipped."""
    found: dict[Reference, None] = {}
    for name in names:
        if not name:
            continue
        try:
            parsed = reference.parse(name)
            if not parsed.digest:
                parsed = reference.with_tag(name, "")
        except InvalidParameter as error:
            words = f'Error parsing reference: "{name[:300]}" is not a valid repository/tag: {error.message}'
            raise InvalidParameter(words) from error
        if parsed.digest:
            raise InvalidParameter("build tag cannot contain a digest")
        found[parsed] = None
    return tuple(found)


def arguments(text: str) -> dict[str, str | None]:
    """The value of `buildargs`: a JSON object of strings or nulls."""
    found = _json(text, dict[str, str | None], "error reading build args: buildargs") or {}
    for name, value in found.items():
        if not name or "=" in name or "\0" in name or "\0" in (value or ""):
            raise InvalidParameter(f"error reading build args: buildargs: {name[:100]!r}: not a valid variable")
    return found


def labels(text: str) -> dict[str, str]:
    """The value of `labels`: a JSON object of strings. A null value is the empty text."""
    found = _json(text, dict[str, str | None], "error reading labels: labels") or {}
    return {name: value or "" for name, value in found.items()}


def ulimits(text: str) -> list[Ulimit]:
    """The value of `ulimits`: a JSON list of {Name, Soft, Hard}."""
    given = _json(text, list[dict[str, object] | None], "error reading ulimit settings: ulimits") or []
    named = [{key.title(): value for key, value in each.items() if value is not None} for each in given if each]
    try:
        return msgspec.convert(named, list[Ulimit])
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"error reading ulimit settings: ulimits: {decoding_reason(error)}") from error


def cache_from(text: str) -> tuple[str, ...]:
    """The value of `cachefrom`: a JSON list of image names."""
    given = _json(text, list[str | None], "error reading cache-from: cachefrom") or []
    return tuple(dict.fromkeys(name for name in given if name))


def platform(text: str, dialect: Dialect = CLASSIC) -> Platform | None:
    """The value of `platform`: `os`, `arch`, `os/arch` or `os/arch/variant`; None for the empty
    text.
    """
    if not text:
        return None
    found = platforms.parse(text)
    if found.os != "linux" and not dialect.all_systems:
        raise InvalidParameter(f'platform: operating system "{found.os}" is not supported')
    return found


def host(given: HostConfig, gateway: str) -> HostConfig:
    """The settings of RUN's containers, checked. `gateway`: the address that `host-gateway` stands
    for in extra hosts.
    """
    if given.isolation not in ("", "default", "process"):
        raise InvalidParameter(f'Unsupported isolation: "{given.isolation[:100]}"')
    extra = [_extra_host(each, gateway) for each in given.extra_hosts or ()]
    checked = body.checked_host(
        msgspec.structs.replace(given, isolation="", extra_hosts=extra or None, log_config=_LOG)
    )
    body.check_together(Config(), checked)
    return checked


def check_frontend(version: str, session: str, remote: str) -> None:
    """`version` and what belongs to it: BuildKit's builds by POST /build are not served."""
    if version not in ("", "1", "2"):
        raise InvalidParameter(f'invalid version "{version[:100]}"')
    if version == "2":
        if not session:
            raise InvalidParameter("version: a build of version 2 needs a session")
        raise Unimplemented("version: BuildKit builds by POST /build are not supported; use version 1 or POST /grpc")
    if remote == "client-session":
        raise Unimplemented("remote: client-session is only supported with BuildKit, by POST /grpc")


def check_outputs(text: str) -> None:
    """The value of `outputs`: a JSON list of {Type, Attrs}. The result of a build by POST /build is
    an image of this engine, so only the exporters that mean this are accepted.
    """
    given = _json(text, list[dict[str, object] | None], "invalid outputs specified: outputs") or []
    for each in given:
        fields = {key.lower(): value for key, value in (each or {}).items()}
        kind, attributes = fields.get("type"), fields.get("attrs")
        if kind not in ("docker", "image", "moby") or attributes:
            what = str(kind or "")[:100] + (" with attributes" if attributes else "")
            raise InvalidParameter(
                f'outputs: exporter "{what}" is not supported: a build by POST /build makes an image of this engine'
            )


def check_squash(squash: bool, *, experimental: bool) -> None:
    if squash and experimental:
        raise Unimplemented("squash: this engine does not merge the layers of an image")
    if squash:
        raise InvalidParameter("squash is only supported with experimental mode")


def check_security(options: Sequence[str]) -> None:
    if options:
        raise InvalidParameter("security options are not supported on linux")


def _extra_host(text: str, gateway: str) -> str:
    name, colon, address = text.partition(":")
    if address == "host-gateway":
        return f"{name}:{gateway}"
    return f"{name}{colon}{address.removeprefix('[').removesuffix(']')}"


def _json(text: str, of: type[T], what: str) -> T | None:
    """A JSON value; None for the empty text and null."""
    if not text:
        return None
    try:
        kind: object = of | None
        return msgspec.json.decode(text.encode(), type=kind)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeError) as error:
        raise InvalidParameter(f"{what}: {decoding_reason(error)}") from None
