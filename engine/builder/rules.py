"""What a build refuses of an instruction whose variables are replaced: what it may not do, or what
it cannot mean. A build by buildx asks before its first step, any other one at the step.

Pure. Not here: words that are wrong whatever the variables are (`images/instructions/records.py`),
what only the files of a step can show.
Raises: InvalidParameter.
Rules:  Dockerfile reference, RUN and ADD; which of them BuildKit has before the first step is what
        dockerd 28.5.2 does.
"""

from __future__ import annotations

import posixpath

from engine.builder import git
from engine.builder.fetching import check_checksum
from engine.builder.options import Options
from engine.builder.remote import is_url
from engine.builder.trees import source_path
from engine.errors import InvalidParameter
from engine.images.archive import ARCHITECTURE
from engine.images.instructions.mounts import RunMount
from engine.images.instructions.records import Add, Copy, Instruction, Run

RUNNABLE = {ARCHITECTURE, *({"386"} if ARCHITECTURE == "amd64" else {"arm"} if ARCHITECTURE == "arm64" else ())}
"""Architectures of images whose programs this host's kernel executes."""


def check(instruction: Instruction, directory: str, options: Options) -> None:
    """Refuse what the instruction cannot mean. `directory`: the working directory."""
    match instruction:
        case Run():
            for mount in instruction.mounts:
                is_file = mount.type in ("secret", "ssh")
                if (mount.target or not is_file) and mount_target(mount, directory) == "/":
                    kind = f"type {mount.type.upper()} for /" if is_file else 'target "/"'
                    raise InvalidParameter(f"invalid mount {kind}")
        case Copy() | Add():
            _check_sources(instruction, options)


def _check_sources(instruction: Copy | Add, options: Options) -> None:
    name = "ADD" if isinstance(instruction, Add) else "COPY"
    if instruction.checksum:
        if len(instruction.sources) != 1:
            raise InvalidParameter("checksum can't be specified for multiple sources")
        is_repository = git.source_of_add(instruction.sources[0]) is not None
        if not is_repository and not is_url(instruction.sources[0]):
            raise InvalidParameter("checksum requires HTTP(S) or Git sources")
        if not is_repository:
            check_checksum(instruction.checksum)
    for heredoc in instruction.heredocs:
        if not source_path(heredoc.name, rooted=options.dialect.rooted_sources):
            raise InvalidParameter(f"{name} <<{heredoc.name}: this is not the name of a file")


def permit(instruction: Instruction, architecture: str, options: Options) -> None:
    """Refuse what the instruction may not do in this build. `architecture`: of its image; empty if
    it is not known.
    """
    if not isinstance(instruction, Run):
        return
    if instruction.command == () and options.dialect.bare_run:
        raise InvalidParameter("arguments are required")
    if instruction.security != "sandbox":
        raise InvalidParameter(f"RUN --security={instruction.security} is not supported: the sandbox cannot be left")
    if instruction.network == "host" and options.host.network_mode != "host" and not options.grants_host_network:
        raise InvalidParameter(
            "RUN --network=host is not allowed: the build must be started with networkmode=host, or by buildx with "
            "--allow network.host"
        )
    if architecture and architecture not in RUNNABLE:
        raise InvalidParameter(f"RUN needs an image for {ARCHITECTURE}; this one is for {architecture}")


def mount_target(mount: RunMount, directory: str) -> str:
    """The absolute path of a mount. `directory`: the working directory."""
    path = posixpath.normpath(posixpath.join("/", directory or "/", mount.target))
    return path.replace("//", "/")


__all__ = ["RUNNABLE", "check", "mount_target", "permit"]
