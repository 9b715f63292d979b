"""The process of a rank: its kernel, torchrun's environment, and the process group."""
