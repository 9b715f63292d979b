"""Puts an agent on a machine; each module is one way, named in `nbdist.launchers`."""
