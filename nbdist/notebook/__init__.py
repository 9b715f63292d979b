"""Code of the notebook's process: magics, displays, and which variables are sent with a cell."""
