"""The `changes` of an import or a commit: Dockerfile instructions that only change an image's
configuration.

In ENV, EXPOSE, LABEL, STOPSIGNAL, USER, VOLUME and WORKDIR, variables of earlier lines are replaced
("Environment replacement" in the Dockerfile reference). Pure. Not here: building.
Raises: InvalidParameter that names the instruction.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvalidParameter
from engine.images.instructions import effects, records, words
from engine.wire.containers import Config

_MAX_LINES = 1000

_ALLOWED = frozenset(
    (
        "CMD",
        "ENTRYPOINT",
        "ENV",
        "EXPOSE",
        "HEALTHCHECK",
        "LABEL",
        "ONBUILD",
        "SHELL",
        "STOPSIGNAL",
        "USER",
        "VOLUME",
        "WORKDIR",
    )
)


def apply(config: Config, changes: Sequence[str], environment: Sequence[str] = ()) -> Config:
    """`config` with every instruction applied, in order.

    `environment`: further variables; those of `config` override them.
    """
    lines = [line.strip() for text in changes for line in text.replace("\\\n", "").splitlines()]
    if len(lines) > _MAX_LINES:
        raise InvalidParameter(f"changes: more than {_MAX_LINES} instructions")
    for text in lines:
        if not text or text.startswith("#"):
            continue
        line = words.line(text, 0)
        if line.keyword not in _ALLOWED:
            raise InvalidParameter(f"{line.keyword} is not a valid change command")
        if not line.text:
            raise InvalidParameter(f"{line.keyword} requires at least one argument")
        variables = dict(one.partition("=")[::2] for one in (*environment, *(config.env or ())))
        instruction = records.expand(records.read(line), variables)
        config = effects.configured(config, instruction, cmd_set=True)
    return config


__all__ = ["apply"]
