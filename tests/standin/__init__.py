"""A stand-in for nccl on machines without a GPU: a backend named "nccl2" in Python, for torch 2.15.

The collectives of the stand-in end in its own threads, so that the main thread runs ahead as on a
GPU.  The stand-in follows torch's sources of nccl2; `contract` checks the behaviour of both.
`pytest tests/standin` shows how worlds heal on the stand-in.
"""
