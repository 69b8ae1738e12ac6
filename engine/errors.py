"""The kinds of error that the engine reports to clients.

The domain raises a kind with the object's name in the message. `api/replies.py` alone knows the
status codes. errno, netlink codes and exit codes of the runtime become a kind where they are met,
in `system/` and `runtime/`, with the cause kept (`raise … from`). Any other exception that reaches
a reply is a bug.
"""

import os
import re
import subprocess

import msgspec

BUG = "internal error; the engine's log has the details"
"""What a client reads of an exception that is none of the kinds."""

_NUMBER = re.compile(r"\[Errno -?\d+\] ")
"""In the text of an OSError. It says nothing to a user."""
_OF_SSL = re.compile(r"^\[[A-Z0-9_]+(: [A-Z0-9_]+)?\] | \(_ssl\.c:\d+\)\.?$")
"""In the text of an ssl.SSLError: its library and number, and the line of Python's source."""
_OF_ASYNCIO = re.compile(r"\[Errno (\d+)\] Connect call failed")
"""Of an OSError of a connection, to one address or several."""
_OF_LIBRARIES = re.compile(
    _NUMBER.pattern
    + r"|^Error -?\d+ (while [a-z ]+: )?"  # zlib and isal
    + r"| - do you need to open .*"  # csv: an argument of Python's open()
    + r"|:\n.*",  # tarfile: the exception of each format that was tried
    re.DOTALL,
)


_NAMELESS: dict[type[BaseException], str] = {
    TimeoutError: "timed out",
    BrokenPipeError: "broken pipe",
    ConnectionAbortedError: "connection aborted",
    ConnectionRefusedError: "connection refused",
    ConnectionResetError: "the connection was closed",
    ConnectionError: "the connection was closed",
    MemoryError: "out of memory",
}
"""Errors that Python and asyncio raise without a text."""


def reason(error: OSError) -> str:
    """The kernel's description of an error, as in the middle of a message: `no space left on
    device`. Of a TLS error it is OpenSSL's.
    """
    text = error.strerror or str(error) or _NAMELESS.get(type(error), "unknown error")
    if unconnected := _OF_ASYNCIO.search(str(error)):
        text = os.strerror(int(unconnected[1]))
    text = _OF_SSL.sub("", text)
    if text.lower() == "pem lib":
        return "not a PEM file"
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def reason_with_file(error: OSError) -> str:
    """`reason` after the name of the file, where the error has one: `/a/b: no space left on
    device`.
    """
    named = isinstance(error.filename, str | bytes | os.PathLike)
    return f"{os.fsdecode(error.filename)}: {reason(error)}" if named else reason(error)


def words(error: BaseException) -> str:
    """What a user reads of any error, also of a library: no number, no class of Python, no place in
    a source.
    """
    if isinstance(error, OSError):
        return reason_with_file(error)
    if isinstance(error, msgspec.MsgspecError | UnicodeError | RecursionError):
        return decoding_reason(error)
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it did not end within {error.timeout:.3g} s"
    if isinstance(error, EOFError) and hasattr(error, "partial"):  # of asyncio's streams
        return "the connection was closed"
    return _OF_LIBRARIES.sub("", str(error)) or _NAMELESS.get(type(error), "unknown error")


def decoding_reason(error: Exception) -> str:
    """What is wrong with a document that msgspec refuses, without Python's type names:
    `HostConfig.Memory: expected integer, got string`.
    """
    text, _, place = str(error).partition(" - at ")
    # msgspec raises UnicodeDecodeError before 0.23, and its own error since.
    if isinstance(error, UnicodeError) or text.startswith("Invalid UTF-8"):
        return "it is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = re.sub(r"`([^`]*)`", lambda names: " or ".join(map(_plain_type, names[1].split(" | "))), text)
    place = place.replace("`", "").removeprefix("$").removeprefix(".")
    if text.split(" ")[0] in _SENTENCES:
        text = text[:1].lower() + text[1:]
    return f"{place}: {text}" if place else text


_SENTENCES = frozenset(("Expected", "Object", "Invalid", "Input", "Integer", "Number", "String", "Length"))
"""First words of msgspec's messages; others, such as JSON, keep their capital."""


def _plain_type(name: str) -> str:
    return {"str": "string", "int": "integer", "bool": "boolean", "float": "number"}.get(name, name)


class EngineError(Exception):
    """Base of the kinds. `message` is what the client reads, valid UTF-8: a byte of a name that is
    none becomes a question mark.
    """

    exit_code = 0
    """Exit code of the program whose failure this is, for streams that report it; 0 for others."""

    def __init__(self, message: str) -> None:
        message = message if message.isascii() else message.encode(errors="replace").decode()
        if "[Errno" in message:
            message = _NUMBER.sub("", message)
        super().__init__(message)
        self.message = message


class NotModified(EngineError):
    """304: the object is already in the wanted state. The reply has no body."""


class InvalidParameter(EngineError):
    """400: a parameter, field or body breaks a rule that the message names."""


class TooLarge(InvalidParameter):
    """413: the request's body is longer than its limit."""


class RequestTimeout(InvalidParameter):
    """408: the client did not send its request in time."""


class Unauthorized(EngineError):
    """401: the credentials are missing or wrong."""


class Forbidden(EngineError):
    """403: the object refuses this operation as such, whatever its parameters."""


class NotAttachable(Forbidden):
    """403 of a start, too: a network of a swarm is not for plain containers."""


class NotFound(EngineError):
    """404: no such object."""


class NotAcceptable(EngineError):
    """406: the engine is not in the state that the operation needs (attach at create, swarm)."""


class NoSwarm(NotAcceptable):
    """406 up to API 1.24, 503 later: the node's part in a swarm, or outside of one, forbids it."""


class Conflict(EngineError):
    """409: the object's state, or its use by another object, forbids the operation now."""


class ServerError(EngineError):
    """500: the host, the runtime or the kernel failed. The message says which, and why."""


class WrongState(ServerError):
    """500 up to API 1.24, 409 later: the state of the object does not permit it."""


class Unimplemented(EngineError):
    """501: the operation exists, and this engine or driver does not have it."""


class Unavailable(EngineError):
    """503: a resource that the operation needs is used up or not ready now. The same request may
    succeed later.
    """
