"""The fault suite on GPUs: nccl's groups, and CUDA tensors in gloo's.

`python -m tests.gpu --out FOLDER` runs all of it and writes a report; README.md beside this
says what that needs.  Without a GPU pytest skips these tests, but for those of the command
itself; `--device cpu` runs their bodies with gloo on the CPU.
"""
