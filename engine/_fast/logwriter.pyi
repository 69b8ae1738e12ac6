from typing_extensions import Buffer

from engine._fast.sink import Sink

class LogWriter(Sink):
    max_size: int
    max_file: int
    error: int
    def __init__(
        self, path: bytes, max_size: int = 0, max_file: int = 1, *, attrs: bytes = b"", exact: bool = False
    ) -> None: ...
    def write(self, stream: int, data: Buffer) -> None: ...
