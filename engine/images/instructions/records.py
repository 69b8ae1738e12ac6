"""Typed Dockerfile instructions: one logical line to one frozen record.

A record holds the values as they are written, with their quotes and variables; `expand` replaces
them. Flags and the number of arguments are checked by `read`, values only where they have no
variables. Not here: joining lines (build/dockerfile/lines.py), the effect on a configuration
(effects.py).
Raises: InvalidParameter in the words of Docker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from engine.images.instructions.words import Line


class _Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """`line`: its first line in the file, from 1. `text`: as `Step N : …` shows it."""

    line: int = 0
    text: str = ""


class Inline(NamedTuple):
    """A file whose content stands in the Dockerfile: a heredoc of COPY or ADD."""

    name: str
    content: str
    expand: bool
    """Variables in the content are replaced. `expand` (the function) does it."""


class RunMount(msgspec.Struct, frozen=True, kw_only=True):
    """`RUN --mount`, with the defaults of its type.

    `source`, `target`: paths as written, `target` is relative to the working directory. For a
    secret, `id` names it and `target` is empty when only `env` is wanted. For ssh, an empty
    `target` means the default path.
    """

    type: str = "bind"
    id: str = ""
    source: str = ""
    target: str = ""
    from_: str = ""
    sharing: str = ""
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    required: bool = False
    read_only: bool = True
    size: int = 0
    env: str = ""


class From(_Instruction, frozen=True, kw_only=True):
    """`FROM [--platform=P] image [AS name]`; `name` is in lower case, empty when not given."""

    image: str
    name: str = ""
    platform: str = ""


class Run(_Instruction, frozen=True, kw_only=True):
    """`command`: a tuple is the JSON form, a str is for the shell. See `script` for heredocs."""

    command: tuple[str, ...] | str
    heredocs: tuple[Inline, ...] = ()
    mounts: tuple[RunMount, ...] = ()
    network: str = "default"
    security: str = "sandbox"
    mount_flags: tuple[str, ...] = ()
    """The texts of `mounts`, which `expand` reads again."""


class _Transfer(_Instruction, frozen=True, kw_only=True):
    """`sources` and `heredocs` go to `destination`. An empty `from_` is the build's context."""

    sources: tuple[str, ...]
    destination: str
    heredocs: tuple[Inline, ...] = ()
    from_: str = ""
    chown: str = ""
    chmod: str = ""
    link: bool = False
    parents: bool = False
    exclude: tuple[str, ...] = ()
    checksum: str = ""
    keep_git_dir: bool | None = None
    unpack: bool | None = None


class Copy(_Transfer, frozen=True, kw_only=True):
    """`COPY`; never `checksum`, `keep_git_dir`, `unpack`."""


class Add(_Transfer, frozen=True, kw_only=True):
    """`ADD`; never `from_`, `parents`. None: the flag was not given."""


class Env(_Instruction, frozen=True, kw_only=True):
    pairs: tuple[tuple[str, str], ...]


class Arg(_Instruction, frozen=True, kw_only=True):
    """Names with their default values; None: no default."""

    pairs: tuple[tuple[str, str | None], ...]


class Label(_Instruction, frozen=True, kw_only=True):
    pairs: tuple[tuple[str, str], ...]


class Cmd(_Instruction, frozen=True, kw_only=True):
    """`command`: a tuple is the JSON form, a str is for the shell."""

    command: tuple[str, ...] | str


class Entrypoint(_Instruction, frozen=True, kw_only=True):
    """`command`: a tuple is the JSON form, a str is for the shell. Empty: no entrypoint."""

    command: tuple[str, ...] | str


class Expose(_Instruction, frozen=True, kw_only=True):
    """Ports and ranges in sorted order, as written."""

    ports: tuple[str, ...]


class Volume(_Instruction, frozen=True, kw_only=True):
    paths: tuple[str, ...]


class User(_Instruction, frozen=True, kw_only=True):
    user: str


class Workdir(_Instruction, frozen=True, kw_only=True):
    path: str


class Shell(_Instruction, frozen=True, kw_only=True):
    command: tuple[str, ...]


class StopSignal(_Instruction, frozen=True, kw_only=True):
    signal: str


class Healthcheck(_Instruction, frozen=True, kw_only=True):
    """`test`: ("NONE",), ("CMD", …) or ("CMD-SHELL", line). Nanoseconds; 0 inherits."""

    test: tuple[str, ...]
    interval: int = 0
    timeout: int = 0
    start_period: int = 0
    start_interval: int = 0
    retries: int = 0


class OnBuild(_Instruction, frozen=True, kw_only=True):
    """`trigger`: the instruction for the next build, with its heredocs below it."""

    trigger: str


class Maintainer(_Instruction, frozen=True, kw_only=True):
    author: str


Instruction = (
    From
    | Run
    | Copy
    | Add
    | Env
    | Arg
    | Label
    | Cmd
    | Entrypoint
    | Expose
    | Volume
    | User
    | Workdir
    | Shell
    | StopSignal
    | Healthcheck
    | OnBuild
    | Maintainer
)


def read(line: Line, escape: str = "\\") -> Instruction:
    """The record of a logical line."""
    raise NotImplementedError


def read_text(text: str, escape: str = "\\") -> Instruction:
    """The record of an instruction in its own text, such as an ONBUILD trigger."""
    raise NotImplementedError


def expand(instruction: Instruction, variables: Mapping[str, str], escape: str = "\\") -> Instruction:
    """The instruction with its variables replaced and its quotes removed, where the language does
    that. Others are returned as they are.
    """
    raise NotImplementedError


def script(run: Run) -> tuple[tuple[str, ...] | str, bytes | None]:
    """What a RUN executes: its command, and the content of a script file.

    With heredocs, the command (a str, for the shell) contains them. If the only word is a heredoc
    whose content begins with `#!`, the command is that script's path, `/dev/pipes/NAME`, where the
    content must be found with mode 0755.
    """
    raise NotImplementedError
