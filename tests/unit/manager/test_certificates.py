"""Certificates: what the root issues, what it refuses, and rotations as TLS sees them."""

from __future__ import annotations

import base64
import contextlib
import datetime
import ssl
import tempfile
import time
from collections.abc import Callable

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.manager import keys
from engine.manager.certificates import (
    BACKDATED,
    Root,
    Subject,
    certificates,
    host_of,
    issued_by,
    names,
    nanoseconds,
    new_root,
    request_key,
    subject_of,
)
from engine.swarm_session.clock import SECOND
from engine.swarm_session.states import Role

NOW = time.time_ns()
HOUR = 3600 * SECOND
WORKER = Subject("n" * 25, Role.WORKER, "s" * 25)
MANAGER = Subject("m" * 25, Role.MANAGER, "s" * 25)


@pytest.fixture(scope="module")
def root() -> Root:
    return Root(*new_root(NOW))


def issue(root: Root, subject: Subject, *, address: str = "", now: int = NOW, lifetime: int = HOUR) -> tuple[str, str]:
    key = keys.new_key()
    public = request_key(keys.request(key))
    return root.issue(public, subject, address=address, now=now, lifetime=lifetime), key


def test_a_certificate_states_node_role_and_swarm(root: Root) -> None:
    pem, key = issue(root, MANAGER, address="10.1.2.3:2377")
    (certificate,) = certificates(pem)
    assert subject_of(certificate) == MANAGER
    assert issued_by(certificate, root.certificate)
    assert nanoseconds(certificate.not_valid_after_utc) == (NOW + HOUR) // SECOND * SECOND
    assert nanoseconds(certificate.not_valid_before_utc) == (NOW - BACKDATED) // SECOND * SECOND
    told = keys.check(key, pem)
    assert (told["node"], told["role"], told["swarm"]) == (MANAGER.node, "manager", MANAGER.swarm)
    with pytest.raises(ValueError, match="not that of the private key"):
        keys.check(keys.new_key(), pem)


def test_a_certificate_does_not_outlive_its_root(root: Root) -> None:
    (certificate,) = certificates(issue(root, WORKER, lifetime=100 * 365 * 24 * HOUR)[0])
    assert certificate.not_valid_after_utc == root.certificate.not_valid_after_utc


@pytest.mark.parametrize(
    ("subject", "address", "expected"),
    [
        (WORKER, "10.1.2.3:2377", ["DNS:" + WORKER.node]),
        (MANAGER, "", ["DNS:" + MANAGER.node, "DNS:swarm-manager"]),
        (MANAGER, "10.1.2.3:2377", ["DNS:" + MANAGER.node, "DNS:swarm-manager", "IP:10.1.2.3"]),
        (MANAGER, "[fd00::1]:2377", ["DNS:" + MANAGER.node, "DNS:swarm-manager", "IP:fd00::1"]),
        (MANAGER, "fd00::1", ["DNS:" + MANAGER.node, "DNS:swarm-manager", "IP:fd00::1"]),
        (MANAGER, "node1.example:2377", ["DNS:" + MANAGER.node, "DNS:swarm-manager", "DNS:node1.example"]),
        (MANAGER, "bad name\n", ["DNS:" + MANAGER.node, "DNS:swarm-manager"]),
        (MANAGER, "*.example", ["DNS:" + MANAGER.node, "DNS:swarm-manager"]),
    ],
)
def test_names(subject: Subject, address: str, expected: list[str]) -> None:
    found = [f"{'DNS' if isinstance(one, x509.DNSName) else 'IP'}:{one.value}" for one in names(subject, address)]
    assert found == expected


@given(st.text(max_size=300))
def test_any_address_gives_names_that_encode(address: str) -> None:
    x509.SubjectAlternativeName(names(MANAGER, address))
    host_of(address)


def other_key(kind: str) -> str:
    key = {
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
        "p192": lambda: ec.generate_private_key(ec.SECP224R1()),
    }[kind]()
    algorithm = None if kind == "ed25519" else hashes.SHA256()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, algorithm)  # type: ignore[arg-type]
    return csr.public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize("kind", ["rsa", "ed25519", "p192"])
def test_requests_with_unfit_keys_are_refused(kind: str) -> None:
    with pytest.raises(InvalidParameter, match="elliptic curve key"):
        request_key(other_key(kind))


def test_a_request_whose_signature_was_changed_is_refused() -> None:
    lines = keys.request(keys.new_key()).splitlines()
    lines[-2] = ("A" if lines[-2][0] != "A" else "B") + lines[-2][1:]
    with pytest.raises(InvalidParameter, match="certificate request"):
        request_key("\n".join(lines))


@given(st.text(max_size=200) | st.text(max_size=200).map(lambda x: f"-----BEGIN CERTIFICATE REQUEST-----\n{x}\n"))
def test_garbage_is_no_request(text: str) -> None:
    with pytest.raises(InvalidParameter):
        request_key(text)


@given(
    st.text(max_size=200)
    | st.text(max_size=200).map(lambda x: f"-----BEGIN CERTIFICATE-----\n{x}\n-----END CERTIFICATE-----\n")
)
def test_garbage_is_no_certificate(text: str) -> None:
    with pytest.raises(InvalidParameter):
        certificates(text)


@given(st.binary(min_size=1, max_size=4), st.integers(0, 10_000))
def test_requests_with_changed_bytes_raise_nothing_else(change: bytes, place: int) -> None:
    csr = bytearray(REQUEST.encode())
    place %= len(csr)
    csr[place : place + len(change)] = change
    with contextlib.suppress(InvalidParameter):
        request_key(csr.decode(errors="replace"))


REQUEST = keys.request(keys.new_key())


def made(*, ca: bool, sign: str = "self", days: int = 1) -> tuple[str, str]:
    key, other = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mine")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .sign(key if sign == "self" else other, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), keys.private_pem(key)


def test_roots_of_operators() -> None:
    pem, key = made(ca=True)
    assert Root(pem, key).can_sign and not Root(pem).can_sign
    assert Root(pem).valid(NOW) and not Root(made(ca=True, days=-1)[0]).valid(NOW)
    with pytest.raises(InvalidParameter, match="not that of its key"):
        Root(pem, keys.new_key())
    with pytest.raises(InvalidParameter, match="basic constraints"):
        Root(*made(ca=False))
    with pytest.raises(InvalidParameter, match="self-signed"):
        Root(made(ca=True, sign="other")[0])
    with pytest.raises(InvalidParameter, match="one certificate"):
        Root(pem + pem)
    with pytest.raises(InvalidParameter) as refused:
        Root(pem, key.replace("A", "B"))
    assert key[40:60] not in str(refused.value) and "BEGIN PRIVATE" not in str(refused.value)


def test_a_root_with_an_rsa_key_issues() -> None:
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mine")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    root = Root(certificate.public_bytes(serialization.Encoding.PEM).decode(), key.private_bytes(*form).decode())
    pem, own = issue(root, MANAGER)
    assert handshake(pem, own, root.pem)


def handshake(chain: str, key: str, trusted: str, name: str = "swarm-manager") -> bool:
    """Returns True if a client that trusts `trusted` accepts a server with this chain, and the
    server accepts the same certificate of the client.
    """
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(chain + key)
        file.flush()
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.load_verify_locations(cadata=trusted)
        client.load_cert_chain(file.name)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.verify_mode = ssl.CERT_REQUIRED
        server.load_verify_locations(cadata=trusted)
        server.load_cert_chain(file.name)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(down, up, server_hostname=name)
    two = server.wrap_bio(up, down, server_side=True)
    done: set[Callable[[], None]] = set()
    for _ in range(8):
        for side in (one, two):
            try:
                side.do_handshake()
                done.add(side.do_handshake)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
    try:
        two.read(1)
    except ssl.SSLWantReadError:
        return len(done) == 2
    except ssl.SSLError:
        return False
    return False


def test_tls_accepts_managers_by_name_and_refuses_workers(root: Root) -> None:
    manager, worker, stranger = issue(root, MANAGER), issue(root, WORKER), issue(Root(*new_root(NOW)), MANAGER)
    assert handshake(*manager, root.pem)
    assert not handshake(*worker, root.pem)
    assert handshake(*worker, root.pem, name=WORKER.node)
    assert not handshake(*stranger, root.pem)


def test_tls_refuses_what_has_expired_or_is_not_valid_yet(root: Root) -> None:
    assert not handshake(*issue(root, MANAGER, now=NOW - 2 * HOUR), root.pem)
    assert not handshake(*issue(root, MANAGER, now=NOW + 2 * HOUR), root.pem)
    assert handshake(*issue(root, MANAGER, now=NOW + HOUR // 2), root.pem), "clocks may differ by almost an hour"


def test_in_a_rotation_each_trust_accepts_the_new_certificates(root: Root) -> None:
    new = Root(*new_root(NOW))
    pem, key = issue(new, MANAGER)
    cross_signed = root.cross_sign(new, NOW)
    assert handshake(pem + cross_signed, key, root.pem), "the old root alone"
    assert handshake(pem + cross_signed, key, root.pem + new.pem)
    assert handshake(pem + cross_signed, key, new.pem), "the new root alone"
    assert handshake(pem, key, new.pem)
    assert not handshake(pem, key, root.pem)
    assert handshake(*issue(root, MANAGER), root.pem + new.pem), "not renewed yet"


def test_a_cross_signed_root_cannot_make_further_authorities(root: Root) -> None:
    new = Root(*new_root(NOW))
    found = certificates(root.cross_sign(new, NOW))[0]
    assert found.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0


def test_a_renewal_is_signed_with_the_old_key(root: Root) -> None:
    pem, key = issue(root, WORKER)
    (certificate,) = certificates(pem)
    csr = keys.request(keys.new_key())
    proof = keys.signature(key, csr)
    assert keys.signed(certificate, csr, proof)
    assert not keys.signed(certificate, keys.request(keys.new_key()), proof)
    assert not keys.signed(certificate, csr, proof[:-1] + bytes([proof[-1] ^ 1]))
    assert not keys.signed(certificate, csr, b"")
    assert not keys.signed(certificate, csr, keys.signature(keys.new_key(), csr))


@given(st.binary(min_size=1, max_size=3), st.integers(0, 2000))
def test_certificates_with_changed_bytes_are_read_or_refused(change: bytes, place: int) -> None:
    der = bytearray(base64.b64decode("".join(ROOT_PEM.split("-----")[2].split())))
    place %= len(der)
    der[place : place + len(change)] = change
    text = base64.b64encode(der).decode()
    with contextlib.suppress(InvalidParameter):
        for found in certificates(f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n"):
            subject_of(found)
            keys.signed(found, "", b"x")


ROOT_PEM = new_root(NOW)[0]
