"""Folders, processes and limits of this machine, and which environment variables are secrets.

All processes of nbdist use these files.
"""
