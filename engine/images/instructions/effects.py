"""The effect of an instruction on an image's configuration, and its words in the history.

Pure. Instructions come expanded. Not here: files, RUN, COPY and ADD (engine/build).
Raises: InvalidParameter in the words of Docker.
"""

from __future__ import annotations

from engine.images.instructions.records import Instruction
from engine.wire.containers import Config


def configured(config: Config, instruction: Instruction, *, cmd_set: bool) -> Config:
    """`config` after the instruction; unchanged for those that do not change it.

    `cmd_set`: this stage has had a CMD. Otherwise ENTRYPOINT removes the inherited one.
    """
    raise NotImplementedError


def recorded(instruction: Instruction, config: Config) -> str:
    """The text after `#(nop) ` in the history, as Docker 20.10 writes it. `config`: after the
    instruction.
    """
    raise NotImplementedError
