"""A notebook's distributed cells as a script for torchrun: their code, their names, their files."""
