"""Managed plugins: installed from a registry, and run by the engine."""
