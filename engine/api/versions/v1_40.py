"""What API 1.40 changed."""

from __future__ import annotations

from typing import Any

from engine.api.versions.change import Change, Flag, ignoring
from engine.api.versions.mounts import ignoring_option
from engine.wire.containers import CreateBody, UpdateBody


def _shareable(request: dict[str, Any]) -> None:
    host = request.setdefault("HostConfig", {})
    if isinstance(host, dict) and not host.get("IpcMode"):
        host["IpcMode"] = "shareable"


CHANGES = (
    Change("1.40", "the default IpcMode is private", of=CreateBody, upgrade=_shareable),
    Change(
        "1.40",
        "create takes KernelMemoryTCP",
        of=CreateBody,
        upgrade=ignoring("HostConfig.KernelMemoryTCP"),
        down_to="1.25",
    ),
    Change("1.40", "update takes PidsLimit", of=UpdateBody, upgrade=ignoring("PidsLimit")),
    Change("1.40", "build takes outputs", flag=Flag.BUILD_OUTPUTS, down_to="1.25"),
    Change(
        "1.40",
        "create takes NonRecursive of binds in Mounts",
        of=CreateBody,
        upgrade=ignoring_option("BindOptions", "NonRecursive"),
        down_to="1.25",
    ),
)
