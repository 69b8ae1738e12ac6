"""Reading a certificate, beside the library that makes it, and documents that are none."""

from __future__ import annotations

import base64
import contextlib
import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster import certificates
from engine.cluster.certificates import Certificate

KEY = ec.generate_private_key(ec.SECP256R1())
BEGIN = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def made(
    *,
    node: str = "n1",
    unit: str = "swarm-worker",
    swarm: str = "s1",
    begins: datetime.datetime = BEGIN,
    ends: datetime.datetime = BEGIN + datetime.timedelta(days=90),
) -> x509.Certificate:
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, swarm),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
            x509.NameAttribute(NameOID.COMMON_NAME, node),
        ]
    )
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "swarm-ca")])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(KEY.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(ends)
    return builder.sign(KEY, hashes.SHA256())


def pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


DER = made().public_bytes(serialization.Encoding.DER)


def test_a_certificate() -> None:
    begins = int(BEGIN.timestamp())
    assert certificates.read(pem(made())) == Certificate("n1", "worker", "s1", begins, begins + 90 * 86400)


def test_the_first_of_a_chain() -> None:
    chain = "leading words\n" + pem(made(unit="swarm-manager")) + pem(made(node="ca"))
    assert certificates.read(chain)[:2] == ("n1", "manager")


@given(
    node=st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=16),
    begins=st.datetimes(datetime.datetime(1951, 1, 1), datetime.datetime(2090, 1, 1)),
    days=st.integers(1, 365 * 100),
)
def test_names_and_times(node: str, begins: datetime.datetime, days: int) -> None:
    """Times from 2050 on have another form."""
    begins = begins.replace(microsecond=0, tzinfo=datetime.UTC)
    found = certificates.read(pem(made(node=node, begins=begins, ends=begins + datetime.timedelta(days=days))))
    assert (found.node, found.begins, found.ends - found.begins) == (node, int(begins.timestamp()), days * 86400)


@pytest.mark.parametrize(
    "text", ["", "x", "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----", pem(made())[:200]]
)
def test_no_certificate(text: str) -> None:
    with pytest.raises(ValueError, match=r"certificate|element"):
        certificates.read(text)


@given(st.integers(0, len(DER) - 1))
def test_cut(size: int) -> None:
    with contextlib.suppress(ValueError):  # or complete: only the signature is missing
        certificates.read(_pem(DER[:size]))


@given(st.integers(0, len(DER) - 1), st.integers(0, 255))
def test_damaged(place: int, byte: int) -> None:
    with contextlib.suppress(ValueError):
        certificates.read(_pem(DER[:place] + bytes([byte]) + DER[place + 1 :]))


@given(st.binary(max_size=200))
def test_noise(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        certificates.read(_pem(data))


def _pem(data: bytes) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{base64.b64encode(data).decode()}\n-----END CERTIFICATE-----\n"
