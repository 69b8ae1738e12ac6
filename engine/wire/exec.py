"""Exec instances on the wire, as the newest API version documents them (Docker Engine API,
"Exec").
"""

from __future__ import annotations

import msgspec

from engine.wire.containers import Strings


class ExecCreate(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """POST /containers/{id}/exec."""

    user: str = ""
    privileged: bool = False
    tty: bool = False
    attach_stdin: bool = False
    attach_stdout: bool = False
    attach_stderr: bool = False
    detach: bool = False
    detach_keys: str | None = None
    env: list[str] | None = None
    working_dir: str = ""
    console_size: list[int] | None = None
    """Rows and columns of its terminal at the start."""
    cmd: Strings = None


class ExecCreated(msgspec.Struct, rename="pascal", frozen=True):
    id: str


class ExecStart(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """POST /exec/{id}/start."""

    detach: bool = False
    tty: bool = False
    console_size: list[int] | None = None


class ProcessConfig(msgspec.Struct, kw_only=True, frozen=True):
    """`ProcessConfig` of ExecInspect; its keys are in lower case."""

    tty: bool
    entrypoint: str
    arguments: list[str]
    privileged: bool
    user: str


class ExecInspect(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """GET /exec/{id}/json. `exit_code` is null until the process has ended."""

    id: str = msgspec.field(name="ID")
    running: bool
    exit_code: int | None
    process_config: ProcessConfig
    open_stdin: bool
    open_stderr: bool
    open_stdout: bool
    can_remove: bool
    container_id: str = msgspec.field(name="ContainerID")
    detach_keys: str
    """The keys' bytes in base64; empty for the default keys."""
    pid: int
