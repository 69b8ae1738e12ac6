"""A build with suppressed output (`q`): its reports are kept until it is known whether it fails.

Owns: a log of them, while the build runs. Threads: the event loop's. Raises: what the build raises.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

from engine.builder.output import Log
from engine.builder.reports import ImageMade, Notice, Report
from engine.errors import EngineError


async def quiet(reports: AsyncGenerator[Report, None], directory: Path) -> AsyncGenerator[Report, None]:
    """Only the image's id, as one line. The other reports are sent when the build fails, before its
    error. `directory`: for a file, if there are many.
    """
    image = ""
    swallowed = Log(directory)
    try:
        try:
            async for report in reports:
                if isinstance(report, ImageMade):
                    image = report.id
                else:
                    swallowed.write(report)
        except EngineError:
            swallowed.close()
            async for report in swallowed.read():
                yield report
            raise
        yield Notice(f"{image}\n")
    finally:
        swallowed.release()
        await reports.aclose()
