from collections.abc import Sequence

class Left:
    key: str
    slot: int
    lines: tuple[bytes, bytes]
    stream: int
    chunk: bytes
    inode: int
    offset: int

class Unlogged:
    path: bytes
    def __init__(self, path: bytes) -> None: ...

def left_in(path: bytes) -> dict[str, Left]: ...
def forget(path: bytes, slot: int) -> None: ...
def all_logged(file: int, pipes: Sequence[int]) -> bool: ...
