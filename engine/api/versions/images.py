"""Older shapes of an image's configuration, for rows of several versions."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from engine.wire.containers import Config
from engine.wire.images import ImageInspect

_ALWAYS = dict.fromkeys(("Cmd", "Entrypoint", "Env", "Labels", "OnBuild", "Volumes")) | {"User": "", "WorkingDir": ""}


def complete_config(image: ImageInspect) -> dict[str, Any]:
    """With null or an empty text where nothing is set."""
    return {**_ALWAYS, **msgspec.to_builtins(image.config)}


def container_config(image: ImageInspect) -> Config:
    """With the fields that only a container has."""
    config = image.config
    return Config(
        user=config.user,
        exposed_ports=config.exposed_ports or UNSET,
        env=config.env,
        entrypoint=config.entrypoint,
        cmd=config.cmd,
        healthcheck=config.healthcheck,
        args_escaped=config.args_escaped or UNSET,
        volumes=config.volumes,
        working_dir=config.working_dir,
        on_build=config.on_build,
        labels=config.labels or {},
        stop_signal=config.stop_signal or UNSET,
        shell=config.shell,
    )
