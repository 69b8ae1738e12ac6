"""Log drivers: the table of drivers and what the daemon asks of them (`drivers/__init__.py`), a
module per driver for its options, the targets that the monitor writes (`targets.py`) and the
documents that the shipper reads (`deliveries.py`). `_fast/logwriter` writes the files.
"""
