"""What API 1.43 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, ignoring
from engine.wire.containers import CreateBody
from engine.wire.images import ImageSummary


def _tags(image: ImageSummary) -> list[str]:
    return image.repo_tags or ([] if image.repo_digests else ["<none>:<none>"])


def _digests(image: ImageSummary) -> list[str]:
    return image.repo_digests or ([] if image.repo_tags else ["<none>@<none>"])


CHANGES = (
    Change(
        "1.43",
        "create takes Annotations",
        of=CreateBody,
        upgrade=ignoring("HostConfig.Annotations"),
        down_to="1.25",
    ),
    Change(
        "1.43",
        "an image without a name has empty lists of names",
        of=ImageSummary,
        downgrade={"RepoTags": _tags, "RepoDigests": _digests},
    ),
)
