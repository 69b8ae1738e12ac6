"""A build with suppressed output (`q`): its messages are kept until it is known whether it fails.

Owns: a log of them, while the build runs. Threads: the event loop's. Raises: what the build raises.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

from engine.build.output import Log
from engine.errors import EngineError
from engine.wire.build import BuildMessage


async def quiet(messages: AsyncGenerator[BuildMessage, None], directory: Path) -> AsyncGenerator[BuildMessage, None]:
    """Only the image's id, as one line. The other messages are sent when the build fails, before
    its error. `directory`: for a file, if there are many.
    """
    image = ""
    swallowed = Log(directory)
    try:
        try:
            async for message in messages:
                if message.aux is not None:
                    image = message.aux.id
                else:
                    swallowed.write(message)
        except EngineError:
            swallowed.close()
            async for message in swallowed.read():
                yield message
            raise
        yield BuildMessage(stream=f"{image}\n")
    finally:
        swallowed.release()
        await messages.aclose()
