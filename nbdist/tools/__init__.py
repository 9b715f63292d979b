"""Magics and options for special purposes: export, diff, timeline, plot and watch.

A magic or option runs in the notebook's process, and its op (`*_op.py`) in the workers.  nbdist
finds all of them by entry points, as it finds magics of other packages.
"""
