"""The manager's own trust and certificate, in ROOT/swarm.

- ca.crt holds the roots of the swarm's record, as soon as they change.
- etcd reads ca.crt at its start alone, so `member.py` starts it again when the roots have changed.
  A claim tells the leader that it was done (`rotation.py`). Certificate and key are read at each
  handshake.
- A copy of the CA's key lies beside etcd's data, for `rescue`.
- The daemon renews node.crt in time. When it has not, because it is down for long, the manager does
  so itself in the last part of the certificate's life: it must not drop out of etcd.

Owns:    the task that looks after them.
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from engine.errors import EngineError, ServerError, Unavailable, words
from engine.manager import cfssl, keys, records, roots
from engine.manager.ca import EXPIRY, Authority
from engine.manager.certificates import Root, Subject, certificates, digest, nanoseconds, request_key, subject_of
from engine.manager.records import CAKey, Claim, Cluster
from engine.manager.rotation import trust_claim
from engine.manager.store import Event, Put, Store
from engine.manager.tls import Credentials
from engine.swarm_session.clock import Clock
from engine.swarm_session.states import Role
from engine.system.files import write_atomically
from engine.system.reconcile import either
from engine.system.tasks import spawn

PERIOD = 30.0
AGAIN = 2.0
"""Seconds after something that failed."""
KEPT = "etcd/authority"
"""In ROOT/swarm: removed with etcd's data, when the node is a manager no more."""
LAST = 0.15
"""The part of a certificate's life in which the manager renews it itself."""

_log = logging.getLogger(__name__)


class Upkeep:
    """`of_etcd` returns the roots that etcd was started with. `address` is the manager's own, for
    its certificate.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        authority: Authority,
        credentials: Credentials,
        *,
        node: str,
        address: str,
        of_etcd: Callable[[], str],
    ) -> None:
        self._store, self._clock = store, clock
        self._authority = authority
        self._credentials = credentials
        self._node, self._address = node, address
        self._of_etcd = of_etcd
        self._kept = b""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe = store.subscribe(self._changed)
        cfssl.own_files = (credentials.certificate_file, credentials.key_file)

    def start(self) -> None:
        self._task = spawn(self._run(), "manager: upkeep of the own certificate")

    async def close(self) -> None:
        self._unsubscribe()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _changed(self, event: Event) -> None:
        if event.kind is records.CLUSTER or event.kind is records.CA_KEY:
            self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self.keep()
                await self.trust()
                await self.renew()
                pause = PERIOD
            except Unavailable:
                pause = AGAIN
            except (EngineError, OSError) as error:
                _log.warning("the own certificate: %s", words(error))
                pause = AGAIN
            except Exception:  # without it the certificate would expire
                _log.exception("the own certificate is not kept")
                pause = AGAIN
            await either(self._wake, pause, self._clock.sleep)

    async def keep(self) -> None:
        """Keep what `rescue` needs, where etcd has it too."""
        ca_key = self._store.record(records.CA_KEY)
        kept = msgspec.msgpack.encode(_Kept(self._authority.cluster, ca_key or CAKey("")))
        if kept != self._kept:
            path = self._credentials.directory / KEPT
            await asyncio.to_thread(write_atomically, path, kept, 0o600, durable=True)
            self._kept = kept

    async def trust(self) -> None:
        """Make file, etcd and claim follow the swarm's roots."""
        trusted = self._authority.trusted()
        await asyncio.to_thread(self._credentials.install, roots=trusted)
        if not self._authority.cluster.rotation:
            return
        if self._of_etcd() != trusted:
            raise Unavailable("etcd has not been started again with the new root yet")
        key = trust_claim(self._node)
        claim = self._store.record(records.CLAIMS, key)
        if claim is None or claim.holder != digest(trusted):
            await self._store.commit([Put(records.CLAIMS, key, Claim(digest(trusted)))])

    async def renew(self) -> None:
        """Renew the own certificate when the daemon has not done so in time."""
        present = certificates(self._credentials.certificate())[0]
        begins, ends = nanoseconds(present.not_valid_before_utc), nanoseconds(present.not_valid_after_utc)
        record = self._store.record(records.NODES, self._node)
        if self._clock.now() < ends - LAST * (ends - begins) or record is None or record.role is not Role.MANAGER:
            return
        await self._store.current()  # the root that certificates come from may be another one now
        key = keys.new_key()
        certificate = await self._authority.sign(keys.request(key), self._node, Role.MANAGER, self._address)
        await asyncio.to_thread(self._credentials.install, certificate=certificate, key=key)
        _log.info("the certificate of node %s was renewed by its manager", subject_of(present).node)


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    """What `rescue` needs of the store."""

    cluster: Cluster
    ca_key: CAKey


def rescue(credentials: Credentials, clock: Clock, *, node: str, address: str) -> None:
    """Renew the own certificate when it has expired, before etcd is started.

    When all managers were off until their certificates expired, none of them could reach another:
    etcd would have no quorum, and no CA would answer. But each manager has the CA's key in its own
    data. etcd does not serve it without quorum, so a copy is kept beside it (`Upkeep`). A manager
    that was removed meanwhile gains nothing: the others know its role.

    Blocks. Raises ServerError when there is no copy, or an external CA must sign.
    """
    chain = certificates(credentials.certificate())
    if clock.now() < nanoseconds(chain[0].not_valid_after_utc):
        return
    text = f"the certificate of node {node} expired at {chain[0].not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC"
    try:
        copy = msgspec.msgpack.decode((credentials.directory / KEPT).read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError) as error:
        raise ServerError(f"{text}, and this manager has no copy of the CA's key: {words(error)}") from error
    cluster, ca_key = copy.cluster, copy.ca_key
    root = Root(cluster.rotation, ca_key.next) if cluster.rotation else Root(cluster.root, ca_key.key)
    if not root.can_sign:
        raise ServerError(f"{text}, and only the external CA can renew it")
    key = keys.new_key()
    certificate = root.issue(
        request_key(keys.request(key)),
        Subject(node, Role.MANAGER, cluster.id),
        address=address,
        now=clock.now(),
        lifetime=cluster.spec.ca_config.node_cert_expiry or EXPIRY,
    )
    credentials.install(roots=roots.trusted(cluster), certificate=certificate + cluster.cross_signed, key=key)
    _log.warning("%s and was renewed with the key in its own data", text)
