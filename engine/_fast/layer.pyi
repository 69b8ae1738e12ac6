from array import array
from typing import Any, Protocol

from engine._fast.tar import Digest, Source

class Recipe(Protocol):
    def write(self, data: bytes, /) -> Any: ...
    def finish(self, whole: bool, size: int, /) -> None: ...

def apply(
    source: int | Source,
    directory: int,
    *,
    offset: int = 0,
    size: int = -1,
    digest: Digest | None = None,
    progress: array[int] | None = None,
    recipe: Recipe | None = None,
) -> tuple[int, int, list[bytes], int]: ...
def unpack(source: int | Source, root: int, at: bytes, *, keep_kinds: bool = False) -> tuple[int, int, int]: ...
def remove_tree(parent: int, name: bytes) -> None: ...
def usage(directory: int) -> tuple[int, int]: ...
