"""Private keys for the daemon, which never loads `cryptography` itself: `python -m
engine.manager.keys`.

A short-lived child. One JSON document on stdin, one on stdout:

    {"verb": "new"} (and "key": PEM, to use it again)  {"key": PEM, "csr": PEM}
    {"verb": "sign", "key": PEM, "data": the CSR}      {"signature": base64}, for `messages.Renew`
    {"verb": "check", "key": PEM, "certificate": PEM}  {"node", "role", "swarm", "from", "until"}

`check` fails unless the key is that of the certificate; times are seconds since the epoch. Keys go
through the two pipes alone: they are in no argument, message or log. On failure the document is
{"error": text} and the exit code 1.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_RENEWAL = b"engined-swarm/1 renewal\0"
"""Before what a renewal signs, so that the signature means nothing else."""


def new_key() -> str:
    """A private key: PEM, PKCS 8, P-256."""
    return private_pem(ec.generate_private_key(ec.SECP256R1()))


def private_pem(key: ec.EllipticCurvePrivateKey) -> str:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption()).decode()


def load_key(pem: str) -> ec.EllipticCurvePrivateKey:
    """Raises ValueError, without the key in its text."""
    try:
        key = serialization.load_pem_private_key(pem.encode(), None)
    except (ValueError, TypeError) as error:
        raise ValueError("the private key is no unencrypted PEM of PKCS 8 or SEC 1") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the private key is no elliptic curve key")
    return key


def request(key: str) -> str:
    """A certificate signing request, PEM. The CA takes the public key of it alone."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engined")])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(load_key(key), hashes.SHA256())
    return csr.public_bytes(serialization.Encoding.PEM).decode()


def signature(key: str, csr: str) -> bytes:
    """Proof that the sender of `csr` has the key of its present certificate."""
    return load_key(key).sign(_RENEWAL + csr.encode(), ec.ECDSA(hashes.SHA256()))


def signed(certificate: x509.Certificate, csr: str, proof: bytes) -> bool:
    """Returns True if `proof` is the `signature` of the certificate's key."""
    try:
        public = certificate.public_key()
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(proof, _RENEWAL + csr.encode(), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


def check(key: str, certificate: str) -> dict[str, Any]:
    found = x509.load_pem_x509_certificate(certificate.encode())
    if load_key(key).public_key() != found.public_key():
        raise ValueError("the certificate is not that of the private key")

    def attribute(oid: x509.ObjectIdentifier) -> str:
        values = found.subject.get_attributes_for_oid(oid)
        return str(values[0].value) if values else ""

    return {
        "node": attribute(NameOID.COMMON_NAME),
        "role": attribute(NameOID.ORGANIZATIONAL_UNIT_NAME).removeprefix("swarm-"),
        "swarm": attribute(NameOID.ORGANIZATION_NAME),
        "from": int(found.not_valid_before_utc.timestamp()),
        "until": int(found.not_valid_after_utc.timestamp()),
    }


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError, KeyError for a question that has no answer."""
    match question["verb"]:
        case "new":
            key = question.get("key") or new_key()
            return {"key": key, "csr": request(key)}
        case "sign":
            return {"signature": base64.b64encode(signature(question["key"], question["data"])).decode()}
        case "check":
            return check(question["key"], question["certificate"])
    raise ValueError("verb: new, sign or check")


def main() -> int:
    try:
        document = answer(json.loads(sys.stdin.buffer.read()))
    except KeyError as error:
        document = {"error": f"{error.args[0]}: missing"}
    except ValueError as error:
        document = {"error": str(error)}
    except (TypeError, AttributeError):
        document = {"error": "the question is malformed"}
    sys.stdout.write(json.dumps(document))
    return 1 if "error" in document else 0


if __name__ == "__main__":
    sys.exit(main())
