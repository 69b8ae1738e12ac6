from typing import Any

class Assembly:
    def entry(
        self,
        name: bytes,
        kind: str,
        mode: int,
        uid: int,
        gid: int,
        mtime: int,
        size: int = 0,
        link: bytes = b"",
        xattrs: tuple[tuple[bytes, bytes], ...] = (),
        major: int = 0,
        minor: int = 0,
        extents: bytes | None = None,
        stored: int = 0,
    ) -> None: ...
    def data(self, content: bytes) -> None: ...
    def range(self, descriptor: int, offset: int, size: int) -> None: ...
    def named(self, root: int, path: bytes, size: int) -> None: ...
    def zeros(self, size: int) -> None: ...
    def readinto(self, target: Any, /) -> int: ...
    def close(self) -> None: ...
