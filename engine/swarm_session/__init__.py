"""The session of a swarm's agents with their managers: what both ends share.

`frames`: connections of messages. `messages`: the messages. `states`: the states of tasks. `clock`:
the time of both.
"""
