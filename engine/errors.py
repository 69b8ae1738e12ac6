"""The kinds of error that the engine reports to clients.

The domain raises a kind with the object's name in the message. `api/replies.py` alone knows the
status codes. errno, netlink codes and exit codes of the runtime become a kind where they are met,
in `system/` and `runtime/`, with the cause kept (`raise … from`). Any other exception that reaches
a reply is a bug.
"""


class EngineError(Exception):
    """Base of the kinds. `message` is what the client reads."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotModified(EngineError):
    """304: the object is already in the wanted state. The reply has no body."""


class InvalidParameter(EngineError):
    """400: a parameter, field or body breaks a rule that the message names."""


class Unauthorized(EngineError):
    """401: the credentials are missing or wrong."""


class Forbidden(EngineError):
    """403: the object refuses this operation as such, whatever its parameters."""


class NotFound(EngineError):
    """404: no such object."""


class NotAcceptable(EngineError):
    """406: the engine is not in the state that the operation needs (attach at create, swarm)."""


class Conflict(EngineError):
    """409: the object's state or another object's claim forbids it now."""


class ServerError(EngineError):
    """500: the host, the runtime or the kernel failed. The message says which, and why."""


class Unimplemented(EngineError):
    """501: the operation exists, and this engine or driver does not have it."""


class Unavailable(EngineError):
    """503: a resource that the operation needs is used up or not ready now. The same request may
    succeed later.
    """
