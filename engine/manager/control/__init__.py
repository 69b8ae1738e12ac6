"""The verbs of the API: a request is decoded, validated against the swarm's records, and carried
out in one transaction. `table.py` has them all; `Control` there is their only caller.

Not here: what follows from a change (the leader's loops), and the HTTP side (`engine/api`).
"""
