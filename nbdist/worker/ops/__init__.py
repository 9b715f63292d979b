"""Ops, the functions that a task can call on a worker, in a file for each subject.

`find_op` finds an op by module and function; entry points `nbdist.ops` add further modules.
"""
