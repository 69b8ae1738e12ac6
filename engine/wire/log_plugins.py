"""The protocol of log plugins (Docker's documentation, "Docker log driver plugins"). Structs name
the fields and have no behaviour.
"""

from __future__ import annotations

import msgspec


class LogInfo(msgspec.Struct, kw_only=True, frozen=True, rename="pascal"):
    """What a plugin learns of a container whose output it gets. `config`: the log options."""

    config: dict[str, str] = {}
    container_id: str = msgspec.field(default="", name="ContainerID")
    container_name: str = ""
    """With its leading slash."""
    container_entrypoint: str = ""
    container_args: list[str] = []
    container_image_id: str = msgspec.field(default="", name="ContainerImageID")
    container_image_name: str = ""
    container_created: str = "0001-01-01T00:00:00Z"
    container_env: list[str] = []
    container_labels: dict[str, str] = {}
    log_path: str = ""
    daemon_name: str = ""
