"""The swarm's certificate authority: tokens, identities of peers, certificates, secrets.

Every manager is an authority of its own, because the key of the root is in the store. With an
external CA (cfssl) in the swarm's settings each request goes there, and the own key is not used as
a silent replacement.

Rotation. A new root is put beside the old one (`Cluster.rotation`), signed by the old one too
(`cross_signed`). From then on certificates come from the new root, with the cross-signed one
behind them, so that nodes which know the old root alone accept them. Agents are given both roots
and are asked to renew. When each node has a certificate of the new root (`rotation.py`), it becomes
the only one, and the tokens change with it. Before that another rotation may begin, or the way back
to the old root: `roots.py` has the rules.

Owns:    nothing. Records are the store's.
Threads: the event loop's.
Raises:  InvalidParameter for bad requests and settings, Forbidden for peers that have no right,
         ServerError when a certificate cannot be issued.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.errors import Forbidden, InvalidParameter, ServerError, Unavailable
from engine.manager import cfssl, keys, records, roots, tokens
from engine.manager.certificates import (
    MALFORMED,
    Root,
    Subject,
    certificates,
    digest,
    issuer_key,
    issuer_name,
    nanoseconds,
    new_root,
    request_key,
    subject_of,
)
from engine.manager.identity import Identity
from engine.manager.records import CAKey, Claim, Cluster, DataKey
from engine.manager.store import Change, Compare, Put, Store
from engine.swarm_session.clock import SECOND, Clock
from engine.swarm_session.states import Role
from engine.wire.swarm import CAConfig, ExternalCA, SwarmSpec, TLSInfo

DAY = 24 * 3600 * SECOND
EXPIRY = 90 * DAY
"""Life of certificates unless the settings say otherwise."""
FOREIGN = "the certificate was not issued by this swarm's CA"
LATE = 30 * DAY
"""A node whose certificate expired within this time may still renew it."""

External = Callable[[Sequence[ExternalCA], Root, str, Subject, str, str], Awaitable[str]]
"""As `cfssl.sign`."""

_NONCE = 12


class Founding(NamedTuple):
    """The first records of a swarm, and the identity of its first node."""

    cluster: Cluster
    ca_key: CAKey
    data_key: DataKey
    certificate: str
    """PEM of the first node, a manager."""
    key: str
    """Its private key, PEM."""

    @property
    def changes(self) -> list[Change]:
        return [
            Put(records.CLUSTER, "", self.cluster),
            Put(records.CA_KEY, "", self.ca_key),
            Put(records.DATA_KEY, "", self.data_key),
        ]


async def found(
    spec: SwarmSpec,
    clock: Clock,
    *,
    node: str,
    address: str,
    address_pool: tuple[str, ...] = (),
    subnet_size: int = 24,
    data_path_port: int = 4789,
    external: External = cfssl.sign,
) -> Founding:
    """Everything that a new swarm begins with. Nothing is written.

    `address`: host:port of the first node. The root is the one in the settings (SigningCACert, or
    that of the external CA), else a new one.

    Raises InvalidParameter for unfit settings, ServerError when an external CA refuses.
    """
    config, now = spec.ca_config, clock.now()
    if config.signing_ca_key and not config.signing_ca_cert:
        raise InvalidParameter("SigningCAKey: SigningCACert must be given with it")
    if config.signing_ca_cert:
        pem, key = config.signing_ca_cert, config.signing_ca_key
    elif config.external_cas:
        pem, key = config.external_cas[0].ca_cert or await cfssl.root_of(config.external_cas[0]), ""
    else:
        pem, key = new_root(now)
    root = Root(pem, key)
    _usable(root, config, now)
    swarm = records.new_id()
    cluster = Cluster(
        id=swarm,
        created=now,
        updated=now,
        spec=without_key(spec),
        root=root.pem,
        worker_token=tokens.token(root.pem, tokens.new_secret()),
        manager_token=tokens.token(root.pem, tokens.new_secret()),
        address_pool=address_pool,
        subnet_size=subnet_size,
        data_path_port=data_path_port,
        force_rotate=config.force_rotate,
    )
    own = keys.new_key()
    subject = Subject(node, Role.MANAGER, swarm)
    certificate = await _issue(
        root, config, keys.request(own), subject, address=address, now=now, trusted=root.pem, external=external
    )
    return Founding(cluster, CAKey(key), DataKey(secrets.token_bytes(32)), certificate, own)


class Authority:
    """What a manager decides about peers and certificates, by the records of the store."""

    def __init__(self, store: Store, clock: Clock, *, external: External = cfssl.sign) -> None:
        self._store = store
        self._clock = clock
        self._external = external

    @property
    def cluster(self) -> Cluster:
        """Raises Unavailable before the store is loaded."""
        cluster = self._store.record(records.CLUSTER)
        if cluster is None:
            raise Unavailable("the swarm's records are not loaded yet")
        return cluster

    def trusted(self) -> str:
        """The roots that nodes trust now, PEM: one, or more during a rotation."""
        return roots.trusted(self.cluster)

    def root(self) -> str:
        """The root that the tokens name, which joining nodes are given first."""
        return self.cluster.root

    def expiry(self) -> int:
        """Nanoseconds that certificates are valid."""
        return self.cluster.spec.ca_config.node_cert_expiry or EXPIRY

    def tls_info(self) -> TLSInfo:
        """For the API: the root of trust."""
        return tls_info(self.cluster.root)

    # --- peers ------------------------------------------------------------------------------------

    def role_of(self, token: str) -> Role:
        """The role that a join token gives. Raises InvalidParameter for one that is not current."""
        tokens.parse(token)
        cluster = self.cluster
        worker = tokens.same(token, cluster.worker_token)
        manager = tokens.same(token, cluster.manager_token)
        if not (worker or manager):
            raise InvalidParameter(f"{tokens.NECESSARY}: this one is not current, or that of another swarm")
        return Role.MANAGER if manager else Role.WORKER

    def identify(self, der: bytes) -> Identity:
        """The identity that a verified certificate states. Raises Forbidden when it is none of this
        swarm.
        """
        try:
            return self._identity(x509.load_der_x509_certificate(der))
        except InvalidParameter as error:
            raise Forbidden(f"the certificate is not one of this swarm: {error.message}") from error
        except MALFORMED as error:
            raise Forbidden("the certificate is not one of this swarm: it is malformed") from error

    async def known(self, der: bytes) -> Identity:
        """As `identify`, also when another manager has just begun a rotation.

        Raises Unavailable when that cannot be found out: the node must ask another manager, and is
        not refused.
        """
        try:
            return self.identify(der)
        except Forbidden:
            if reason := await self._store.current():
                raise Unavailable(reason) from None
            return self.identify(der)

    def _identity(self, certificate: x509.Certificate) -> Identity:
        """Raises InvalidParameter, Forbidden."""
        subject = subject_of(certificate)
        cluster = self.cluster
        if subject.swarm != cluster.id:
            raise Forbidden(f"the certificate is that of another swarm, {subject.swarm[:64]}")
        issuer = roots.issuer_of(cluster, certificate)
        if not issuer:
            raise Forbidden(FOREIGN)
        until = nanoseconds(certificate.not_valid_after_utc)
        return Identity(subject.node, subject.role, digest(issuer), subject.swarm, until)

    async def admit(self, identity: Identity, role: Role | None = None) -> None:
        """Raises Forbidden when the node was removed from the swarm, or never was in it, or is not
        to have `role` any more; Unavailable when the records may be too old to say so.
        """
        if self._refusal(identity.node, role):
            reason = await self._store.current()
            if refusal := self._refusal(identity.node, role):
                if reason and not self.barred(identity.node):
                    raise Unavailable(reason)
                raise Forbidden(refusal)

    def _refusal(self, node: str, role: Role | None) -> str:
        record = self._store.record(records.NODES, node)
        if record is None or self.barred(node):
            return f"node {node[:64]} is not part of this swarm: it was removed"
        if role is not None and record.role is not role:
            return f"node {node} is not to be a {role.label}"
        return ""

    def barred(self, node: str) -> bool:
        """Returns True if the node was removed and its certificates are still valid."""
        claim = self._store.record(records.CLAIMS, records.barred_claim(node))
        return claim is not None

    def bar(self, node: str) -> Change:
        """The change that keeps a removed node out, in the transaction that removes its record. It
        is dropped when no certificate of the node can be valid or be renewed any more.
        """
        until = self._clock.now() + max(self.expiry(), EXPIRY) + LATE
        return Put(records.CLAIMS, records.barred_claim(node), Claim(str(until)))

    def expired(self, csr: str, certificate: str, signature: bytes) -> Identity:
        """The identity of a node whose certificate has expired, and which proves by a signature
        that it has its key.

        Raises Forbidden when the certificate is not ours, not the signing key's, or too old.
        """
        try:
            found = certificates(certificate)[0]
            identity = self._identity(found)
        except InvalidParameter as error:
            raise Forbidden(f"the certificate is not one of this swarm: {error.message}") from error
        if not keys.signed(found, csr, signature):
            raise Forbidden("the signature is not that of the certificate's key")
        now = self._clock.now()
        if now > identity.until + LATE:
            raise Forbidden(
                f"the certificate of node {identity.node} expired more than {LATE // DAY} days ago "
                f"(at {found.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC): leave the swarm and join again"
            )
        return identity

    # --- certificates -----------------------------------------------------------------------------

    async def sign(self, csr: str, node: str, role: Role, address: str = "") -> str:
        """A certificate for the key of `csr`, PEM; during a rotation the cross-signed one follows.

        `address` is that of a manager, with or without a port. Nothing else of the request counts.
        Raises InvalidParameter for an unfit request, ServerError when the CA cannot sign.
        """
        cluster = self.cluster
        root = self._signing(cluster)
        config = cluster.spec.ca_config
        issued = await _issue(
            root,
            config,
            csr,
            Subject(node, role, cluster.id),
            address=address,
            now=self._clock.now(),
            trusted=roots.trusted(cluster),
            external=self._external,
        )
        return issued + cluster.cross_signed if cluster.rotation else issued

    def _signing(self, cluster: Cluster) -> Root:
        """The root that certificates come from now, with its key where the swarm has it."""
        ca_key = self._store.record(records.CA_KEY) or CAKey("")
        if cluster.rotation:
            return _root(cluster.rotation, ca_key.next)
        return _root(cluster.root, ca_key.key)

    def should_renew(self, identity: Identity) -> bool:
        """Returns True if this node should renew its certificate now, because of a rotation."""
        data = self._store.record(records.NODE_DATA, identity.node)
        return roots.should_renew(self.cluster, identity.certificate, data)

    # --- settings ---------------------------------------------------------------------------------

    async def reconfigure(self, old: Cluster, new: Cluster) -> tuple[Cluster, list[Change], list[Compare]]:
        """`new`, whose spec an update has replaced, with the roots that its CAConfig asks for, and
        without the key in it. The changes and comparisons belong into its transaction.

        Raises InvalidParameter for settings that do not fit together, WrongState after too many
        rotations that have not ended, ServerError when the external CA cannot sign.
        """
        entry = self._store.get(records.CA_KEY)
        ca_key = entry.record if entry is not None else CAKey("")
        config, now = new.spec.ca_config, self._clock.now()
        new = _counted(msgspec.structs.replace(new, spec=without_key(new.spec)), old.force_rotate)
        wanted = self._wanted(old, ca_key, config, now)
        if wanted is None:
            present = _root(old.rotation, ca_key.next) if old.rotation else _root(old.root, ca_key.key)
            _usable(present, config, now)
            return new, [], []
        root, pem = wanted
        if root.pem == old.root:
            new = roots.returned(new)
            key = CAKey(pem)
        else:
            new = roots.rotated(new, root.pem, await self._cross_signed(old, ca_key, root, now))
            key = CAKey(ca_key.key, pem)
        revision = entry.revision if entry is not None else 0
        return new, [Put(records.CA_KEY, "", key)], [Compare(records.CA_KEY, "", revision)]

    def _wanted(self, old: Cluster, ca_key: CAKey, config: CAConfig, now: int) -> tuple[Root, str] | None:
        """The root and key that the settings ask for; None for those that are there. The rules are
        those of `docker swarm ca`.
        """
        if config.signing_ca_key and not config.signing_ca_cert:
            raise InvalidParameter("SigningCAKey: SigningCACert must be given with it")
        if not config.signing_ca_cert:
            if config.force_rotate <= old.force_rotate:
                return None
            if config.external_cas:
                raise InvalidParameter(
                    "ForceRotate: with an external CA, SigningCACert must be given: the certificate of its new root"
                )
            pem, key = new_root(now)
            return Root(pem, key), key
        key = config.signing_ca_key
        try:
            root = Root(config.signing_ca_cert, key)
        except InvalidParameter as error:
            raise InvalidParameter(f"SigningCACert: {error.message}") from error
        if root.pem == (old.rotation or old.root) and not key:
            return None
        if root.pem == old.root:
            key = key or ca_key.key
            root = Root(root.pem, key)
        _usable(root, config, now)
        present = (old.rotation or old.root, ca_key.next if old.rotation else ca_key.key)
        return None if present == (root.pem, key) else (root, key)

    async def _cross_signed(self, old: Cluster, ca_key: CAKey, root: Root, now: int) -> str:
        if root.pem == old.rotation:
            return old.cross_signed
        signer = _root(old.root, ca_key.key)
        if signer.can_sign:
            return signer.cross_sign(root, now)
        own = [one for one in old.spec.ca_config.external_cas if _is_of(one, signer)]
        return await cfssl.cross_sign(own, signer, root, roots.trusted(old))

    # --- secrets ----------------------------------------------------------------------------------

    def seal(self, id: str, data: bytes) -> bytes:
        """Encrypt the content of the secret or config `id`, for its record."""
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._cipher().encrypt(nonce, data, id.encode())

    def unseal(self, id: str, sealed: bytes) -> bytes:
        """Raises ServerError when the record was changed, or is that of another object."""
        try:
            return self._cipher().decrypt(sealed[:_NONCE], sealed[_NONCE:], id.encode())
        except (InvalidTag, ValueError) as error:
            raise ServerError(f"the content of {id} cannot be decrypted") from error

    def _cipher(self) -> AESGCM:
        key = self._store.record(records.DATA_KEY)
        if key is None:
            raise Unavailable("the key of secrets and configs is not loaded yet")
        return AESGCM(key.key)


def without_key(spec: SwarmSpec) -> SwarmSpec:
    """The settings as they are stored and shown: never with the key of the CA."""
    config = msgspec.structs.replace(spec.ca_config, signing_ca_key="")
    return msgspec.structs.replace(spec, ca_config=config)


def _counted(cluster: Cluster, least: int) -> Cluster:
    """ForceRotate is a counter, which clients raise. Those that do not know it send 0."""
    count = max(cluster.spec.ca_config.force_rotate, least)
    config = msgspec.structs.replace(cluster.spec.ca_config, force_rotate=count)
    spec = msgspec.structs.replace(cluster.spec, ca_config=config)
    return msgspec.structs.replace(cluster, spec=spec, force_rotate=count)


@lru_cache(maxsize=32)
def tls_info(pem: str) -> TLSInfo:
    root = roots.issuer(pem)
    return TLSInfo(trust_root=pem, cert_issuer_subject=issuer_name(root), cert_issuer_public_key=issuer_key(root))


@lru_cache(maxsize=8)
def _root(pem: str, key: str = "") -> Root:
    return Root(pem, key)


def _is_of(one: ExternalCA, root: Root) -> bool:
    """Returns True if the external CA issues for `root`. One without CACert issues for the root
    that the swarm has.
    """
    return not one.ca_cert or certificates(one.ca_cert)[0] == root.certificate


def _usable(root: Root, config: CAConfig, now: int) -> None:
    """Raises InvalidParameter when nothing can issue certificates for `root`."""
    for one in config.external_cas:
        if one.ca_cert:
            certificates(one.ca_cert)
    if not root.valid(now):
        raise InvalidParameter(
            f"SigningCACert: valid from {root.certificate.not_valid_before_utc:%Y-%m-%d} "
            f"until {root.certificate.not_valid_after_utc:%Y-%m-%d}, which is not now"
        )
    if config.external_cas and not any(_is_of(one, root) for one in config.external_cas):
        raise InvalidParameter("ExternalCAs: none has the CACert of the swarm's root")
    if not root.can_sign and not config.external_cas:
        raise InvalidParameter("SigningCACert: without SigningCAKey an external CA with this CACert is needed")


async def _issue(
    root: Root,
    config: CAConfig,
    csr: str,
    subject: Subject,
    *,
    address: str,
    now: int,
    trusted: str,
    external: External,
) -> str:
    public = request_key(csr)
    others = [one for one in config.external_cas if _is_of(one, root)]
    if others:
        return await external(others, root, csr, subject, address, trusted)
    if not root.can_sign:
        raise ServerError("the swarm has neither the key of its CA nor an external CA for it")
    return root.issue(public, subject, address=address, now=now, lifetime=config.node_cert_expiry or EXPIRY)
