"""One width for prose: comments, docstrings and documents at 100 columns, code at 120, in .py,
.pyx, .pxd and .pyi alike.

    python -m tests.lint.prose [--fix] [FILE …]

Without --fix, lines that are too long are listed. With it, comments, docstrings and the paragraphs
of Markdown are wrapped; lists, heads such as `Raises:`, tables and examples keep their shape. Code
is not changed.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support import ROOT

PROSE, CODE = 100, 120
SUFFIXES = (".py", ".pyx", ".pxd", ".pyi")

_DIRECTIVE = re.compile(r"#\s*(noqa|type:|ruff:|fmt:|cython:|pragma|!|distutils)|  # noqa|# type: ignore")
_ITEM = re.compile(r"(- |\* |\d+\. |[A-Z][A-Za-z]+:\s+)(?=\S)")
_RULER = re.compile(r"(\s*# -{3,} .*? )-+$|(\s*# )-+$")


def files() -> list[Path]:
    """The sources that are checked."""
    tops = ("engine", "tests", "bench", "docs")
    found = [path for top in tops for path in (ROOT / top).rglob("*") if path.suffix in (*SUFFIXES, ".md")]
    return sorted([*found, ROOT / "setup.py", ROOT / "README.md", ROOT / "CHANGELOG.md"])


def check(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of each line beyond its limit."""
    measure = document_too_long if path.suffix == ".md" else too_long
    for number, size, limit in measure(text):
        yield number, f"{size} columns, not {limit}; `python -m tests.lint.prose --fix` wraps prose"


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of Python or Cython; both have the same tokens."""
    return tokenize.generate_tokens(io.StringIO(text).readline)


def _prose(text: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of prose: comments, and strings that are statements."""
    previous, statement = tokenize.NEWLINE, ""
    for token in _tokens(text):
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING
            and previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            and not statement.startswith("cdef extern from")  # C in Cython
        ):
            yield token
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            previous = token.type
        if token.type == tokenize.NEWLINE:
            statement = token.line.lstrip()


def too_long(text: str) -> Iterator[tuple[int, int, int]]:
    """(number of the line, its columns, its limit) of each line beyond its limit."""
    prose: set[int] = set()
    for token in _prose(text):
        prose.update(range(token.start[0], token.end[0] + 1))
    for number, line in enumerate(text.splitlines(), 1):
        limit = PROSE if number in prose else CODE
        if len(line) > limit and not (limit == PROSE and _unbreakable(line)):
            yield number, len(line), limit


def _unbreakable(line: str) -> bool:
    """True for a linter's directive after code, and for a single word such as an address."""
    return _DIRECTIVE.search(line) is not None or len(line.split()) < 3


def wrapped(text: str) -> str:
    """`text` with the comments and docstrings that are too long wrapped."""
    lines = text.splitlines()
    long = {number for number, _, limit in too_long(text) if limit == PROSE}
    edits: dict[tuple[int, int], list[str]] = {}  # (first line, last line) -> what replaces them
    comments: list[tokenize.TokenInfo] = []
    for token in _prose(text):
        if token.type == tokenize.COMMENT:
            comments.append(token)
            continue
        span = range(token.start[0], token.end[0] + 1)
        if long.intersection(span):
            new = _docstring(token, lines)
            if new is not None:
                edits[span[0], span[-1]] = new
    for block in _blocks(comments, lines):
        span = range(block[0].start[0], block[-1].start[0] + 1)
        if long.intersection(span):
            new = _comment(block, lines)
            if new is not None:
                edits[span[0], span[-1]] = new
    for (first, last), new in sorted(edits.items(), reverse=True):
        lines[first - 1 : last] = new
    return "\n".join(lines) + "\n"


def _fill(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, PROSE, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _paragraph(lines: list[str], indent: str, lead: int) -> list[str]:
    """Wrap the lines of one paragraph, item by item.

    `lead`: columns that the first line must leave free.
    """
    items: list[list[str]] = []
    for line in lines:
        stripped = line.strip()
        deeper = len(line) - len(line.lstrip()) > len(indent)
        if items and not _ITEM.match(stripped) and (deeper or not _ITEM.match(items[-1][0].strip())):
            items[-1].append(line)
        else:
            items.append([line])
    found: list[str] = []
    for item in items:
        room = PROSE - (lead if not found else 0)
        if all(len(line) <= room for line in item[:1]) and all(len(line) <= PROSE for line in item[1:]):
            found += item
            continue
        own = item[0][: len(item[0]) - len(item[0].lstrip())]
        head = _ITEM.match(item[0].strip()) if found or not lead else None
        if any("   " in line.strip() for line in item) and head is None:
            found += item  # a table
            continue
        follow = own
        if len(item) > 1:
            follow = item[1][: len(item[1]) - len(item[1].lstrip())]
        elif head is not None:
            follow = own + " " * len(head[0])
        text = " ".join(line.strip() for line in item)
        if head is not None:  # its alignment stays
            text = text[len(head[0]) :]
            made = _fill(text, own + "\0" * len(head[0]), follow)
            made[0] = own + head[0] + made[0][len(own) + len(head[0]) :]
        elif lead and not found:
            made = _fill(text, own + "\0" * lead, follow)  # as if the quotes were there
            made[0] = own + made[0][len(own) + lead :]
        else:
            made = _fill(text, own, follow)
        found += made
    return found


def _docstring(token: tokenize.TokenInfo, lines: list[str]) -> list[str] | None:
    match = re.fullmatch(r'([rR]?""")(.*)"""', token.string, re.DOTALL)
    row, column = token.start
    indent = lines[row - 1][:column]
    if match is None or indent.strip() or lines[token.end[0] - 1][token.end[1] :].strip() or "\\\n" in token.string:
        return None
    quotes, inner = match.groups()
    body = inner.split("\n")
    single = len(body) == 1
    ends_alone = not single and not body[-1].strip()
    if ends_alone:
        body.pop()
    body[0] = indent + body[0].strip()
    if single:
        text = body[0].strip()
        sentence = re.match(r"(.*?[.:?])\s+(?=[A-Z`(\"\d])", text)
        if sentence is not None and len(indent) + len(quotes) + len(sentence[1]) <= PROSE and sentence[1][-1] == ".":
            body = [indent + sentence[1], "", indent + text[sentence.end() :]]
    made: list[str] = []
    paragraph: list[str] = []
    for line in [*body, ""]:
        if line.strip():
            paragraph.append(line.rstrip())
            continue
        if paragraph:
            lead = len(quotes) if not made else 0
            made += _paragraph(paragraph, indent, lead + 3 if single and len(body) == 1 else lead)
            paragraph = []
        made.append("")
    while made and not made[-1]:
        made.pop()
    made[0] = indent + quotes + made[0].strip()
    if ends_alone or len(made) > 1 or len(made[-1]) + 3 > PROSE:
        made.append(indent + '"""')
    else:
        made[-1] += '"""'
    return made


def _blocks(comments: Iterable[tokenize.TokenInfo], lines: list[str]) -> Iterator[list[tokenize.TokenInfo]]:
    """Groups of comments on consecutive lines. A comment after code is grouped with the lines that
    continue it.
    """
    block: list[tokenize.TokenInfo] = []
    for token in comments:
        alone = not lines[token.start[0] - 1][: token.start[1]].strip()
        follows = block and token.start == (block[-1].start[0] + 1, block[-1].start[1])
        if block and not (alone and follows):
            yield block
            block = []
        block.append(token)
    if block:
        yield block


def _comment(block: list[tokenize.TokenInfo], lines: list[str]) -> list[str] | None:
    row, column = block[0].start
    before = lines[row - 1][:column]
    texts = [token.string for token in block]
    if any(_DIRECTIVE.search(text) for text in texts):
        return None
    if before.strip():
        if row > 1 and lines[row - 2].endswith("\\"):
            return None
        indent = before[: len(before) - len(before.lstrip())]
        return [*_fill(" ".join(text[1:].strip() for text in texts), indent + "# ", indent + "# "), before.rstrip()]
    found: list[str] = []
    paragraph: list[str] = []

    def flush() -> None:
        if paragraph:
            found.extend(before + "#" + line for line in _unindented(paragraph, len(before) + 1))
            paragraph.clear()

    for text in texts:
        if ruler := _RULER.fullmatch(before + text):
            flush()
            start = ruler[1] or ruler[2]
            found.append(start + "-" * (min(PROSE, len(before + text)) - len(start)))
        elif not text[1:].strip():
            flush()
            found.append(before + "#")
        else:
            paragraph.append(text[1:])
    flush()
    return found


def _unindented(paragraph: list[str], columns: int) -> list[str]:
    """As `_paragraph`, for texts that start after `columns` columns."""
    made = _paragraph([" " * columns + text for text in paragraph], " " * (columns + 1), 0)
    return [line[columns:] for line in made]


# --- Markdown -------------------------------------------------------------------------------------

_MARKER = re.compile(r"\s*(?:- |\d+\. )")
_NOT_PROSE = re.compile(r"\s*(\||#|!\[|<|```)")
_GENERATED, _GENERATED_END = re.compile(r"<!-- .* written by "), "<!-- end of "


def _paragraphs(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line + 1 of each paragraph and list item; not of code, tables and generated
    blocks.
    """
    first, skipped = -1, ""
    for number, line in enumerate([*lines, ""]):
        if skipped:
            if line.startswith(skipped):
                skipped = ""
            continue
        ends = not line.strip() or _NOT_PROSE.match(line) is not None
        if first >= 0 and (ends or _MARKER.match(line)):
            yield first, number
            first = -1
        if line.startswith("```"):
            skipped = "```"
        elif _GENERATED.match(line):
            skipped = _GENERATED_END
        elif not ends and first < 0:
            first = number


def document_too_long(text: str) -> Iterator[tuple[int, int, int]]:
    """As `too_long`, for Markdown."""
    lines = text.splitlines()
    for first, end in _paragraphs(lines):
        for number in range(first, end):
            if len(lines[number]) > PROSE and not _unbreakable(lines[number]):
                yield number + 1, len(lines[number]), PROSE


def document_wrapped(text: str) -> str:
    """`text`, in Markdown, with the paragraphs that are too long wrapped."""
    lines = text.splitlines()
    long = {number for number, _, _ in document_too_long(text)}
    for first, end in reversed([*_paragraphs(lines)]):
        if long.isdisjoint(range(first + 1, end + 1)):
            continue
        marker = _MARKER.match(lines[first])
        head = marker[0] if marker is not None else lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        words = " ".join(line.strip() for line in lines[first:end])
        # A command in backquotes stays on one line.
        whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), words)
        made = _fill(whole[len(head.lstrip()) :], head, " " * len(head))
        lines[first:end] = [line.replace("\0", " ") for line in made]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lint.prose", description="The width of prose and code.")
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    status = 0
    for path in options.files or files():
        text = path.read_text()
        if options.fix:
            new = document_wrapped(text) if path.suffix == ".md" else wrapped(text)
            if text and new != text:  # an empty file stays empty
                path.write_text(new)
                text = new
        for number, columns, limit in (document_too_long if path.suffix == ".md" else too_long)(text):
            print(f"{path}:{number}: {columns} columns, {limit} allowed")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
