from typing import Any

from engine._fast.tar import Source

Member = tuple[
    str,
    str,
    bool,
    str,
    int,
    int,
    int,
    int,
    int,
    str,
    tuple[tuple[bytes, bytes], ...],
    int,
    int,
    int,
    int,
    bytes | None,
    bytes | None,
]

class Members:
    def __init__(self, source: Source) -> None: ...
    def take(self, count: int, large: int = ...) -> list[Member]: ...
    def following(self) -> Member | None: ...
    def content(self, target: Any, /) -> int: ...
