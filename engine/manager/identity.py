"""The identity of a peer, as its certificate states it. Checked by `ca.Authority`, made by the
listener for each connection, and by the manager's program for the Unix socket of its own daemon.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.swarm_session.states import Role


class Identity(NamedTuple):
    node: str
    role: Role
    """OU of the certificate, which may lag behind the wish in `NodeRecord.role`."""
    certificate: str = ""
    """SHA-256 of the PEM of the root that issued the certificate: `NodeData.certificate`."""
    swarm: str = ""
    until: int = 0
    """When the certificate expires, nanoseconds."""
