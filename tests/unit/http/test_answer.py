"""Bytes of answers: heads, and what may not be in them."""

from __future__ import annotations

import pytest

from engine.http.answer import AnswerWriter, field_lines


def test_heads() -> None:
    now = [1420559251.9]
    heads = AnswerWriter((("Server", "s"), ("Ostype", "linux")), lambda: now[0])
    expected = (
        b"HTTP/1.1 200 OK\r\nServer: s\r\nOstype: linux\r\nContent-Type: text/plain\r\n"
        b"Date: Tue, 06 Jan 2015 15:47:31 GMT\r\n"
    )
    assert heads.start(200, "text/plain") == expected
    now[0] = 1420559251.99
    assert heads.start(200, "text/plain") == expected
    now[0] = 1420559252.0
    assert b"15:47:32" in heads.start(200, "text/plain")
    assert heads.start(204, "") == (
        b"HTTP/1.1 204 No Content\r\nServer: s\r\nOstype: linux\r\nDate: Tue, 06 Jan 2015 15:47:32 GMT\r\n"
    )
    assert heads.start(599, "").startswith(b"HTTP/1.1 599 Unknown\r\n")


def test_a_field_cannot_break_out_of_its_line() -> None:
    assert field_lines((("A", "b"), ("C", "ü"))) == b"A: b\r\nC: \xfc\r\n"
    for name, value in (("A", "b\r\nC: d"), ("A", "b\n"), ("A\r", "b"), ("A", "\0")):
        with pytest.raises(ValueError, match="control characters"):
            field_lines(((name, value),))
