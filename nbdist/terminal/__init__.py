"""The `nbdist` command, run in a terminal beside the notebook.

The command shows worlds and what ranks do, checks this machine, ends worlds, lets this machine join
a world, and answers assistants.
"""
