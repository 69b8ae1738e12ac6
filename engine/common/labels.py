"""Labels of containers, images, networks and volumes, as filters ask for them.

Rules: Docker Engine API, the filters `label` and `label!` of lists and prunes.
Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def has(labels: Mapping[str, str], wanted: str) -> bool:
    """True if the labels have the key of `key` or `key=value`, and the value if there is one."""
    key, equals, value = wanted.partition("=")
    return key in labels and (not equals or labels[key] == value)


def have_all(labels: Mapping[str, str], wanted: Iterable[str]) -> bool:
    """True if the labels have every wanted one."""
    return all(has(labels, text) for text in wanted)
