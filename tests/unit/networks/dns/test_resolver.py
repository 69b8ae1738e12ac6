"""The resolver when descriptors or threads run short; tests/system/test_resolver.py asks it."""

from __future__ import annotations

import _thread
import asyncio
import errno
import gc
import os

import pytest

from engine.errors import ServerError
from engine.networks.dns import resolver
from engine.networks.dns.names import NameTable
from engine.networks.dns.resolver import Resolver


def no_descriptor(descriptor: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def no_thread(*_: object) -> int:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("scarce", ["descriptors", "threads"])
def test_a_container_that_cannot_be_served_is_not_taken_for_served(
    monkeypatch: pytest.MonkeyPatch, scarce: str
) -> None:
    """Its next start opens the resolver again. No descriptor is left open."""

    async def main() -> None:
        made = Resolver(NameTable(), tuple)
        with monkeypatch.context() as short:
            if scarce == "descriptors":
                short.setattr(resolver.os, "dup", no_descriptor)
            else:
                short.setattr(_thread, "start_new_thread", no_thread)
            gc.collect()  # frees leftovers of earlier tests
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(ServerError):
                await made.open_for("c", 0)
            assert len(os.listdir("/proc/self/fd")) == before
        assert not made.serves("c")
        await made.close()

    asyncio.run(main())
