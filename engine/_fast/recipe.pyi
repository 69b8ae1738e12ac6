from typing import Any

from engine._fast.tar import Source

class Stream:
    def __init__(self, source: Source, directory: int) -> None: ...
    def readinto(self, target: Any, /) -> int: ...
