"""Messages for errors of the kernel and for documents that cannot be decoded."""

import asyncio
import bz2
import csv
import errno
import io
import lzma
import os
import socket
import sqlite3
import ssl
import subprocess
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import httptools
import msgspec
import pytest
import zstandard
from isal import isal_zlib

from engine.errors import InvalidParameter, ServerError, decoding_reason, reason, reason_with_file, words


class Inner(msgspec.Struct):
    number: int


class Document(msgspec.Struct, forbid_unknown_fields=True):
    inner: Inner
    names: list[str] | None = None


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_a_document_that_does_not_fit(text: bytes, said: str) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)) as raised:
        msgspec.json.decode(text, type=Document if len(text) < 1000 else object)
    assert decoding_reason(raised.value) == said


@pytest.mark.parametrize("decode", [bytes.decode, msgspec.json.decode])
def test_text_that_is_not_utf8(decode: Callable[[bytes], object]) -> None:
    with pytest.raises((UnicodeDecodeError, msgspec.DecodeError)) as raised:
        decode(b'"\xff"')
    assert decoding_reason(raised.value) == "it is not UTF-8"


def test_the_reason_of_the_kernel() -> None:
    assert reason(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == "no space left on device"
    assert reason(OSError("odd")) == "odd"
    assert reason(OSError(errno.EREMOTEIO, os.strerror(errno.EREMOTEIO))) == "remote I/O error"
    assert reason(OSError(errno.ERANGE, "RFC 1123 has no such name")) == "RFC 1123 has no such name"
    assert reason(TimeoutError()) == "timed out"
    assert reason_with_file(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == "no space left on device"
    for path in ("/a", b"/a", Path("/a")):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        assert reason_with_file(full) == "/a: no space left on device"


def test_words_for_any_error() -> None:
    assert words(OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/A/b")) == "/A/b: no such file or directory"
    assert words(OSError(errno.ENOENT, os.strerror(errno.ENOENT))) == "no such file or directory"
    assert words(ValueError("[Errno 5] odd")) == "odd"
    assert words(InvalidParameter("Names stay")) == "Names stay"
    assert (words(TimeoutError()), words(MemoryError()), words(ValueError())) == (
        *("timed out", "out of memory", "unknown error"),
    )


def test_a_message_is_valid_utf_8() -> None:
    """Names that are not UTF-8 have surrogates, which JSON cannot carry."""
    error = InvalidParameter("é: a\udcff\ud800")
    assert error.message == str(error) == "é: a??"


def test_no_message_has_the_number_of_an_error() -> None:
    error = OSError(errno.ENOENT, "No such file or directory", "/x")
    assert ServerError(f"volume v: {error}").message == "volume v: No such file or directory: '/x'"
    assert ServerError("[Errno x] stays").message == "[Errno x] stays"


def _raise(error: BaseException) -> None:
    raise error


REFUSED = "[Errno 111] Connect call failed ('127.0.0.1', 1)"


@pytest.mark.parametrize(
    ("failing", "text"),
    [
        (lambda: Path("/nowhere/x").read_bytes(), "/nowhere/x: no such file or directory"),
        (lambda: _raise(TimeoutError()), "timed out"),
        (lambda: _raise(ConnectionResetError()), "the connection was closed"),
        (lambda: _raise(OSError(111, REFUSED[12:])), "connection refused"),
        (lambda: _raise(OSError(f"Multiple exceptions: {REFUSED}, [Errno 101] Connect ...")), "connection refused"),
        (lambda: _raise(socket.gaierror(socket.EAI_NONAME, "Name or service not known")), "name or service not known"),
        (
            lambda: _raise(ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)")),
            "wrong version number",
        ),
        (lambda: ssl.create_default_context().load_cert_chain(__file__), "not a PEM file"),
        (lambda: ssl.create_default_context(cafile=__file__), "no certificate or crl found"),
        (lambda: _raise(subprocess.TimeoutExpired(["a"], 0.09996)), "it did not end within 0.1 s"),
        (lambda: _raise(asyncio.IncompleteReadError(b"", 4)), "the connection was closed"),
        (lambda: msgspec.json.decode("[1]", type=list[str]), "[0]: expected string, got integer"),
        (lambda: str(b"\xff", "utf-8"), "it is not UTF-8"),
        (lambda: msgspec.json.decode("[" * 100_000), "it is nested too deeply"),
        (lambda: sqlite3.connect(__file__).execute("SELECT 1 FROM a"), "file is not a database"),
        (lambda: tarfile.open(__file__).close(), "file could not be opened successfully"),
        (lambda: [*csv.reader(["a\nb"])], "new-line character seen in unquoted field"),
        (lambda: zlib.decompress(b"xx"), "incorrect header check"),
        (lambda: isal_zlib.decompress(isal_zlib.compress(b"x")[:-1] + b"x"), "Incorrect checksum found"),
        (lambda: lzma.decompress(b"xx"), "Input format not supported by decoder"),
        (lambda: bz2.decompress(b"xx"), "invalid data stream"),
        (
            lambda: zstandard.ZstdDecompressor().stream_reader(io.BytesIO(b"x" * 99)).read(9),
            "zstd decompress error: Unknown frame descriptor",
        ),
        (lambda: httptools.HttpRequestParser(object()).feed_data(b"?\r\n"), "Invalid method encountered"),
        (lambda: _raise(ServerError("as it is")), "as it is"),
        (lambda: _raise(RuntimeError()), "unknown error"),
    ],
)
def test_words_of_libraries(failing: Callable[[], object], text: str) -> None:
    with pytest.raises(Exception) as raised:
        failing()
    assert words(raised.value) == text
