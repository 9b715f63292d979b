"""Magics and options that few people use, with their ops.

They are found by entry points, as those of another package would be.
"""
