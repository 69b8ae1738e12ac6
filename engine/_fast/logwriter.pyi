from typing_extensions import Buffer

from engine._fast.sink import Sink

class LogWriter(Sink):
    max_size: int
    max_file: int
    error: int
    dropped: int
    def __init__(self, path: bytes, max_size: int = 0, max_file: int = 1, *, attrs: bytes = b"") -> None: ...
    def write(self, stream: int, data: Buffer) -> None: ...
