"""A stand-in for nccl on machines without a GPU: a backend named "nccl2" in Python, for torch 2.15.

Its collectives end in threads of its own, so that the main thread runs ahead as on a GPU.  Written
after torch's sources of nccl2; `contract` has what it and the real one are to have in common.
`pytest tests/standin` shows how worlds heal on it.
"""
