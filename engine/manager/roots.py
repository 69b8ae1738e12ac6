"""The set of roots that a swarm trusts: how rotations of the CA let it grow and shrink. Pure.

```
root         the tokens name it. Every certificate of the swarm leads to it, as it has signed each
             other root of the set (`cross_signed`)
rotation     where a rotation leads to. Certificates come from it, or without a rotation from root
abandoned    where earlier rotations led to that others have replaced, or that went back to root
```

A rotation that is replaced does not end: some nodes have certificates of its root by then, or will
have, because an answer with one is on its way or the node is down. So that root stays in the set,
and each node renews once more.

A session shows one certificate of a node, not the one that the node was given since. So
`Cluster.issuer_changes` counts how often certificates have come from another root before a rotation
had ended. A node renews one certificate at a time: when it asks for one, it can hold no others than
the one that it shows and the one that it is given. `NodeData.issuer_changes` keeps what the count
was then.

When each node shows a certificate of the root that certificates come from, and has asked for one
since that root was changed, no other root is needed, and the set shrinks to that one.

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
"""Roots of abandoned rotations. Each handshake of each node looks at all of them. A rotation leaves
room for one more, so that it can be given up.
"""

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
    after = _abandoning(cluster, without=to)
    if len(after.abandoned) >= MOST_ABANDONED:
        raise WrongState(
            f"the CA was rotated {MOST_ABANDONED} times before each node had renewed its certificate, and no more "
            "roots of abandoned rotations are kept for the nodes that may need them: start the nodes that are down, "
            "or remove them from the swarm, and wait for the end of the present rotation"
        )
    after = replace(after, rotation=to, cross_signed=cross_signed)
    return _issuer_changed(after) if changing(cluster) else after


def returned(cluster: Cluster) -> Cluster:
    """Certificates come from `root` again: the rotation under way is given up."""
    if not cluster.rotation:
        return cluster
    return _issuer_changed(replace(_abandoning(cluster), rotation="", cross_signed=""))


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
            return _issuer_changed(_with(cluster, normal(between)))
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
    return cluster if pem in cluster.abandoned else replace(cluster, abandoned=(*cluster.abandoned, pem))


def _issuer_changed(cluster: Cluster) -> Cluster:
    return replace(cluster, issuer_changes=cluster.issuer_changes + 1)


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
    must_ask = changing(cluster) and data is not None and not _has_asked(cluster, data)
    return must_ask or certificate != digest(signing(cluster))


def noted(cluster: Cluster, certificate: str, data: NodeData | None) -> NodeData:
    """The record of a node that asks for a certificate, and shows one of the root with this
    digest.
    """
    data = data or NodeData()
    if _has_asked(cluster, data):
        return data
    return replace(data, certificate=certificate, issuer_changes=cluster.issuer_changes)


def _has_asked(cluster: Cluster, data: NodeData) -> bool:
    return data.issuer_changes >= cluster.issuer_changes
