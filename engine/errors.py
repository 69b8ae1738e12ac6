"""The seven kinds of error that the engine tells a client about.

The domain raises a kind with the object's name in the message; `api/replies.py` alone knows the status codes
(specification, chapter "Errors"). errno, netlink codes and exit codes of the runtime become a kind where they are
met, in `system/` and `runtime/`, with the cause kept. Any other exception that reaches a reply is a bug.
"""


class EngineError(Exception):
    """Base of the seven kinds; `message` is what the client reads."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotModified(EngineError):
    """304: the object is already in the wanted state. It has no body on the wire."""


class InvalidParameter(EngineError):
    """400: a parameter, field or body breaks a rule that the message names."""


class Forbidden(EngineError):
    """403: the object refuses this operation as such, whatever its parameters."""


class NotFound(EngineError):
    """404: no such object."""


class NotAcceptable(EngineError):
    """406: the engine is not in the state that the operation asks for (attach at create, swarm)."""


class Conflict(EngineError):
    """409: the object's state or another object's claim forbids it now."""


class ServerError(EngineError):
    """500: the host, the runtime or the kernel failed; the message says which and with what reason."""
