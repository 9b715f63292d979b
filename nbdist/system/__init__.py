"""Folders, processes and limits of the machine, for all processes of nbdist."""
