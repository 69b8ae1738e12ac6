from collections.abc import Sequence

def spawn(
    argv: list[bytes],
    environment: list[bytes],
    cwd: bytes,
    stdin: int,
    stdout: int,
    stderr: int,
    files: int,
    program: int = -1,
    inherited: Sequence[int] = (),
    namespace: int = -1,
) -> int: ...
def sealed(
    argv: list[bytes],
    environment: list[bytes],
    directory: bytes,
    place: bytes,
    stdin: int,
    stdout: int,
    stderr: int,
    user: int,
    group: int,
    limits: Sequence[tuple[int, int]] = (),
) -> tuple[int, int]: ...
def user_namespace(uid_map: bytes, gid_map: bytes, network: bool = False) -> tuple[int, int]: ...
def network_within(user: int) -> int: ...
def read_only(path: bytes) -> int: ...
def exit_of(pidfd: int) -> int | None: ...
def become_subreaper() -> None: ...
