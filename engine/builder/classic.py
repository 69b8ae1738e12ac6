"""The stream of `POST /build`: the reports of a build in the words of Docker's classic builder,
which clients match.

Pure. Not here: the reports (`reports.py`), errors (`api/replies.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from engine.builder.reports import STDERR, CacheHit, ImageMade, Notice, Output, Report, StepBegun, Transfer
from engine.wire.build import BuildMessage, BuiltImage

_RED, _PLAIN = "\x1b[91m", "\x1b[0m"
"""How classic builds mark the standard error of RUN (ECMA-48, SGR)."""


async def stream(reports: AsyncGenerator[Report, None], *, numbered: bool) -> AsyncGenerator[BuildMessage, None]:
    """The objects of the stream. `numbered`: `Step N/M : …` instead of `Step N : …`."""
    async with contextlib.aclosing(reports):
        async for report in reports:
            yield message(report, numbered=numbered)


def message(report: Report, *, numbered: bool) -> BuildMessage:
    """One object."""
    if isinstance(report, StepBegun):
        number = f"{report.number}/{report.total}" if numbered else f"{report.number}"
        return BuildMessage(stream=f"Step {number} : {report.text}\n")
    if isinstance(report, CacheHit):
        return BuildMessage(stream=" ---> Using cache\n")
    if isinstance(report, Output):
        return BuildMessage(stream=f"{_RED}{report.text}{_PLAIN}" if report.stream == STDERR else report.text)
    if isinstance(report, ImageMade):
        return BuildMessage(aux=BuiltImage(id=report.id))
    if isinstance(report, Transfer):
        return BuildMessage(
            status=report.status, id=report.id, progress=report.progress, progress_detail=report.progress_detail
        )
    assert isinstance(report, Notice)  # files are checked for BuildKit's clients alone
    return BuildMessage(stream=report.text)


__all__ = ["message", "stream"]
