"""A container engine for dense Linux hosts: it serves the Docker Engine API with one daemon and one
monitor process.
"""

__version__ = "0.1.0"
