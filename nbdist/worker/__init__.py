"""Runs in each rank: the kernel, torchrun's environment, the process group."""
