"""Magics with their ops that few use, found by entry points as another package's would be."""
