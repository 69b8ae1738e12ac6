from array import array

from engine._fast.tar import Digest, Source

def apply(
    source: int | Source,
    directory: int,
    *,
    offset: int = 0,
    size: int = -1,
    digest: Digest | None = None,
    progress: array[int] | None = None,
) -> tuple[int, int, list[bytes], int]: ...
def remove_tree(parent: int, name: bytes) -> None: ...
def usage(directory: int) -> tuple[int, int]: ...
