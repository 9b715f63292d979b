"""Pickles values for other processes, and finds changes of objects that they have in common."""
