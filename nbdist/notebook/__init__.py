"""Runs in the notebook's kernel: magics, display, and what to ship."""
