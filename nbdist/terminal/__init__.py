"""Runs in a terminal beside the notebook: `nbdist top`, `nbdist status`; reads, and no more."""
