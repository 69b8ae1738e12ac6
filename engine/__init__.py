"""A container engine for dense Linux hosts: the Docker Engine API over one daemon and one
monitor process.
"""

__version__ = "0.1.0"
