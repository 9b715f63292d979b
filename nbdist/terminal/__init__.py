"""The `nbdist` command, which users run in a terminal beside the notebook.

The command shows worlds and what their ranks do, checks this machine, ends worlds, lets this
machine join a world, opens the tutorial, and answers AI assistants.
"""
