"""The output of ranks, from terminal text to the panel of a cell; no module here does I/O."""
