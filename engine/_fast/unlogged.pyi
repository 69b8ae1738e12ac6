class Left:
    key: str
    lines: tuple[bytes, bytes]
    stream: int
    chunk: bytes
    inode: int
    offset: int

class Unlogged:
    path: bytes
    def __init__(self, path: bytes) -> None: ...

def left_in(path: bytes) -> dict[str, Left]: ...
