"""Pickles Python values for other processes, and explains why a value cannot be pickled."""
