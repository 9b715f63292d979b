"""Folders, processes, limits and secret variables of this machine, for all processes of nbdist."""
