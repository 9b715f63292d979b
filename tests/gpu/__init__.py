"""Tests of faults on GPUs: groups of nccl, and groups of gloo with CUDA tensors.

`python -m tests.gpu --out FOLDER` runs all of them and writes a report; README.md in this folder
has the requirements.  Without a GPU pytest skips all tests but those of the command itself;
`--device cpu` runs the tests with gloo on the CPU.
"""
