"""A plugin of pytest that prints each failure when it happens: the console then says why, whatever
becomes of the machine later. The controller prints; what xdist's workers report comes to it.
"""

from __future__ import annotations

import os
import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}\n{report.longreprtext}\n", file=sys.stderr, flush=True)
