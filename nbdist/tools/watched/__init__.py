"""The ranks' side of `--watch`, imported where a cell is watched."""
