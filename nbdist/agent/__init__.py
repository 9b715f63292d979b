"""Runs once per machine: the agent, the fork server, and what they keep."""
