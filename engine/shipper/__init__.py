"""The shipper: the process that delivers containers' lines to remote log targets.

It reads the spools that the monitor writes, and the documents that the daemon writes beside them
(`engine/logs/deliveries.py`). It knows files and sockets, and nothing of containers. Everything
that it must remember is on disk or on the board, so it may be killed at any time.

`process.py` finds the spools; `feed.py` reads one; `destination.py` is the common part of all
senders, which are in `senders/`.
"""
