"""Magics and options for special purposes: export, diff, timeline, plot and watch.

The magics and options run in the notebook's process, and their ops (`*_op.py`) in the workers.
nbdist finds all of them by entry points, as it finds magics of other packages.
"""
