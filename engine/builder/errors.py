"""Errors of builds."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvalidParameter, ServerError


class StepFailed(ServerError):
    """A RUN step failed. Clients read its exit code in `errorDetail`."""

    def __init__(self, message: str, code: int, command: str, *, started: bool = True) -> None:
        """`command`: the one that ended with this code, or that was not `started`."""
        super().__init__(message)
        self.exit_code = code
        self.command = command
        self.started = started


class AtLine(InvalidParameter):
    """A line of the Dockerfile is invalid."""

    def __init__(self, message: str, line: int, reason: str, last: int = 0) -> None:
        """`line`: its number, from 1. `reason`: the message without the place. `last`: the number
        of the last line with its heredocs, if that is known.
        """
        super().__init__(message)
        self.line = line
        self.last = max(line, last)
        self.reason = reason


class Circular(AtLine):
    """Stages wait for one another."""

    def __init__(self, reason: str, lines: Sequence[int]) -> None:
        """`lines`: those that make each of the stages wait, the last one first."""
        super().__init__(reason, lines[0], reason)
        self.lines = lines


class Unresolved(AtLine):
    """An image is neither here nor in its registry."""

    def __init__(self, message: str, line: int, reason: str, answer: str) -> None:
        """`answer`: why, without the names of the image."""
        super().__init__(message, line, reason)
        self.answer = answer


__all__ = ["AtLine", "Circular", "StepFailed", "Unresolved"]
