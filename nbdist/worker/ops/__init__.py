"""Ops, the functions that a task can call on a worker, in a file for each subject.

The kernel finds an op by the names of its file and function, as `find_op` says.
"""
