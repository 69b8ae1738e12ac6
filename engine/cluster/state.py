"""What a node knows of its membership, in ROOT/swarm: `state.json`, the certificate and its key.

```
state.json   the phase and what its step needs             written before each effect
ca.crt       roots that this node trusts                   with the certificate, and by sessions
node.crt     certificate: CN = node, OU = role, O = swarm  one pair: a new one is complete with
node.key     its key, 0600                                 node.crt.new, and renamed into place
node.key.new key and request of a certificate asked for    until it is here
```

A daemon that was killed between the two renames finishes them at the next start (`settle`). The
manager's process writes the pair too, at need, by the same rule (`engine/manager/tls.py`).

Owns:    these files. What writes waits for the disk, and is called in threads; what reads is small,
         and is called on the event loop.
Raises:  ServerError for a file that cannot be read or written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import msgspec

from engine.cluster import certificates
from engine.cluster.certificates import Certificate
from engine.cluster.phases import Phase
from engine.errors import ServerError, reason_with_file, words
from engine.swarm_session.messages import Peer
from engine.system.files import sync_directory, write_atomically

FILE = "state.json"
ROOTS, CERTIFICATE, KEY = "ca.crt", "node.crt", "node.key"
REQUESTED_KEY, NEW_KEY, NEW_CERTIFICATE = "node.key.new", "node.key.install", "node.crt.new"

_ID_LENGTH = 25
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class State(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record in `state.json`."""

    phase: Phase = Phase.NONE
    node: str = ""
    swarm: str = ""
    listen: str = ""
    """host:port that a manager here listens on."""
    advertise: str = ""
    """host:port that others reach a manager here at, as the operator gives it; "" when a manager
    reports it.
    """
    seen: str = ""
    """The same as a manager has seen it."""
    data_path: str = ""
    remotes: tuple[str, ...] = ()
    """host:port of the managers that a join asks."""
    token: str = ""
    """Of a join, until it has its certificate."""
    availability: str = ""
    detached: bool = False
    """The client of the join has been told that it goes on in the background."""
    managers: tuple[Peer, ...] = ()
    """As the last session told."""
    epoch: int = 0
    force: bool = False
    """Of a leave."""
    request: str = ""
    """JSON of the body of an init."""
    error: str = ""

    @property
    def address(self) -> str:
        """host:port that others reach a manager here at; "" until a manager has told it."""
        return self.advertise or self.seen


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent needs to know of its node."""

    node: str
    swarm: str
    role: str
    """manager: it connects to `socket` first; worker: to `peers`."""
    directory: Path
    """Of ca.crt, node.crt and node.key."""
    socket: Path
    advertise: str = ""
    """Address without port that the operator gave; "" for the one that managers see."""
    data_path: str = ""
    """Address of VXLAN packets that the operator gave; "" for `advertise`."""
    manager_address: str = ""
    """host:port that its manager is, or would be, reached at."""
    peers: tuple[Peer, ...] = ()
    epoch: int = 0


def new_id() -> str:
    """25 characters of base 36, as of every object of a swarm."""
    number = secrets.randbits(128)
    digits = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, 36)
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))


class Directory:
    """ROOT/swarm."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> State:
        """The state on disk. Raises ServerError for a file that is no state."""
        path = self.path / FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=State)
        except FileNotFoundError:
            return State()
        except OSError as error:
            raise ServerError(f"the swarm's state cannot be read: {reason_with_file(error)}") from error
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ServerError(f"the swarm's state cannot be read: {path}: {words(error)}") from error

    def save(self, state: State) -> None:
        """Replace the state on disk, durably."""
        self._write(FILE, msgspec.json.encode(state), 0o600)

    def make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)

    def settle(self) -> None:
        """Finish the exchange of a certificate that a crash has cut."""
        if (self.path / NEW_CERTIFICATE).exists():
            self._exchange()

    def keep_request(self, key: str, csr: str) -> None:
        """Keep the key of a request under way, so that its repetition uses the same one."""
        self._write(REQUESTED_KEY, (key + csr).encode(), 0o600)

    def kept_request(self) -> tuple[str, str] | None:
        """Key and signing request that `keep_request` wrote; None when there are none."""
        key, begin, csr = self._text(REQUESTED_KEY).partition("-----BEGIN CERTIFICATE REQUEST-----")
        return (key, begin + csr) if csr else None

    def install(self, certificate: str, key: str, roots: str) -> Certificate:
        """Replace certificate, key and trusted roots. Raises ServerError for a document that is no
        certificate."""
        try:
            found = certificates.read(certificate)
        except ValueError as error:
            raise ServerError(f"the manager's certificate for this node is not valid: {error}") from error
        if roots:
            self.trust(roots)
        self._write(NEW_KEY, key.encode(), 0o600)
        self._write(NEW_CERTIFICATE, certificate.encode(), 0o644)
        self._exchange()
        (self.path / REQUESTED_KEY).unlink(missing_ok=True)
        return found

    def _exchange(self) -> None:
        try:
            if (self.path / NEW_KEY).exists():
                os.rename(self.path / NEW_KEY, self.path / KEY)
            os.rename(self.path / NEW_CERTIFICATE, self.path / CERTIFICATE)
            sync_directory(self.path)
        except FileNotFoundError:
            pass  # the manager's process has finished it
        except OSError as error:
            raise ServerError(f"the node's certificate cannot be written: {reason_with_file(error)}") from error

    def trust(self, roots: str) -> None:
        """Replace the roots that this node trusts."""
        self._write(ROOTS, roots.encode(), 0o644)

    def roots(self) -> str:
        return self._text(ROOTS)

    def certificate(self) -> Certificate | None:
        """The node's certificate; None without a readable one."""
        try:
            return certificates.read(self._text(CERTIFICATE))
        except ValueError:
            return None

    def certificate_text(self) -> str:
        return self._text(CERTIFICATE)

    def key(self) -> str:
        """The key of the certificate."""
        return self._text(KEY)

    def has_member(self) -> bool:
        """True if an etcd member's data is here."""
        return (self.path / "etcd" / "member" / "wal").is_dir()

    def remove_member(self) -> None:
        """Delete the data of the etcd member, which has been removed from its cluster."""
        with contextlib.suppress(OSError):
            _remove(self.path / "etcd")

    def erase(self) -> None:
        """Delete everything but mount points. The state is deleted last, so that a crash before
        leads here again.
        """
        if not self.path.exists():
            return
        try:
            for entry in self.path.iterdir():
                if entry.name == FILE:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    _remove(entry)
                else:
                    entry.unlink()
            (self.path / FILE).unlink(missing_ok=True)
            _remove(self.path)
        except OSError as error:
            raise ServerError(f"the swarm's state cannot be removed: {reason_with_file(error)}") from error

    def _write(self, name: str, data: bytes, mode: int) -> None:
        try:
            write_atomically(self.path / name, data, mode, durable=True)
        except OSError as error:
            raise ServerError(f"the swarm's state cannot be written: {reason_with_file(error)}") from error

    def _text(self, name: str) -> str:
        try:
            return (self.path / name).read_text(errors="replace")
        except OSError:
            return ""


def _remove(directory: Path) -> None:
    """Delete a directory tree. Directories that something is mounted on are emptied and stay, with
    those above them. Raises OSError.
    """
    busy: list[str] = []

    def failed(function: object, name: str, raised: Any) -> None:
        error: OSError = raised[1]
        if error.errno == errno.EBUSY:
            busy.append(name)
        elif error.errno != errno.ENOTEMPTY or not any(each.startswith(f"{name}/") for each in busy):
            raise error

    shutil.rmtree(directory, onerror=failed)
