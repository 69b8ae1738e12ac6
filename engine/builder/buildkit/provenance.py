"""What a build was made of, as BuildKit's history says it: a predicate of SLSA provenance 0.2,
which `docker buildx history inspect` and `docker build --metadata-file` show. Pure.

It has the bases with their digests and what the client asked for. It is not signed, is no part of
the image, and does not describe the steps (`buildConfig`), as BuildKit's with `mode=max` does.

Sources: SLSA provenance 0.2; BuildKit's solver/llbsolver/provenance, as dockerd 28.5 answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from engine.builder.git import without_password
from engine.builder.options import context_key
from engine.common import times
from engine.errors import InvalidParameter
from engine.images import platforms, reference
from engine.images.record import ImageRecord
from engine.wire.images import Platform

PREDICATE = "https://slsa.dev/provenance/v0.2"
MEDIA_TYPE = "application/vnd.in-toto+json"
_BUILD_TYPE = "https://mobyproject.org/buildkit@v1"
_SHOWN = ("build-arg:", "label:", "context:")
_VCS = "vcs:"


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a build began with. Times in ns since the epoch."""

    ref: str
    attributes: Mapping[str, str]
    """Of the frontend, as the client has sent them."""
    bases: Mapping[str, ImageRecord]
    """By their names in the Dockerfile."""
    begun: int
    ended: int


def predicate(inputs: Inputs) -> bytes:
    """The predicate, as JSON."""
    attributes = inputs.attributes
    url = attributes.get("context", "")
    source: dict[str, Any] = {"uri": without_password(url)} if url else {}
    source["entryPoint"] = attributes.get("filename", "") or "Dockerfile"
    arguments = {name: value for name, value in attributes.items() if name.startswith(_SHOWN) or name == "target"}
    parameters: dict[str, Any] = {"frontend": "dockerfile.v0"}
    if arguments:
        parameters["args"] = arguments
    if not url:
        parameters["locals"] = [{"name": "context"}, {"name": "dockerfile"}]
    document: dict[str, Any] = {
        "builder": {"id": ""},
        "buildType": _BUILD_TYPE,
        "materials": [_material(name, record) for name, record in sorted(inputs.bases.items())],
        "invocation": {
            "configSource": source,
            "parameters": parameters,
            "environment": {"platform": platforms.text_of(platforms.HOST)},
        },
        "metadata": {
            "buildInvocationID": inputs.ref,
            "buildStartedOn": times.rfc3339(inputs.begun),
            "buildFinishedOn": times.rfc3339(inputs.ended),
            "completeness": {"parameters": True, "environment": True, "materials": False},
            "reproducible": False,
        },
    }
    vcs = {name.removeprefix(_VCS): value for name, value in attributes.items() if name.startswith(_VCS)}
    if vcs:
        document["metadata"][f"{_BUILD_TYPE}#metadata"] = {"vcs": vcs}
    return msgspec.json.encode(document)


def _material(name: str, record: ImageRecord) -> dict[str, Any]:
    """A base as a package URL, with the digest by which registries know it, else with its id."""
    try:
        parsed = reference.parse(name)
        wanted = parsed.repository
    except InvalidParameter:
        parsed, wanted = None, ""
    digest = next((each.digest for each in map(reference.read, record.digests) if each.repository == wanted), record.id)
    config = record.config
    platform = Platform(os=config.os or "linux", architecture=config.architecture, variant=config.variant)
    shown = parsed.familiar_repository if parsed is not None else context_key(name)
    tag = f"@{parsed.tag or 'latest'}" if parsed is not None and not parsed.digest else ""
    uri = f"pkg:docker/{quote(shown, safe='/:')}{tag}?platform={quote(platforms.text_of(platform), safe='')}"
    return {"uri": uri, "digest": {"sha256": digest.removeprefix("sha256:")}}


__all__ = ["MEDIA_TYPE", "PREDICATE", "Inputs", "predicate"]
