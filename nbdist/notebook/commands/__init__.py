"""The magics of nbdist, which run in the notebook's process when a user calls them.

`find_commands` in `nbdist.notebook.command` imports each file of this folder.
"""
