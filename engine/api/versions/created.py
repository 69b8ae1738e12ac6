"""Rows for fields of a container that create takes and inspect shows."""

from __future__ import annotations

from engine.api.versions.change import Change, ignoring, without
from engine.wire.containers import ContainerInspect, CreateBody


def created_with(since: str, words: str, *fields: str) -> tuple[Change, Change]:
    """Rows for fields of Config (`Healthcheck`) or HostConfig (`HostConfig.Tmpfs`) that are new in
    `since`.

    Older versions ignore these fields in create and omit them from inspect.
    """
    shown = [field if field.startswith("HostConfig.") else f"Config.{field}" for field in fields]
    return (
        Change(since, words, of=CreateBody, upgrade=ignoring(*fields)),
        Change(since, words, of=ContainerInspect, downgrade=without(*shown)),
    )
