"""The magics of nbdist.  `find_commands` in `nbdist.notebook.command` imports each file here."""
