"""Certificates: the root of a swarm, and those that it issues to nodes. Pure but for randomness.

A node's certificate says who it is: CN = node id, OU = `swarm-worker` or `swarm-manager`, O = swarm
id. Names: DNS:<node id>, for managers also DNS:swarm-manager, which clients and etcd ask for, and
the address that others reach it at. Nothing of a signing request is taken over but its key.

Not here: files and TLS (`tls.py`), records and decisions (`ca.py`).
Raises: InvalidParameter for PEM, requests and keys of others that are unfit.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
from functools import lru_cache
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from engine.errors import InvalidParameter
from engine.manager.keys import load_key, new_key
from engine.swarm_session.clock import SECOND
from engine.swarm_session.states import Role

MANAGER_NAME = "swarm-manager"
"""In the certificates of managers alone."""
ROOT_YEARS = 20
BACKDATED = 3600 * SECOND
"""Certificates are valid from an hour ago, for hosts whose clock is behind."""
LONGEST_PEM = 16 << 10

MALFORMED = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What the library raises for documents of others that are not what they should be."""
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_UNITS = {"swarm-worker": Role.WORKER, "swarm-manager": Role.MANAGER}


class Subject(NamedTuple):
    node: str
    role: Role
    swarm: str


class Root:
    """A root certificate, with its private key where the swarm has it."""

    def __init__(self, pem: str, key: str = "") -> None:
        """Raises InvalidParameter when the certificate is no self-signed CA, or has another key."""
        found = certificates(pem)
        if len(found) != 1:
            raise InvalidParameter(f"a root must be one certificate in PEM, not {len(found)}")
        self.certificate = found[0]
        self.pem = normal(self.certificate)
        self._key = _signing_key(key) if key else None
        if self._key is not None and self._key.public_key() != self.certificate.public_key():
            raise InvalidParameter("the certificate of the CA is not that of its key")
        if not _may_sign(self.certificate):
            raise InvalidParameter("the certificate is not that of a CA (basic constraints)")
        if not issued_by(self.certificate, self.certificate):
            raise InvalidParameter("the certificate of the CA is not self-signed: a root is needed")

    @property
    def can_sign(self) -> bool:
        return self._key is not None

    @property
    def digest(self) -> str:
        return digest(self.pem)

    def valid(self, now: int) -> bool:
        return self.certificate.not_valid_before_utc <= _moment(now) < self.certificate.not_valid_after_utc

    def issue(
        self, public: CertificatePublicKeyTypes, subject: Subject, *, address: str, now: int, lifetime: int
    ) -> str:
        """A certificate for a node's key, PEM."""
        assert self._key is not None
        until = min(_moment(now + lifetime), self.certificate.not_valid_after_utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(self.certificate.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_moment(now - BACKDATED))
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(_issuer_identifier(self.certificate), critical=False)
            .add_extension(x509.SubjectAlternativeName(names(subject, address)), critical=False)
        )
        return normal(builder.sign(self._key, hashes.SHA256()))

    def cross_sign(self, other: Root, now: int) -> str:
        """The other root's name and key, signed by this root: nodes that trust this root alone
        accept what the other one issues. PEM.
        """
        assert self._key is not None
        until = min(other.certificate.not_valid_after_utc, self.certificate.not_valid_after_utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(other.certificate.subject)
            .issuer_name(self.certificate.subject)
            .public_key(other.certificate.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_moment(now - BACKDATED))
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(_own_identifier(other.certificate), critical=False)
            .add_extension(_issuer_identifier(self.certificate), critical=False)
        )
        return normal(builder.sign(self._key, hashes.SHA256()))


def new_root(now: int) -> tuple[str, str]:
    """A root certificate and its key, PEM."""
    pem = new_key()
    key = load_key(pem)
    public = key.public_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "swarm-ca")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_moment(now - BACKDATED))
        .not_valid_after(_moment(now) + datetime.timedelta(days=365 * ROOT_YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    return normal(builder.sign(key, hashes.SHA256())), pem


def _signing_key(pem: str) -> ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey:
    """The key of a root. Raises InvalidParameter, without the key in its text."""
    try:
        key = load_pem_private_key(pem.encode(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InvalidParameter("the key of the CA is no unencrypted private key in PEM") from None
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, _CURVES):
        return key
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size >= 2048:
        return key
    raise InvalidParameter("the key of the CA must be P-256, P-384, P-521, or RSA of 2048 bits or more")


def certificates(pem: str) -> list[x509.Certificate]:
    """All certificates of a PEM text. Raises InvalidParameter when there is none, or a bad one."""
    if len(pem) > 4 * LONGEST_PEM:
        raise InvalidParameter(f"certificate: longer than {4 * LONGEST_PEM} bytes")
    blocks = _BLOCK.findall(pem)
    try:
        found = [x509.load_pem_x509_certificate(block.encode()) for block in blocks]
        for each in found:  # parts are decoded when they are asked for
            _ = each.subject, each.issuer, each.extensions, each.public_key(), each.not_valid_after_utc
    except MALFORMED as error:
        raise InvalidParameter("certificate: no PEM of an X.509 certificate") from error
    if not found:
        raise InvalidParameter("certificate: no PEM of an X.509 certificate")
    return found


def request_key(csr: str) -> CertificatePublicKeyTypes:
    """The public key of a certificate signing request, whose sender has its private key.

    Raises InvalidParameter, also for keys that are too weak.
    """
    if len(csr) > LONGEST_PEM:
        raise InvalidParameter(f"certificate request: longer than {LONGEST_PEM} bytes")
    try:
        found = x509.load_pem_x509_csr(csr.encode())
        public = found.public_key()
        proven = found.is_signature_valid
    except (*MALFORMED, InvalidSignature) as error:
        raise InvalidParameter("certificate request: no PEM of a PKCS 10 request") from error
    if not proven:
        raise InvalidParameter("certificate request: its signature is not that of its key")
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, _CURVES):
        raise InvalidParameter("certificate request: the key must be an elliptic curve key of P-256, P-384 or P-521")
    return public


def subject_of(certificate: x509.Certificate) -> Subject:
    """Raises InvalidParameter when the certificate is not that of a node."""

    def only(oid: x509.ObjectIdentifier) -> str:
        values = certificate.subject.get_attributes_for_oid(oid)
        if len(values) != 1:
            raise InvalidParameter("the certificate is not that of a node: it needs one CN, one OU and one O")
        return str(values[0].value)

    unit = only(NameOID.ORGANIZATIONAL_UNIT_NAME)
    if unit not in _UNITS:
        raise InvalidParameter(f"the certificate is not that of a node: OU {unit[:64]}")
    return Subject(only(NameOID.COMMON_NAME), _UNITS[unit], only(NameOID.ORGANIZATION_NAME))


def name(subject: Subject) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, subject.swarm),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, f"swarm-{subject.role.label}"),
            x509.NameAttribute(NameOID.COMMON_NAME, subject.node),
        ]
    )


def names(subject: Subject, address: str) -> list[x509.GeneralName]:
    """The subject's alternative names. `address`: IP address or host name, with or without a port;
    "" for none. Those of workers have none.
    """
    found: list[x509.GeneralName] = [x509.DNSName(subject.node)]
    if subject.role is Role.MANAGER:
        found.append(x509.DNSName(MANAGER_NAME))
        if host := host_of(address):
            try:
                found.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                if host.isascii() and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,250}[A-Za-z0-9])?", host):
                    found.append(x509.DNSName(host))
    return found


def host_of(address: str) -> str:
    """`address` without its port and brackets."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address


def issued_by(certificate: x509.Certificate, root: x509.Certificate) -> bool:
    """Returns True if the key of `root` signed the certificate. Times are not looked at."""
    try:
        certificate.verify_directly_issued_by(root)
    except (*MALFORMED, InvalidSignature):
        return False
    return True


@lru_cache(maxsize=32)
def digest(pem: str) -> str:
    """SHA-256 of a root's PEM, in hex: what `NodeData.certificate` holds."""
    return hashlib.sha256(pem.encode()).hexdigest()


def normal(certificate: x509.Certificate) -> str:
    """One certificate as this engine writes it, so that digests of equal roots are equal."""
    return certificate.public_bytes(Encoding.PEM).decode()


def issuer_name(root: x509.Certificate) -> bytes:
    """DER, for the API's TLSInfo."""
    return root.subject.public_bytes()


def issuer_key(root: x509.Certificate) -> bytes:
    """DER of SubjectPublicKeyInfo, for the API's TLSInfo."""
    return root.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def nanoseconds(moment: datetime.datetime) -> int:
    return int(moment.timestamp()) * SECOND


def _moment(now: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(now // SECOND, datetime.UTC)


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except (x509.ExtensionNotFound, ValueError):
        return False
    return constraints.value.ca


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _own_identifier(certificate: x509.Certificate) -> x509.SubjectKeyIdentifier:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.SubjectKeyIdentifier.from_public_key(certificate.public_key())


def _issuer_identifier(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(_own_identifier(issuer))
