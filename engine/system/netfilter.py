"""nftables through libnftables, in process: one call is one transaction.

Rules: libnftables(3), nft(8). libnftables is loaded at the first call; a host without it has no NAT from here, which is the caller's to say.
Blocking, with the GIL released (ctypes). Raises: NetfilterError with the library's own words. Not here: what the rules are (`networks/`).
"""

from __future__ import annotations

import ctypes
import functools
import threading

_context = threading.Lock()
"""One context at a time: making one sets up tables that the library shares between them."""


class NetfilterError(Exception):
    """A transaction that was refused as a whole."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnftables.so.1")
    except OSError:
        return None
    library.nft_ctx_new.restype = ctypes.c_void_p
    library.nft_ctx_new.argtypes = (ctypes.c_uint32,)
    library.nft_ctx_free.argtypes = (ctypes.c_void_p,)
    library.nft_ctx_buffer_error.argtypes = (ctypes.c_void_p,)
    library.nft_ctx_buffer_output.argtypes = (ctypes.c_void_p,)
    library.nft_ctx_get_error_buffer.argtypes = (ctypes.c_void_p,)
    library.nft_ctx_get_error_buffer.restype = ctypes.c_char_p
    library.nft_ctx_get_output_buffer.argtypes = (ctypes.c_void_p,)
    library.nft_ctx_get_output_buffer.restype = ctypes.c_char_p
    library.nft_run_cmd_from_buffer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    return library


def available() -> bool:
    """Whether libnftables is installed."""
    return _library() is not None


def run(commands: str) -> str:
    """Carry out nft commands as one transaction; returns what `list` commands print. Raises NetfilterError; nothing has changed then."""
    library = _library()
    if library is None:
        raise NetfilterError("libnftables.so.1 is not installed")
    with _context:
        return _run(library, commands)


def _run(library: ctypes.CDLL, commands: str) -> str:
    context = library.nft_ctx_new(0)
    if not context:
        raise NetfilterError("nft_ctx_new failed")
    try:
        library.nft_ctx_buffer_error(context)
        library.nft_ctx_buffer_output(context)
        if library.nft_run_cmd_from_buffer(context, commands.encode()) != 0:
            words = (library.nft_ctx_get_error_buffer(context) or b"").decode(errors="replace").strip()
            raise NetfilterError(words.splitlines()[0] if words else "nftables refused the transaction")
        return (library.nft_ctx_get_output_buffer(context) or b"").decode(errors="replace")
    finally:
        library.nft_ctx_free(context)
