class LogReader:
    path: bytes
    done: bool
    at_end: bool
    nowait: bool
    def __init__(
        self,
        path: bytes,
        *,
        stdout: bool = True,
        stderr: bool = True,
        since_ns: int = 0,
        until_ns: int = 0,
        timestamps: bool = False,
        framed: bool = False,
        details: bytes = b"",
        until_position: tuple[int, int] | None = None,
        until_now: bool = False,
        nowait: bool = False,
        rotates: bool = True,
    ) -> None: ...
    def seek_tail(self, lines: int) -> None: ...
    def read(self, max_bytes: int) -> bytes: ...
    def position(self) -> tuple[int, int]: ...
    def newest(self) -> int: ...
    def close(self) -> None: ...
