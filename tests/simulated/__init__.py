"""A real manager process with thousands of agents that run no containers."""
