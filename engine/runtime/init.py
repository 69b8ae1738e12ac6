"""The init program of this host, which runs as the first process of a container with
HostConfig.Init: it reaps orphans and forwards signals.

Not here: how it gets into the container (`containers/spec.py`).
"""

from __future__ import annotations

import os
import shutil

from engine.errors import InvalidParameter

NAMES = ("docker-init", "tini-static", "catatonit")
"""All linked statically: they run in the container's root."""

_SEARCH = "/usr/libexec/docker:/usr/local/bin:/usr/bin:/bin:/usr/libexec/podman:/usr/sbin:/sbin"


def program(configured: str = "") -> str:
    """Its path on this host: the configured one if there is one. Raises InvalidParameter if it is
    missing.
    """
    if configured:
        if os.access(configured, os.X_OK):
            return configured
        raise InvalidParameter(f"Init: {configured} is not an executable file")
    for name in NAMES:
        found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SEARCH}")
        if found is not None:
            return found
    raise InvalidParameter(f"Init: none of {', '.join(NAMES)} is installed on this host")
