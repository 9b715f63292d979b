"""The process group in each rank: formed, aborted and formed again, with its subgroups."""
