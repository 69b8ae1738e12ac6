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

class Unread:
    def __init__(self, path: bytes, pid: int) -> None: ...
    def nothing(self, pipes: list[int]) -> bool: ...

def left_in(path: bytes) -> dict[str, Left]: ...
def forget(path: bytes, slot: int) -> None: ...
