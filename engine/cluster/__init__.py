"""The daemon's part of a swarm: its membership, and the agent that runs the tasks of this node.

Owns:     ROOT/swarm/state.json and the node's certificate; the life of the manager's process; the
          session with a manager; the containers of tasks.
Not here: consensus, the API's verbs, the scheduler: these are in the manager's process
          (`engine/manager`), of which messages and frames alone are imported.

`cluster.py` is the facade, and all that a daemon outside of a swarm loads.
"""
