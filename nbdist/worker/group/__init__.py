"""The process group in each rank: formed, aborted, formed again, and what was made on it."""
