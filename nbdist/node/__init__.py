"""Runs once per machine: the agent, the nursery, and what they keep."""
