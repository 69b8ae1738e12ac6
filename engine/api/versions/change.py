"""One difference between two API versions: the vocabulary in which the files `v1_*.py` are written.

Pure. Not here: how the rows of several versions are composed (`__init__.py`), how an older reply is
built (`shapes.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

from engine.wire.containers import FROM_OLDER

Source = Callable[[Any], Any] | None
"""The origin of a field in an older reply: a function of the whole newest struct, or None if the
older reply does not have the field.
"""

Downgrade = Mapping[str, Source]
"""Fields of the older reply by path. A dot descends into an object, or into each element of a list
or map of objects.
"""

Upgrade = Callable[[dict[str, Any]], None]
"""Changes the JSON object of an older request in place. Field names are spelled as the struct
spells them.
"""


class Flag(enum.Enum):
    """Behaviour that depends on the version. Handlers ask `request.version.has(flag)`.

    The value is the change in the changelog's words.
    """

    LOGS_SINCE = "logs take since"
    INSPECT_SIZE = "inspect takes size"
    DETACH_KEYS = "start and attach take detachKeys"
    STATS_NAMED = "stats show name and id"
    KILL_NEEDS_A_PROCESS = "kill of a stopped container is an error"
    START_TAKES_NO_HOST_CONFIG = "start takes no HostConfig"
    NUMBERED_STEPS = "build numbers its steps as N/M"
    UNUSED_ARGUMENTS_WARN = "build warns of unused build arguments"
    LATER_ROUTES_NAMED = "a request of a later version is refused with 400 and that version, not with 404"
    NO_SWARM_IS_503 = "what needs a swarm answers 503 outside of one, not 406"
    UNIQUE_NETWORK_NAMES = "names of networks are unique"
    BUILD_AUX = "build streams the image's id in aux"
    NETWORKS_LISTED_SHORT = "the list of networks has no Containers"
    STATE_CONFLICTS = "what the state of a container does not permit is a conflict"
    EXEC_ALWAYS_HIJACKS = "start of an exec hijacks the connection although nothing is attached"
    WEBSOCKET_BINARY = "attach/ws sends binary frames"
    WAIT_CONDITION = "wait takes condition"
    WAIT_HEAD = "wait sends its head at once"
    PULL_PLATFORM = "pull, import and build take platform"
    WAIT_ERROR = "wait reports a removal that failed"
    BUILD_OUTPUTS = "build takes outputs"
    CREATE_PLATFORM = "create takes platform"
    STATS_ONE_SHOT = "stats take one-shot"
    IMAGES_WITHOUT_FILTER = "the image list takes no filter, but filters"
    STOP_SIGNAL = "stop and restart take signal"
    STREAM_TYPES = "streams of frames have a media type of their own"
    WEBSOCKET_STREAMS = "attach/ws takes stdin, stdout and stderr"
    IMAGE_WITHOUT_MAKER = "inspect of an image shows no Container and ContainerConfig"
    REFUSED_CREDENTIALS = "pull answers 401 where a registry refuses credentials"
    UNREADABLE_AUTH = "an X-Registry-Auth that cannot be read means none"
    IMAGE_IDENTITY = "the image list takes identity"
    IMAGE_CONTAINERS = "the image list counts the containers of an image"
    SHARED_SIZE = "the image list takes shared-size"
    NO_KERNEL_MEMORY = "info has no KernelMemory"
    DF_TYPES = "system/df takes type"
    PRUNE_ANONYMOUS = "a prune of volumes removes anonymous ones"
    PUSH_PLATFORM = "push takes platform"
    IMAGE_CREATE_EVENTS = "events report new images"
    IMAGE_PLATFORM = "save, load and history take platform"
    INSPECT_MANIFESTS = "inspect of an image takes manifests"
    PRUNE_SPACE = "build/prune takes reserved-space, max-used-space and min-free-space"
    INSPECT_PLATFORM = "inspect of an image takes platform"
    DELETE_PLATFORMS = "delete of an image takes platforms"
    NO_BRIDGE_NF = "info has no BridgeNfIptables and BridgeNfIp6tables"
    DF_VERBOSE = "system/df takes verbose"
    NO_REQUESTED_MAC = "inspect of a container has no MacAddress in Config"
    EVENTS_LINES = "events are application/jsonl"
    SWARM_EVENTS = "events report services, nodes, secrets and configs"
    DIGEST_BY_CLIENT = "clients find the digest of a service's image"
    NETWORK_STATUS = "inspect of a network counts its addresses"
    INGRESS_REMOVABLE = "the network ingress can be removed"
    NETWORKS_CHANGE = "updates of services can change their networks"
    NODE_LOCAL_NETWORKS = "services can use networks of their nodes"
    PLUGIN_DISABLE_FORCE = "disable of a plugin takes force"
    SERVICE_STATUS = "the list of services takes status"


class Change:
    """One difference, present from release `since` on.

    `downgrade` describes the older shape of the reply `of`. `upgrade` turns an older request `of`
    into the newer one. A change with only a `flag` is a change of behaviour.

    With `down_to` the older behaviour is that of the versions from `down_to` on; still older ones
    behave as the newest. Requests of 1.18 to 1.24 have it for what later versions added: what such
    a client sends is obeyed (`docs/COMPATIBILITY.md`).
    """

    __slots__ = ("down_to", "downgrade", "flag", "of", "since", "upgrade", "words")

    def __init__(
        self,
        since: str,
        words: str,
        *,
        flag: Flag | None = None,
        of: type | None = None,
        downgrade: Downgrade | None = None,
        upgrade: Upgrade | None = None,
        down_to: str = "0.0",
    ) -> None:
        if (of is None) != (downgrade is None and upgrade is None):
            raise ValueError(f"change {words!r}: `of` goes with `downgrade` or `upgrade`")
        self.since = release(since)
        self.words = words
        self.flag = flag
        self.of = of
        self.downgrade = downgrade
        self.upgrade = upgrade
        self.down_to = release(down_to)

    def differs(self, at: tuple[int, int]) -> bool:
        """True if version `at` has the older behaviour."""
        return self.down_to <= at < self.since

    def __repr__(self) -> str:
        return f"Change({self.since[0]}.{self.since[1]}, {self.words!r})"


def release(text: str) -> tuple[int, int]:
    """`1.24` as the pair (1, 24). Raises ValueError for other texts."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal() and major.isascii() and minor.isascii() and len(text) < 12):
        raise ValueError(f"not a version: {text!r}")
    return int(major), int(minor)


def notes(request: dict[str, Any]) -> dict[str, Any]:
    """The notes of upgrades in a create body (`FromOlder`)."""
    found: dict[str, Any] = request.setdefault(FROM_OLDER, {})
    return found


def without(*fields: str) -> Downgrade:
    """A downgrade for fields that older replies lack."""
    return dict.fromkeys(fields)


def ignoring(*fields: str) -> Upgrade:
    """An upgrade for fields that have no meaning in older requests.

    A dot descends into an object.
    """
    paths = [field.split(".") for field in fields]

    def drop(request: dict[str, Any]) -> None:
        for *parents, name in paths:
            place: Any = request
            for parent in parents:
                place = place.get(parent) if isinstance(place, dict) else None
            if isinstance(place, dict):
                place.pop(name, None)

    return drop
