"""Commands of `engined` that run in a process of their own, beside the daemon or without it."""
