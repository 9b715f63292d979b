"""The ranks' side of `--watch`."""
