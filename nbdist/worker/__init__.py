"""A worker, the process of a rank: its kernel, tasks and output, and its process groups."""
