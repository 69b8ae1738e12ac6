"""nftables through libnftables, in process. One call is one transaction.

Rules: libnftables(3), nft(8). The library is loaded at the first call; `available` returns False if
the host lacks it. Blocking, with the GIL released. Locks: one for the process, held during a
transaction. Raises: NetfilterError with the library's message. Not here: the engine's rules
(`networks/`).
"""

from __future__ import annotations

import functools
import threading

from engine._fast import nftables

_one_at_a_time = threading.Lock()


class NetfilterError(Exception):
    """A transaction that was refused as a whole."""


@functools.cache
def available() -> bool:
    """True if libnftables is installed."""
    return nftables.load()


def run(commands: str) -> str:
    """Carry out nft commands as one transaction; returns what `list` commands print.

    Acts in the network namespace of the calling thread. Raises NetfilterError; nothing has changed
    then.
    """
    if not available():
        raise NetfilterError("libnftables.so.1 is not installed")
    try:
        with _one_at_a_time:
            taken, printed = nftables.run(commands.encode())
    except OSError as error:
        raise NetfilterError(f"nftables: {error.strerror}") from error
    text = printed.decode(errors="replace")
    if not taken:
        words = text.strip()
        raise NetfilterError(words.splitlines()[0] if words else "nftables refused the transaction")
    return text
