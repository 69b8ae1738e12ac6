"""Set up `logging` of a process of the engine: lines to standard error, in the form that
`log_lines.py` has.
"""

from __future__ import annotations

import logging
import sys

from engine.system import log_lines

NAMED = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_LEVELS = {"CRITICAL": "fatal"}
"""dockerd's names, where they differ in more than their case."""


def configure(level: str, text: str = NAMED) -> None:
    """Log this level and those above. `text`: the form of lines that are text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_lines.is_json() else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _Json(logging.Formatter):
    """A JSON object; a traceback is its field `error`."""

    def format(self, record: logging.LogRecord) -> str:
        level = _LEVELS.get(record.levelname, record.levelname.lower())
        fields = {"module": record.name}
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return log_lines.json_line(level, record.getMessage(), int(record.created * 1e9), **fields)


__all__ = ["NAMED", "configure"]
