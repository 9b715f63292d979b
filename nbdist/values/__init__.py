"""Python values that cross between processes: pickled, in shared memory, or why they cannot."""
