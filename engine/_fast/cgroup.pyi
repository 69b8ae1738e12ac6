from typing import Literal, final

NO_LIMIT: int
FORMS: dict[str, int]

@final
class Sample:
    cpu_total: int
    cpu_user: int
    cpu_kernel: int
    cpu_each: tuple[int, ...]
    periods: int
    throttled_periods: int
    throttled_time: int
    memory_unified: bool
    memory_usage: int
    memory_peak: int
    memory_failures: int
    memory_limit: int
    memory_swap: int
    memory: dict[str, int]
    pids: int
    io_unified: bool
    io: list[tuple[int, int, str, int]]
    io_operations: list[tuple[int, int, str, int]]
    networks: dict[str, tuple[int, int, int, int, int, int, int, int]]

class Counters:
    def __init__(
        self,
        *,
        cpu: bytes | None = None,
        cpuacct: bytes | None = None,
        memory: bytes | None = None,
        io: bytes | None = None,
        pids: bytes | None = None,
        network: bytes | None = None,
    ) -> None: ...
    def sample(self) -> Sample | None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...

def samples(counters: list[Counters]) -> list[Sample | None]: ...

class Processors:
    def __init__(self, path: bytes = b"/proc/stat") -> None: ...
    def read(self) -> tuple[int, tuple[int, ...]]: ...
    def close(self) -> None: ...

def parse(
    form: Literal["numbers", "flat", "io_v1", "io_v2", "interfaces", "processors"], text: bytes
) -> list[tuple[bytes, int, int, int]]: ...
