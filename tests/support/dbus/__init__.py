"""A system bus, and services on it."""
