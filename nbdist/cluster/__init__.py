"""Worlds on several machines: the head, and the launchers, which start agents on other machines.

The head is a process on the notebook's machine, between the notebook and the agents. An agent uses
only `nbdist.cluster.client` and `nbdist.cluster.ticket`, to connect to its head.
"""
