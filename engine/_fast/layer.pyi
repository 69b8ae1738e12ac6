from array import array
from typing import Any, Protocol

from engine._fast.tar import Digest, Source

IdRanges = tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]

class TarSplit(Protocol):
    def write(self, data: bytes, /) -> Any: ...
    def finish(self, size: int, /) -> None: ...
    def inline_files(self) -> None: ...

def apply(
    source: int | Source,
    directory: int,
    *,
    offset: int = 0,
    size: int = -1,
    digest: Digest | None = None,
    progress: array[int] | None = None,
    tar_split: TarSplit | None = None,
) -> tuple[int, int, list[bytes], int, bytes]: ...
def unpack(
    source: int | Source,
    root: int,
    at: bytes,
    *,
    keep_kinds: bool = False,
    owner: tuple[int, int] | None = None,
    ids: IdRanges | None = None,
) -> tuple[int, int, int]: ...
