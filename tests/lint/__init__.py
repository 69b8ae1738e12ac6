"""Checks of the sources that are this project's own: `make lint` runs them, beside ruff and mypy.

`prose`: the width of prose and code. `imports`: which package may import which. `bounds`: bounds in
seconds that a slow host breaks. `layout`: where a test and its helpers lie. `messages`:
words of libraries in what clients read. `words`: the kernel's numbers there and in the log, and a
list of all messages.
"""
