"""Pickles values for other processes, and finds changes of objects that the processes share."""
