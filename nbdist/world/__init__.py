"""The heart of the house: N workers as one, and what a cell on them says."""
