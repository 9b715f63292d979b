"""The magics, a file each or a family: `nbdist.notebook.command` finds what lies here."""
