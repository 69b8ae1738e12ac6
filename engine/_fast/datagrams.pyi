from array import array
from collections.abc import Sequence

def send(fd: int, wire: bytes, ends: array[int] | Sequence[int], first: int) -> int: ...
