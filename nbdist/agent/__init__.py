"""The agent, a process on each machine that starts, watches and ends the workers there.

The fork server, a helper process of the agent, is in this package too.
"""
