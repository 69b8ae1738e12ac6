"""Cache keys of steps. Pure.

A key is the digest of everything that decides a step's result: the key of the step before, the kind
of step, its instruction, the whole configuration that results, and digests of the content that it
copies. Two steps with one key have the same result, whatever image it is in. A base image's key is
its id, so what was pulled or loaded is never matched as the result of a step.

Docker's classic builder compared only some fields of the configuration, by which an image that was
made for it could pass as a step's result (CVE-2024-24557). Secrets, limits, modification times and
the values of predefined proxy variables are not part of a key.
"""

from __future__ import annotations

import hashlib

import msgspec

from engine.wire.containers import Config

VERSION = 4
"""Part of every key: increased when a step's result changes without its parts, which empties the
cache.
"""

_MANY = 1000
"""Ports."""

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def key_of(parent: str, kind: str, *parts: object, config: Config | None = None) -> str:
    """The key of a step. `parts` are MessagePack types."""
    if config is not None and config.exposed_ports and len(config.exposed_ports) > _MANY:
        # To encode and sort 65,535 ports in one call would hold the GIL for 0.1 s.
        ports = hashlib.sha256("\n".join(sorted(config.exposed_ports)).encode()).hexdigest()
        parts, config = (*parts, "ports", ports), msgspec.structs.replace(config, exposed_ports=None)
    shown = {} if config is None else msgspec.to_builtins(config)
    return hashlib.sha256(_encode((VERSION, parent, kind, parts, shown))).hexdigest()


def base_key(image_id: str) -> str:
    """The key of a base image; "" is `FROM scratch`."""
    return key_of("", "from", image_id)


__all__ = ["VERSION", "base_key", "key_of"]
