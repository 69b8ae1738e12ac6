"""What tests import. Each package serves one field: `engine` first, which starts a real engine."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""

PATIENCE = float(os.environ.get("ENGINED_TEST_PATIENCE", "1"))
"""Factor for the time that tests wait for events that should happen soon: 1 on a real machine, more
under emulation and in CI.
"""
