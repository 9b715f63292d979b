"""Pickles values for other processes, and finds and applies changes of objects that they share."""
