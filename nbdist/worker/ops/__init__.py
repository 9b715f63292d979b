"""What a task can ask of a worker besides running source: a file for each subject.

A function here is an op; the kernel finds it by name, as `find_op` says.
"""
