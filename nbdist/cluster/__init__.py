"""Worlds on several machines: the head between notebook and agents, and ways to start agents."""
