from typing import Any, final

from engine._fast.layer import IdRanges, TarSplit

@final
class Packer:
    content: int
    size: int
    sockets: list[bytes]
    def __init__(
        self,
        descriptor: int,
        name: bytes,
        *,
        top: bool = True,
        fine: bool = False,
        layer: bool = False,
        tar_split: TarSplit | None = None,
        ids: IdRanges | None = None,
    ) -> None: ...
    def read(self, size: int) -> bytes: ...
    def readinto(self, target: Any, /) -> int: ...
    def close(self) -> None: ...
