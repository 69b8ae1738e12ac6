"""The operator's configuration: paths, listeners, runtime, limits and defaults of containers.

`declaration` has every option once, `rules` what values they may have, `docker` the keys of
dockerd's file, `files` puts command line and file together.

Not here: anything that changes while the daemon runs. A reload makes another `Config`.
"""

from engine.config import docker, reloads
from engine.config.declaration import (
    DEFAULT_BRIDGE,
    DEFAULT_CERTIFICATES,
    DEFAULT_ROOT,
    DEFAULT_RUN,
    DEFAULT_SOCKET,
    FIREWALL_MARK,
    INHERITED,
    Config,
    Option,
    options,
)
from engine.config.docker import FLAGS
from engine.config.files import (
    DEFAULT_FILE,
    FileError,
    Source,
    Verdict,
    decode,
    default_file,
    encode,
    from_keys,
    parse,
    verdicts,
)
from engine.config.rules import ULIMITS, cgroup_parent, runtime, seccomp_document, size_in_bytes, ulimit

__all__ = [
    "DEFAULT_BRIDGE",
    "DEFAULT_CERTIFICATES",
    "DEFAULT_FILE",
    "DEFAULT_ROOT",
    "DEFAULT_RUN",
    "DEFAULT_SOCKET",
    "FIREWALL_MARK",
    "FLAGS",
    "INHERITED",
    "ULIMITS",
    "Config",
    "FileError",
    "Option",
    "Source",
    "Verdict",
    "cgroup_parent",
    "decode",
    "default_file",
    "docker",
    "encode",
    "from_keys",
    "options",
    "parse",
    "reloads",
    "runtime",
    "seccomp_document",
    "size_in_bytes",
    "ulimit",
    "verdicts",
]
