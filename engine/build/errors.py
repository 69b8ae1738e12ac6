"""Errors of builds."""

from __future__ import annotations

from engine.errors import ServerError


class StepFailed(ServerError):
    """A RUN step's command failed. Clients read its exit code in
    `errorDetail`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


__all__ = ["StepFailed"]
