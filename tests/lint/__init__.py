"""Checks of the sources that are this project's own: `make lint` runs them, beside ruff and mypy.

`prose`: the width of prose and code. `imports`: which package may import which. `bounds`: bounds in
seconds that a slow host breaks. `layout`: where a test and its helpers lie.
"""
