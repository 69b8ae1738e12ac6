"""The swarm manager's process, which runs on managers only and outlives the daemon.

Owns:     one etcd member, the cache of its records, the CA, the sessions of agents, and on the
          leader the loops that make tasks out of services.
Not here: containers. The daemon has the agent that runs tasks (`engine/cluster`).

The program is `main.py`. The daemon imports nothing of this: `engine/swarm_session` has what both
need.
"""
