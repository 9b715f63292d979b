"""Ops, the functions of nbdist that a task can call on a worker, in a file for each subject.

`find_op` in `nbdist.worker.namespace` finds an op by module and function. The entry points
`nbdist.ops` of other packages add further modules.
"""
