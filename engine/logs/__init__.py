"""Log drivers: the table (`drivers.py`), and one module per driver for its options.
`_fast/logwriter` writes the files."""
