"""Magics and options that few people use, with their ops.

nbdist finds these magics and options by entry points, as it finds those of other packages.
"""
