from typing import final

@final
class Packer:
    def __init__(
        self, descriptor: int, name: bytes, *, top: bool = True, fine: bool = False, layer: bool = False
    ) -> None: ...
    def read(self, size: int) -> bytes: ...

def changes(upper: int, layers: list[int]) -> list[tuple[bytes, int]]: ...
