"""The set of roots that a swarm trusts: how rotations of the CA let it grow and shrink. Pure.

```
root         the tokens name it. Every certificate of the swarm leads to it, as it has signed each
             other root of the set (`cross_signed`)
rotation     where a rotation leads to. Certificates come from it, or without a rotation from root
abandoned    where earlier rotations led to that others have replaced, or that went back to root
```

A rotation that is replaced does not end: some nodes have certificates of its root by then, or will
have, because an answer with one is on its way or the node is down. So that root stays in the set,
and each node renews once more. `Cluster.abandonments` counts the roots that were abandoned. A node
renews one certificate at a time. So when it asks for one, it can hold no others than the one that
it shows and the one that it is given. `NodeData.abandonments` keeps what the count was then.

When each node has a certificate of the root that certificates come from, and has asked for one
since the last abandonment, no other root is needed, and the set shrinks to that one.

Raises: WrongState when the set would have too many roots.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
from cryptography import x509

from engine.errors import InvalidParameter, WrongState
from engine.manager.certificates import certificates, digest, issued_by, normal
from engine.manager.records import Cluster, NodeData

MOST_ABANDONED = 8
"""Roots of abandoned rotations. Each handshake of each node looks at all of them."""

replace = msgspec.structs.replace


@lru_cache(maxsize=32)
def issuer(pem: str) -> x509.Certificate:
    """The certificate of a root of the set. Raises InvalidParameter."""
    return certificates(pem)[0]


# --- the set --------------------------------------------------------------------------------------


def members(cluster: Cluster) -> tuple[str, ...]:
    """The roots that nodes trust now, each in PEM. The first one is named by the tokens."""
    return tuple(pem for pem in (cluster.root, cluster.rotation, *cluster.abandoned) if pem)


def trusted(cluster: Cluster) -> str:
    """The same as one text: ca.crt of each node."""
    return "".join(members(cluster))


def signing(cluster: Cluster) -> str:
    """The root that certificates come from."""
    return cluster.rotation or cluster.root


def issuer_of(cluster: Cluster, certificate: x509.Certificate) -> str:
    """The root that has issued a certificate; "" for one of another CA."""
    for pem in members(cluster):
        if issued_by(certificate, issuer(pem)):
            return pem
    return ""


def changing(cluster: Cluster) -> bool:
    """Returns True if more than one root is trusted: a rotation, or the way back, has not ended."""
    return bool(cluster.rotation or cluster.abandoned)


# --- rotations ------------------------------------------------------------------------------------


def rotated(cluster: Cluster, to: str, cross_signed: str) -> Cluster:
    """A rotation to the root `to` begins, and replaces the one under way."""
    if to == cluster.rotation:
        return replace(cluster, cross_signed=cross_signed)
    return replace(_abandoning(cluster, without=to), rotation=to, cross_signed=cross_signed)


def returned(cluster: Cluster) -> Cluster:
    """Certificates come from `root` again: the rotation under way is given up."""
    return replace(_abandoning(cluster), rotation="", cross_signed="")


def adopted(cluster: Cluster, chain: str) -> Cluster:
    """With the issuer of this node's certificate in the set, when it is a root that `root` has
    signed and that an earlier version has forgotten. `chain`: the certificate with what follows.
    """
    try:
        own, *others = certificates(chain)
    except InvalidParameter:
        return cluster
    if issuer_of(cluster, own):
        return cluster
    for between in others:
        if issued_by(own, between) and issued_by(between, issuer(cluster.root)):
            return _with(cluster, normal(between)) if len(cluster.abandoned) < MOST_ABANDONED else cluster
    return cluster


def finished(cluster: Cluster) -> Cluster:
    """No node needs another root than the one that certificates come from."""
    return replace(cluster, root=signing(cluster), rotation="", cross_signed="", abandoned=())


def _abandoning(cluster: Cluster, without: str = "") -> Cluster:
    """With the root of the rotation under way among the abandoned ones. `without`: a root that is
    none of them any more.
    """
    cluster = replace(cluster, abandoned=tuple(pem for pem in cluster.abandoned if pem != without))
    return _with(cluster, cluster.rotation) if cluster.rotation else cluster


def _with(cluster: Cluster, pem: str) -> Cluster:
    if pem in cluster.abandoned:
        return cluster
    if len(cluster.abandoned) >= MOST_ABANDONED:
        raise WrongState(
            f"the CA was rotated {MOST_ABANDONED + 1} times before each node had renewed its certificate, and at most "
            f"{MOST_ABANDONED} roots of abandoned rotations are kept for the nodes that may need them: start the nodes "
            "that are down, or remove them from the swarm, and wait for the end of the present rotation"
        )
    return replace(cluster, abandoned=(*cluster.abandoned, pem), abandonments=cluster.abandonments + 1)


# --- nodes ----------------------------------------------------------------------------------------


def settled(cluster: Cluster, data: NodeData | None) -> bool:
    """Returns True if the node holds certificates of `signing` alone. `data`: None for a node that
    has never connected.
    """
    return data is not None and data.certificate == digest(signing(cluster)) and _has_asked(cluster, data)


def should_renew(cluster: Cluster, certificate: str, data: NodeData | None) -> bool:
    """Returns True if a node that shows a certificate of the root with this digest should renew it
    now, because of a rotation.
    """
    if certificate == "":
        return False
    return certificate != digest(signing(cluster)) or not (data is None or _has_asked(cluster, data))


def noted(cluster: Cluster, certificate: str, data: NodeData | None) -> NodeData:
    """The record of a node that asks for a certificate, and shows one of the root with this
    digest.
    """
    data = data or NodeData()
    if not cluster.abandoned or _has_asked(cluster, data):
        return data
    return replace(data, certificate=certificate, abandonments=cluster.abandonments)


def _has_asked(cluster: Cluster, data: NodeData) -> bool:
    return not cluster.abandoned or data.abandonments >= cluster.abandonments
