"""Log drivers: which there are (`drivers.py`), what their options mean, one file each. The files themselves are written in `_fast/jsonlog`."""
