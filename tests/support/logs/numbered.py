"""Numbered lines of several writers, and the verdict on what has arrived of them.

A line is `WRITER:NUMBER` and perhaps a space with padding behind it. Numbers of a writer begin at 0
and have no gaps. Delivery is at least once: after a failure a target may receive lines again. Lost
lines and lines in another order are errors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

# The lookbehind keeps the time linear in long padding. JSON may follow.
_LINE = re.compile(rb'(?<![0-9A-Za-z_:-])([0-9A-Za-z_-]{1,40}):([0-9]+)(?: |\n|"|$)')


def line(writer: str, number: int, size: int = 0) -> bytes:
    """A line with its newline; `size`: its length at least, without the newline."""
    text = b"%b:%d" % (writer.encode(), number)
    return (text if len(text) >= size else (text + b" ").ljust(size, b"x")) + b"\n"


def lines(writer: str, first: int, count: int, size: int = 0) -> bytes:
    return b"".join(line(writer, number, size) for number in range(first, first + count))


@dataclass
class Verdict:
    """What has arrived of one writer's lines."""

    expected: int
    missing: int = 0
    first_missing: int = -1
    out_of_order: int = 0
    """Lines whose first arrival came after the first arrival of a later line."""
    duplicates: int = 0
    restarts: int = 0
    """Places where an earlier line follows a later one, as after a new connection."""
    unknown: int = 0
    """Numbers that were never written."""

    @property
    def right(self) -> bool:
        """Nothing is lost, and the order is kept."""
        return not (self.missing or self.out_of_order or self.unknown)


def verdict(numbers: Iterable[int], expected: int) -> Verdict:
    """The verdict on the numbers of one writer in the order of their arrival."""
    found = Verdict(expected)
    seen = bytearray(expected)
    newest, previous = -1, -1
    for number in numbers:
        if not 0 <= number < expected:
            found.unknown += 1
            continue
        found.restarts += number <= previous
        previous = number
        if seen[number]:
            found.duplicates += 1
            continue
        seen[number] = 1
        found.out_of_order += number < newest
        newest = max(newest, number)
    found.missing = seen.count(0)
    found.first_missing = seen.find(0)
    return found


def by_writer(texts: Iterable[bytes]) -> dict[str, list[int]]:
    """Numbers of each writer, of texts that contain such a line each. Others are ignored."""
    found: dict[str, list[int]] = defaultdict(list)
    for text in texts:
        for writer, number in _LINE.findall(text):
            found[writer.decode()].append(int(number))
    return dict(found)


def complete(texts: Iterable[bytes], expected: dict[str, int]) -> bool:
    """Every line has arrived."""
    found = by_writer(texts)
    return all(len(set(found.get(writer, ()))) >= count for writer, count in expected.items())


def verdicts(texts: Iterable[bytes], expected: dict[str, int]) -> dict[str, Verdict]:
    found = by_writer(texts)
    return {writer: verdict(found.get(writer, ()), count) for writer, count in expected.items()}


def assert_right(texts: Iterable[bytes], expected: dict[str, int]) -> dict[str, Verdict]:
    """Raises AssertionError if something is lost or out of order; returns the verdicts."""
    found = verdicts(texts, expected)
    wrong = {writer: each for writer, each in found.items() if not each.right}
    assert not wrong, wrong
    return found
