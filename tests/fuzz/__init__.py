"""A mutation fuzzer of every parser that reads bytes from containers, registries, clients or
archives.
"""
