"""The width of prose and code in every source, as tests/lint/prose.py measures it."""

from __future__ import annotations

from tests.lint.prose import document_wrapped, too_long, wrapped


def test_wrapping() -> None:
    """Prose is wrapped with its shape; code, C in Cython, tables and directives stay."""
    words = "word " * 30
    text = f'''"""Title.

{words}
Owns:    {words}
- {words}
"""

X = 1  # {words}


def f():
    """One sentence of some length, which is followed by another. Then {words}"""
    # {words}
    return "{words}"  # noqa: E501
'''
    new = wrapped(text)
    assert [number for number, _, limit in too_long(new) if limit == 100] == []
    assert wrapped(new) == new
    assert "\nOwns:    word" in new and "\n         word" in new and "\n- word" in new and "\n  word" in new
    assert new.index("# word") < new.index("X = 1") and "  # noqa: E501" in new
    assert '    """One sentence of some length, which is followed by another.\n\n    Then word' in new


def test_wrapping_a_document() -> None:
    """Paragraphs and items are wrapped; tables, code and generated blocks stay."""
    words = "word " * 30
    text = f"""# {words}

{words}
{words}
- {words}
1. {words}
   more

| {words} |

```
{words}
```
<!-- figures: written by `make` -->
{words}
<!-- end of figures -->
(1) {words}
"""
    new = document_wrapped(text)
    assert new.split() == text.split() and document_wrapped(new) == new
    assert [line for line in new.splitlines() if len(line) > 100] == [
        each for each in text.splitlines() if each.startswith(("# ", "| "))
    ] + [words.rstrip() + " "] * 2
    assert "\n- word" in new and "\n  word" in new and "\n1. word" in new and "\n   word" in new
