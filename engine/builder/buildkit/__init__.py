"""BuildKit's protocols, as far as docker's clients use them: gRPC over a hijacked connection.

`session.py` is light and loaded with the daemon. The other modules, and h2 with them, are loaded
when the first client opens a session.

Not here: the builder itself. Raises: the kinds of `engine/errors.py`.
"""
