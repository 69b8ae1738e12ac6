"""nftables through libnftables, in process: one call is one transaction.

Rules: libnftables(3), nft(8). libnftables is loaded at the first call; a host without it has no NAT from here, which is the caller's to say.
Blocking, with the GIL released. Raises: NetfilterError with the library's own words. Not here: what the rules are (`networks/`).
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
    """Whether libnftables is installed."""
    return nftables.load()


def run(commands: str) -> str:
    """Carry out nft commands as one transaction; returns what `list` commands print. Raises NetfilterError; nothing has changed then.

    It acts in the network namespace of the calling thread.
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
