"""What a reload takes over of a new configuration, and what waits for a restart.

The attributes of the event are dockerd's, so that programs that watch for it find them.
"""

from __future__ import annotations

import msgspec

from engine.config.declaration import Config, options

OUTCOME = "reloaded"
"""File in RUN with the outcome of the last reload, for `engined reload`: what waits for a restart,
or why nothing was reloaded, in lines.
"""
FAILED = "not reloaded: "
"""Begins the latter."""


def merged(old: Config, new: Config) -> Config:
    """The old configuration with what a reload may change from the new one."""
    return msgspec.structs.replace(
        old, **{option.field: getattr(new, option.field) for option in options() if option.reload}
    )


def waiting(old: Config, new: Config) -> list[str]:
    """Fields whose new values are in force only after a restart."""
    return [
        option.field
        for option in options()
        if not option.reload and getattr(old, option.field) != getattr(new, option.field)
    ]


def attributes(config: Config) -> dict[str, str]:
    """Of the event `reload` of the daemon."""
    return {
        "allow-nondistributable-artifacts": "[]",
        "authorization-plugins": _texts(config.authorization_plugins),
        "debug": str(config.log_level == "debug").lower(),
        "default-cgroupns-mode": config.cgroupns_mode,
        "default-ipc-mode": config.ipc_mode,
        "default-runtime": config.runtime or "runc",
        "default-shm-size": config.shm_size,
        "features": f"map[{' '.join(sorted(each.replace('=', ':', 1) for each in config.features))}]",
        "insecure-registries": _texts(config.insecure_registries),
        "labels": _texts(config.labels),
        "live-restore": "true",
        "max-concurrent-downloads": str(config.max_downloads),
        "max-concurrent-uploads": str(config.max_uploads),
        "max-download-attempts": str(config.download_attempts),
        "registry-mirrors": _texts(config.registry_mirrors),
        "runtimes": " ".join(sorted(entry.replace("=", ":", 1) for entry in config.runtimes)),
        "shutdown-timeout": str(config.shutdown_timeout),
    }


def _texts(values: tuple[str, ...]) -> str:
    return msgspec.json.encode(values).decode()
