"""Contexts for TLS; what they verify is in tests/unit/http/test_tls.py, by certificates without key
identifiers.
"""

import ssl

import pytest

from engine.system.tls import verifying_context


@pytest.mark.parametrize("server", [False, True])
def test_certificates_need_no_key_identifiers(server: bool) -> None:
    made = verifying_context(server=server)
    assert not made.verify_flags & ssl.VerifyFlags.VERIFY_X509_STRICT, "Python 3.13 sets it"
    assert made.verify_mode == (ssl.CERT_NONE if server else ssl.CERT_REQUIRED)


def test_an_authority_that_is_no_certificate() -> None:
    with pytest.raises(ssl.SSLError):
        verifying_context(authority=__file__)
