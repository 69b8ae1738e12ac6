"""A plugin of pytest that prints each failure when it happens: the console then says why, whatever
becomes of the machine later.
"""

from __future__ import annotations

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext}\n", file=sys.stderr, flush=True)
