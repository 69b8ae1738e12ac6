"""Drivers that are plugins: any name that is neither built in nor refused.

The options are the plugin's, and are passed to it unchecked. Whether the plugin exists is not known
here (`containers/log_plugins.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.common import times
from engine.logs import tags
from engine.logs.deliveries import LogPlugin
from engine.logs.facts import Facts
from engine.logs.options import Options
from engine.wire.log_plugins import LogInfo

REFUSED = frozenset(("etwlogs", "gcplogs"))
"""Docker's drivers that this engine does not have. A plugin of that name would be something
else."""

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_./:@-]{0,499}")


def is_name(name: str) -> bool:
    """The name may be that of a plugin, given that no driver has it."""
    return name not in REFUSED and _NAME.fullmatch(name) is not None


def parse(options: Options) -> LogPlugin:
    return LogPlugin(options.driver)


def completed(target: LogPlugin, options: Mapping[str, str], facts: Facts) -> LogPlugin:
    """With the container's FIFO, and what the plugin learns of the container."""
    return LogPlugin(
        target.name,
        facts.fifo,
        LogInfo(
            config=dict(options),
            container_id=facts.id,
            container_name=f"/{facts.name}",
            container_entrypoint=facts.path,
            container_args=list(facts.args),
            container_image_id=facts.image_id,
            container_image_name=facts.image_name,
            container_created=times.rfc3339(facts.created),
            container_env=list(facts.environment),
            container_labels=dict(facts.labels),
            daemon_name=tags.DAEMON,
        ),
    )
