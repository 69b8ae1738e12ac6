"""The history of images in BuildKit's words (`docker history`): one text for each step. Pure.

Not here: the words of Docker's classic builder (`images/instructions/effects.py`).
Source: what dockerd 28.5.2 records; tests/data/build/dockerfiles is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.images.instructions import effects, words
from engine.images.instructions.records import Add, Arg, Copy, Expose, Instruction
from engine.wire.containers import Config

COMMENT = "buildkit.dockerfile.v0"
"""Of each step."""
_FILES = " # buildkit"
"""The end of a step that makes a layer."""


def configured(instruction: Instruction, before: Config, after: Config, arguments: Mapping[str, str]) -> str:
    """An instruction that changes the configuration. `arguments`: after it."""
    match instruction:
        case Expose():
            ports = after.exposed_ports if isinstance(after.exposed_ports, dict) else {}
            known = before.exposed_ports if isinstance(before.exposed_ports, dict) else {}
            named = {port.partition("/")[0] for port in instruction.ports}
            new = sorted(port for port in ports if port not in known or port.partition("/")[0] in named)
            return f"EXPOSE [{' '.join(new)}]"
        case Arg():
            texts = (f"{name}={arguments[name]}" if name in arguments else name for name, _ in instruction.pairs)
            return " ".join(("ARG", *texts))
        case _:
            return effects.recorded(instruction, after, whole_checks=True)


def ran(argv: Sequence[str], arguments: Sequence[str]) -> str:
    """A RUN. `arguments`: `name=value`, in the order of the file."""
    return " ".join(("RUN", *([f"|{len(arguments)}", *arguments] if arguments else ()), *argv)) + _FILES


def copied(instruction: Copy | Add) -> str:
    """COPY and ADD. Names of files may be no text, which a document cannot hold."""
    flags = ["--parents"] if instruction.parents else []
    flags += [f"--chown={instruction.chown}"] if instruction.chown else []
    flags += [f"--chmod={instruction.chmod}"] if instruction.chmod else []
    files = (*instruction.sources, *(f"<<{each.name}" for each in instruction.heredocs))
    name = "ADD" if isinstance(instruction, Add) else "COPY"
    return words.readable(" ".join((name, *flags, *files, instruction.destination))) + _FILES


__all__ = ["COMMENT", "configured", "copied", "ran"]
