"""The check for words of libraries in messages."""

import pytest

from tests.lint import messages
from tests.support import ROOT


@pytest.mark.parametrize(
    ("caught", "body", "found"),
    [
        ("OSError", 'raise ServerError(f"x: {error}") from error', True),
        ("sqlite3.Error", "raise ServerError(str(error)) from error", True),
        ("(NotFound, msgspec.DecodeError)", "why = repr(error)", True),
        ("Exception", "why = type(error).__name__", True),
        ("NetlinkError", "why = str(error)", True),  # the engine's, and of the kernel
        ("OSError", "raise ServerError(words(error)) from error", False),
        ("OSError", '_log.warning("%s", str(error))', False),
        ("EngineError", 'raise ServerError(f"x: {error}")', False),
        ("(ValueError, NetfilterError)", "why = str(error)", False),
    ],
)
def test_words_of_libraries(caught: str, body: str, found: bool) -> None:
    text = f"try:\n    pass\nexcept {caught} as error:\n    {body}\n"
    lines = [line for line, _ in messages.check(ROOT / "engine/images/x.py", text)]
    assert lines == [4] * found


def test_processes_without_them_are_left_alone() -> None:
    text = "try:\n    pass\nexcept OSError as error:\n    why = str(error)\n"
    assert list(messages.check(ROOT / "engine/monitor/x.py", text)) == []
