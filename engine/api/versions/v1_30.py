"""What API 1.30 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (
    Change("1.30", "build streams the image's id in aux", flag=Flag.BUILD_AUX),
    Change("1.30", "wait takes condition", flag=Flag.WAIT_CONDITION, down_to="1.25"),
    Change("1.30", "wait sends its head at once", flag=Flag.WAIT_HEAD),
    Change("1.30", "events report services, nodes, secrets and configs", flag=Flag.SWARM_EVENTS),
    Change("1.30", "clients find the digest of a service's image", flag=Flag.DIGEST_BY_CLIENT, down_to="1.25"),
    Change("1.30", "services can use networks of their nodes", flag=Flag.NODE_LOCAL_NETWORKS),
)
