"""The agent, a process on each machine that starts, watches and ends the workers there.

Also its helper process, the fork server.
"""
