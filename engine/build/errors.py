"""Errors of builds."""

from __future__ import annotations

from engine.errors import ServerError


class StepFailed(ServerError):
    """A RUN step failed. Clients read its exit code in `errorDetail`."""

    def __init__(self, message: str, code: int, command: str = "") -> None:
        """`command`: the one that ended with this code; empty if none was started."""
        super().__init__(message)
        self.exit_code = code
        self.command = command


__all__ = ["StepFailed"]
