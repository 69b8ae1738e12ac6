from engine._fast.board import Board
from engine._fast.logwriter import LogWriter

class PackedLog(LogWriter):
    compress: bool
    def replace(self, inode: int, packed: bytes) -> bool: ...

class Spool(PackedLog):
    slot: int
    quota: int
    blocking: bool
    @property
    def unacked(self) -> int: ...
    def join(
        self, board: Board, id: str, acked: tuple[int, int, int, int], quota: int, blocking: bool = True
    ) -> None: ...
    def move(self, board: Board) -> None: ...
