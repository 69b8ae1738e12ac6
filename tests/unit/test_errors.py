"""Messages for errors of the kernel and for documents that cannot be decoded."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from engine.errors import InvalidParameter, ServerError, decoding_reason, reason, reason_with_file


class Inner(msgspec.Struct):
    number: int


class Document(msgspec.Struct, forbid_unknown_fields=True):
    inner: Inner
    names: list[str] | None = None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"inner":{"number":"a"}}', "inner.number: expected integer, got string"),
        (b'{"inner":{"number":1},"names":[true]}', "names[0]: expected string, got boolean"),
        (b'{"inner":{"number":1},"names":1.5}', "names: expected array or null, got number"),
        (b'{"names":[]}', "object missing required field inner"),
        (b'{"inner":{"number":1},"more":1}', "object contains unknown field more"),
        (b"[]", "expected object, got array"),
        (b"{", "input data was truncated"),
        (b"{x", "JSON is malformed: object keys must be strings (byte 1)"),
        (b"[" * 100_000, "it is nested too deeply"),
    ],
)
def test_a_document_that_does_not_fit(text: bytes, words: str) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)) as raised:
        msgspec.json.decode(text, type=Document if len(text) < 1000 else object)
    assert decoding_reason(raised.value) == words


def test_text_that_is_not_utf8() -> None:
    with pytest.raises(UnicodeDecodeError) as raised:
        b"\xff".decode()
    assert decoding_reason(raised.value) == "it is not UTF-8"


def test_the_reason_of_the_kernel() -> None:
    assert reason(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == "no space left on device"
    assert reason(OSError("odd")) == "odd"
    assert reason_with_file(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == "no space left on device"
    for path in ("/a", b"/a", Path("/a")):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        assert reason_with_file(full) == "/a: no space left on device"


def test_a_message_is_valid_utf_8() -> None:
    """Names that are not UTF-8 have surrogates, which JSON cannot carry."""
    error = InvalidParameter("é: a\udcff\ud800")
    assert error.message == str(error) == "é: a??"


def test_no_message_has_the_number_of_an_error() -> None:
    error = OSError(errno.ENOENT, "No such file or directory", "/x")
    assert ServerError(f"volume v: {error}").message == "volume v: No such file or directory: '/x'"
    assert ServerError("[Errno x] stays").message == "[Errno x] stays"
