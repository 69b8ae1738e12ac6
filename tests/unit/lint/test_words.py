"""Messages as they are listed, and errors of the kernel in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lint import words

SOURCE = """
def work():
    try:
        pass
    except OSError as error:
        raise ServerError({}) from error
"""


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ('f"a file: {error}"', 1),
        ('f"a file: {error!r}"', 1),
        ('"a file: " + str(error)', 1),
        ('f"a file: {type(error).__name__}"', 1),
        ('"[Errno 2] a file"', 1),
        ('f"a file: {words(error)}"', 0),
        ('f"a file: {reason(error)}"', 0),
        ('"a file"', 0),
    ],
)
def test_errors_of_the_kernel(message: str, found: int) -> None:
    assert len(list(words.check(Path("x.py"), SOURCE.format(message)))) == found


def test_the_list() -> None:
    [message] = words.messages(SOURCE.format('f"container {name}: {words(error)}"'))
    assert (message.line, message.kind, message.text) == (6, "ServerError", "container {name}: {words(error)}")
