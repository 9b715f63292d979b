"""The `nbdist` command, run in a terminal beside the notebook.

It shows worlds and what their ranks do, checks a machine, ends worlds, joins them with a machine,
and serves assistants.
"""
