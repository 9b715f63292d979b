"""The code of a worker, the process of a rank: its kernel, tasks, output and process groups.

The agent of a machine starts its workers, and sends them tasks.
"""
